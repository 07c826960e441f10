// Keys, turned from one position to another.
#pragma once
#include "paged.cuh"

enum Element { OPAQUE = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };

__device__ inline float widen(u32 element, u32 bits) {
    if (element == BFLOAT16) return from_bits(bits << 16);
    if (element == FLOAT16) return from_half(bits);
    return from_bits(bits);
}

// Rounds to nearest even; all that is not a number becomes one pattern. Without branches, which lanes
// would take one by one.
__device__ inline u32 narrow(u32 element, float value) {
    bool none = value != value;
    u32 bits = to_bits(value);
    if (element == FLOAT32) return none ? 0x7FFFFFFFu : bits;
    u32 narrowed = element == FLOAT16 ? to_half(value) : (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
    return none ? 0x7FFFu : narrowed;
}

__device__ inline u32 element_of(const u8 *row, u32 index, u32 bytes) {
    if (bytes == 4) return ((const u32 *)row)[index];
    return ((const unsigned short *)row)[index];
}

// A pair's element, turned by the pair's cosine and sine; the second one is (b, a).
__device__ inline u32 turned_pair(u32 element, u32 own, u32 partner, bool second, float2 angle) {
    float a = product(widen(element, own), angle.x);
    float b = product(widen(element, partner), angle.y);
    float sum = plus(a, b), difference = minus(a, b);
    return narrow(element, second ? sum : difference);
}

// One element of a key's row, turned by the angles of `turns`. A job has the rotation.
template <typename J>
__device__ u32 turned_element(const J *job, const u8 *row, u32 index, const float2 *turns) {
    const u32 bytes = job->element == FLOAT32 ? 4 : 2, half = job->rotary_dim / 2;
    u32 own = element_of(row, index, bytes);
    if (index >= job->rotary_dim) return own;
    u32 pair = job->interleaved ? index / 2 : index % half;
    bool second = job->interleaved ? index % 2 : index >= half;
    u32 partner = job->interleaved ? index ^ 1 : second ? index - half : index + half;
    return turned_pair(job->element, own, element_of(row, partner, bytes), second, turns[pair]);
}

// What of a key's row at byte `within`, turned by the angles of `turns`.
template <typename V, typename J>
__device__ V turned(const J *job, const u8 *row, u32 within, const float2 *turns) {
    const u32 bytes = job->element == FLOAT32 ? 4 : 2;
    V out;
    for (u32 w = 0; w < sizeof(V) / 4; w++) {
        u32 word = 0;
        for (u32 part = 0; part < 4; part += bytes) {
            u32 bits = turned_element(job, row, (within + 4 * w + part) / bytes, turns);
            word |= bytes == 4 ? bits : bits << (8 * part);
        }
        out.word[w] = word;
    }
    return out;
}

// A vector of one half of a row, turned with its partners in the other half.
template <u32 element, typename V>
__device__ inline V turned_half(const V &own, const V &partner, bool second, const float2 *angle) {
    V out;
#pragma unroll
    for (u32 w = 0; w < sizeof(V) / 4; w++) {
        u32 a = own.word[w], b = partner.word[w];
        if (element == FLOAT32) {
            out.word[w] = turned_pair(element, a, b, second, angle[w]);
            continue;
        }
        u32 low = turned_pair(element, a & 0xFFFF, b & 0xFFFF, second, angle[2 * w]);
        u32 high = turned_pair(element, a >> 16, b >> 16, second, angle[2 * w + 1]);
        out.word[w] = low | high << 16;
    }
    return out;
}

// The vector of a key's row at byte `within`, which is `own`, turned by the angles of `turns`.
template <typename V, typename J>
__device__ inline V turned_vector(const J *job, const u8 *row, u32 within, const V &own,
                                  const float2 *turns) {
    const u32 bytes = job->element == FLOAT32 ? 4 : 2, half = job->rotary_dim / 2 * bytes;
    if (within >= 2 * half) return own;
    if (job->interleaved || half % sizeof(V)) return turned<V>(job, row, within, turns);
    bool second = within >= half;
    u32 first = second ? within - half : within;
    V partner = load((const V *)(row + (second ? first : within + half)));
    const float2 *angle = turns + first / bytes;
    // One branch for a vector, not some for each element.
    if (job->element == BFLOAT16) return turned_half<BFLOAT16>(own, partner, second, angle);
    if (job->element == FLOAT16) return turned_half<FLOAT16>(own, partner, second, angle);
    return turned_half<FLOAT32>(own, partner, second, angle);
}
