// Tables that grow. No Python in here.
#ifndef KMESH_HOST_GROW_H
#define KMESH_HOST_GROW_H

#include <stddef.h>
#include <stdlib.h>

// Records of `each` bytes. Those that were there may move when it grows.
typedef struct {
    void *at;
    size_t count, room, each;
} km_grown;

static inline void *km_at(const km_grown *table, size_t index) {
    return (char *)table->at + index * table->each;
}

// `count` more records, which hold anything; NULL: no memory.
static void *km_grow(km_grown *table, size_t count) {
    size_t needed, bytes;
    if (__builtin_add_overflow(table->count, count, &needed)) return NULL;
    if (needed > table->room || !table->at) {
        size_t room = needed < 64 ? 64 : needed + needed / 2;
        if (room < needed || __builtin_mul_overflow(room, table->each, &bytes)) return NULL;
        void *moved = realloc(table->at, bytes);
        if (!moved) return NULL;
        table->at = moved, table->room = room;
    }
    void *made = km_at(table, table->count);
    table->count = needed;
    return made;
}

#endif
