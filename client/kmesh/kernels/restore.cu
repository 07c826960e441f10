// Span payloads to paged KV, for all layers and all requests of a job in one launch.
#include "paged.cuh"

enum Result { DONE = 0, BAD_ROOT = 1, BAD_TILE = 2 };
// Parts of the job that one launch moves.
struct Range { u32 begin, end; };

enum Element { OPAQUE = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3 };

__device__ inline u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

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

// Addresses of the pages of an item's rows, for some requests at a time: made once for a row
// instead of once for each of its vectors. 0 stands for none; the lowest bit for a key to be turned.
static const u32 ENTRIES = 1024;

template <bool TURN>
__device__ inline void address(const Job *job, const Item &item, u32 rows, u32 first, u32 count_,
                               u64 *table) {
    for (u32 i = thread(); i < rows * count_; i += threads()) {
        u32 r = i / rows, row = i - r * rows;
        Place place = place_of(job, item.part, item.row + row);
        u64 entry = 0;
        if (place.wanted && item.part->requests >> (first + r) & 1) {
            const Request *request = request_of(job, item.part->request_begin + first + r);
            entry = (u64)page_of(job, item.part, request, place);
            if (TURN && place.key && request->turns != NONE) entry |= 1;
        }
        table[i] = entry;
    }
}

template <typename V, bool TURN>
__device__ inline void put(const Job *job, const Item &item, const u8 *stage, u32 row, u32 within,
                           u32 request, u64 entry, const V &v) {
    V *to = (V *)((entry & ~(u64)1) + within);
    if (TURN && entry & 1) {
        const float2 *turns = (const float2 *)((const u8 *)job + job->turns);
        turns += request_of(job, item.part->request_begin + request)->turns;
        store_once(to, turned<V>(job, stage + (u64)row * job->row_bytes, within, turns));
    } else if (entry) {
        store_once(to, v);
    }
}

// Pages of requests from `first` on; the sums go along with the first ones.
template <typename V, bool TURN>
__device__ inline void scatter(const Job *job, const Item &item, const u8 *stage, u32 rows,
                               u32 first, u32 count_, const u64 *table, Sums *sums) {
    const u32 vectors = item.bytes / sizeof(V), in_row = job->by_vectors.value;
#pragma unroll 4
    for (u32 i = thread(); i < vectors; i += threads()) {
        V v = load((const V *)stage + i);
#ifndef KM_NO_SUMS
        if (first == 0) sums->take(v, i * (sizeof(V) / 4));
#endif
        u32 row = job->by_vectors.divide(i), within = (i - row * in_row) * sizeof(V);
        const u64 *entries = table + row;
        u32 r = 0;
        for (; r + 4 <= count_; r += 4, entries += 4 * rows) {
            u64 entry[4] = {entries[0], entries[rows], entries[2 * rows], entries[3 * rows]};
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                put<V, TURN>(job, item, stage, row, within, first + r + k, entry[k], v);
        }
        for (; r < count_; r++, entries += rows)
            put<V, TURN>(job, item, stage, row, within, first + r, *entries, v);
    }
}

// The sums that the parts should have, read once, while the first payload bytes are on their way.
__device__ inline void fetch_sums(const Job *job, Range range) {
    const Part *parts = parts_of(job);
    u64 *expected = (u64 *)((u8 *)job + job->expected);
    u64 *folded = (u64 *)((u8 *)job + job->folded);
    u32 warps = threads() / lanes();
    for (u32 p = range.begin + thread() / lanes() * blocks() + block(); p < range.end;
         p += warps * blocks()) {
        const Part *part = parts + p;
        if (!part->requests) continue;
        const u64 *stored = (const u64 *)part->sums_address;
        u32 tiles = (u32)((part->length + TILE - 1) / TILE);
        u64 root = 0;
        for (u32 t = lane(); t < tiles; t += lanes()) {
            u64 sum = load_shared_word(stored + t);
            root += mix(sum + (t + 1) * 0x9E3779B97F4A7C15ull);
            if (t >= part->first_tile && t < part->end_tile)
                expected[part->tile_begin + t - part->first_tile] = sum;
        }
        root = warp_sum(root);
        if (lane() == 0) add(folded + p, root);
    }
}

// By the last block: compares what was moved with what should have been, a warp to a part.
__device__ inline void judge(const Job *job, u32 *results, Range range) {
    const Part *parts = parts_of(job);
    const volatile u64 *expected = (const volatile u64 *)((const u8 *)job + job->expected);
    const volatile u64 *sums = (const volatile u64 *)((const u8 *)job + job->sums);
    const volatile u64 *folded = (const volatile u64 *)((const u8 *)job + job->folded);
    for (u32 p = range.begin + thread() / lanes(); p < range.end; p += threads() / lanes()) {
        const Part *part = parts + p;
        u32 bad = 0;
        for (u32 t = part->first_tile + lane(); t < part->end_tile; t += lanes()) {
            u32 at = part->tile_begin + t - part->first_tile;
            if (expected[at] != sums[at] && tile_wanted(job, part, t)) bad = 1;
        }
        bad = (u32)warp_sum(bad);
        if (lane() != 0) continue;
        if (part->requests && folded[p] != part->root) tell_host(results + p, BAD_ROOT);
        else tell_host(results + p, bad ? BAD_TILE : DONE);
    }
}

__device__ inline u32 begin_of(const Job *job, u32 part) {
    return part < job->parts_count ? parts_of(job)[part].item_begin : job->items_count;
}

template <typename V, bool TURN>
__device__ inline void restore(const Job *job, u32 *results, Range range, u8 *shared) {
    u64 *table = (u64 *)shared;
    Ring<V> ring(shared + ENTRIES * sizeof(u64), job->stages, 16384);
    const u32 begin = begin_of(job, range.begin), count_ = begin_of(job, range.end);
    const u32 step = blocks();
    // Filled and read in the same order; an item of which nothing is wanted takes no part.
    u32 ahead = begin + block(), filled = 0;
    for (; ahead < count_ && filled < ring.count; ahead += step) {
        Item item = item_at(job, ahead);
        if (!item.wanted[0] && !item.wanted[1]) continue;
        ring.fill(filled++, (const u8 *)item.part->address + item.begin, item.bytes);
    }
#ifndef KM_NO_SUMS
    fetch_sums(job, range);
#endif
    u32 stage = 0, parity = 0;
    for (u32 at = begin + block(); at < count_; at += step) {
        Item item = item_at(job, at);
        if (!item.wanted[0] && !item.wanted[1]) continue;
        const u32 rows = item.bytes / job->row_bytes, at_once = ENTRIES / rows;
        const u32 requests = 32 - leading_zeros(item.part->requests);
        Sums sums(item);
        for (u32 first = 0; first < requests; first += at_once) {
            u32 some = requests - first < at_once ? requests - first : at_once;
            if (first) barrier();
            address<TURN>(job, item, rows, first, some, table);
            barrier();
            if (!first) ring.wait(stage, parity);
            scatter<V, TURN>(job, item, ring.stage(stage), rows, first, some, table, &sums);
        }
#ifndef KM_NO_SUMS
        sums.give(job, item);
#endif
        barrier();
        for (; ahead < count_; ahead += step) {
            Item next = item_at(job, ahead);
            if (!next.wanted[0] && !next.wanted[1]) continue;
            ring.fill(stage, (const u8 *)next.part->address + next.begin, next.bytes);
            ahead += step;
            break;
        }
        if (++stage == ring.count) stage = 0, parity ^= 1;
    }
    fence();
    barrier();
    u32 *last = (u32 *)table, *counter = (u32 *)((u8 *)job + job->counters);
    if (thread() == 0) *last = count(counter) + 1 == blocks();
    barrier();
    if (!*last) return;
    fence();
    // For the launch that moves the next parts of this job.
    if (thread() == 0) *counter = 0;
#ifndef KM_NO_SUMS
    judge(job, results, range);
#else
    for (u32 p = range.begin + thread(); p < range.end; p += threads()) tell_host(results + p, DONE);
#endif
    system_fence();
}

#ifndef KM_ENTRY
#define KM_ENTRY(name, vector, turn, resident)                             \
    extern "C" __global__ void __launch_bounds__(256, resident)            \
        name(const Job *job, u32 *results, Range range) {                  \
        extern __shared__ __align__(1024) u8 shared[];                     \
        restore<vector, turn>(job, results, range, shared);                \
    }
#endif

KM_ENTRY(kmesh_restore_16, Vec16, false, 4)
KM_ENTRY(kmesh_restore_4, Vec4, false, 4)
KM_ENTRY(kmesh_restore_turn_16, Vec16, true, 3)
KM_ENTRY(kmesh_restore_turn_4, Vec4, true, 3)
