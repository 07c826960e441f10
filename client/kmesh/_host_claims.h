// Which bytes a round reads, and who takes what of them. See docs/kernels.md. No Python in here.
#ifndef KMESH_HOST_CLAIMS_H
#define KMESH_HOST_CLAIMS_H

#include "_host_shapes.h"

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
// how keys are turned as those before it do; otherwise the member is a bad record. False: no memory.
static int km_round_open(km_round *r, size_t at, int *right) {
    const km_member *m = &r->members[at];
    km_recipe *recipe = &r->recipes[at];
    const unsigned char *tables = (const void *)(uintptr_t)m->tables;
    km_recipe_lay(recipe, tables);
    const km_recipe_head *head = recipe->head;
    *right = head->form == KM_FORM_ADDRESSABLE && head->file_bytes == m->part.length &&
             recipe->row_bytes == r->layout->row_bytes && head->tokens == m->part.tokens &&
             recipe->heads == m->part.src_heads && recipe->run_count == 2 * m->part.src_layers;
    if (!*right) return 1;
    if (!km_round_shape(r, at)) return 0;
    for (size_t i = 0; i < head->turns; i++) {
        uint32_t interleaved = km_recipe_turn_at(recipe, i).interleaved;
        if (!r->pairs)
            r->pairs = head->pairs, r->interleaved = interleaved, r->element = head->dtype;
        if (head->pairs != r->pairs || interleaved != r->interleaved || head->dtype != r->element)
            r->wrong = "recipes that turn keys in different ways are not served in one round";
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

// Whether a recipe's turns are those of the job from `first` on.
static int km_round_turns_at(const km_round *r, const km_recipe *recipe, size_t first) {
    size_t each = 8 * (size_t)r->pairs, count = recipe->head->turns;
    const unsigned char *own = recipe->turns + KM_TURN_HEAD;
    if (first + count > r->turns.count / each) return 0;
    for (size_t i = 0; i < count; i++)
        if (memcmp(km_at(&r->turns, (first + i) * each), own + i * recipe->turn_bytes, each)) return 0;
    return 1;
}

// The turns of a member's recipe. Siblings' recipes have few in common, a sibling's own nearly all, so
// they are looked for among the last ones: what is not there twice stays in the GPU's caches.
static int km_round_turns(km_round *r, size_t at) {
    const km_recipe *recipe = &r->recipes[at];
    size_t each = 8 * (size_t)r->pairs, count = recipe->head->turns, have = r->turns.count / each;
    size_t first = r->turn_hint;
    if (!km_round_turns_at(r, recipe, first)) {
        first = have < KM_TURNS_BACK ? 0 : have - KM_TURNS_BACK;
        while (first < have && !km_round_turns_at(r, recipe, first)) first++;
    }
    r->turn_begin[at] = r->turn_hint = (uint32_t)first;
    if (first < have || !count) return 1;
    if (have + count > UINT16_MAX) {
        r->wrong = "65,536 turns of keys and more are not served in one round";
        return 1;
    }
    const unsigned char *own = recipe->turns + KM_TURN_HEAD;
    unsigned char *to = km_grow(&r->turns, count * each);
    for (size_t i = 0; to && i < count; i++)
        memcpy(to + i * each, own + i * recipe->turn_bytes, each);
    return to != NULL;
}

// Asks for a later member's tables, as if it had as many as this one: caches foresee no memcmp, and
// memory is slow for who waits for each line.
static void km_round_ahead(const km_round *r, size_t at) {
    const char *next = at + KM_AHEAD_TABLES < r->member_count
                           ? (const char *)(uintptr_t)r->members[at + KM_AHEAD_TABLES].tables
                           : NULL;
    uint64_t bytes = next && r->members[at].tables ? r->recipes[at].tables_end : 0;
    if (bytes > KM_AHEAD_BYTES) bytes = KM_AHEAD_BYTES;
    for (uint64_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line);
}

static int km_round_member(km_round *r, size_t at) {
    const km_member *m = &r->members[at];
    const km_wanted *wanted = &r->wanted[m->request];
    const km_job_input in = {.layout = r->layout};
    km_part payload = km_round_payload(r, m);
    int code = km_wanted_check(&in, wanted, &payload), right = 1;
    if (code == KM_DONE && payload.length / r->layout->row_bytes >= KM_JOB_LIMIT) right = 0;
    else if (code == KM_DONE && m->tables && !km_round_open(r, at, &right)) return 0;
    if (!right) code = KM_BAD_RECORD;
    km_round_ahead(r, at);
    r->status[at] = (unsigned char)code;
    if (code != KM_DONE || r->wrong) return 1;
    if (m->part.token_begin == m->part.token_end || !m->part.heads || !m->part.layers) return 1;
    if (!m->tables)
        return km_round_claim(r, km_round_source(r, &m->part, m->order, 0), at, KM_CLAIM_DENSE);
    if (!km_round_claim_recipe(r, at)) return 0;
    return r->status[at] != KM_DONE || !r->pairs || km_round_turns(r, at);
}

#endif
