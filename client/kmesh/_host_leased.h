// Leased spans on their way into a load, all of them in one call: what a lease has of each becomes
// a record, and records become parts for the kernels. The GIL is kept: it takes microseconds.
#ifndef KMESH_HOST_LEASED_H
#define KMESH_HOST_LEASED_H

#include "_host_batch.h"
#include "_host_paged.h"

// As kmesh.kernels.plan has them.
typedef struct {
    uint32_t slab, part;
    uint64_t offset, length, root;
    uint32_t tokens, entry;
    uint64_t start;
} leased_span;

typedef struct {
    uint64_t src_begin, dst_begin, heads;
} leased_heads;

typedef struct {
    uint64_t slab, offset, length, end;  // the largest of each; 2^64 - 1 for what has no such end
} leased_extent;

typedef struct {
    uint64_t slab, address, sums_address, on_gpu;
} leased_slab;

typedef struct {
    int64_t begin, end;
    uint64_t block, src_heads, layers;
} leased_range;

static PyObject *host_leased_spans(PyObject *module, PyObject *args) {
    (void)module;
    static const char *const names[] = {"slab", "offset", "length", "root", "tokens"};
    PyObject *objects[5], *result = NULL;
    km_column columns[5];
    uint64_t count, shards, first, step;
    host_batch batch = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOOO&O&O&O&:leased_spans", &objects[0], &objects[1],
                          &objects[2], &objects[3], &objects[4], to_u64, &count, to_u64, &shards,
                          to_u64, &first, to_u64, &step))
        return NULL;
    for (int i = 0; i < 5; i++) {
        if (!batch_take(&batch, objects[i], names[i], 0, 0, &columns[i])) goto done;
        if (columns[i].count < count) {
            PyErr_Format(PyExc_ValueError, "%s: fewer than there are spans", names[i]);
            goto done;
        }
    }
    if (!shards || shards > UINT32_MAX || count > UINT32_MAX) {
        refuse("count, shards: of no use");
        goto done;
    }
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * sizeof(leased_span)));
    char *out = result ? PyBytes_AsString(result) : NULL;
    for (uint64_t i = 0; out && i < count; i++) {
        leased_span span = {.slab = (uint32_t)km_column_get(&columns[0], i),
                            .part = (uint32_t)(i % shards),
                            .offset = km_column_get(&columns[1], i),
                            .length = km_column_get(&columns[2], i),
                            .root = km_column_get(&columns[3], i),
                            .tokens = (uint32_t)km_column_get(&columns[4], i),
                            .entry = (uint32_t)i,
                            .start = (first + i / shards) * step};
        memcpy(out + i * sizeof span, &span, sizeof span);
    }
done:
    batch_release(&batch);
    return result;
}

// What is wrong with spans and with what each part of their sharding gives.
static const char *leased_wrong(const Py_buffer *spans, const Py_buffer *heads) {
    if ((size_t)spans->len % sizeof(leased_span)) return "spans: not whole records";
    if ((size_t)heads->len % sizeof(leased_heads)) return "heads: not whole records";
    size_t parts = (size_t)heads->len / sizeof(leased_heads);
    for (size_t at = 0; at < (size_t)spans->len; at += sizeof(leased_span)) {
        leased_span span;
        memcpy(&span, (const char *)spans->buf + at, sizeof span);
        if (span.part >= parts) return "spans: a part that the sharding has not";
    }
    return NULL;
}

// Where parts begin to give something, or NULL: this one gives nothing.
static const leased_heads *leased_gives(const Py_buffer *heads, uint32_t part, leased_heads *out) {
    memcpy(out, (const char *)heads->buf + part * sizeof *out, sizeof *out);
    return out->heads ? out : NULL;
}

static uint64_t leased_most(uint64_t one, uint64_t other) {
    return one > other ? one : other;
}

static PyObject *host_leased_extents(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer spans, heads;
    if (!PyArg_ParseTuple(args, "y*y*:leased_extents", &spans, &heads)) return NULL;
    PyObject *result = NULL;
    size_t count = (size_t)spans.len / sizeof(leased_span), found = 0;
    leased_extent *extents = malloc(count * sizeof *extents + 1);
    const char *wrong = leased_wrong(&spans, &heads);
    for (size_t i = 0; extents && !wrong && i < count; i++) {
        leased_span span;
        leased_heads own;
        memcpy(&span, (const char *)spans.buf + i * sizeof span, sizeof span);
        if (!leased_gives(&heads, span.part, &own)) continue;
        if (span.offset % KM_TILE) wrong = "spans: one begins on no tile";
        // Few slabs, and mostly the last one's neighbour.
        size_t at = found;
        while (at && extents[at - 1].slab != span.slab) at--;
        if (!at) {
            extents[found] = (leased_extent){.slab = span.slab};
            at = ++found;
        }
        leased_extent *e = &extents[at - 1];
        uint64_t end;
        if (__builtin_add_overflow(span.offset, span.length, &end)) end = UINT64_MAX;
        e->offset = leased_most(e->offset, span.offset);
        e->length = leased_most(e->length, span.length);
        e->end = leased_most(e->end, end);
    }
    if (wrong) refuse(wrong);
    else if (!extents)
        PyErr_NoMemory();
    else
        result = PyBytes_FromStringAndSize((char *)extents, (Py_ssize_t)(found * sizeof *extents));
    free(extents);
    PyBuffer_Release(&spans);
    PyBuffer_Release(&heads);
    return result;
}

static const leased_slab *leased_find(const leased_slab *slabs, size_t count, uint32_t number) {
    for (size_t i = 0; i < count; i++)
        if (slabs[i].slab == number) return &slabs[i];
    return NULL;
}

// One part, of a span that begins `start - base` tokens behind the first page.
static km_part leased_part(const leased_span *span, const leased_heads *own,
                           const leased_slab *slab, const leased_range *range, int64_t base) {
    int64_t start = (int64_t)span->start, end = range->end - start, begin = range->begin - start;
    if (end > span->tokens) end = span->tokens;
    if (end < 0) end = 0;
    // Of a span before or behind what is wanted nothing is.
    if (begin > end) begin = end;
    return (km_part){.address = slab->address + span->offset,
                     .sums_address = slab->sums_address + span->offset / KM_TILE * 8,
                     .root = span->root,
                     .length = span->length,
                     .tokens = span->tokens,
                     .token_begin = begin > 0 ? (uint64_t)begin : 0,
                     .token_end = (uint64_t)end,
                     .position = (uint64_t)(start - base),
                     .src_heads = range->src_heads,
                     .src_head_begin = own->src_begin,
                     .dst_head_begin = own->dst_begin,
                     .heads = own->heads,
                     .src_layers = range->layers,
                     .layers = range->layers};
}

static PyObject *host_leased_parts(PyObject *module, PyObject *args) {
    (void)module;
    enum { LIMIT = 1 << 30 };
    Py_buffer spans, heads, slabs;
    long long begin, end;
    leased_range range;
    if (!PyArg_ParseTuple(args, "y*y*y*LLO&O&O&:leased_parts", &spans, &heads, &slabs, &begin,
                          &end, to_u64, &range.block, to_u64, &range.src_heads, to_u64,
                          &range.layers))
        return NULL;
    range.begin = begin, range.end = end;
    PyObject *parts = NULL, *on_gpu = NULL, *entries = NULL, *result = NULL;
    size_t count = (size_t)spans.len / sizeof(leased_span), kept = 0;
    int64_t base = begin, reach = 0;
    const char *wrong = leased_wrong(&spans, &heads);
    if (!wrong && (slabs.len % sizeof(leased_slab) || (uintptr_t)slabs.buf % 8))
        wrong = "slabs: not whole records";
    if (!wrong && (!range.block || begin < 0 || end < 0 || begin >= LIMIT || end >= LIMIT))
        wrong = "begin, end, block: of no use";
    for (size_t i = 0; !wrong && i < count; i++) {
        leased_span span;
        leased_heads own;
        memcpy(&span, (const char *)spans.buf + i * sizeof span, sizeof span);
        if (span.start >= LIMIT) wrong = "spans: one that begins too far away";
        else if ((int64_t)span.start < base)
            base = (int64_t)span.start;
        kept += leased_gives(&heads, span.part, &own) != NULL;
    }
    if (wrong) {
        refuse(wrong);
        goto done;
    }
    base -= base % (int64_t)range.block;
    parts = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(kept * sizeof(km_part)));
    on_gpu = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)kept);
    entries = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(kept * 4));
    if (!parts || !on_gpu || !entries) goto done;
    char *to = PyByteArray_AsString(parts), *places = PyByteArray_AsString(on_gpu);
    char *numbers = PyByteArray_AsString(entries);
    size_t at = 0, slab_count = (size_t)slabs.len / sizeof(leased_slab);
    for (size_t i = 0; i < count; i++) {
        leased_span span;
        leased_heads own;
        memcpy(&span, (const char *)spans.buf + i * sizeof span, sizeof span);
        if (!leased_gives(&heads, span.part, &own)) continue;
        const leased_slab *slab = leased_find(slabs.buf, slab_count, span.slab);
        if (!slab) {
            refuse("spans: one in none of the slabs");
            goto done;
        }
        km_part part = leased_part(&span, &own, slab, &range, base);
        memcpy(to + at * sizeof part, &part, sizeof part);
        places[at] = slab->on_gpu != 0;
        memcpy(numbers + at * 4, &span.entry, 4);
        int64_t ends = (int64_t)span.start + (int64_t)part.token_end;
        if (ends > reach) reach = ends;
        at++;
    }
    result = Py_BuildValue("(OOOLL)", parts, on_gpu, entries, (long long)base, (long long)reach);
done:
    Py_XDECREF(parts);
    Py_XDECREF(on_gpu);
    Py_XDECREF(entries);
    PyBuffer_Release(&spans);
    PyBuffer_Release(&heads);
    PyBuffer_Release(&slabs);
    return result;
}

// Bytes of pages that parts have written which are done.
static PyObject *host_moved_bytes(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer parts, status;
    uint64_t row, sum = 0;
    if (!PyArg_ParseTuple(args, "y*y*O&:moved_bytes", &parts, &status, to_u64, &row)) return NULL;
    PyObject *result = NULL;
    size_t count = (size_t)status.len;
    if ((size_t)parts.len != count * sizeof(km_part)) refuse("status: not one byte for each part");
    else {
        for (size_t i = 0; i < count; i++) {
            km_part part;
            if (((const unsigned char *)status.buf)[i] != KM_DONE) continue;
            memcpy(&part, (const char *)parts.buf + i * sizeof part, sizeof part);
            sum += 2 * part.layers * part.heads * (part.token_end - part.token_begin) * row;
        }
        result = PyLong_FromUnsignedLongLong(sum);
    }
    PyBuffer_Release(&parts);
    PyBuffer_Release(&status);
    return result;
}

#endif
