// A job that restores a round: dense spans and recipes, and what these refer to, with each byte read
// once for all who take it. No Python in here.
#ifndef KMESH_HOST_ROUND_JOB_H
#define KMESH_HOST_ROUND_JOB_H

#include "_host_parts.h"

static int km_round_by_order(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    if (x[0] != y[0]) return x[0] < y[0] ? -1 : 1;
    return x[1] < y[1] ? -1 : x[1] > y[1];
}

static int km_round_plan(km_round *r) {
    for (size_t m = 0; m < r->member_count && !r->wrong; m++)
        if (!km_round_member(r, m)) return 0;
    size_t count = r->sources.count;
    uint64_t *orders = km_grow(&r->orders, 2 * count);
    if (!orders) return 0;
    for (size_t s = 0; s < count; s++)
        orders[2 * s] = ((const km_source *)km_at(&r->sources, s))->order, orders[2 * s + 1] = s;
    qsort(orders, count, 2 * sizeof *orders, km_round_by_order);
    for (size_t s = 0; s < count && !r->wrong; s++) {
        if (!km_round_part(r, (uint32_t)orders[2 * s + 1])) return 0;
        if (!orders[2 * s]) r->slow_items = r->item_count;
        // In place of the source: what is left is the order of each part.
        orders[s] = orders[2 * s];
    }
    return 1;
}

static uint64_t km_round_table(uint64_t *at, const km_grown *table) {
    uint64_t begin = *at;
    *at += km_room(table->count * table->each);
    return begin;
}

static void km_round_put(unsigned char *memory, uint64_t at, const km_grown *table) {
    if (table->count) memcpy(memory + at, table->at, table->count * table->each);
}

// Strands and items of all parts, most of which are alike: each is written where it belongs, once.
static void km_round_put_placed(const km_round *r, km_strand *strands, km_round_item *items) {
    for (size_t p = 0; p < r->placed.count; p++) {
        const km_placed *placed = km_at(&r->placed, p);
        const km_drawn *d = km_at(&r->drawn, placed->drawn);
        const km_strand *strand = km_at(&r->strands, d->strands);
        const km_round_item *item = km_at(&r->items, d->items);
        uint32_t apart = (uint32_t)(placed->strands - d->strands);
        for (size_t i = 0; i < d->strands_end - d->strands; i++) {
            km_strand one = strand[i];
            one.part = (uint32_t)p, one.cell_begin += placed->cells;
            *strands++ = one;
        }
        for (size_t i = 0; i < d->items_end - d->items; i++) {
            km_round_item one = item[i];
            one.strand += apart;
            *items++ = one;
        }
    }
}

// Writes a planned round, if there is room for it.
static const char *km_round_write(const km_round *r, unsigned char *memory, size_t room,
                                  km_round_sizes *sizes) {
    const km_layout *l = r->layout;
    uint64_t rows = km_job_item_rows(l), entries = km_job_entries(rows, r->most ? r->most : 1);
    uint64_t stage = KM_STAGE + KM_UNIT + entries * 8;
    uint64_t stages = km_stages(r->options.shared, stage, r->options.stages);
    if (!stages) return "the shared memory has no room for a stage";
    if (r->item_count >= KM_JOB_LIMIT || r->pieces.count >= KM_JOB_LIMIT ||
        r->cells.count >= KM_JOB_LIMIT || r->strand_count >= KM_JOB_LIMIT)
        return "more than 2^31 items at once";
    size_t ids;
    const char *wrong = km_job_requests_wrong(l, r->wanted, r->requests, &ids);
    if (wrong) return wrong;

    uint64_t bits = l->block_stride | l->head_stride | l->token_stride | l->row_bytes;
    uint64_t low = UINT64_MAX, high = 0, reach, slow = r->slow_items;
    for (uint64_t i = 0; i < 2 * l->layers; i++) {
        bits |= r->bases[i];
        if (r->bases[i] < low) low = r->bases[i];
        if (r->bases[i] > high) high = r->bases[i];
    }
    uint64_t sums = 0;
    for (size_t p = 0; p < r->parts.count; p++) {
        const km_job_part *part = km_at(&r->parts, p);
        bits |= part->part.address, sums |= part->part.sums_address;
    }
    if (bits % 4) return "payloads, pages and their strides must be multiples of 4 bytes";
    if (sums % 8) return "sums must be multiples of 8 bytes";
    reach = (l->num_blocks - 1) * l->block_stride + (l->heads - 1) * l->head_stride +
            (l->block_tokens - 1) * l->token_stride;
    if (high - low >= UINT64_C(1) << 47 || reach >= UINT64_C(1) << 47)
        return "pages that lie 2^47 bytes apart are not served";

    uint64_t blocks = r->options.blocks, fast = r->item_count - slow, slow_blocks = 0;
    if (slow && fast && blocks > 1 && r->options.slow_blocks) {
        slow_blocks = r->options.slow_blocks < blocks ? r->options.slow_blocks : blocks - 1;
        if (slow_blocks > slow) slow_blocks = slow;
        blocks -= slow_blocks;
    }
    uint64_t others = slow_blocks ? fast : r->item_count;
    if (blocks > others) blocks = others;

    km_job job = {.block_stride = l->block_stride,
                  .head_stride = l->head_stride,
                  .token_stride = l->token_stride,
                  .layers = (uint32_t)l->layers,
                  .row_bytes = (uint32_t)l->row_bytes,
                  .item_rows = (uint32_t)rows,
                  .item_bytes = (uint32_t)(rows * l->row_bytes),
                  .parts_count = (uint32_t)r->parts.count,
                  .items_count = (uint32_t)r->item_count,
                  .tiles_count = (uint32_t)r->tiles,
                  .stages = (uint32_t)stages,
                  .entries = (uint32_t)entries,
                  .heads = (uint32_t)l->heads,
                  .by_block = km_divide_by(l->block_tokens),
                  .by_vectors = km_divide_by(l->row_bytes / (bits % 16 ? 4 : 16)),
                  .rotary_dim = 2 * r->pairs,
                  .interleaved = r->interleaved,
                  .element = r->element,
                  .origin = low - 4,
                  .slow_items = (uint32_t)slow,
                  .slow_blocks = (uint32_t)slow_blocks};
    uint64_t at = km_room(sizeof job);
    job.bases = at, at += km_room(16 * l->layers);
    job.requests = at, at += km_room(r->requests * sizeof(km_job_request));
    uint64_t pages = at;
    at += km_room(4 * ids);
    job.parts = km_round_table(&at, &r->parts), job.turns = km_round_table(&at, &r->turns);
    job.items = at, at += km_room(r->item_count * sizeof(km_round_item));
    job.strands = at, at += km_room(r->strand_count * sizeof(km_strand));
    job.cells = km_round_table(&at, &r->cells), job.takers = km_round_table(&at, &r->takers);
    job.pieces = km_round_table(&at, &r->pieces), job.wanted = km_round_table(&at, &r->bits);
    job.counters = at, at += 16;
    job.folded = at, at += km_room(8 * r->parts.count);
    job.sums = at, at += km_room(8 * r->tiles);
    job.expected = at;
    *sizes = (km_round_sizes){.size = at + km_room(8 * r->tiles),
                              .upload = at,
                              .vector = bits % 16 ? 4 : 16,
                              .parts = r->parts.count,
                              .items = r->item_count,
                              .tiles = r->tiles,
                              .bytes = r->bytes,
                              .shared = KM_HEAD + stages * stage,
                              .blocks = blocks + slow_blocks,
                              .drawn = r->drawn.count};
    if (sizes->size > room) return NULL;

    memcpy(memory, &job, sizeof job);
    memcpy(memory + job.bases, r->bases, 16 * l->layers);
    km_job_requests_write(r->wanted, r->requests, memory, job.requests, pages);
    km_round_put(memory, job.parts, &r->parts), km_round_put(memory, job.turns, &r->turns);
    km_round_put_placed(r, (void *)(memory + job.strands), (void *)(memory + job.items));
    km_round_put(memory, job.cells, &r->cells), km_round_put(memory, job.takers, &r->takers);
    km_round_put(memory, job.pieces, &r->pieces), km_round_put(memory, job.wanted, &r->bits);
    memset(memory + job.counters, 0, sizes->upload - job.counters);
    return NULL;
}

enum { KM_ROUND_TABLES = 21, KM_ROUND_KEPT = 32 << 20 };

static void km_round_tables(km_round *r, km_grown *tables[KM_ROUND_TABLES]) {
    km_grown *all[KM_ROUND_TABLES] = {
        &r->sources, &r->claims, &r->matched, &r->parts, &r->strands, &r->cells,
        &r->takers, &r->pieces, &r->items, &r->turns, &r->bits, &r->uses,
        &r->orders, &r->sorted, &r->literals, &r->lists, &r->stretches,
        &r->shapes, &r->drawn, &r->claimed, &r->placed};
    memcpy(tables, all, sizeof all);
}

// Takes the tables' memory from the round before, if it left any. One thread at a time.
static void km_round_reuse(km_round *r, km_grown kept[KM_ROUND_TABLES]) {
    km_grown *tables[KM_ROUND_TABLES];
    km_round_tables(r, tables);
    for (size_t i = 0; i < KM_ROUND_TABLES; i++) {
        tables[i]->at = kept[i].at, tables[i]->room = kept[i].room;
        kept[i] = (km_grown){0};
    }
}

// Leaves the tables' memory to the next round, unless it is much or another has left its own: new
// pages cost more than what is written to them. One thread at a time.
static void km_round_close(km_round *r, km_grown kept[KM_ROUND_TABLES]) {
    km_grown *tables[KM_ROUND_TABLES];
    km_round_tables(r, tables);
    size_t bytes = 0;
    int leave = 1;
    for (size_t i = 0; i < KM_ROUND_TABLES; i++)
        bytes += tables[i]->room * tables[i]->each, leave &= !kept[i].at;
    leave &= bytes <= KM_ROUND_KEPT;
    for (size_t i = 0; i < KM_ROUND_TABLES; i++) {
        if (leave) kept[i] = *tables[i];
        else free(tables[i]->at);
    }
    free(r->recipes);
    free(r->turn_begin);
    free(r->shape_of);
    free(r->slots);
    free(r->shape_slots);
}

// Room for what is planned. False: no memory.
static int km_round_start(km_round *r) {
    r->sources.each = sizeof(km_source), r->claims.each = sizeof(km_claim);
    r->parts.each = sizeof(km_job_part), r->strands.each = sizeof(km_strand);
    r->cells.each = sizeof(km_cell), r->takers.each = sizeof(km_taker);
    r->pieces.each = r->sorted.each = sizeof(km_piece), r->items.each = sizeof(km_round_item);
    r->turns.each = 1, r->bits.each = r->lists.each = r->matched.each = sizeof(uint32_t);
    r->orders.each = sizeof(uint64_t), r->uses.each = sizeof(km_use), r->literals.each = sizeof(km_literals);
    r->stretches.each = sizeof(km_stretch), r->shapes.each = sizeof(km_shape);
    r->drawn.each = sizeof(km_drawn), r->claimed.each = sizeof(km_apart), r->dense = KM_NOBODY;
    r->placed.each = sizeof(km_placed);
    size_t most = 1;
    for (size_t m = 0; m < r->member_count; m++) {
        const km_recipe_head *head = (const void *)(uintptr_t)r->members[m].tables;
        most += 1 + (head ? head->segments : 0);
    }
    for (r->slot_count = 1; r->slot_count < 2 * most; r->slot_count *= 2) continue;
    r->slots = calloc(r->slot_count, sizeof *r->slots);
    r->recipes = calloc(r->member_count + 1, sizeof *r->recipes);
    r->turn_begin = calloc(r->member_count + 1, sizeof *r->turn_begin);
    r->shape_of = calloc(r->member_count + 1, sizeof *r->shape_of);
    r->shape_slots = calloc(r->slot_count, sizeof *r->shape_slots);
    return r->slots && r->shape_slots && r->recipes && r->turn_begin && r->shape_of;
}

#endif
