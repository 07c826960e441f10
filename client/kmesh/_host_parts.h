// Parts of a round, each written down for itself or like one before it. No Python in here.
#ifndef KMESH_HOST_PARTS_H
#define KMESH_HOST_PARTS_H

#include "_host_strands.h"

// Where the source that was drawn last is noted, of those that are likely to look like this one.
static uint32_t *km_round_noted(km_round *r, const km_source *source) {
    const km_claim *claim = km_at(&r->claims, source->first);
    if (claim->segment == KM_CLAIM_DENSE) return &r->dense;
    km_shape *shape = km_at(&r->shapes, r->shape_of[claim->member]);
    return source->literal ? &shape->literals : &shape->payload;
}

// Whether two claims, of sources of the same sizes, take the same.
static int km_round_claims_same(const km_round *r, const km_claim *a, const km_claim *b) {
    const km_member *x = &r->members[a->member], *y = &r->members[b->member];
    return a->segment == b->segment && x->part.token_begin == y->part.token_begin &&
           x->part.token_end == y->part.token_end &&
           (a->segment == KM_CLAIM_DENSE ||
            r->shape_of[a->member] == r->shape_of[b->member]);
}

// Whether a source is cut, and taken, as another one was.
static int km_round_same(const km_round *r, const km_source *a, const km_source *b) {
    size_t sizes = offsetof(km_part, length);
    if (a->literal != b->literal || memcmp((const char *)&a->part + sizes,
                                           (const char *)&b->part + sizes, sizeof a->part - sizes))
        return 0;
    uint32_t x = a->first, y = b->first;
    while (x != KM_NOBODY && y != KM_NOBODY) {
        const km_claim *one = km_at(&r->claims, x), *other = km_at(&r->claims, y);
        if (!km_round_claims_same(r, one, other)) return 0;
        x = one->next, y = other->next;
    }
    return x == y;
}

// Of one claim, how what it takes differs from what the other took.
typedef struct {
    uint32_t request, shift, turn;
} km_apart;

// Claims of `source` against those of the one that was drawn; NULL: no memory.
static const km_apart *km_round_apart(km_round *r, const km_source *source, const km_source *drawn) {
    r->claimed.count = 0;
    for (uint32_t x = source->first, y = drawn->first; x != KM_NOBODY;) {
        km_claim *own = km_at(&r->claims, x);
        const km_claim *other = km_at(&r->claims, y);
        const km_member *m = &r->members[own->member], *n = &r->members[other->member];
        km_apart *made = km_grow(&r->claimed, 1);
        if (!made) return NULL;
        *made = (km_apart){(uint32_t)m->request, km_round_position(r, m) - km_round_position(r, n),
                           r->turn_begin[own->member] - r->turn_begin[other->member]};
        own->used = other->used;
        x = own->next, y = other->next;
    }
    return r->claimed.at;
}

static void *km_round_again(km_grown *table, size_t begin, size_t end) {
    size_t count = end - begin;
    void *made = km_grow(table, count);
    if (made) memcpy(made, km_at(table, begin), count * table->each);
    return made;
}

// Writes down for a source what was for one like it; its strands and items are the other's.
static int km_round_repeat(km_round *r, const km_source *source, const km_drawn *d) {
    const km_apart *apart = km_round_apart(r, source, km_at(&r->sources, d->source));
    uint32_t takers = (uint32_t)(r->takers.count - d->takers);
    uint32_t pieces = (uint32_t)(r->pieces.count - d->pieces);
    km_cell *cell = km_round_again(&r->cells, d->cells, d->cells_end);
    km_taker *taker = km_round_again(&r->takers, d->takers, d->takers_end);
    km_piece *piece = km_round_again(&r->pieces, d->pieces, d->pieces_end);
    if (!apart || !cell || !taker || !piece) return 0;
    for (size_t i = 0; i < d->cells_end - d->cells; i++) cell[i].taker_begin += takers;
    for (size_t i = 0; i < d->takers_end - d->takers; i++, taker++) {
        const km_apart *claim = &apart[taker->claim];
        taker->request = claim->request, taker->piece_begin += pieces;
        for (uint32_t p = 0; p < taker->pieces; p++, piece++)
            piece->shift += claim->shift, piece->turn += piece->turn ? claim->turn : 0;
    }
    r->bytes += d->bytes;
    uint32_t *bits = r->bits.at;
    for (uint64_t t = 0, to = r->tiles; t < km_tiles(source->part.length); t++, to++)
        bits[to / 32] |= (uint32_t)km_round_tile(r, d->tile + t) << to % 32;
    return 1;
}

// Writes down for a source what is taken of it, and notes that it was.
static int km_round_draw(km_round *r, uint32_t number, uint32_t *noted) {
    const km_source *source = km_at(&r->sources, number);
    km_drawn d = {.source = number, .tile = r->tiles, .bytes = r->bytes,
                  .strands = r->strands.count, .cells = r->cells.count, .takers = r->takers.count,
                  .pieces = r->pieces.count, .items = r->items.count};
    r->stretches.count = 0;
    int made = source->literal ? km_round_file_strands(r, source, r->tiles)
                               : km_round_payload_strands(r, source, r->tiles);
    if (!made || !km_round_items(r, source, r->tiles)) return 0;
    d.strands_end = r->strands.count, d.cells_end = r->cells.count, d.takers_end = r->takers.count;
    d.pieces_end = r->pieces.count, d.items_end = r->items.count;
    d.bytes = r->bytes - d.bytes, d.wanted = r->stretches.count != 0;
    km_drawn *to = km_grow(&r->drawn, 1);
    if (!to) return 0;
    *to = d, *noted = (uint32_t)r->drawn.count - 1;
    return 1;
}

static int km_round_uses(km_round *r, const km_source *source) {
    int any = 0;
    for (uint32_t c = source->first; c != KM_NOBODY;) {
        const km_claim *claim = km_at(&r->claims, c);
        if (claim->used) {
            km_use *use = km_grow(&r->uses, 1);
            if (!use) return 0;
            *use = (km_use){claim->member, (uint32_t)r->parts.count}, any = 1;
        }
        c = claim->next;
    }
    if (!any || source->base == KM_NOBODY) return 1;
    km_use *use = km_grow(&r->uses, 1);
    if (use) *use = (km_use){(uint32_t)(r->member_count + source->base), (uint32_t)r->parts.count};
    return use != NULL;
}

// Room for `tiles` more tiles of which nothing is wanted yet.
static int km_round_bits(km_round *r, uint64_t tiles) {
    uint64_t words = (r->tiles + tiles + 31) / 32;
    size_t have = r->bits.count;
    if (words <= have) return 1;
    uint32_t *bits = km_grow(&r->bits, words - have);
    if (bits) memset(bits, 0, 4 * (words - have));
    return bits != NULL;
}

static int km_round_part(km_round *r, uint32_t number) {
    const km_source *source = km_at(&r->sources, number);
    uint64_t tiles = km_tiles(source->part.length);
    if (tiles >= KM_JOB_LIMIT - r->tiles) {
        r->wrong = "more than 2^31 tiles at once";
        return 1;
    }
    uint32_t cells = (uint32_t)r->cells.count, *noted = km_round_noted(r, source);
    const km_drawn *like = *noted == KM_NOBODY ? NULL : km_at(&r->drawn, *noted);
    if (like && !km_round_same(r, source, km_at(&r->sources, like->source))) like = NULL;
    if (!km_round_bits(r, tiles) ||
        !(like ? km_round_repeat(r, source, like) : km_round_draw(r, number, noted)) ||
        !km_round_uses(r, source))
        return 0;
    km_job_part *part = km_grow(&r->parts, 1);
    km_placed *placed = km_grow(&r->placed, 1);
    if (!part || !placed) return 0;
    const km_drawn *d = km_at(&r->drawn, *noted);
    *placed = (km_placed){*noted, cells - (uint32_t)d->cells, r->strand_count, r->item_count};
    *part = (km_job_part){.part = source->part,
                          .item_begin = (uint32_t)r->item_count,
                          .tile_begin = (uint32_t)r->tiles,
                          .end_tile = (uint32_t)tiles,
                          .requests = d->wanted};
    r->tiles += tiles;
    r->strand_count += d->strands_end - d->strands, r->item_count += d->items_end - d->items;
    return 1;
}

#endif
