// A round's bytes as its kernel reads them: strands of rows, who takes which of them, and items. No
// Python in here.
#ifndef KMESH_HOST_STRANDS_H
#define KMESH_HOST_STRANDS_H

#include "_host_claims.h"

// Tiles that hold wanted bytes of one piece of a cell, whose first byte is at `begin`.
static void km_round_mark(km_round *r, const km_part *p, uint64_t first_tile, uint64_t begin,
                          uint64_t tokens, const km_piece *piece) {
    uint32_t *bits = r->bits.at;
    uint64_t row = r->layout->row_bytes, heads = p->heads, each = piece->end - piece->begin;
    begin += (p->src_head_begin * tokens + piece->begin) * row;
    // What reaches from one head to the next is one run.
    if (each == tokens) each *= heads, heads = 1;
    for (uint64_t h = 0; h < heads; h++, begin += tokens * row)
        for (uint64_t t = begin / KM_TILE; t <= (begin + each * row - 1) / KM_TILE; t++)
            bits[(first_tile + t) / 32] |= 1u << (first_tile + t) % 32;
}

static int km_piece_order(const void *a, const void *b) {
    const km_piece *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

// Gives pieces of one request to takers: a taker's do not overlap.
static int km_round_take(km_round *r, uint32_t request, uint32_t claim, km_piece *pieces,
                         size_t count) {
    qsort(pieces, count, sizeof *pieces, km_piece_order);
    while (count) {
        km_taker *taker = km_grow(&r->takers, 1);
        km_piece *to = km_grow(&r->pieces, count);
        if (!taker || !to) return 0;
        size_t left = 0, taken = 0;
        for (size_t i = 0; i < count; i++) {
            if (taken && pieces[i].begin < to[taken - 1].end) pieces[left++] = pieces[i];
            else to[taken++] = pieces[i];
        }
        r->pieces.count -= count - taken;
        *taker = (km_taker){request, (uint32_t)(r->pieces.count - taken), (uint32_t)taken, claim};
        count = left;
    }
    return 1;
}

static uint32_t km_round_position(const km_round *r, const km_member *m) {
    return (uint32_t)(m->part.position + (uint64_t)r->wanted[m->request].shift);
}

// The pieces that a claim takes of a run of a dense payload. NULL: no memory.
static km_piece *km_round_pieces(km_round *r, const km_claim *claim, size_t run, size_t *count) {
    const km_member *m = &r->members[claim->member];
    const km_recipe *recipe = &r->recipes[claim->member];
    uint32_t position = km_round_position(r, m);
    r->sorted.count = *count = 0;
    if (claim->segment == KM_CLAIM_DENSE) {
        km_piece *one = km_grow(&r->sorted, 1);
        if (one)
            *one = (km_piece){(uint32_t)m->part.token_begin, (uint32_t)m->part.token_end, position, 0};
        *count = 1;
        return one;
    }
    const km_recipe_list *list = &recipe->lists[recipe->runs[run].list];
    km_piece *pieces = km_grow(&r->sorted, list->count);
    if (!pieces) return NULL;
    for (size_t i = list->first; i < list->first + (size_t)list->count; i++) {
        const km_recipe_op *op = &recipe->ops[i];
        uint64_t begin, end;
        if (op->kind == KM_OP_LITERAL || op->segment != claim->segment ||
            !km_round_clip(&m->part, op->token, op->tokens, &begin, &end))
            continue;
        pieces[(*count)++] = (km_piece){op->source + (uint32_t)begin, op->source + (uint32_t)end,
                                        position + op->token - op->source,
                                        op->turn ? r->turn_begin[claim->member] + op->turn : 0};
    }
    return pieces;
}

// Whether all who claim something of a payload do the same with two of its runs of one plane.
static int km_round_alike(const km_round *r, const km_source *source, size_t run, size_t other) {
    for (uint32_t c = source->first; c != KM_NOBODY;) {
        const km_claim *claim = km_at(&r->claims, c);
        c = claim->next;
        if (claim->segment == KM_CLAIM_DENSE) continue;
        const km_recipe *recipe = &r->recipes[claim->member];
        const km_shape *shape = km_at(&r->shapes, r->shape_of[claim->member]);
        if (!shape->alike && recipe->runs[run].list != recipe->runs[other].list) return 0;
    }
    return 1;
}

static int km_round_stretch(km_round *r, uint64_t begin, const km_strand *strand) {
    km_stretch *stretch = km_grow(&r->stretches, 1);
    km_strand *made = km_grow(&r->strands, 1);
    if (!stretch || !made) return 0;
    *made = *strand;
    *stretch = (km_stretch){begin, begin + strand->rows * r->layout->row_bytes,
                            (uint32_t)r->strands.count - 1};
    if (strand->takers > r->most) r->most = strand->takers;
    return 1;
}

// Tiles of a strand of which something is wanted.
static void km_round_mark_strand(km_round *r, const km_part *p, uint64_t first_tile, uint64_t begin,
                                 const km_strand *strand) {
    uint64_t row = r->layout->row_bytes, end = begin + strand->rows * row - 1;
    if (begin / KM_TILE == end / KM_TILE) {
        ((uint32_t *)r->bits.at)[(first_tile + begin / KM_TILE) / 32] |=
            1u << (first_tile + begin / KM_TILE) % 32;
        return;
    }
    for (uint32_t c = 0; c < strand->cells; c++) {
        const km_cell *cell = km_at(&r->cells, strand->cell_begin + c);
        for (uint32_t t = 0; t < cell->takers; t++) {
            const km_taker *taker = km_at(&r->takers, cell->taker_begin + t);
            for (uint32_t i = 0; i < taker->pieces; i++)
                km_round_mark(r, p, first_tile, begin + cell->row_begin * row, cell->by_tokens.value,
                              km_at(&r->pieces, taker->piece_begin + i));
        }
    }
}

// Where K and V of a part's layers begin in the pages.
static uint32_t km_round_plane(const km_round *r, const km_part *p, size_t run) {
    uint64_t layer = run / 2 - p->src_layer_begin + p->dst_layer_begin;
    return (uint32_t)(layer + run % 2 * r->layout->layers);
}

// The one cell of a run of a dense payload.
static int km_round_cell(km_round *r, const km_source *source, size_t run) {
    uint32_t begin = (uint32_t)r->takers.count, number = 0;
    for (uint32_t c = source->first; c != KM_NOBODY; number++) {
        km_claim *claim = km_at(&r->claims, c);
        size_t count;
        km_piece *pieces = km_round_pieces(r, claim, run, &count);
        uint32_t request = (uint32_t)r->members[claim->member].request;
        if (!pieces || !km_round_take(r, request, number, pieces, count)) return 0;
        claim->used |= count != 0;
        c = claim->next;
    }
    km_cell *cell = km_grow(&r->cells, 1);
    if (!cell) return 0;
    *cell = (km_cell){0, km_divide_by(source->part.tokens), begin,
                      (uint32_t)r->takers.count - begin};
    return 1;
}

static int km_round_payload_strands(km_round *r, const km_source *source, uint64_t first_tile) {
    const km_part *p = &source->part;
    uint64_t rows = p->src_heads * p->tokens, before[2] = {0, 0};
    uint32_t cells[2] = {0, 0};
    size_t begin = 2 * p->src_layer_begin, end = begin + 2 * p->layers;
    for (size_t run = begin; run < end; run++) {
        int plane = run % 2;
        if (run - begin < 2 || !km_round_alike(r, source, run, before[plane])) {
            if (!km_round_cell(r, source, run)) return 0;
            cells[plane] = (uint32_t)r->cells.count - 1;
        }
        before[plane] = run;
        const km_cell *cell = km_at(&r->cells, cells[plane]);
        km_strand strand = {(uint32_t)r->parts.count, km_round_plane(r, p, run), cells[plane], 1,
                            (uint32_t)rows, cell->takers};
        if (!strand.takers) continue;
        uint64_t at = run * rows * r->layout->row_bytes;
        if (!km_round_stretch(r, at, &strand)) return 0;
        km_round_mark_strand(r, p, first_tile, at, &strand);
    }
    return 1;
}

// One literal op's cell: each claim has a taker, if the op has a token that it wants.
static int km_round_literal_cell(km_round *r, const km_source *source, const km_recipe_op *op,
                                 uint32_t row) {
    uint32_t first = (uint32_t)r->takers.count, number = 0;
    for (uint32_t c = source->first; c != KM_NOBODY; number++) {
        km_claim *claim = km_at(&r->claims, c);
        const km_member *m = &r->members[claim->member];
        uint64_t begin, end;
        if (km_round_clip(&m->part, op->token, op->tokens, &begin, &end)) {
            km_piece one = {(uint32_t)begin, (uint32_t)end, km_round_position(r, m) + op->token, 0};
            if (!km_round_take(r, (uint32_t)m->request, number, &one, 1)) return 0;
            claim->used = 1;
        }
        c = claim->next;
    }
    km_cell *cell = km_grow(&r->cells, 1);
    if (!cell) return 0;
    *cell = (km_cell){row, km_divide_by(op->tokens), first, (uint32_t)r->takers.count - first};
    return 1;
}

// Literals of a list, as they lie from where a run's begin.
static int km_round_literals(km_round *r, const km_source *source, const km_recipe *recipe,
                             const km_recipe_list *list) {
    km_literals *open = NULL;
    for (size_t i = list->first; i < list->first + (size_t)list->count; i++) {
        const km_recipe_op *op = &recipe->ops[i];
        if (op->kind != KM_OP_LITERAL) continue;
        uint64_t at = op->data * (uint64_t)KM_RECIPE_UNIT;
        if (!open || open->offset + open->rows * r->layout->row_bytes != at) {
            open = km_grow(&r->literals, 1);
            if (!open) return 0;
            *open = (km_literals){at, (uint32_t)r->cells.count, 0, 0, 0};
        }
        if (!km_round_literal_cell(r, source, op, open->rows)) return 0;
        const km_cell *cell = km_at(&r->cells, r->cells.count - 1);
        if (cell->takers > open->takers) open->takers = cell->takers;
        open->cells++, open->rows += op->tokens * (uint32_t)recipe->heads;
    }
    return 1;
}

static int km_round_file_strands(km_round *r, const km_source *source, uint64_t first_tile) {
    const km_part *p = &source->part;
    const km_recipe *recipe =
        &r->recipes[((const km_claim *)km_at(&r->claims, source->first))->member];
    // Of each list, where its literals begin in `literals`, and end; 0 until it is asked for.
    r->lists.count = r->literals.count = 0;
    uint32_t *lists = km_grow(&r->lists, 2 * (size_t)recipe->head->lists);
    if (!lists || !km_grow(&r->literals, 1)) return 0;
    memset(lists, 0, 8 * (size_t)recipe->head->lists);
    for (size_t run = 2 * p->src_layer_begin; run < 2 * (p->src_layer_begin + p->layers); run++) {
        const km_recipe_run *one = &recipe->runs[run];
        uint32_t *own = lists + 2 * (size_t)one->list;
        if (!own[0]) {
            own[0] = (uint32_t)r->literals.count;
            if (!km_round_literals(r, source, recipe, &recipe->lists[one->list])) return 0;
            own[1] = (uint32_t)r->literals.count;
        }
        for (uint32_t i = own[0]; i < own[1]; i++) {
            const km_literals *l = km_at(&r->literals, i);
            km_strand strand = {(uint32_t)r->parts.count, km_round_plane(r, p, run), l->cell_begin,
                                l->cells, l->rows, l->takers};
            if (!strand.takers) continue;
            uint64_t at = recipe->literals_at + one->offset + l->offset;
            if (!km_round_stretch(r, at, &strand)) return 0;
            km_round_mark_strand(r, p, first_tile, at, &strand);
        }
    }
    return 1;
}

static int km_round_tile(const km_round *r, uint64_t tile) {
    return ((const uint32_t *)r->bits.at)[tile / 32] >> tile % 32 & 1;
}

// An item, if anything of its tiles is wanted.
static int km_round_item_add(km_round *r, uint64_t first_tile, uint64_t begin, uint64_t bytes,
                             uint32_t strand, uint32_t row) {
    uint64_t tile = begin / KM_TILE, last = (begin + bytes - 1) / KM_TILE;
    uint64_t wanted = (uint64_t)km_round_tile(r, first_tile + tile);
    if (last > tile) wanted |= (uint64_t)km_round_tile(r, first_tile + last) << 1;
    if (!wanted) return 1;
    km_round_item *item = km_grow(&r->items, 1);
    if (!item) return 0;
    *item = (km_round_item){begin | wanted, strand, row};
    r->bytes += bytes;
    return 1;
}

// Bytes of wanted tiles that belong to nobody.
static int km_round_gap(km_round *r, uint64_t first_tile, uint64_t begin, uint64_t end,
                        uint32_t strand) {
    while (begin < end) {
        uint64_t behind = (begin / KM_TILE + 1) * KM_TILE;
        if (behind > end) behind = end;
        if (km_round_tile(r, first_tile + begin / KM_TILE)) {
            if (behind - begin > KM_STAGE) behind = begin + KM_STAGE;
            if (!km_round_item_add(r, first_tile, begin, behind - begin, strand,
                                   (uint32_t)(behind - begin)))
                return 0;
        }
        begin = behind;
    }
    return 1;
}

static int km_round_items(km_round *r, const km_source *source, uint64_t first_tile) {
    uint64_t row = r->layout->row_bytes, most = km_job_item_rows(r->layout), at = 0;
    km_strand *gap = km_grow(&r->strands, 1);
    if (!gap) return 0;
    *gap = (km_strand){.part = (uint32_t)r->parts.count};
    uint32_t nobody = (uint32_t)r->strands.count - 1;
    for (size_t i = 0; i < r->stretches.count; i++) {
        const km_stretch *s = km_at(&r->stretches, i);
        uint64_t rows = (s->end - s->begin) / row;
        if (!km_round_gap(r, first_tile, at, s->begin, nobody)) return 0;
        for (uint64_t n = 0; n < rows; n += most) {
            uint64_t count = rows - n < most ? rows - n : most;
            if (!km_round_item_add(r, first_tile, s->begin + n * row, count * row, s->strand,
                                   (uint32_t)n))
                return 0;
        }
        at = s->end;
    }
    return km_round_gap(r, first_tile, at, source->part.length, nobody);
}

#endif
