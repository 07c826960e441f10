// Columns of machine integers, and how protobuf writes them. No Python in here.
#ifndef KMESH_HOST_COLUMNS_H
#define KMESH_HOST_COLUMNS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// A view of machine integers, `size` bytes each.
typedef struct {
    void *at;
    size_t count, size;
} km_column;

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

static int km_varint_read(const unsigned char **at, const unsigned char *end, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; shift < 64 && *at < end; shift += 7) {
        uint64_t byte = *(*at)++;
        *value |= (byte & 0x7f) << shift;
        if (byte < 0x80) return 1;
    }
    return 0;
}

typedef struct {
    km_column out;
    size_t count;
} km_unpacked;

// False: no room for one more, or the item is too small for it.
static int km_unpacked_add(km_unpacked *found, uint64_t value) {
    if (found->count == found->out.count) return 0;
    if (found->out.size < 8 && value >> (8 * found->out.size)) return 0;
    km_column_put(&found->out, found->count++, value);
    return 1;
}

// Values of `size` bytes, or varints if that is 0, until `end`.
static int km_unpack_run(km_unpacked *found, const unsigned char *at, const unsigned char *end,
                         size_t size) {
    while (at < end) {
        uint64_t value = 0;
        if (size) {
            if ((size_t)(end - at) < size) return 0;
            memcpy(&value, at, size);
            at += size;
        } else if (!km_varint_read(&at, end, &value)) {
            return 0;
        }
        if (!km_unpacked_add(found, value)) return 0;
    }
    return 1;
}

enum { KM_WIRE_VARINT = 0, KM_WIRE_8 = 1, KM_WIRE_BYTES = 2, KM_WIRE_4 = 5 };

// Takes all values of one repeated field out of a message, packed or not. False: it is no message.
static int km_unpack_field(const unsigned char *at, const unsigned char *end, uint64_t number,
                           size_t size, km_unpacked *found) {
    while (at < end) {
        uint64_t head, length;
        if (!km_varint_read(&at, end, &head)) return 0;
        const unsigned char *begin = at;
        switch (head & 7) {
        case KM_WIRE_VARINT:
            if (!km_varint_read(&at, end, &length)) return 0;
            break;
        case KM_WIRE_BYTES:
            if (!km_varint_read(&at, end, &length) || length > (size_t)(end - at)) return 0;
            begin = at;
            at += length;
            break;
        case KM_WIRE_8:
        case KM_WIRE_4:
            length = (head & 7) == KM_WIRE_8 ? 8 : 4;
            if (length > (size_t)(end - at)) return 0;
            at += length;
            break;
        default: return 0;
        }
        if (head >> 3 == number && !km_unpack_run(found, begin, at, size)) return 0;
    }
    return 1;
}

#endif
