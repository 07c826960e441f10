// Units: what the pages of one or a few blocks take of one layer, K and V of all heads. A unit is
// brought as one run of the payload for each head of K and of V, and written page by page, so that
// a page's bytes are written together.
#pragma once
#include "moving.cuh"

// The head of a stage that holds a unit. Behind it lie addresses: for each request, for each block,
// where K and V of the block's first token of the unit belong (0: nowhere).
struct __align__(16) Unit {
    const Part *part;
    u64 begin, stride;  // in the payload: its first run, and from one run to the next
    u32 tokens, requests;  // no tokens: there are no more units
};

__device__ inline u32 units_before(const Job *job, u32 part) {
    return part < job->parts_count ? parts_of(job)[part].unit_begin : job->units_count;
}

// Blocks of a unit.
__device__ inline u32 unit_blocks(const Job *job) {
    return (job->unit_tokens - 1) / job->by_block.value + 1;
}

// One of a unit's addresses.
__device__ inline u64 address(const Job *job, const Unit &unit, u32 layer, u32 token, u32 number) {
    const Part *part = unit.part;
    const u64 *bases = (const u64 *)((const u8 *)job + job->bases) + part->dst_layer_begin + layer;
    const u32 size = job->by_block.value, each = 2 * unit_blocks(job);
    const u32 r = number / each, inside = (number - r * each) / 2 * size, plane = number & 1;
    if (!(part->requests >> r & 1) || inside >= unit.tokens) return 0;
    const Request *request = request_of(job, part->request_begin + r);
    const u32 *pages = (const u32 *)((const u8 *)job + request->pages);
    u32 at = (u32)part->position + token + inside + request->shift;
    u32 block = job->by_block.divide(at), slot = at - block * size;
    return bases[plane * job->layers] + pages[block] * job->block_stride +
           slot * job->token_stride + part->dst_head_begin * job->head_stride;
}

// Units are asked for in bursts: reads that come one by one between writes make the memory turn
// around each time. The producing warps take turns; more of them than stages would let one run a
// whole round ahead of another, and a barrier tells one round from the next, not from the one after.
struct UnitProducer {
    const Job *job;
    const Ring<Vec16> *ring;
    Lot lot;
    u32 count, turn, stride;  // of the block's units: how many, this warp's next, its step
    bool ended;

    __device__ UnitProducer(const Job *job_, const Ring<Vec16> *ring_, const Lot &lot_, u32 own)
        : job(job_), ring(ring_), lot(lot_), count(0), turn(own), ended(false) {
        stride = UNIT_PRODUCERS < ring->count ? (u32)UNIT_PRODUCERS : ring->count;
        ended = own >= stride;
        if (lot.begin < lot.end) count = (lot.end - lot.begin - 1) / lot.stride + 1;
    }

    __device__ void step() {
        const Cursor cursor(turn, ring->count);
        if (turn >= count) {
            ended = true;
            if (turn > count) return;
            ring->wait_empty(cursor);
            if (lane() == 0) ((Unit *)ring->head(cursor))->tokens = 0;
            warp_barrier();
            ring->ready(cursor);
            return;
        }
        Unit unit;
        u32 layer, token;
        find(unit, layer, token);
        // What takes long is looked up while the stage is not empty yet.
        const u32 addresses = unit.requests * 2 * unit_blocks(job);
        u64 first = lane() < addresses ? address(job, unit, layer, token, lane()) : 0;
        const u32 burst = job->burst < ring->count ? job->burst : ring->count;
        for (u32 behind = turn - turn % burst + burst, at = turn; at < behind; at++)
            ring->wait_empty(Cursor(at, ring->count));
        const u32 row = job->row_bytes;
        ring->fill(cursor, (const u8 *)unit.part->address + unit.begin, unit.tokens * row,
                   2 * job->heads, unit.stride, job->unit_tokens * row);
        if (lane() == 0) *(Unit *)ring->head(cursor) = unit;
        u64 *table = ring->table(cursor);
        if (lane() < addresses) table[lane()] = first;
        for (u32 i = lane() + lanes(); i < addresses; i += lanes())
            table[i] = address(job, unit, layer, token, i);
        warp_barrier();
        ring->ready(cursor);
        turn += stride;
    }

    __device__ void find(Unit &unit, u32 &layer, u32 &token) const {
        const u32 index = lot.begin + turn * lot.stride, most = job->unit_tokens;
        const Part *part = part_with(job, index, job->by_units, &Part::unit_begin);
        const u32 all = (u32)part->tokens, chunks = (all - 1) / most + 1;
        const u32 number = index - part->unit_begin;
        layer = number / chunks, token = (number - layer * chunks) * most;
        unit.part = part;
        unit.stride = (u64)all * job->row_bytes;
        unit.begin = (part->src_layer_begin + layer) * 2 * job->heads * unit.stride +
                     (u64)token * job->row_bytes;
        unit.tokens = all - token < most ? all - token : most;
        unit.requests = 32 - leading_zeros(part->requests);
    }
};

// Some warps write units and others sum them, from the same stage. Each thread that writes has the
// same vectors of every unit: where they lie in the stage and where they belong in a page is found
// once. Neighbours belong beside each other in the page.
template <bool WRITES, bool SUMS>
struct UnitConsumer {
    const Job *job;
    const Ring<Vec16> *ring;
    Cursor cursor;
    bool ended;
    u32 each;                  // addresses of one request
    u32 pieces;                // of a run, each summed by a warp
    u32 place[PER_CONSUMER];   // vector of the stage, address, token of the unit
    u32 offset[PER_CONSUMER];  // from that address

    static const u32 FROM = 11, ENTRY = 9, NOWHERE = 2047;

    __device__ UnitConsumer(const Job *job_, const Ring<Vec16> *ring_)
        : job(job_), ring(ring_), ended(false), each(2 * unit_blocks(job_)) {
        const u32 warps = unit_summers().threads() / lanes(), runs = 2 * job->heads;
        pieces = warps > runs ? warps / runs : 1;
        const u32 heads = job->heads, in_row = job->by_vectors.value, most = job->unit_tokens;
        const u32 size = job->by_block.value, vectors = 2 * heads * most * in_row;
        const u64 *bases = (const u64 *)((const u8 *)job + job->bases);
        const u64 apart = bases[0] < bases[job->layers] ? bases[job->layers] - bases[0]
                                                        : bases[0] - bases[job->layers];
        const bool joined = apart < job->head_stride && apart < job->token_stride;
        const bool by_token = job->token_stride >= job->head_stride;
        if (!WRITES) return;
        const Crew writers = unit_writers();
#pragma unroll
        for (u32 k = 0; k < PER_CONSUMER; k++) {
            u32 i = writers.thread() + k * writers.threads();
            place[k] = NOWHERE << (FROM + ENTRY);
            if (i >= vectors) continue;
            u32 row = i / in_row, within = i - row * in_row, plane = 0;
            if (joined) plane = row & 1, row >>= 1;
            u32 inner = by_token ? heads : most, outer = row / inner, head = row - outer * inner;
            u32 token = outer;
            if (!joined) {
                u32 count = by_token ? most : heads;
                plane = outer / count, token = outer - plane * count;
            }
            if (!by_token) {
                u32 other = head;
                head = token, token = other;
            }
            u32 from = ((plane * heads + head) * most + token) * in_row + within;
            u32 number = token / size;
            place[k] = from | (2 * number + plane) << FROM | token << (FROM + ENTRY);
            offset[k] = head * (u32)job->head_stride +
                        (token - number * size) * (u32)job->token_stride + 16 * within;
        }
    }

    __device__ void step() {
        ring->wait_full(cursor);
        const Unit unit = *(const Unit *)ring->head(cursor);
        if (!unit.tokens) {
            ended = true;
            return;
        }
        const Vec16 *stage = (const Vec16 *)ring->stage(cursor);
        if (WRITES) scatter(unit, ring->table(cursor), stage);
#ifndef KM_NO_SUMS
        if (SUMS) sum(unit, stage);
#endif
        ring->release(cursor);
        cursor.turn();
        cursor.next(ring->count);
    }

    __device__ void scatter(const Unit &unit, const u64 *table, const Vec16 *stage) const {
        Vec16 v[PER_CONSUMER];
#pragma unroll
        for (u32 k = 0; k < PER_CONSUMER; k++)
            if (place[k] >> (FROM + ENTRY) < unit.tokens)
                v[k] = load(stage + (place[k] & ((1u << FROM) - 1)));
#pragma unroll 1
        for (u32 r = 0; r < unit.requests; r++, table += each) {
#pragma unroll
            for (u32 k = 0; k < PER_CONSUMER; k++) {
                if (place[k] >> (FROM + ENTRY) >= unit.tokens) continue;
                u64 entry = table[place[k] >> FROM & ((1u << ENTRY) - 1)];
                if (!entry) continue;
                store_once((Vec16 *)(entry + offset[k]), v[k]);
            }
        }
    }

    // Each summing warp sums runs, or parts of them where there are more warps than runs.
    __device__ void sum(const Unit &unit, const Vec16 *stage) const {
        const Crew summers = unit_summers();
        const u32 warps = summers.threads() / lanes(), in_row = job->by_vectors.value;
        const u32 vectors = unit.tokens * in_row, pitch = job->unit_tokens * in_row;
        for (u32 i = summers.thread() / lanes(); i < 2 * job->heads * pieces; i += warps) {
            u32 run = i, first = 0, end = vectors;
            if (pieces > 1) {
                run = i / pieces;
                u32 piece = i - run * pieces;
                first = vectors * piece / pieces, end = vectors * (piece + 1) / pieces;
                if (first == end) continue;
            }
            Item item;
            item.part = unit.part;
            item.begin = unit.begin + run * unit.stride + 16 * first;
            item.bytes = 16 * (end - first);
            item.wanted[0] = true;
            item.wanted[1] = item.begin % TILE + item.bytes > TILE;
            Sums sums(item);
            sums.take_run(stage + run * pitch + first, end - first);
            sums.give(job, item);
        }
    }
};

// All that is done with units.
struct UnitConsumers : UnitConsumer<true, true> {
    using UnitConsumer<true, true>::UnitConsumer;

    __device__ static void consume(const Job *job, const Ring<Vec16> *ring) {
        if (unit_summers().has()) consume_as<UnitConsumer<false, true>>(job, ring);
        else consume_as<UnitConsumer<true, false>>(job, ring);
    }

    template <typename C>
    __device__ static void consume_as(const Job *job, const Ring<Vec16> *ring) {
        C consumer(job, ring);
        while (!consumer.ended) consumer.step();
    }
};
