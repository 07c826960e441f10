// A job of the GPU's kernels, written down: see docs/kernels.md. No Python in here.
#ifndef KMESH_HOST_JOB_H
#define KMESH_HOST_JOB_H

#include "_host_paged.h"

// What is below is what client/kmesh/kernels/paged.cuh reads, member by member.
enum { KM_STAGE = 16384, KM_ENTRIES = 1024, KM_SHARED_BY = 32, KM_MOST_STAGES = 12 };
// Of shared memory: before all stages, and in each beside its bytes and its addresses.
enum { KM_HEAD = 512, KM_UNIT = 128 };
// Of a unit: its bytes, and addresses of pages (of K, of V) for which its stage has room.
enum { KM_UNIT_BYTES = 32768, KM_UNIT_ENTRIES = 512 };
#define KM_NO_TURNS UINT32_MAX
#define KM_JOB_LIMIT (UINT64_C(1) << 31)

typedef struct {
    uint32_t value, factor, shift;
} km_divisor;

typedef struct {
    km_part part;
    uint32_t item_begin, first_item, tile_begin, first_tile, end_tile, request_begin, requests;
    uint32_t dense;
    km_divisor by_tokens, by_heads;
    uint32_t bad, unit_begin;
} km_job_part;

typedef struct {
    uint64_t pages;
    uint32_t shift, by_slot, turns, spare;
} km_job_request;

typedef struct {
    uint64_t block_stride, head_stride, token_stride;
    uint64_t bases, parts, requests, turns, expected, sums, folded, counters;
    uint32_t layers, row_bytes, item_rows, item_bytes;
    uint32_t parts_count, items_count, tiles_count, stages;
    km_divisor by_vectors, by_block, by_items, by_units;
    uint32_t rotary_dim, interleaved, element, entries;
    uint32_t units_count, unit_tokens, unit_stages, unit_entries, burst, heads;
    uint64_t items, strands, cells, takers, pieces, wanted, origin;  // of a round
    uint32_t slow_items, slow_blocks;
} km_job;

// As kmesh.kernels.plan packs it.
typedef struct {
    uint64_t pages, count;  // address of int64 ids
    int64_t shift;
    uint32_t by_slot, turns;
} km_wanted;

typedef struct {
    uint32_t parts, requests;
} km_group;

typedef struct {
    uint32_t shared, stages;  // bytes of shared memory and stages in it, at most
    uint32_t unit_shared, unit_stages;  // the same for units; no stages: no units
    uint32_t burst;                     // units that are asked for together
    uint32_t rotary_dim, interleaved, element;
} km_job_options;

typedef struct {
    uint64_t size, upload, vector, parts, items, tiles, bytes, shared, units, unit_shared;
} km_job_sizes;

typedef struct {
    const km_layout *layout;
    const uint64_t *bases;  // k_base[layers], v_base[layers]
    const unsigned char *parts;
    const km_group *groups;
    size_t group_count;
    const km_wanted *wanted;
    const unsigned char *turns;
    size_t turns_bytes;
    km_job_options options;
    unsigned char *status;  // for each group, for each of its requests, for each of its parts
} km_job_input;

// n / value = n · factor >> (32 + shift) for n < 2^31.
static km_divisor km_divide_by(uint64_t value) {
    km_divisor d = {(uint32_t)value, 0, 0};
    if (value <= 1 || value >= KM_JOB_LIMIT) return d;
    uint32_t bits = 64 - (uint32_t)__builtin_clzll(value - 1);
    d.factor = (uint32_t)(((UINT64_C(1) << (31 + bits)) + value - 1) / value);
    d.shift = bits - 1;
    return d;
}

static uint64_t km_stages(uint64_t shared, uint64_t stage, uint64_t most) {
    uint64_t stages = shared > KM_HEAD ? (shared - KM_HEAD) / stage : 0;
    if (stages > most) stages = most;
    return stages < KM_MOST_STAGES ? stages : KM_MOST_STAGES;
}

static size_t km_room(size_t bytes) {
    return (bytes + 15) / 16 * 16;
}

static int km_wanted_check(const km_job_input *in, const km_wanted *wanted, const km_part *part) {
    km_paged paged = {.layout = *in->layout,
                      .blocks = (const int64_t *)(uintptr_t)wanted->pages,
                      .block_count = wanted->count};
    if (wanted->by_slot) {
        paged.layout.num_blocks *= paged.layout.block_tokens;
        paged.layout.block_stride = paged.layout.token_stride;
        paged.layout.block_tokens = 1;
    }
    km_part moved = *part;
    // A position before 0 becomes one behind all pages, and is refused as such.
    moved.position += (uint64_t)wanted->shift;
    return km_part_check(&paged, &moved);
}

// Which items and tiles of its payload a part touches.
static void km_part_extent(const km_job_input *in, uint64_t item, km_job_part *out) {
    const km_part *s = &out->part;
    uint64_t row = in->layout->row_bytes;
    uint64_t first = (s->src_layer_begin * 2 * s->src_heads + s->src_head_begin) * s->tokens +
                     s->token_begin;
    uint64_t plane = (s->src_layer_begin + s->layers) * 2 - 1;
    uint64_t last = (plane * s->src_heads + s->src_head_begin + s->heads - 1) * s->tokens +
                    s->token_end - 1;
    uint64_t end = ((last + 1) * row + KM_TILE - 1) / KM_TILE;
    out->first_tile = (uint32_t)(first * row / KM_TILE);
    out->end_tile = (uint32_t)end;
    out->first_item = (uint32_t)(out->first_tile * KM_TILE / item);
    out->dense = !s->token_begin && s->token_end == s->tokens && s->heads == s->src_heads;
}

static uint64_t km_part_items(const km_job_part *p, uint64_t item) {
    uint64_t end = (uint64_t)p->end_tile * KM_TILE;
    if (end > p->part.length) end = p->part.length;
    return (end + item - 1) / item - p->first_item;
}

// Tokens of a unit, which lies in one block or is made of whole ones; 0: there are none.
static uint64_t km_unit_tokens(const km_layout *l, uint64_t longest, uint64_t requests) {
    uint64_t token, most, block = l->block_tokens;
    // Offsets in a page have 32 bits.
    if (__builtin_mul_overflow(2 * l->row_bytes, l->heads, &token) || l->heads >= KM_JOB_LIMIT ||
        (l->heads - 1) * l->head_stride + (block - 1) * l->token_stride + l->row_bytes > UINT32_MAX)
        return 0;
    most = KM_UNIT_BYTES / token;
    if (most < block) {
        uint64_t tokens = most;
        while (tokens && block % tokens) tokens--;
        return tokens;
    }
    uint64_t blocks = most / block, needed = (longest - 1) / block + 1;
    if (blocks > needed) blocks = needed;
    if (blocks > KM_UNIT_ENTRIES / 2 / requests) blocks = KM_UNIT_ENTRIES / 2 / requests;
    return blocks * block;
}

// Whether a part can be moved in units: all of its layers' bytes are wanted, its tiles hold nothing
// of other layers, and each unit begins where a page or a part of one does, for all who want it.
static int km_part_in_units(const km_job_input *in, uint64_t tokens, const km_job_part *p,
                            const km_wanted *wanted) {
    const km_layout *l = in->layout;
    const km_part *s = &p->part;
    if (!tokens || !p->dense || s->heads != l->heads || s->address % 16) return 0;
    uint64_t layer = 2 * s->heads * s->tokens * l->row_bytes;
    uint64_t begin = s->src_layer_begin * layer, end = begin + s->layers * layer;
    if (begin % KM_TILE || (end % KM_TILE && end != s->length)) return 0;
    uint64_t step = tokens < l->block_tokens ? tokens : l->block_tokens;
    for (uint32_t r = 0; r < KM_SHARED_BY; r++)
        if (p->requests >> r & 1 &&
            (wanted[r].by_slot || (s->position + (uint64_t)wanted[r].shift) % step))
            return 0;
    return 1;
}

// What is not served of an engine's pages.
static const char *km_job_layout_wrong(const km_layout *l) {
    if (l->order[0].atom || l->order[1].atom)
        return "pages are not served: a token's row must be contiguous";
    if (l->row_bytes < 4 || l->row_bytes > KM_STAGE || l->row_bytes % 4)
        return "rows are not served: only of 4 to 16384 bytes, by fours";
    if (l->num_blocks >= KM_JOB_LIMIT || l->block_tokens >= KM_JOB_LIMIT ||
        l->num_blocks * l->block_tokens >= KM_JOB_LIMIT)
        return "2^31 pages, or slots in them, and more are not served";
    return NULL;
}

// What is not served of requests; counts their ids.
static const char *km_job_requests_wrong(const km_layout *l, const km_wanted *wanted,
                                         size_t requests, size_t *ids) {
    *ids = 0;
    for (size_t r = 0; r < requests; r++) {
        const km_wanted *w = &wanted[r];
        if (w->count >= KM_JOB_LIMIT || (!w->by_slot && w->count * l->block_tokens >= KM_JOB_LIMIT))
            return "2^31 tokens of a request and more are not served";
        *ids += w->count;
    }
    return NULL;
}

// Requests at `at` of a job, their ids at `pages`.
static void km_job_requests_write(const km_wanted *wanted, size_t requests, unsigned char *memory,
                                  size_t at, size_t pages) {
    for (size_t r = 0; r < requests; r++) {
        const km_wanted *w = &wanted[r];
        km_job_request out = {.pages = pages,
                              .shift = (uint32_t)(uint64_t)w->shift,
                              .by_slot = w->by_slot,
                              .turns = w->turns};
        memcpy(memory + at + r * sizeof out, &out, sizeof out);
        const int64_t *from = (const int64_t *)(uintptr_t)w->pages;
        uint32_t *to = (uint32_t *)(memory + pages);
        for (uint64_t i = 0; i < w->count; i++) to[i] = (uint32_t)from[i];
        pages += 4 * w->count;
    }
}

static uint64_t km_job_item_rows(const km_layout *l) {
    uint64_t rows = KM_STAGE / l->row_bytes;
    return rows < KM_ENTRIES ? rows : KM_ENTRIES;
}

// Addresses for as many requests at a time as a stage has room for, at least one.
static uint64_t km_job_entries(uint64_t item_rows, uint64_t most) {
    uint64_t entries = most < KM_ENTRIES ? most * item_rows : KM_ENTRIES;
    if (entries > KM_ENTRIES) entries = KM_ENTRIES;
    if (entries > item_rows) entries = entries / item_rows * item_rows;
    return entries + (entries & 1);
}

static const char *km_job_try(const km_job_input *in, unsigned char *memory, size_t room,
                              km_job_sizes *sizes) {
    const km_layout *l = in->layout;
    const char *wrong = km_job_layout_wrong(l);
    if (wrong) return wrong;
    size_t parts = 0, requests = 0, ids, most = 1;
    for (size_t g = 0; g < in->group_count; g++) {
        if (in->groups[g].requests > KM_SHARED_BY) return "too many requests for one read";
        parts += in->groups[g].parts, requests += in->groups[g].requests;
        if (in->groups[g].requests > most) most = in->groups[g].requests;
    }
    if ((wrong = km_job_requests_wrong(l, in->wanted, requests, &ids))) return wrong;
    uint64_t item_rows = km_job_item_rows(l), item = item_rows * l->row_bytes;
    uint64_t entries = km_job_entries(item_rows, most);
    uint64_t stage = KM_STAGE + KM_UNIT + entries * 8;
    uint64_t stages = km_stages(in->options.shared, stage, in->options.stages);
    if (!stages) return "the shared memory has no room for a stage";

    uint64_t longest = 1;
    for (size_t p = 0; p < parts; p++) {
        km_part s;
        memcpy(&s, in->parts + p * sizeof s, sizeof s);
        if (s.tokens > longest) longest = s.tokens;
    }
    // Turned keys go in items: units of them would double the time that compiling takes.
    uint64_t unit_tokens = in->turns_bytes ? 0 : km_unit_tokens(l, longest, most);
    uint64_t unit_entries = 0, unit_stages = 0;
    uint64_t unit_stage = KM_UNIT_BYTES + KM_UNIT;
    if (unit_tokens) {
        uint64_t blocks = (unit_tokens - 1) / l->block_tokens + 1;
        unit_entries = 2 * blocks * most;
        unit_stage += unit_entries * 8;
        unit_stages = km_stages(in->options.unit_shared, unit_stage, in->options.unit_stages);
        if (!unit_stages) unit_tokens = 0;
    }

    km_job job = {.block_stride = l->block_stride,
                  .head_stride = l->head_stride,
                  .token_stride = l->token_stride,
                  .layers = (uint32_t)l->layers,
                  .row_bytes = (uint32_t)l->row_bytes,
                  .item_rows = (uint32_t)item_rows,
                  .item_bytes = (uint32_t)item,
                  .parts_count = (uint32_t)parts,
                  .stages = (uint32_t)stages,
                  .entries = (uint32_t)entries,
                  .unit_tokens = (uint32_t)unit_tokens,
                  .unit_stages = (uint32_t)unit_stages,
                  .unit_entries = (uint32_t)unit_entries,
                  .burst = in->options.burst,
                  .heads = (uint32_t)l->heads,
                  .by_block = km_divide_by(l->block_tokens),
                  .rotary_dim = in->options.rotary_dim,
                  .interleaved = in->options.interleaved,
                  .element = in->options.element};
    size_t at = km_room(sizeof job);
    job.bases = at, at += km_room(16 * l->layers);
    job.parts = at, at += km_room(parts * sizeof(km_job_part));
    job.requests = at, at += km_room(requests * sizeof(km_job_request));
    job.turns = at, at += km_room(in->turns_bytes);
    size_t pages = at;
    at += km_room(4 * ids);
    job.counters = at, at += 16;
    job.folded = at, at += km_room(8 * parts);
    job.sums = at;
    int fits = at <= room;

    uint64_t bits = l->block_stride | l->head_stride | l->token_stride | l->row_bytes;
    for (uint64_t i = 0; i < 2 * l->layers; i++) bits |= in->bases[i];
    uint64_t items = 0, units = 0, tiles = 0, bytes = 0;
    size_t part = 0, request = 0;
    unsigned char *status = in->status;
    for (size_t g = 0; g < in->group_count; g++) {
        const km_group *group = &in->groups[g];
        for (uint32_t p = 0; p < group->parts; p++, part++) {
            km_job_part out = {.request_begin = (uint32_t)request};
            memcpy(&out.part, in->parts + part * sizeof out.part, sizeof out.part);
            const km_part *s = &out.part;
            for (uint32_t r = 0; r < group->requests; r++) {
                int code = km_wanted_check(in, &in->wanted[request + r], s);
                if (code == KM_DONE && s->length / l->row_bytes >= KM_JOB_LIMIT)
                    code = KM_BAD_RECORD;
                status[(size_t)r * group->parts + p] = (unsigned char)code;
                out.requests |= (uint32_t)(code == KM_DONE) << r;
            }
            if (s->token_begin == s->token_end || !s->heads || !s->layers) out.requests = 0;
            out.item_begin = (uint32_t)items, out.tile_begin = (uint32_t)tiles;
            out.unit_begin = (uint32_t)units;
            if (out.requests) {
                km_part_extent(in, item, &out);
                out.by_tokens = km_divide_by(s->tokens);
                out.by_heads = km_divide_by(s->src_heads);
                if (km_part_in_units(in, unit_tokens, &out, in->wanted + request)) {
                    uint64_t own = s->layers * ((s->tokens - 1) / unit_tokens + 1);
                    if (!units) job.by_units = km_divide_by(own);
                    units += own;
                } else {
                    if (!items) job.by_items = km_divide_by(km_part_items(&out, item));
                    items += km_part_items(&out, item);
                }
                tiles += out.end_tile - out.first_tile;
                bytes += km_part_reads(s, l->row_bytes);
                bits |= s->address;
            }
            if (fits) memcpy(memory + job.parts + part * sizeof out, &out, sizeof out);
        }
        status += (size_t)group->requests * group->parts, request += group->requests;
    }
    if (items >= KM_JOB_LIMIT || units >= KM_JOB_LIMIT || tiles >= KM_JOB_LIMIT)
        return "more than 2^31 tiles at once";
    if (bits % 4) return "payloads, pages and their strides must be multiples of 4 bytes";
    *sizes = (km_job_sizes){.vector = bits % 16 ? 4 : 16,
                            .upload = at + km_room(8 * tiles),
                            .parts = parts,
                            .items = items,
                            .tiles = tiles,
                            .bytes = bytes,
                            .shared = KM_HEAD + stages * stage,
                            .units = units,
                            .unit_shared = units ? KM_HEAD + unit_stages * unit_stage : 0};
    job.expected = sizes->upload;
    sizes->size = job.expected + km_room(8 * tiles);
    if (sizes->size > room) return NULL;

    job.items_count = (uint32_t)items, job.tiles_count = (uint32_t)tiles;
    job.units_count = (uint32_t)units;
    job.by_vectors = km_divide_by(l->row_bytes / sizes->vector);
    memcpy(memory, &job, sizeof job);
    memcpy(memory + job.bases, in->bases, 16 * l->layers);
    memcpy(memory + job.turns, in->turns, in->turns_bytes);
    memset(memory + job.counters, 0, sizes->upload - job.counters);
    km_job_requests_write(in->wanted, requests, memory, job.requests, pages);
    return NULL;
}

// Writes as much as `room` allows; what it takes is in `sizes`. NULL, or what is not served.
static const char *km_job_write(const km_job_input *in, unsigned char *memory, size_t room,
                                km_job_sizes *sizes) {
    const char *wrong = km_job_try(in, memory, room, sizes);
    if (wrong || !sizes->units || sizes->vector == 16) return wrong;
    // Units are for whole vectors.
    km_job_input other = *in;
    other.options.unit_stages = 0;
    return km_job_try(&other, memory, room, sizes);
}

#endif
