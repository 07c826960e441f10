// A round of restores on its way to a job: its records, and what is known of it. See docs/kernels.md.
// No Python in here.
#ifndef KMESH_HOST_ROUND_STATE_H
#define KMESH_HOST_ROUND_STATE_H

#include "_host_grow.h"
#include "_host_job.h"
#include "_host_recipe.h"

// What is below is what client/kmesh/kernels/round.cu reads, member by member.
typedef struct {
    uint32_t part, base, cell_begin, cells, rows, takers;
} km_strand;

typedef struct {
    uint64_t begin;
    uint32_t strand, row;
} km_round_item;

typedef struct {
    uint32_t row_begin;
    km_divisor by_tokens;
    uint32_t taker_begin, takers;
} km_cell;

// `claim` is not the kernel's: which of its source's claims it is of.
typedef struct {
    uint32_t request, piece_begin, pieces, claim;
} km_taker;

typedef struct {
    uint32_t begin, end, shift, turn;
} km_piece;

// As kmesh.kernels.rounds packs them. A segment of bases that recipes may name: where it lies, when it
// is read (lower numbers first), whether its digest is known, and what it is.
typedef struct {
    uint64_t address, sums_address, order, known;
    km_recipe_segment segment;
    unsigned char space[32];
    uint16_t layer_begin, layer_end, head_begin, head_end;
    uint32_t head_dim, dtype;
} km_base;

// A payload that a request wants. Of a recipe, address, sums, root and length are of its file, and
// `tables` is the address of a copy of its head and tables, which were checked; 0: it is dense.
typedef struct {
    km_part part;
    uint64_t tables, request, order;
} km_member;

typedef struct {
    uint32_t shared, stages;       // bytes of shared memory and stages in it, at most
    uint32_t blocks, slow_blocks;  // of a launch, and of these for what is read first and slowly
} km_round_options;

typedef struct {
    uint64_t size, upload, vector, parts, items, tiles, bytes, shared, blocks, drawn;
} km_round_sizes;

// Who took something of a part: a member, or (behind all members) the base that it is of.
typedef struct {
    uint32_t owner, part;
} km_use;

// What one member takes of a source: what a recipe's ops take of one of its segments, or one of
// these. Claims of a source are in a list.
enum { KM_CLAIM_DENSE = UINT32_MAX, KM_CLAIM_LITERAL = UINT32_MAX - 1, KM_NOBODY = UINT32_MAX };
// Turns among which a recipe's are looked for; how many members ahead tables are asked for.
enum { KM_TURNS_BACK = 64, KM_AHEAD_TABLES = 2 };

typedef struct {
    uint32_t member, segment, next, used;
} km_claim;

// Bytes that are read: a payload, or a recipe's file.
typedef struct {
    km_part part;
    uint64_t order;
    uint32_t literal, first, last, base;
} km_source;

// Literals of a run that lie back to back: they are alike in all runs with the same list.
typedef struct {
    uint64_t offset;
    uint32_t cell_begin, cells, rows, takers;
} km_literals;

typedef struct {
    uint64_t begin, end;
    uint32_t strand;
} km_stretch;

// What was written down for a source, from where on: as it is in the tables of `km_round`.
typedef struct {
    uint32_t source, wanted;  // whether anybody wants any of it
    uint64_t bytes, tile;
    size_t strands, cells, takers, pieces, items;
    size_t strands_end, cells_end, takers_end, pieces_end, items_end;
} km_drawn;

// What a part's strands and items are copied from, where they are in the job, and how far its cells
// are from those of the one that was drawn.
typedef struct {
    uint32_t drawn, cells;
    uint64_t strands, items;
} km_placed;

// Recipes whose lists, ops and runs are the same: the first one, the sources that were drawn last of
// those that such a recipe claims first (its own literals, and a payload), and whether all layers have
// one list for K and one for V.
typedef struct {
    uint32_t member, literals, payload, alike;
} km_shape;

typedef struct {
    const km_layout *layout;
    const uint64_t *bases;
    const km_wanted *wanted;
    size_t requests;
    const km_member *members;
    size_t member_count;
    const km_base *segments;
    size_t segment_count;
    km_round_options options;
    unsigned char *status;  // of each member

    km_recipe *recipes;    // of each member that has one
    uint32_t *turn_begin;  // of each member's turns in the job's
    uint32_t *shape_of;    // of each member that has a recipe
    uint32_t *slots;       // sources by address; a power of two
    uint32_t *shape_slots; // shapes by what they say; as many
    size_t slot_count, hint;
    uint32_t shape_hint, turn_hint, dense;  // `dense`: of payloads that a dense member claims first
    uint32_t pairs, interleaved, element;
    km_grown sources, claims, matched, parts, strands, cells, takers, pieces, items, turns, bits;
    km_grown uses, orders, sorted, literals, lists, stretches, shapes, drawn, claimed, placed;
    uint64_t tiles, bytes, most, slow_items;
    uint64_t strand_count, item_count;  // of the job: what is repeated is in no table
    const char *wrong;  // what is not served
} km_round;

#endif
