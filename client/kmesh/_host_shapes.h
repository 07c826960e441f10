// Recipes that say the same: siblings' mostly do, but for what they refer to and where that lies. What
// was worked out for one is known of the others. No Python in here.
#ifndef KMESH_HOST_SHAPES_H
#define KMESH_HOST_SHAPES_H

#include "_host_round_state.h"

// Of a recipe's ops, how many tell shapes apart before their tables are compared.
enum { KM_SHAPE_OPS = 8 };

static size_t km_shape_bytes(const km_recipe *recipe) {
    return recipe->tables_end - (size_t)((const char *)recipe->lists - (const char *)recipe->head);
}

static int km_shape_is(const km_recipe *a, const km_recipe *b) {
    const km_recipe_head *x = a->head, *y = b->head;
    size_t begin = offsetof(km_recipe_head, layer_begin), end = offsetof(km_recipe_head, generation);
    return x->tokens == y->tokens && x->dtype == y->dtype &&
           !memcmp((const char *)x + begin, (const char *)y + begin, end - begin) &&
           !memcmp(a->lists, b->lists, km_shape_bytes(a));
}

static uint64_t km_shape_hash(const km_recipe *recipe) {
    const km_recipe_head *head = recipe->head;
    size_t ops = head->ops < KM_SHAPE_OPS ? head->ops : KM_SHAPE_OPS;
    uint64_t hash = head->file_bytes ^ (uint64_t)head->tokens << 32, word;
    for (size_t at = 0; at < ops * sizeof *recipe->ops; at += sizeof word) {
        memcpy(&word, (const char *)recipe->ops + at, sizeof word);
        hash = (hash ^ word) * KM_GOLDEN;
        hash ^= hash >> 32;
    }
    return km_mix(hash);
}

// Whether no run has another list than the first one of its plane.
static int km_shape_alike(const km_recipe *recipe) {
    for (size_t run = 2; run < recipe->run_count; run++)
        if (recipe->runs[run].list != recipe->runs[run % 2].list) return 0;
    return 1;
}

// The shape of a member's recipe, as it is in `shape_of`. False: no memory.
static int km_round_shape(km_round *r, size_t at) {
    const km_recipe *recipe = &r->recipes[at];
    const km_shape *last = r->shapes.count ? km_at(&r->shapes, r->shape_hint) : NULL;
    r->shape_of[at] = r->shape_hint;
    if (last && km_shape_is(recipe, &r->recipes[last->member])) return 1;
    size_t slot = km_shape_hash(recipe) & (r->slot_count - 1);
    for (; r->shape_slots[slot]; slot = (slot + 1) & (r->slot_count - 1)) {
        uint32_t found = r->shape_slots[slot] - 1;
        const km_shape *shape = km_at(&r->shapes, found);
        if (!km_shape_is(recipe, &r->recipes[shape->member])) continue;
        r->shape_of[at] = r->shape_hint = found;
        return 1;
    }
    for (size_t i = 0; i < recipe->head->ops; i++)
        if (recipe->ops[i].kind > KM_OP_REF_ROT)
            r->wrong = "recipes with differences (XOR) are not served: decode them on the host";
    km_shape *made = km_grow(&r->shapes, 1);
    if (!made) return 0;
    *made = (km_shape){(uint32_t)at, KM_NOBODY, KM_NOBODY, (uint32_t)km_shape_alike(recipe)};
    r->shape_slots[slot] = (uint32_t)r->shapes.count;
    r->shape_of[at] = r->shape_hint = (uint32_t)r->shapes.count - 1;
    return 1;
}

#endif
