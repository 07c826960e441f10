// A round of restores: which bytes are read, and who takes what of them. See docs/kernels.md. No
// Python in here.
#ifndef KMESH_HOST_CLAIMS_H
#define KMESH_HOST_CLAIMS_H

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

typedef struct {
    uint32_t request, piece_begin, pieces, spare;
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
    uint64_t size, upload, vector, parts, items, tiles, bytes, shared, blocks;
} km_round_sizes;

// Who took something of a part: a member, or (behind all members) the base that it is of.
typedef struct {
    uint32_t owner, part;
} km_use;

// What one member takes of a source: what a recipe's ops take of one of its segments, or one of
// these. Claims of a source are in a list.
enum { KM_CLAIM_DENSE = UINT32_MAX, KM_CLAIM_LITERAL = UINT32_MAX - 1, KM_NOBODY = UINT32_MAX };
// Turns among which a recipe's are looked for.
enum { KM_TURNS_BACK = 64 };

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
    uint32_t *slots;       // sources by address; a power of two
    size_t slot_count, hint;
    uint32_t pairs, interleaved, element;
    km_grown sources, claims, matched, parts, strands, cells, takers, pieces, items, turns, bits;
    km_grown uses, orders, sorted, literals, lists, stretches;
    uint64_t tiles, bytes, most, slow_items;
    const char *wrong;  // what is not served
} km_round;

static km_part km_round_payload(const km_round *r, const km_member *m) {
    km_part part = m->part;
    if (m->tables && __builtin_mul_overflow(2 * part.src_layers * part.src_heads, part.tokens,
                                            &part.length))
        part.length = 0;
    if (m->tables) part.length *= r->layout->row_bytes;
    return part;
}

// Whether a base is the segment that a recipe names, as far as can be told without reading it.
static int km_round_is(const km_recipe *recipe, const km_recipe_segment *named, const km_base *b) {
    const km_recipe_head *head = recipe->head;
    const km_recipe_segment *s = &b->segment;
    return !memcmp(s->key, named->key, sizeof s->key) && s->root == named->root &&
           s->generation == named->generation && s->tokens == named->tokens &&
           s->position == named->position && !memcmp(b->space, head->space, sizeof b->space) &&
           b->layer_begin == head->layer_begin && b->layer_end == head->layer_end &&
           b->head_begin == head->head_begin && b->head_end == head->head_end &&
           b->head_dim == head->head_dim && b->dtype == head->dtype &&
           (!b->known || !memcmp(s->digest, named->digest, sizeof s->digest));
}

static uint32_t km_round_base_of(km_round *r, const km_recipe *recipe, size_t number) {
    const km_recipe_segment *named = &recipe->segments[number];
    for (size_t i = 0; i < r->segment_count; i++) {
        // Members take their bases in order, mostly.
        size_t b = (r->hint + i) % r->segment_count;
        if (!km_round_is(recipe, named, &r->segments[b])) continue;
        r->hint = b;
        return (uint32_t)b;
    }
    return KM_NOBODY;
}

// Opens a member's recipe. It is of the member's payload and of the file that is named, and says
// how keys are turned as those before it do; otherwise the member is a bad record.
static int km_round_open(km_round *r, size_t at) {
    const km_member *m = &r->members[at];
    km_recipe *recipe = &r->recipes[at];
    const unsigned char *tables = (const void *)(uintptr_t)m->tables;
    const km_recipe_head *head = (const km_recipe_head *)tables;
    if (km_recipe_open(recipe, tables, head->file_bytes, head->file_bytes).field ||
        head->form != KM_FORM_ADDRESSABLE || head->file_bytes != m->part.length ||
        recipe->row_bytes != r->layout->row_bytes || head->tokens != m->part.tokens ||
        recipe->heads != m->part.src_heads || recipe->run_count != 2 * m->part.src_layers)
        return 0;
    for (size_t i = 0; i < head->ops; i++)
        if (recipe->ops[i].kind > KM_OP_REF_ROT) {
            r->wrong = "recipes with differences (XOR) are not served: decode them on the host";
            return 0;
        }
    for (size_t i = 0; i < head->turns; i++) {
        uint32_t interleaved = km_recipe_turn_at(recipe, i).interleaved;
        if (!r->pairs)
            r->pairs = head->pairs, r->interleaved = interleaved, r->element = head->dtype;
        if (head->pairs != r->pairs || interleaved != r->interleaved || head->dtype != r->element) {
            r->wrong = "recipes that turn keys in different ways are not served in one round";
            return 0;
        }
    }
    return 1;
}

static uint32_t km_round_source(km_round *r, const km_part *part, uint64_t order,
                                uint32_t literal) {
    km_source source = {.part = *part, .order = order, .literal = literal, .first = KM_NOBODY,
                        .last = KM_NOBODY, .base = KM_NOBODY};
    source.part.token_begin = source.part.position = 0, source.part.token_end = part->tokens;
    size_t slot = km_mix(part->address) & (r->slot_count - 1);
    for (; r->slots[slot]; slot = (slot + 1) & (r->slot_count - 1)) {
        const km_source *other = km_at(&r->sources, r->slots[slot] - 1);
        if (!memcmp(&other->part, &source.part, sizeof source.part) &&
            other->literal == literal && other->order == order)
            return r->slots[slot] - 1;
    }
    km_source *made = km_grow(&r->sources, 1);
    if (!made) return KM_NOBODY;
    *made = source;
    r->slots[slot] = (uint32_t)r->sources.count;
    return r->slots[slot] - 1;
}

static int km_round_claim(km_round *r, uint32_t number, size_t member, uint32_t segment) {
    km_claim *claim = number == KM_NOBODY ? NULL : km_grow(&r->claims, 1);
    if (!claim) return 0;
    *claim = (km_claim){(uint32_t)member, segment, KM_NOBODY, 0};
    km_source *source = km_at(&r->sources, number);
    uint32_t own = (uint32_t)r->claims.count - 1;
    if (source->first == KM_NOBODY) source->first = own;
    else ((km_claim *)km_at(&r->claims, source->last))->next = own;
    source->last = own;
    return 1;
}

// The tokens of an op that a member wants: [*begin, *end) of the op.
static int km_round_clip(const km_part *p, uint64_t token, uint64_t tokens, uint64_t *begin,
                         uint64_t *end) {
    uint64_t first = token > p->token_begin ? token : p->token_begin;
    uint64_t behind = token + tokens < p->token_end ? token + tokens : p->token_end;
    if (first >= behind) return 0;
    *begin = first - token, *end = behind - token;
    return 1;
}

// Claims what a recipe's ops need. A segment that is not there as it is named makes the member a
// bad record, even if none of its wanted tokens needs it.
static int km_round_claim_recipe(km_round *r, size_t at) {
    const km_member *m = &r->members[at];
    const km_recipe *recipe = &r->recipes[at];
    size_t count = recipe->head->segments;
    r->matched.count = 0;
    uint32_t *bases = km_grow(&r->matched, 2 * count);
    if (!bases) return 0;
    uint32_t *needed = bases + count;
    for (size_t s = 0; s < count; s++) {
        bases[s] = km_round_base_of(r, recipe, s), needed[s] = 0;
        if (bases[s] != KM_NOBODY) continue;
        r->status[at] = KM_BAD_RECORD;
        return 1;
    }
    int literal = 0;
    uint64_t begin, end;
    for (size_t i = 0; i < recipe->head->ops; i++) {
        const km_recipe_op *op = &recipe->ops[i];
        if (!km_round_clip(&m->part, op->token, op->tokens, &begin, &end)) continue;
        if (op->kind == KM_OP_LITERAL) literal = 1;
        else needed[op->segment] = 1;
    }
    for (size_t s = 0; s < count; s++) {
        if (!needed[s]) continue;
        const km_base *b = &r->segments[bases[s]];
        km_member payload = *m;
        payload.part.tokens = recipe->segments[s].tokens;
        km_part part = km_round_payload(r, &payload);
        if (part.length / r->layout->row_bytes >= KM_JOB_LIMIT) r->status[at] = KM_BAD_RECORD;
        if (r->status[at] != KM_DONE) return 1;
        part.address = b->address, part.sums_address = b->sums_address, part.root = b->segment.root;
        uint32_t source = km_round_source(r, &part, b->order, 0);
        if (!km_round_claim(r, source, at, (uint32_t)s)) return 0;
        ((km_source *)km_at(&r->sources, source))->base = bases[s];
    }
    return !literal ||
           km_round_claim(r, km_round_source(r, &m->part, m->order, 1), at, KM_CLAIM_LITERAL);
}

// The turns of a member's recipe. Siblings' recipes have few in common, a sibling's own nearly all, so
// they are looked for among the last ones: what is not there twice stays in the GPU's caches.
static int km_round_turns(km_round *r, size_t at) {
    const km_recipe *recipe = &r->recipes[at];
    size_t each = 8 * (size_t)r->pairs, count = recipe->head->turns, have = r->turns.count / each;
    size_t back = have < KM_TURNS_BACK ? have : KM_TURNS_BACK;
    const unsigned char *own = recipe->turns + KM_TURN_HEAD;
    for (size_t first = have - back; first + count <= have; first++) {
        const unsigned char *there = km_at(&r->turns, first * each);
        size_t same = 0;
        while (same < count &&
               !memcmp(there + same * each, own + same * recipe->turn_bytes, each))
            same++;
        if (same < count) continue;
        r->turn_begin[at] = (uint32_t)first;
        return 1;
    }
    r->turn_begin[at] = (uint32_t)have;
    if (have + count > UINT16_MAX) {
        r->wrong = "65,536 turns of keys and more are not served in one round";
        return 1;
    }
    unsigned char *to = km_grow(&r->turns, count * each);
    for (size_t i = 0; to && i < count; i++)
        memcpy(to + i * each, own + i * recipe->turn_bytes, each);
    return to || !count;
}

static int km_round_member(km_round *r, size_t at) {
    const km_member *m = &r->members[at];
    const km_wanted *wanted = &r->wanted[m->request];
    const km_job_input in = {.layout = r->layout};
    km_part payload = km_round_payload(r, m);
    int code = km_wanted_check(&in, wanted, &payload);
    if (code == KM_DONE && (payload.length / r->layout->row_bytes >= KM_JOB_LIMIT ||
                            (m->tables && !km_round_open(r, at))))
        code = KM_BAD_RECORD;
    r->status[at] = (unsigned char)code;
    if (code != KM_DONE || r->wrong) return 1;
    if (m->part.token_begin == m->part.token_end || !m->part.heads || !m->part.layers) return 1;
    if (!m->tables)
        return km_round_claim(r, km_round_source(r, &m->part, m->order, 0), at, KM_CLAIM_DENSE);
    if (!km_round_claim_recipe(r, at)) return 0;
    return r->status[at] != KM_DONE || !r->pairs || km_round_turns(r, at);
}

#endif
