// Keys, turned from one position to another.
#pragma once
#include "paged.cuh"

enum Element { OPAQUE = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };

__device__ inline float widen(u32 element, u32 bits) {
    if (element == BFLOAT16) return from_bits(bits << 16);
    if (element == FLOAT16) return from_half(bits);
    return from_bits(bits);
}

// Rounds to nearest even; all that is not a number becomes one pattern.
__device__ inline u32 narrow(u32 element, float value) {
    bool none = value != value;
    if (element == FLOAT32) return none ? 0x7FFFFFFFu : to_bits(value);
    if (none) return 0x7FFFu;
    if (element == FLOAT16) return to_half(value);
    u32 bits = to_bits(value);
    return (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
}

__device__ inline u32 element_of(const u8 *row, u32 index, u32 bytes) {
    if (bytes == 4) return ((const u32 *)row)[index];
    return ((const unsigned short *)row)[index];
}

// What of a key's row at byte `within`, turned by the angles of `turns`.
template <typename V>
__device__ V turned(const Job *job, const u8 *row, u32 within, const float2 *turns) {
    const u32 bytes = job->element == FLOAT32 ? 4 : 2, half = job->rotary_dim / 2;
    V out;
    for (u32 w = 0; w < sizeof(V) / 4; w++) {
        u32 word = 0;
        for (u32 part = 0; part < 4; part += bytes) {
            u32 index = (within + 4 * w + part) / bytes;
            u32 own = element_of(row, index, bytes), bits = own;
            if (index < job->rotary_dim) {
                u32 pair = job->interleaved ? index / 2 : index % half;
                bool second = job->interleaved ? index % 2 : index >= half;
                u32 partner = job->interleaved ? index ^ 1 : second ? index - half : index + half;
                float a = product(widen(job->element, own), turns[pair].x);
                float b = product(widen(job->element, element_of(row, partner, bytes)),
                                  turns[pair].y);
                bits = narrow(job->element, second ? plus(a, b) : minus(a, b));
            }
            word |= bytes == 4 ? bits : bits << (8 * part);
        }
        out.word[w] = word;
    }
    return out;
}
