// Batches over the columns of a table whose rows are numbers: what the daemon's core does for
// every span of a request. No Python in here; every row is checked against the columns.
#ifndef KMESH_HOST_ROWS_H
#define KMESH_HOST_ROWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// A view of machine integers, `size` bytes each.
typedef struct {
    void *at;
    size_t count, size;
} km_column;

typedef struct {
    const uint32_t *index;
    uint64_t mask;
    const uint64_t *words[4];
    const uint16_t *scopes;
    size_t rows, limit;
} km_rows;

enum { KM_ROWS_AHEAD = 16 };

// The row of one key, 0 for none; -1: the index names a row that the columns don't have.
static int64_t km_rows_find_one(const km_rows *table, const uint64_t *key, uint64_t home,
                                uint16_t scope) {
    for (size_t step = 0; step < table->limit; step++) {
        uint32_t row = table->index[(home + step) & table->mask];
        if (!row) return 0;
        if (row >= table->rows) return -1;
        if (table->words[0][row] == key[0] && table->words[1][row] == key[1] &&
            table->words[2][row] == key[2] && table->words[3][row] == key[3] &&
            table->scopes[row] == scope)
            return row;
    }
    return 0;
}

// Number of keys found, or -1 as above.
static int64_t km_rows_find(const km_rows *table, const unsigned char *keys, size_t count,
                            uint64_t fold, uint16_t scope, uint32_t *out) {
    int64_t found = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t key[4], ahead;
        if (i + KM_ROWS_AHEAD < count) {
            memcpy(&ahead, keys + (i + KM_ROWS_AHEAD) * 32, 8);
            __builtin_prefetch(&table->index[(ahead ^ fold) & table->mask]);
        }
        memcpy(key, keys + i * 32, 32);
        int64_t row = km_rows_find_one(table, key, key[0] ^ fold, scope);
        if (row < 0) return -1;
        out[i] = (uint32_t)row;
        found += row != 0;
    }
    return found;
}

static int km_rows_within(const uint32_t *rows, size_t count, size_t limit) {
    for (size_t i = 0; i < count; i++)
        if (rows[i] >= limit) return 0;
    return 1;
}

static uint64_t km_column_get(const km_column *column, size_t at) {
    switch (column->size) {
    case 1: return ((const uint8_t *)column->at)[at];
    case 2: return ((const uint16_t *)column->at)[at];
    case 4: return ((const uint32_t *)column->at)[at];
    default: return ((const uint64_t *)column->at)[at];
    }
}

static void km_column_put(const km_column *column, size_t at, uint64_t value) {
    switch (column->size) {
    case 1: ((uint8_t *)column->at)[at] = (uint8_t)value; break;
    case 2: ((uint16_t *)column->at)[at] = (uint16_t)value; break;
    case 4: ((uint32_t *)column->at)[at] = (uint32_t)value; break;
    default: ((uint64_t *)column->at)[at] = value;
    }
}

static void km_rows_gather(const km_column *column, const uint32_t *rows, size_t count,
                           const km_column *out, uint64_t factor) {
    for (size_t i = 0; i < count; i++)
        km_column_put(out, i, km_column_get(column, rows[i]) * factor);
}

// Rows that had no pin go to `fresh`; their number.
static size_t km_rows_pin(uint32_t *pins, const uint32_t *rows, size_t count, uint32_t *fresh) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++)
        if (!pins[rows[i]]++) fresh[found++] = rows[i];
    return found;
}

// Last first. Rows that have no pin any more get `tick` and go to `idle`; their number, or -1
// at a row that had none.
static int64_t km_rows_unpin(uint32_t *pins, const uint32_t *rows, size_t count, uint32_t *used,
                             uint32_t tick, uint32_t *idle) {
    int64_t found = 0;
    for (size_t i = count; i--;) {
        uint32_t row = rows[i];
        if (!pins[row]) return -1;
        if (--pins[row]) continue;
        used[row] = tick;
        idle[found++] = row;
    }
    return found;
}

// Appends rows to the list whose head and tail is `head`. False: a link leads out of the columns.
static int km_rows_link(uint32_t *after, uint32_t *before, size_t limit, uint32_t head,
                        const uint32_t *rows, size_t count) {
    uint32_t last = before[head];
    if (last >= limit) return 0;
    for (size_t i = 0; i < count; i++) {
        after[last] = rows[i];
        before[rows[i]] = last;
        last = rows[i];
    }
    after[last] = head;
    before[head] = last;
    return 1;
}

static size_t km_varint_size(uint64_t value) {
    size_t size = 1;
    while (value >>= 7) size++;
    return size;
}

static unsigned char *km_varint_write(unsigned char *out, uint64_t value) {
    for (; value >> 7; value >>= 7) *out++ = (unsigned char)(value | 0x80);
    *out++ = (unsigned char)value;
    return out;
}

// Bytes that a column takes as a packed field of protobuf, without the field's head.
static size_t km_packed_size(const km_column *column, int fixed) {
    size_t size = 0;
    if (fixed) return column->count * column->size;
    for (size_t i = 0; i < column->count; i++) size += km_varint_size(km_column_get(column, i));
    return size;
}

static unsigned char *km_packed_write(unsigned char *out, const km_column *column, int fixed) {
    if (fixed) {
        memcpy(out, column->at, column->count * column->size);
        return out + column->count * column->size;
    }
    for (size_t i = 0; i < column->count; i++)
        out = km_varint_write(out, km_column_get(column, i));
    return out;
}

static int km_rows_unlink(uint32_t *after, uint32_t *before, size_t limit, const uint32_t *rows,
                          size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t left = before[rows[i]], right = after[rows[i]];
        if (left >= limit || right >= limit) return 0;
        after[left] = right;
        before[right] = left;
    }
    return 1;
}

#endif
