// A job, as client/kmesh/_host_job.h writes it, and where its rows lie.
#pragma once
#include "device.cuh"

static const u32 TILE = 65536;
static const u32 NONE = 0xFFFFFFFFu;

// Division of n < 2^31 by a number that is known beforehand: by a product and a shift.
struct Divisor {
    u32 value, factor, shift;
    __device__ u32 divide(u32 n) const { return factor ? high_product(n, factor) >> shift : n; }
};

// As SpanPart packs it (u64 each), then what the planner adds.
struct Part {
    u64 address, sums_address, root, length;
    u64 tokens, token_begin, token_end, position;
    u64 src_heads, src_head_begin, dst_head_begin, heads;
    u64 src_layers, src_layer_begin, dst_layer_begin, layers;
    u32 item_begin;     // of the job's items, where this part's begin
    u32 first_item;     // and which of the payload's that is
    u32 tile_begin;     // of the job's tile sums, where this part's begin
    u32 first_tile, end_tile;
    u32 request_begin;  // of the job's requests
    u32 requests;       // a bit for each that wants this part
    u32 dense;          // every tile between the first and the last is wanted
    Divisor by_tokens, by_heads;
    u32 bad;            // written by the kernel
    u32 unit_begin;     // of the job's units, where this part's begin; it has items or units
};

// One destination: the page of each token, by block or by slot.
struct Request {
    u64 pages;       // offset of u32 ids in the job
    u32 shift;       // added to the part's position, modulo 2^32
    u32 by_slot;     // ids are of slots, one a token
    u32 turns;       // index of its first cosine and sine, or NONE
    u32 spare;
};

struct Job {
    u64 block_stride, head_stride, token_stride;
    // Offsets in the job.
    u64 bases, parts, requests, turns, expected, sums, folded, counters;
    u32 layers, row_bytes, item_rows, item_bytes;
    u32 parts_count, items_count, tiles_count, stages;
    Divisor by_vectors, by_block, by_items, by_units;
    u32 rotary_dim, interleaved, element;
    u32 entries;  // addresses of pages for which a stage has room
    u32 units_count, unit_tokens, unit_stages, unit_entries;
    u32 burst;  // units that are asked for together
    u32 heads;  // of the pages, and of each part that is moved in units
    // Of a round: offsets again. Items of slow memory come first, and some blocks move only these.
    u64 items, strands, cells, takers, pieces, wanted;
    u64 origin;  // below all pages
    u32 slow_items, slow_blocks;
};

__device__ inline const Part *parts_of(const Job *job) {
    return (const Part *)((const u8 *)job + job->parts);
}

__device__ inline const Request *request_of(const Job *job, u32 index) {
    return (const Request *)((const u8 *)job + job->requests) + index;
}

__device__ inline u32 tile_bytes(const Part *part, u32 tile) {
    u64 left = part->length - (u64)tile * TILE;
    return left < TILE ? (u32)left : TILE;
}

// Where a row of a payload belongs: the offset of its token 0 of block 0 has an address.
struct Place {
    u64 base;
    u32 token;
    bool key, wanted;
};

__device__ inline Place place_of(const Job *job, const Part *part, u32 row) {
    u32 run = part->by_tokens.divide(row);
    u32 plane = part->by_heads.divide(run);
    u32 token = row - run * part->by_tokens.value;
    u32 head = run - plane * part->by_heads.value - (u32)part->src_head_begin;
    u32 layer = (plane >> 1) - (u32)part->src_layer_begin;
    Place place;
    place.token = token;
    place.key = !(plane & 1);
    place.wanted = token - (u32)part->token_begin < (u32)(part->token_end - part->token_begin) &&
                   head < (u32)part->heads && layer < (u32)part->layers;
    place.base = 0;
    if (place.wanted) {
        const u64 *bases = (const u64 *)((const u8 *)job + job->bases);
        u32 own = layer + (u32)part->dst_layer_begin + (plane & 1) * job->layers;
        place.base = bases[own] + (head + part->dst_head_begin) * job->head_stride;
    }
    return place;
}

// The address of a token in a request's pages, of one plane and head whose block 0 has one.
__device__ inline u64 page_of(const Job *job, const Request *request, u64 base, u32 at) {
    const u32 *pages = (const u32 *)((const u8 *)job + request->pages);
    u32 block, slot;
    if (request->by_slot) {
        u32 id = pages[at];
        block = job->by_block.divide(id);
        slot = id - block * job->by_block.value;
    } else {
        u32 number = job->by_block.divide(at);
        slot = at - number * job->by_block.value;
        block = pages[number];
    }
    return base + block * job->block_stride + slot * job->token_stride;
}

// The first wanted row at or after `row`; NONE if there is none.
__device__ inline u32 next_wanted(const Part *part, u32 row) {
    u32 tokens = part->by_tokens.value, heads = part->by_heads.value;
    u32 run = part->by_tokens.divide(row), plane = part->by_heads.divide(run);
    u32 token = row - run * tokens, head = run - plane * heads;
    u32 begin = (u32)part->token_begin, end = (u32)part->token_end;
    u32 first = (u32)part->src_head_begin, behind = first + (u32)part->heads;
    u32 first_plane = 2 * (u32)part->src_layer_begin;
    if (token >= end) token = 0, head++;
    if (head >= behind) head = token = 0, plane++;
    if (plane < first_plane) plane = first_plane, head = token = 0;
    if (head < first) head = first, token = 0;
    if (token < begin) token = begin;
    if (plane >= first_plane + 2 * (u32)part->layers) return NONE;
    return (plane * heads + head) * tokens + token;
}

__device__ inline bool tile_wanted(const Job *job, const Part *part, u32 tile) {
    if (tile < part->first_tile || tile >= part->end_tile) return false;
    if (part->dense) return true;
    u32 row = next_wanted(part, (u32)((u64)tile * TILE / job->row_bytes));
    return row != NONE && (u64)row * job->row_bytes < (u64)(tile + 1) * TILE;
}

// A run of whole rows that is moved at once; it may reach into a second tile.
struct Item {
    const Part *part;
    u64 begin;  // in the payload
    u32 bytes, row;
    bool wanted[2];  // its tile, the one behind
};

// The part with an item, or a unit. Parts are mostly alike, so the first guess is mostly right.
__device__ inline const Part *part_with(const Job *job, u32 index, const Divisor &by,
                                        u32 Part::*begin) {
    const Part *parts = parts_of(job);
    u32 low = 0, high = job->parts_count, guess = by.divide(index);
    if (guess < high && parts[guess].*begin <= index &&
        (guess + 1 == high || parts[guess + 1].*begin > index))
        low = guess, high = guess + 1;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (parts[middle].*begin <= index) low = middle;
        else high = middle;
    }
    return parts + low;
}

__device__ inline Item item_at(const Job *job, u32 index) {
    Item item;
    item.part = part_with(job, index, job->by_items, &Part::item_begin);
    u32 number = index - item.part->item_begin + item.part->first_item;
    item.row = number * job->item_rows;
    item.begin = (u64)number * job->item_bytes;
    u64 left = item.part->length - item.begin;
    item.bytes = left < job->item_bytes ? (u32)left : job->item_bytes;
    u32 tile = (u32)(item.begin / TILE);
    item.wanted[0] = tile_wanted(job, item.part, tile);
    item.wanted[1] = (item.begin + item.bytes - 1) / TILE > tile &&
                     tile_wanted(job, item.part, tile + 1);
    return item;
}

// The sums of the one or two tiles of an item, of the words that this thread saw.
struct Sums {
    u32 first_word, split;  // of the tile; the word of the item with which the next tile begins
    bool straddles;
    u64 sum[2];

    __device__ explicit Sums(const Item &item) {
        u32 inside = (u32)(item.begin % TILE);
        first_word = inside / 4;
        split = (TILE - inside) / 4;
        straddles = inside + item.bytes > TILE;
        sum[0] = sum[1] = 0;
    }

    template <typename V>
    __device__ void take(const V &v, u32 word) {
        const u32 words = sizeof(V) / 4;
        bool next = straddles && word >= split;
        u32 index = next ? word - split : word + first_word;
        i64 taken = 0;
#pragma unroll
        for (u32 i = 0; i < words; i++)
            taken += (i64)(int)v.word[i] * (int)(2 * (index + i) + 1);
        if (next) sum[1] += (u64)taken;
        else sum[0] += (u64)taken;
    }

    // A run of vectors, by a warp's lanes.
    __device__ void take_run(const Vec16 *from, u32 count) {
        if (straddles) {
#pragma unroll 4
            for (u32 i = lane(); i < count; i += lanes()) take(load(from + i), 4 * i);
            return;
        }
        // In two chains: each product waits for the one before.
        i64 even = 0, odd = 0;
        int weight = 2 * (int)(first_word + 4 * lane()) + 1;
#pragma unroll 8
        for (u32 i = lane(); i < count; i += lanes(), weight += 8 * lanes()) {
            const Vec16 v = load(from + i);
            even += (i64)(int)v.word[0] * weight;
            odd += (i64)(int)v.word[1] * (weight + 2);
            even += (i64)(int)v.word[2] * (weight + 4);
            odd += (i64)(int)v.word[3] * (weight + 6);
        }
        sum[0] += (u64)(even + odd);
    }

    // By all threads: adds to the job's sums those of wanted tiles.
    __device__ void give(const Job *job, const Item &item) const {
        u64 *sums = (u64 *)((u8 *)job + job->sums) + item.part->tile_begin +
                    (u32)(item.begin / TILE) - item.part->first_tile;
        for (u32 i = 0; i < 2; i++) {
            if (!item.wanted[i]) continue;
            u64 all = warp_sum(sum[i]);
            if (lane() == 0) add(sums + i, all);
        }
    }
};
