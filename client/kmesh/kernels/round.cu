// A round to paged KV in one launch: dense spans, recipes, and the bases that these refer to, each
// byte read once for all who take it. client/kmesh/_host_round.h has written down who that is.
#include "moving.cuh"

// Rows of one plane of one layer that lie back to back in a part's bytes. No rows: bytes that belong
// to nobody, and are there for their tile's sum.
struct Strand {
    u32 part, base;         // of the job's parts; of the pages' bases, K of all layers and then V
    u32 cell_begin, cells;
    u32 rows, takers;       // the most that one of its cells has
};

// Whole rows of a strand. `row` is the first of them, or how many bytes there are if there are no
// rows. The lowest bits of `begin` say whether its tile is wanted, and the one behind.
struct RoundItem {
    u64 begin;
    u32 strand, row;
};

// Rows [head][token] of a strand, with takers of their own.
struct Cell {
    u32 row_begin;
    Divisor by_tokens;
    u32 taker_begin, takers;
};

// A request and what of a cell's tokens it takes: pieces that are in order and do not overlap.
struct Taker { u32 request, piece_begin, pieces, spare; };

// Tokens of a cell, how far away in the request's pages they belong (modulo 2^32), and the number of
// the turn, from 1; 0: none.
struct Piece { u32 begin, end, shift, turn; };

template <typename T>
__device__ inline const T *table_of(const Job *job, u64 offset) {
    return (const T *)((const u8 *)job + offset);
}

// An entry is how far above the job's origin its page is, and in its upper 16 bits the turn.
struct RoundRows {
    static const u32 TURN_AT = 48, UNROLL = 2;

    __device__ static void find(const Job *job, u32 index, Share &share) {
        const RoundItem found = table_of<RoundItem>(job, job->items)[index];
        const Strand *strand = table_of<Strand>(job, job->strands) + found.strand;
        Item &item = share.item;
        u32 left = strand->rows - found.row;
        share.strand = strand;
        share.rows = !strand->rows ? 0 : left < job->item_rows ? left : job->item_rows;
        share.wanting = strand->takers;
        item.part = parts_of(job) + strand->part;
        item.begin = found.begin & ~(u64)3;
        item.row = found.row;
        item.bytes = strand->rows ? share.rows * job->row_bytes : found.row;
        item.wanted[0] = found.begin & 1;
        item.wanted[1] = found.begin >> 1 & 1;
    }

    __device__ static bool tile_wanted(const Job *job, const Part *, u32 tile) {
        return table_of<u32>(job, job->wanted)[tile / 32] >> tile % 32 & 1;
    }

    __device__ static void address(const Job *job, const Share &share, u64 *table) {
        const Strand *strand = share.strand;
        const Part *part = share.item.part;
        const u64 base = table_of<u64>(job, job->bases)[strand->base] - job->origin;
        for (u32 row = lane(); row < share.rows; row += lanes()) {
            const u32 at = share.item.row + row;
            const Cell *cell = cell_with(job, strand, at);
            const u32 inside = at - cell->row_begin, head = cell->by_tokens.divide(inside);
            const u32 token = inside - head * cell->by_tokens.value;
            const u32 own = head - (u32)part->src_head_begin;
            const bool wanted = own < (u32)part->heads;
            const u64 first = base + (own + part->dst_head_begin) * job->head_stride;
#pragma unroll 2
            for (u32 r = 0; r < share.requests; r++) {
                const u32 number = share.first + r;
                u64 entry = 0;
                if (wanted && number < cell->takers)
                    entry = entry_of(job, cell->taker_begin + number, token, first);
                table[r * share.rows + row] = entry;
            }
        }
    }

    __device__ static u64 origin(const Job *job) { return job->origin; }
    __device__ static u64 above(u64 entry) { return entry & (((u64)1 << TURN_AT) - 1); }
    __device__ static bool turns(u64 entry) { return entry >> TURN_AT; }

    __device__ static const float2 *turn(const Job *job, const Item &, u32, u64 entry) {
        return table_of<float2>(job, job->turns) +
               ((u32)(entry >> TURN_AT) - 1) * (job->rotary_dim / 2);
    }

    __device__ static const Cell *cell_with(const Job *job, const Strand *strand, u32 row) {
        const Cell *cells = table_of<Cell>(job, job->cells) + strand->cell_begin;
        u32 low = 0, high = strand->cells;
        while (high - low > 1) {
            u32 middle = (low + high) / 2;
            if (cells[middle].row_begin <= row) low = middle;
            else high = middle;
        }
        return cells + low;
    }

    // Where one taker wants a token of a plane and head whose block 0 is at `base`.
    __device__ static u64 entry_of(const Job *job, u32 number, u32 token, u64 base) {
        const Taker taker = table_of<Taker>(job, job->takers)[number];
        const Piece *pieces = table_of<Piece>(job, job->pieces) + taker.piece_begin;
        u32 low = 0, high = taker.pieces;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (pieces[middle].end <= token) low = middle + 1;
            else high = middle;
        }
        if (low == taker.pieces) return 0;
        const Piece piece = pieces[low];
        if (token < piece.begin) return 0;
        const Request *request = request_of(job, taker.request);
        return page_of(job, request, base, token + piece.shift) | (u64)piece.turn << TURN_AT;
    }
};

// Slow memory is read from the first moment to the last, by blocks that do nothing else: what the
// others bring from the GPU's own hides behind that.
__device__ inline Lot lot_of(const Job *job, Range range) {
    const u32 slow = job->slow_blocks, begin = items_before(job, range.begin);
    const u32 end = items_before(job, range.end);
    if (!slow) return Lot{begin + block(), end, blocks()};
    if (block() < slow) return Lot{block(), job->slow_items, slow};
    return Lot{job->slow_items + block() - slow, end, blocks() - slow};
}

template <typename V>
__device__ inline void restore_round(const Job *job, u32 *results, Range range, u8 *shared) {
    Ring<V> ring(shared, job->stages, ITEM_BYTES, job->entries);
    move<1, Producer<V, RoundRows>, Consumer<V, RoundRows>>(job, ring, range, lot_of(job, range),
                                               all_consumers());
    finish<RoundRows>(job, results, range, shared, everybody());
}

KM_UPLOAD_ENTRY(kmesh_round_upload)

// Bytes that only the GPU reads, and where they go in what is found; counted in vectors.
struct Fetched { u64 address; u32 at, vectors; };

// Recipes' tables, for whoever plans a round on the host: a block takes a piece at a time.
__device__ inline void fetch(const Fetched *pieces, Vec16 *found, Range range) {
    for (u32 i = range.begin + block(); i < range.end; i += blocks()) {
        const Fetched piece = pieces[i];
        for (u32 v = thread(); v < piece.vectors; v += threads())
            store_once(found + piece.at + v, load_once((const Vec16 *)piece.address + v));
    }
}

#ifndef KM_FETCH_ENTRY
#define KM_FETCH_ENTRY(name)                                                                \
    extern "C" __global__ void name(const Fetched *pieces, Vec16 *found, Range range) { \
        fetch(pieces, found, range);                                                        \
    }
#endif

KM_FETCH_ENTRY(kmesh_round_fetch)

#ifndef KM_ENTRY
#define KM_ENTRY(name, vector, threads, resident)                          \
    extern "C" __global__ void __launch_bounds__(threads, resident)        \
        name(const Job *job, u32 *results, Range range) {                  \
        extern __shared__ __align__(1024) u8 shared[];                     \
        restore_round<vector>(job, results, range, shared);                \
    }
#endif

KM_ENTRY(kmesh_round_16, Vec16, 288, 3)
KM_ENTRY(kmesh_round_4, Vec4, 288, 3)
