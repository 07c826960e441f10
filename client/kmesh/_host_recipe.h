// Recipes, as docs/recipe-format.md defines them: what their structure must be, and how a plane is
// made from them. No Python in here; nothing is believed that was not checked.
#ifndef KMESH_HOST_RECIPE_H
#define KMESH_HOST_RECIPE_H

#include "_host_turn.h"

enum { KM_RECIPE_HEAD = 256, KM_RECIPE_HEAD_SUMMED = 248, KM_RECIPE_VERSION = 1 };
enum { KM_FORM_ADDRESSABLE = 1, KM_FORM_COLD = 2, KM_TURN_KERNEL = 1 };
enum { KM_OP_LITERAL = 1, KM_OP_REF = 2, KM_OP_REF_ROT = 3, KM_OP_XOR = 4 };
enum { KM_XOR_DENSE = 0, KM_XOR_SPARSE = 1 };
enum { KM_RECIPE_UNIT = 16, KM_RUN_ALIGN = 64, KM_TURN_HEAD = 8, KM_HEAD_DIM_MAX = 8192 };

typedef struct {
    char magic[8];
    uint16_t version;
    uint8_t form, dtype;
    uint16_t block_tokens, zero;
    uint32_t tokens, position;
    uint16_t layer_begin, layer_end, head_begin, head_end;
    uint32_t head_dim, segments, turns, pairs, ops, lists, chunks, zero2;
    uint64_t literal_bytes, stored_bytes, file_bytes, generation;
    unsigned char space[32], key[32];
    uint64_t payload_root, tables_root, stored_root;
    unsigned char zero3[64];
    uint64_t head_root;
} km_recipe_head;

typedef struct {
    unsigned char key[32], digest[32];
    uint64_t root, generation;
    uint32_t tokens, position;
    uint64_t zero;
} km_recipe_segment;

typedef struct {
    int32_t delta;
    uint16_t kernel;
    uint8_t interleaved, zero;
} km_recipe_turn;

typedef struct {
    uint32_t first, count;
} km_recipe_list;

// `data` and `size` are counted in KM_RECIPE_UNIT bytes, `data` from the run's first literal.
typedef struct {
    uint8_t kind, code;
    uint16_t turn;
    uint32_t segment, token, tokens, source, data, size, zero;
} km_recipe_op;

typedef struct {
    uint32_t list, zero;
    uint64_t offset, length;
} km_recipe_run;

typedef struct {
    uint32_t raw, stored[4], zero;
} km_recipe_chunk;

_Static_assert(sizeof(km_recipe_head) == KM_RECIPE_HEAD, "no gaps");
_Static_assert(sizeof(km_recipe_segment) == 96 && sizeof(km_recipe_op) == 32, "no gaps");
_Static_assert(sizeof(km_recipe_run) == 24 && sizeof(km_recipe_chunk) == 24, "no gaps");

typedef struct {
    const km_recipe_head *head;
    const km_recipe_segment *segments;
    const unsigned char *turns;
    const km_recipe_list *lists;
    const km_recipe_op *ops;
    const km_recipe_run *runs;
    const km_recipe_chunk *chunks;
    size_t heads, row_bytes, token_bytes, element_bytes, run_count, turn_bytes;
    uint64_t tables_end, literals_at;
} km_recipe;

// A field that is wrong, and of which record; NULL: none.
typedef struct {
    const char *field;
    uint64_t at;
} km_wrong;

#define KM_WRONG(FIELD, AT) return (km_wrong){FIELD, AT}
#define KM_RIGHT ((km_wrong){NULL, 0})

static uint64_t km_root_of(const void *bytes, size_t length) {
    uint64_t root = 0;
    for (size_t t = 0; t < km_tiles(length); t++)
        root += km_fold_one(
            km_tile_sum((const unsigned char *)bytes + t * KM_TILE, km_tile_bytes(length, t)), t);
    return root;
}

static int km_zero(const void *bytes, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (((const unsigned char *)bytes)[i]) return 0;
    return 1;
}

static inline uint64_t km_ceil(uint64_t value, uint64_t step) {
    return (value + step - 1) / step * step;
}

static km_wrong km_recipe_head_check(const km_recipe_head *head, size_t length) {
    if (length < KM_RECIPE_HEAD) KM_WRONG("file_bytes", 0);
    if (memcmp(head->magic, "KMRECIPE", 8)) KM_WRONG("magic", 0);
    if (head->version != KM_RECIPE_VERSION) KM_WRONG("version", 0);
    if (head->head_root != km_root_of(head, KM_RECIPE_HEAD_SUMMED)) KM_WRONG("head_root", 0);
    if (head->file_bytes != length) KM_WRONG("file_bytes", 0);
    if (head->form != KM_FORM_ADDRESSABLE && head->form != KM_FORM_COLD) KM_WRONG("form", 0);
    if (!km_element_bytes(head->dtype)) KM_WRONG("dtype", 0);
    if (head->block_tokens != 16 && head->block_tokens != 32 && head->block_tokens != 64)
        KM_WRONG("block_tokens", 0);
    if (!head->tokens || head->tokens > INT32_MAX) KM_WRONG("tokens", 0);
    if ((uint64_t)head->position + head->tokens > INT32_MAX) KM_WRONG("position", 0);
    if (head->layer_begin >= head->layer_end) KM_WRONG("layer_end", 0);
    if (head->head_begin >= head->head_end) KM_WRONG("head_end", 0);
    if (!head->head_dim || head->head_dim > KM_HEAD_DIM_MAX) KM_WRONG("head_dim", 0);
    if (head->segments > 65535) KM_WRONG("segments", 0);
    if (head->turns > 65535) KM_WRONG("turns", 0);
    if (head->turns ? !head->pairs || head->pairs > head->head_dim / 2 : head->pairs)
        KM_WRONG("pairs", 0);
    if (!head->lists || head->lists > head->ops) KM_WRONG("lists", 0);
    if (head->form == KM_FORM_ADDRESSABLE && head->chunks) KM_WRONG("chunks", 0);
    if (head->zero || head->zero2 || !km_zero(head->zero3, sizeof head->zero3))
        KM_WRONG("reserved", 0);
    return KM_RIGHT;
}

// Where the tables are, of a file whose head is right. Counts have 32 bits, so no sum here overflows.
static void km_recipe_lay(km_recipe *r, const unsigned char *file) {
    const km_recipe_head *head = r->head = (const km_recipe_head *)file;
    r->heads = (size_t)(head->head_end - head->head_begin);
    r->element_bytes = km_element_bytes(head->dtype);
    r->row_bytes = head->head_dim * r->element_bytes;
    r->token_bytes = r->heads * r->row_bytes;
    r->run_count = 2 * (size_t)(head->layer_end - head->layer_begin);
    r->turn_bytes = KM_TURN_HEAD + 8 * (size_t)head->pairs;
    uint64_t segments = KM_RECIPE_HEAD;
    uint64_t turns = segments + head->segments * (uint64_t)sizeof *r->segments;
    uint64_t lists = turns + head->turns * (uint64_t)r->turn_bytes;
    uint64_t ops = lists + head->lists * (uint64_t)sizeof *r->lists;
    uint64_t runs = ops + head->ops * (uint64_t)sizeof *r->ops;
    uint64_t chunks = runs + r->run_count * sizeof *r->runs;
    r->tables_end = chunks + head->chunks * (uint64_t)sizeof *r->chunks;
    r->literals_at = km_ceil(r->tables_end, KM_RUN_ALIGN);
    r->segments = (const km_recipe_segment *)(file + segments);
    r->turns = file + turns;
    r->lists = (const km_recipe_list *)(file + lists);
    r->ops = (const km_recipe_op *)(file + ops);
    r->runs = (const km_recipe_run *)(file + runs);
    r->chunks = (const km_recipe_chunk *)(file + chunks);
}

// The same of a file of which at least the first `have` bytes can be read, if all of it can be there.
static km_wrong km_recipe_open(km_recipe *r, const unsigned char *file, size_t length,
                               size_t have) {
    const km_recipe_head *head = r->head = (const km_recipe_head *)file;
    if (have < KM_RECIPE_HEAD) KM_WRONG("file_bytes", 0);
    km_wrong wrong = km_recipe_head_check(head, length);
    if (wrong.field) return wrong;
    km_recipe_lay(r, file);
    if (r->literals_at > length || length - r->literals_at != head->stored_bytes)
        KM_WRONG("stored_bytes", 0);
    if (r->literals_at > have) KM_WRONG("file_bytes", 0);
    if (!km_zero(file + r->tables_end, r->literals_at - r->tables_end)) KM_WRONG("reserved", 0);
    return KM_RIGHT;
}

static inline km_recipe_turn km_recipe_turn_at(const km_recipe *r, size_t number) {
    km_recipe_turn turn;
    memcpy(&turn, r->turns + number * r->turn_bytes, sizeof turn);
    return turn;
}

// ---- tables ---------------------------------------------------------------------

static km_wrong km_recipe_small_tables_check(const km_recipe *r) {
    const km_recipe_head *head = r->head;
    for (size_t i = 0; i < head->segments; i++) {
        const km_recipe_segment *s = &r->segments[i];
        if (!s->tokens) KM_WRONG("segments.tokens", i);
        if ((uint64_t)s->position + s->tokens > INT32_MAX) KM_WRONG("segments.position", i);
        if (!memcmp(s->key, head->key, 32)) KM_WRONG("segments.key", i);
        if (s->zero) KM_WRONG("segments.reserved", i);
    }
    for (size_t i = 0; i < head->turns; i++) {
        km_recipe_turn turn = km_recipe_turn_at(r, i);
        if (!turn.delta) KM_WRONG("turns.delta", i);
        if (turn.kernel != KM_TURN_KERNEL) KM_WRONG("turns.kernel", i);
        if (turn.interleaved > 1) KM_WRONG("turns.interleaved", i);
        if (turn.zero) KM_WRONG("turns.reserved", i);
    }
    return KM_RIGHT;
}

// A turned op goes from a segment's frame to the member's, and nowhere else.
static int km_recipe_distance_ok(const km_recipe *r, const km_recipe_op *op) {
    int64_t there = (int64_t)r->head->position + op->token;
    int64_t here = (int64_t)r->segments[op->segment].position + op->source;
    return km_recipe_turn_at(r, (size_t)op->turn - 1).delta == there - here;
}

static km_wrong km_recipe_op_check(const km_recipe *r, size_t at, uint64_t token, uint64_t data) {
    const km_recipe_op *op = &r->ops[at];
    uint64_t dense = km_ceil(op->tokens * (uint64_t)r->token_bytes, KM_RECIPE_UNIT) / KM_RECIPE_UNIT;
    int literal = op->kind == KM_OP_LITERAL, xored = op->kind == KM_OP_XOR;
    if (op->kind < KM_OP_LITERAL || op->kind > KM_OP_XOR) KM_WRONG("ops.kind", at);
    if (op->code > (xored ? KM_XOR_SPARSE : 0)) KM_WRONG("ops.code", at);
    if (op->token != token) KM_WRONG("ops.token", at);
    if (!op->tokens || op->tokens > r->head->tokens - token) KM_WRONG("ops.tokens", at);
    if (op->zero) KM_WRONG("ops.reserved", at);
    if (literal ? op->segment != 0 : op->segment >= r->head->segments)
        KM_WRONG("ops.segment", at);
    if (literal ? op->source != 0
                : op->source >= r->segments[op->segment].tokens ||
                      op->tokens > r->segments[op->segment].tokens - op->source)
        KM_WRONG("ops.source", at);
    if (xored                       ? op->turn > r->head->turns
        : op->kind == KM_OP_REF_ROT ? !op->turn || op->turn > r->head->turns
                                    : op->turn != 0)
        KM_WRONG("ops.turn", at);
    if (op->turn && !km_recipe_distance_ok(r, op)) KM_WRONG("turns.delta", op->turn - 1u);
    if (op->data != data) KM_WRONG("ops.data", at);
    if (literal || xored ? !op->size || (op->code == KM_XOR_DENSE ? op->size != dense : op->size > dense)
                         : op->size != 0)
        KM_WRONG("ops.size", at);
    return KM_RIGHT;
}

// Writes for each list its units of data, and whether it turns anything.
static km_wrong km_recipe_lists_check(const km_recipe *r, uint64_t *units, unsigned char *turned) {
    uint64_t first = 0;
    for (size_t l = 0; l < r->head->lists; l++) {
        const km_recipe_list *list = &r->lists[l];
        if (list->first != first) KM_WRONG("lists.first", l);
        if (!list->count || list->count > r->head->ops - first) KM_WRONG("lists.count", l);
        uint64_t token = 0, data = 0;
        first += list->count;
        turned[l] = 0;
        for (size_t i = list->first; i < first; i++) {
            km_wrong wrong = km_recipe_op_check(r, i, token, data);
            if (wrong.field) return wrong;
            token += r->ops[i].tokens, data += r->ops[i].size;
            turned[l] |= r->ops[i].turn != 0;
        }
        if (token != r->head->tokens) KM_WRONG("lists.count", l);
        units[l] = data;
    }
    if (first != r->head->ops) KM_WRONG("ops", 0);
    return KM_RIGHT;
}

static km_wrong km_recipe_runs_check(const km_recipe *r, const uint64_t *units,
                                     const unsigned char *turned) {
    uint64_t end = 0;
    for (size_t i = 0; i < r->run_count; i++) {
        const km_recipe_run *run = &r->runs[i];
        if (run->list >= r->head->lists || (i % 2 && turned[run->list])) KM_WRONG("runs.list", i);
        if (run->zero) KM_WRONG("runs.reserved", i);
        if (run->offset != km_ceil(end, KM_RUN_ALIGN)) KM_WRONG("runs.offset", i);
        if (run->length != units[run->list] * KM_RECIPE_UNIT) KM_WRONG("runs.length", i);
        end = run->offset + run->length;
    }
    return end == r->head->literal_bytes ? KM_RIGHT : (km_wrong){"literal_bytes", 0};
}

static km_wrong km_recipe_chunks_check(const km_recipe *r) {
    const km_recipe_head *head = r->head;
    uint64_t raw = 0, stored = 0;
    if (head->form == KM_FORM_ADDRESSABLE)
        return head->stored_bytes == head->literal_bytes ? KM_RIGHT
                                                         : (km_wrong){"stored_bytes", 0};
    for (size_t i = 0; i < head->chunks; i++) {
        const km_recipe_chunk *c = &r->chunks[i];
        if (!c->raw || c->raw > 1u << 20 || c->raw % KM_RECIPE_UNIT) KM_WRONG("chunks.raw", i);
        for (size_t p = 0; p < 4; p++) {
            if (p < r->element_bytes ? !c->stored[p] || c->stored[p] > c->raw / r->element_bytes
                                     : c->stored[p] != 0)
                KM_WRONG("chunks.stored", i);
            stored += c->stored[p];
        }
        if (c->zero) KM_WRONG("chunks.reserved", i);
        raw += c->raw;
    }
    if (raw != head->literal_bytes) KM_WRONG("literal_bytes", 0);
    return stored == head->stored_bytes ? KM_RIGHT : (km_wrong){"stored_bytes", 0};
}

// What the tables say, without sums. False: no memory.
static int km_recipe_structure(km_recipe *r, const unsigned char *file, size_t length, size_t have,
                               km_wrong *wrong) {
    *wrong = km_recipe_open(r, file, length, have);
    if (!wrong->field) *wrong = km_recipe_small_tables_check(r);
    if (wrong->field) return 1;
    uint64_t *units = malloc(r->head->lists * (sizeof *units + 1));
    if (!units) return 0;
    unsigned char *turned = (unsigned char *)(units + r->head->lists);
    *wrong = km_recipe_lists_check(r, units, turned);
    if (!wrong->field) *wrong = km_recipe_runs_check(r, units, turned);
    if (!wrong->field) *wrong = km_recipe_chunks_check(r);
    free(units);
    return 1;
}

// Everything but the payload's root and what sparse differences say; of a file of which not all can
// be read, `have` bytes of it, everything but the literals too. False: no memory.
static int km_recipe_check(km_recipe *r, const unsigned char *file, size_t length, size_t have,
                           km_wrong *wrong) {
    *wrong = km_recipe_open(r, file, length, have);
    if (wrong->field) return 1;
    if (r->head->tables_root != km_root_of(file + KM_RECIPE_HEAD, r->literals_at - KM_RECIPE_HEAD))
        *wrong = (km_wrong){"tables_root", 0};
    else if (have == length &&
             r->head->stored_root != km_root_of(file + r->literals_at, r->head->stored_bytes))
        *wrong = (km_wrong){"stored_root", 0};
    return wrong->field ? 1 : km_recipe_structure(r, file, length, have, wrong);
}

#endif
