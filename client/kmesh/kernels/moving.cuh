// Payloads to pages: one warp of a block brings items, the others sum and scatter them. `Rows` says
// which items there are, and where each of their rows belongs.
#pragma once
#include "turning.cuh"
#include "upload.cuh"

// Of a stage.
enum { ITEM_BYTES = 16384 };

enum Result { DONE = 0, BAD_ROOT = 1, BAD_TILE = 2 };
// Items, or units, of this block: every one in `stride`, from `begin` on.
struct Lot { u32 begin, end, stride; };

__device__ inline u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

struct Strand;

// What is done at once: an item, for some of those that want it. It lies in shared memory: this, then
// for each of those for each row an entry, made once for a row instead of once for each of its
// vectors, that says where its page is and how it is turned (0: nowhere); then the item's bytes.
struct __align__(16) Share {
    Item item;
    const Strand *strand;  // of a round's item
    u32 rows, wanting;     // how many want the item
    u32 first, requests;   // of those, this time
    bool last;             // of its item
};

// One warp brings items to the stages; it runs ahead as far as there are stages.
template <typename V, typename Rows>
struct Producer {
    const Job *job;
    const Ring<V> *ring;
    u32 at, end, stride, first;
    Cursor cursor;
    bool ended;

    __device__ Producer(const Job *job_, const Ring<V> *ring_, const Lot &lot, u32)
        : job(job_), ring(ring_), at(lot.begin), end(lot.end), stride(lot.stride), first(0),
          ended(false) {}

    __device__ void step() {
        Share share;
        for (; at < end; at += stride) {
            Rows::find(job, at, share);
            if (share.item.wanted[0] || share.item.wanted[1]) break;
        }
        if (at >= end) {
            ring->wait_empty(cursor);
            Share *to = (Share *)ring->head(cursor);
            if (lane() == 0) to->item.bytes = 0;
            warp_barrier();
            ring->ready(cursor);
            ended = true;
            return;
        }
        share.first = first;
        u32 left = share.wanting - first, room = left ? ring->entries / share.rows : 0;
        share.requests = left < room ? left : room;
        share.last = share.requests == left;
        ring->wait_empty(cursor);
        if (first == 0)
            ring->fill(cursor, (const u8 *)share.item.part->address + share.item.begin,
                       share.item.bytes);
        if (lane() == 0) *(Share *)ring->head(cursor) = share;
        Rows::address(job, share, ring->table(cursor));
        warp_barrier();
        ring->ready(cursor);
        // The next requests of an item find its bytes where they are.
        cursor.turn();
        if (share.last) first = 0, at += stride, cursor.next(ring->count);
        else first += share.requests;
    }
};

// The other warps sum what has come, and put it where it belongs.
template <typename V, typename Rows>
struct Consumer {
    const Job *job;
    const Ring<V> *ring;
    Cursor cursor;
    bool ended;

    __device__ Consumer(const Job *job_, const Ring<V> *ring_)
        : job(job_), ring(ring_), ended(false) {}

    __device__ static void consume(const Job *job, const Ring<V> *ring) {
        Consumer consumer(job, ring);
        while (!consumer.ended) consumer.step();
    }

    __device__ void step() {
        ring->wait_full(cursor);
        const Share *share = (const Share *)ring->head(cursor);
        if (share->item.bytes == 0) {
            ended = true;
            return;
        }
        const Item item = share->item;
        const bool last = share->last, sum = share->first == 0;
        Sums sums(item);
        scatter(*share, item, ring->table(cursor), ring->stage(cursor), sum, sums);
#ifndef KM_NO_SUMS
        if (sum) sums.give(job, item);
#endif
        ring->release(cursor);
        cursor.turn();
        if (last) cursor.next(ring->count);
    }

    __device__ void scatter(const Share &share, const Item &item, const u64 *table, const u8 *stage,
                            bool sum, Sums &sums) const {
        const u32 vectors = item.bytes / sizeof(V), in_row = job->by_vectors.value;
        const u32 rows = share.rows, requests = share.requests;
        const u64 origin = Rows::origin(job);
        // Vectors of 4 bytes are for what is rare: less code, and less to compile.
#pragma unroll (sizeof(V) == 16 ? Rows::UNROLL : 1)
        for (u32 i = consumer(); i < vectors; i += consumers()) {
            V v = load((const V *)stage + i);
#ifndef KM_NO_SUMS
            if (sum) sums.take(v, i * (sizeof(V) / 4));
#endif
            u32 row = job->by_vectors.divide(i), within = (i - row * in_row) * sizeof(V);
            const u64 *entries = table + row;
            bool turning = false;
            u32 r = 0;
            for (; r + 4 <= requests; r += 4, entries += 4 * rows) {
                u64 entry[4] = {entries[0], entries[rows], entries[2 * rows], entries[3 * rows]};
#pragma unroll
                for (u32 k = 0; k < 4; k++) turning |= put(origin, within, entry[k], v);
            }
            for (; r < requests; r++, entries += rows) turning |= put(origin, within, *entries, v);
            // Written out once: turning is much code.
            if (turning) turn(share, item, table + row, stage + (u64)row * job->row_bytes, within, v);
        }
    }

    // To a page as it is; whether it is to be turned before.
    __device__ bool put(u64 origin, u32 within, u64 entry, const V &v) const {
        if (Rows::turns(entry)) return true;
        if (entry) store_once((V *)(origin + Rows::above(entry) + within), v);
        return false;
    }

    // A vector to the pages of those for whom it is turned.
    __device__ void turn(const Share &share, const Item &item, const u64 *entries, const u8 *row,
                         u32 within, const V &v) const {
        const u64 origin = Rows::origin(job);
#pragma unroll 1
        for (u32 r = 0; r < share.requests; r++) {
            u64 entry = entries[r * share.rows];
            if (!Rows::turns(entry)) continue;
            const float2 *turns = Rows::turn(job, item, share.first + r, entry);
            store_once((V *)(origin + Rows::above(entry) + within),
                       turned_vector(job, row, within, v, turns));
        }
    }
};

// The sums that the parts should have, read once, while the first payload bytes are on their way.
__device__ inline void fetch_sums(const Job *job, Range range, const Crew &crew) {
    const Part *parts = parts_of(job);
    u64 *expected = (u64 *)((u8 *)job + job->expected);
    u64 *folded = (u64 *)((u8 *)job + job->folded);
    u32 warps = crew.threads() / lanes();
    for (u32 p = range.begin + crew.thread() / lanes() * blocks() + block(); p < range.end;
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

// A tile whose sum is not what it should be: its part is bad, if anything of it is wanted.
template <typename Rows>
__device__ inline void suspect(const Job *job, u32 tile) {
    Part *parts = (Part *)parts_of(job);
    u32 low = 0, high = job->parts_count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (parts[middle].tile_begin <= tile) low = middle;
        else high = middle;
    }
    Part *part = parts + low;
    if (Rows::tile_wanted(job, part, tile)) part->bad = 1;
}

__device__ inline u32 tiles_before(const Job *job, u32 part) {
    return part < job->parts_count ? parts_of(job)[part].tile_begin : job->tiles_count;
}

// Of a part whose sums do not fold to the root that it should have.
__device__ inline bool root_differs(const Job *job, u32 part) {
    const Part *one = parts_of(job) + part;
    const u64 *folded = (const u64 *)((const u8 *)job + job->folded);
    return one->requests && load_fresh(folded + part) != one->root;
}

__device__ inline u64 tile_differs(const Job *job, u32 tile) {
    const u64 *expected = (const u64 *)((const u8 *)job + job->expected);
    const u64 *sums = (const u64 *)((const u8 *)job + job->sums);
    return load_fresh(expected + tile) ^ load_fresh(sums + tile);
}

// What is wrong is looked for once something is known to be: this is much code, and whoever ran
// it each time would wait for it to come from memory.
template <typename Rows>
__device__ KM_APART void blame(const Job *job, u32 *results, Range range, const Crew crew) {
    const u32 end = tiles_before(job, range.end);
#pragma unroll 1
    for (u32 t = tiles_before(job, range.begin) + crew.thread(); t < end; t += crew.threads())
        if (tile_differs(job, t)) suspect<Rows>(job, t);
    crew.barrier();
    for (u32 p = range.begin + crew.thread(); p < range.end; p += crew.threads()) {
        u32 result = *(const volatile u32 *)&parts_of(job)[p].bad ? BAD_TILE : DONE;
        if (root_differs(job, p)) result = BAD_ROOT;
        tell_host(results + p, result);
    }
}

// By the last block: compares what was moved with what should have been. `wrong` is the block's, 0.
template <typename Rows, u32 AT_ONCE>
__device__ inline void judge(const Job *job, u32 *results, Range range, const Crew &crew,
                             volatile u32 *wrong) {
    const u32 end = tiles_before(job, range.end), step = crew.threads();
    u64 differ = 0;
    for (u32 p = range.begin + crew.thread(); p < range.end; p += step)
        differ |= root_differs(job, p);
    for (u32 t = tiles_before(job, range.begin) + crew.thread(); t < end; t += AT_ONCE * step) {
#pragma unroll
        for (u32 k = 0; k < AT_ONCE; k++)
            if (t + k * step < end) differ |= tile_differs(job, t + k * step);
    }
    if (differ) *wrong = 1;
    crew.barrier();
    if (*wrong) return blame<Rows>(job, results, range, crew);
    for (u32 p = range.begin + crew.thread(); p < range.end; p += step)
        tell_host(results + p, DONE);
}

__device__ inline u32 items_before(const Job *job, u32 part) {
    return part < job->parts_count ? parts_of(job)[part].item_begin : job->items_count;
}

// Through a ring, a block's lot; some of those that consume fetch the sums of the range first.
template <u32 PRODUCERS, typename P, typename C, typename R>
__device__ inline void move(const Job *job, const R &ring, Range range, const Lot &lot, Crew fetch) {
#ifdef KM_NO_SUMS
    fetch = nobody();
#endif
    if (ALONE) {
        if (fetch.has()) fetch_sums(job, range, fetch);
        P producer(job, &ring, lot, 0);
        C consumer(job, &ring);
        while (!consumer.ended) producer.step(), consumer.step();
    } else if (produces(PRODUCERS)) {
        P producer(job, &ring, lot, ::producer(PRODUCERS));
        while (!producer.ended) producer.step();
    } else {
        if (fetch.has()) fetch_sums(job, range, fetch);
        C::consume(job, &ring);
    }
}

// By a block's crew that has summed all of its lot: the block that ends last says how it went. What
// others of the block still write, and what is told here, has come by the end of the launch, before
// which nobody asks.
template <typename Rows, u32 AT_ONCE = 8>
__device__ inline void finish(const Job *job, u32 *results, Range range, u8 *shared,
                              const Crew &crew) {
    fence();
    crew.barrier();
    // Behind a ring's barriers, at which others may still wait.
    u32 *last = (u32 *)(shared + AFTER_BARRIERS), *counter = (u32 *)((u8 *)job + job->counters);
    if (crew.thread() == 0) *last = count(counter) + 1 == blocks(), last[1] = 0;
    crew.barrier();
    if (!*last) return;
    fence();
    // For the launch that moves the next parts of this job.
    if (crew.thread() == 0) *counter = 0;
#ifndef KM_NO_SUMS
    judge<Rows, AT_ONCE>(job, results, range, crew, last + 1);
#else
    for (u32 p = range.begin + crew.thread(); p < range.end; p += crew.threads())
        tell_host(results + p, DONE);
#endif
}
