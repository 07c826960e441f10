// Planes out of recipes, and what an encoder asks about rows of keys and values. No Python in here.
#ifndef KMESH_HOST_DECODE_H
#define KMESH_HOST_DECODE_H

#include "_host_recipe.h"

// dst ^= a sparse difference: a bitmap of elements, then those that are not zero.
static int km_xor_sparse(unsigned char *dst, size_t rows_bytes, size_t element_bytes,
                         const unsigned char *data, size_t skip_elements, size_t *used) {
    size_t elements = rows_bytes / element_bytes;
    const unsigned char *words = data + *used;
    for (size_t e = 0; e < elements; e++) {
        size_t bit = skip_elements + e;
        if (!(data[bit / 8] >> bit % 8 & 1)) continue;
        unsigned char any = 0;
        for (size_t b = 0; b < element_bytes; b++) {
            dst[e * element_bytes + b] ^= words[b];
            any |= words[b];
        }
        if (!any) return 0;
        words += element_bytes;
    }
    *used = (size_t)(words - data);
    return 1;
}

// Whether the sizes that a sparse difference implies are those that it has.
static int km_xor_sparse_ok(const unsigned char *data, size_t size, size_t elements,
                            size_t element_bytes) {
    size_t bitmap = km_ceil((elements + 7) / 8, 4), words = 0;
    if (bitmap > size) return 0;
    for (size_t i = 0; i < bitmap; i++) words += (size_t)__builtin_popcount(data[i]);
    for (size_t bit = elements; bit < bitmap * 8; bit++)
        if (data[bit / 8] >> bit % 8 & 1) return 0;
    size_t used = bitmap + words * element_bytes;
    return km_ceil(used, KM_RECIPE_UNIT) == size && km_zero(data + used, size - used);
}

static void km_xor_dense(unsigned char *restrict dst, const unsigned char *restrict data,
                         size_t size) {
    for (size_t i = 0; i < size; i++) dst[i] ^= data[i];
}

// One op of one run. `data` is the op's own; `out` is the run's first byte.
static int km_recipe_op_run(const km_recipe *r, const km_recipe_op *op, size_t run,
                            const unsigned char *data, const unsigned char *segment,
                            unsigned char *out) {
    size_t bytes = op->tokens * r->row_bytes, used = 0;
    size_t elements = op->tokens * r->heads * (size_t)r->head->head_dim;
    size_t size = op->size * (size_t)KM_RECIPE_UNIT;
    if (op->kind == KM_OP_XOR && op->code == KM_XOR_SPARSE) {
        if (!km_xor_sparse_ok(data, size, elements, r->element_bytes)) return 0;
        used = km_ceil((elements + 7) / 8, 4);
    }
    for (size_t h = 0; h < r->heads; h++) {
        unsigned char *dst = out + (h * r->head->tokens + op->token) * r->row_bytes;
        if (op->kind == KM_OP_LITERAL) {
            memcpy(dst, data + h * bytes, bytes);
            continue;
        }
        size_t tokens = r->segments[op->segment].tokens;
        const unsigned char *src =
            segment + ((run * r->heads + h) * tokens + op->source) * r->row_bytes;
        if (op->turn) {
            const unsigned char *record = r->turns + (op->turn - 1u) * r->turn_bytes;
            km_recipe_turn head = km_recipe_turn_at(r, op->turn - 1u);
            km_turn turn = {(const float *)(record + KM_TURN_HEAD), r->head->pairs,
                            (uint32_t)r->row_bytes, head.interleaved, r->head->dtype};
            km_turn_rows(&turn, dst, src, op->tokens);
        } else {
            memcpy(dst, src, bytes);
        }
        if (op->kind != KM_OP_XOR) continue;
        if (op->code == KM_XOR_DENSE) km_xor_dense(dst, data + h * bytes, bytes);
        else if (!km_xor_sparse(dst, bytes, r->element_bytes, data,
                                h * op->tokens * (size_t)r->head->head_dim, &used))
            return 0;
    }
    return 1;
}

// Runs [begin, end) to `out`, which holds exactly them. Segments are (address, length) each.
static km_wrong km_recipe_decode(const km_recipe *r, const unsigned char *literals,
                                 const uint64_t *segments, size_t begin, size_t end,
                                 unsigned char *out) {
    size_t run_bytes = r->head->tokens * r->token_bytes;
    for (size_t run = begin; run < end; run++, out += run_bytes) {
        const km_recipe_run *one = &r->runs[run];
        const km_recipe_list *list = &r->lists[one->list];
        for (size_t i = list->first; i < list->first + (size_t)list->count; i++) {
            const km_recipe_op *op = &r->ops[i];
            const unsigned char *data = literals + one->offset + op->data * (size_t)KM_RECIPE_UNIT;
            const unsigned char *segment =
                op->kind == KM_OP_LITERAL ? NULL : (const void *)(uintptr_t)segments[2 * (size_t)op->segment];
            if (!km_recipe_op_run(r, op, run, data, segment, out)) KM_WRONG("ops.data", i);
        }
    }
    return KM_RIGHT;
}

// ---- what an encoder asks -----------------------------------------------------------

// equal[i] stays 1 where row i of both is the same.
static void km_rows_equal(const unsigned char *a, const unsigned char *b, size_t rows,
                          size_t row_bytes, unsigned char *equal) {
    for (size_t i = 0; i < rows; i++)
        if (memcmp(a + i * row_bytes, b + i * row_bytes, row_bytes)) equal[i] = 0;
}

KM_CLONES
static uint64_t km_row_hash(const unsigned char *row, size_t words, const uint32_t *keys) {
    uint64_t sum = 0;
    for (size_t i = 0; i < words; i += 2) {
        uint32_t pair[2];
        memcpy(pair, row + 4 * i, 8);
        sum += (uint64_t)(pair[0] + keys[i]) * (uint64_t)(uint32_t)(pair[1] + keys[i + 1]);
    }
    return sum;
}

// A hash of each token of a run [head][token][row], for finding equal ones. False: no memory.
static int km_token_hashes(const unsigned char *run, size_t heads, size_t tokens, size_t row_bytes,
                           uint64_t *out) {
    size_t even = row_bytes / 8 * 2, rest = row_bytes % 8;
    uint32_t *keys = malloc((even + 2) * sizeof *keys);
    if (!keys) return 0;
    for (size_t i = 0; i < even + 2; i++) keys[i] = (uint32_t)(km_mix((i + 1) * KM_GOLDEN) >> 32);
    memset(out, 0, tokens * sizeof *out);
    for (size_t h = 0; h < heads; h++)
        for (size_t t = 0; t < tokens; t++) {
            const unsigned char *row = run + (h * tokens + t) * row_bytes;
            unsigned char last[8] = {0};
            memcpy(last, row + row_bytes - rest, rest);
            uint64_t hash = km_row_hash(row, even, keys);
            if (rest) hash += km_row_hash(last, 2, keys + even);
            out[t] = km_mix(out[t] + hash + KM_GOLDEN);
        }
    free(keys);
    return 1;
}

#endif
