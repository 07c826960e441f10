// Records of a catalog, placed in the columns of a table: what the daemon's core does for every
// span that an earlier daemon left. No Python in here; records are not trusted.
#ifndef KMESH_HOST_PLACE_H
#define KMESH_HOST_PLACE_H

#include "_host_rows.h"
#include "_host_sums.h"

enum { KM_RECORD = 128 };

// As kmesh_spand.core.record writes it.
typedef struct __attribute__((packed)) {
    uint64_t head;
    uint32_t tokens, start, generation, slab, born;
    uint64_t offset;
    uint32_t length, dense;
    uint64_t shard, root, key[4];
    unsigned char rest[36];
} km_record;

_Static_assert(sizeof(km_record) == KM_RECORD, "a record has 128 bytes");

// Columns by row, with `rows` rows; `index` has mask + 1 places, `owner` a slab's tiles.
typedef struct {
    uint64_t *words[4];
    uint32_t *index, *owner;
    uint16_t *scope;
    uint32_t *space;
    uint16_t *tokens;
    uint32_t *start;
    uint16_t *slab;
    uint32_t *tile, *length;
    uint64_t *root;
    uint32_t *born, *used;
    size_t rows;
    uint64_t mask, tiles;
} km_ground;

// Records, their slots and kinds; by kind the numbers of scope (0: refused) and namespace.
typedef struct {
    const unsigned char *data;
    const uint32_t *slots, *kinds, *which;
    const uint16_t *scopes;
    const uint64_t *folds;
    const uint32_t *spaces;
    size_t records, count, kind_count;
} km_arrivals;

typedef struct {
    uint64_t slab, span_tokens, sub_tokens, limit, tick;
} km_terms;

static int km_arrivals_within(const km_arrivals *in, size_t rows) {
    for (size_t i = 0; i < in->count; i++) {
        uint32_t number = in->which[i];
        if (number >= in->records || (uint64_t)in->slots[number] + 1 >= rows ||
            in->kinds[number] >= in->kind_count)
            return 0;
    }
    return 1;
}

// KM_TAKEN: somebody has the key, or there is no room near its place.
#define KM_TAKEN UINT64_MAX
#define KM_OUTSIDE (UINT64_MAX - 1)

static uint64_t km_free_place(const km_ground *ground, const uint64_t *key, uint64_t home,
                              uint16_t scope, uint64_t limit) {
    for (uint64_t step = 0; step < limit; step++) {
        uint64_t place = (home + step) & ground->mask;
        uint32_t row = ground->index[place];
        if (!row) return place;
        if (row >= ground->rows) return KM_OUTSIDE;
        if (ground->words[0][row] == key[0] && ground->words[1][row] == key[1] &&
            ground->words[2][row] == key[2] && ground->words[3][row] == key[3] &&
            ground->scope[row] == scope)
            return KM_TAKEN;
    }
    return KM_TAKEN;
}

static int km_range_free(const uint32_t *owner, uint64_t first, uint64_t end) {
    for (uint64_t tile = first; tile < end; tile++)
        if (owner[tile]) return 0;
    return 1;
}

// 1: it holds and was placed. 0: it does not. -1: the index names a row that the columns lack.
static int km_place_one(const km_ground *ground, const km_arrivals *in, const km_terms *terms,
                        uint32_t number) {
    km_record record;
    memcpy(&record, in->data + (size_t)number * KM_RECORD, sizeof record);
    uint32_t kind = in->kinds[number], row = in->slots[number] + 1;
    uint64_t key[4], first = record.offset / KM_TILE;
    uint64_t end = first + ((uint64_t)record.length + KM_TILE - 1) / KM_TILE;
    if (!in->scopes[kind] || record.offset % KM_TILE || !record.length || !record.tokens ||
        record.tokens > terms->span_tokens || record.tokens % terms->sub_tokens ||
        end > ground->tiles || !km_range_free(ground->owner, first, end))
        return 0;
    memcpy(key, record.key, sizeof key);
    uint64_t place = km_free_place(ground, key, key[0] ^ in->folds[kind], in->scopes[kind],
                                   terms->limit);
    if (place == KM_OUTSIDE) return -1;
    if (place == KM_TAKEN) return 0;
    for (uint64_t tile = first; tile < end; tile++) ground->owner[tile] = row;
    ground->index[place] = row;
    for (int i = 0; i < 4; i++) ground->words[i][row] = key[i];
    ground->scope[row] = in->scopes[kind];
    ground->space[row] = in->spaces[kind];
    ground->tokens[row] = (uint16_t)record.tokens;
    ground->start[row] = record.start;
    ground->slab[row] = (uint16_t)terms->slab;
    ground->tile[row] = (uint32_t)first;
    ground->length[row] = record.length;
    ground->root[row] = record.root;
    ground->born[row] = record.born < terms->tick ? record.born : (uint32_t)terms->tick;
    ground->used[row] = (uint32_t)terms->tick;
    return 1;
}

// Says in `held` of each whether it holds. False: as -1 above, and no more was placed.
static int km_place(const km_ground *ground, const km_arrivals *in, const km_terms *terms,
                    unsigned char *held) {
    for (size_t i = 0; i < in->count; i++) {
        int placed = km_place_one(ground, in, terms, in->which[i]);
        if (placed < 0) return 0;
        held[i] = (unsigned char)placed;
    }
    return 1;
}

#endif
