// Payloads in chunks for the copy engine's buffers, all of them in one call.
#ifndef KMESH_HOST_CHUNKS_H
#define KMESH_HOST_CHUNKS_H

#include "_host_args.h"
#include "_host_paged.h"

enum { CHUNK_ALIGN = 256 };

typedef struct {
    uint64_t begin, end, size, first_copy, end_copy;
} chunks_chunk;

typedef struct {
    uint64_t offset, address, size;
} chunks_copy;

typedef struct {
    const unsigned char *parts;
    size_t count;
    uint64_t *offsets;
    chunks_chunk *chunks;
    chunks_copy *copies;
    size_t chunk_count, copy_count;
} chunks_plan;

static km_part chunks_part(const chunks_plan *plan, size_t at) {
    km_part part;
    memcpy(&part, plan->parts + at * sizeof part, sizeof part);
    return part;
}

// One more chunk, of parts that end within `target` bytes, and one at least.
static void chunks_add(chunks_plan *plan, size_t begin, uint64_t target) {
    chunks_chunk chunk = {.begin = begin, .end = begin, .first_copy = plan->copy_count};
    uint64_t at = 0;
    while (chunk.end < plan->count) {
        km_part part = chunks_part(plan, chunk.end);
        if (chunk.end > begin && at + part.length > target) break;
        chunks_copy *last = chunk.end > begin ? &plan->copies[plan->copy_count - 1] : NULL;
        // What is as far from the part before in memory as in the buffer is brought with it.
        if (last && part.address - last->address == at - last->offset)
            last->size = at + part.length - last->offset;
        else
            plan->copies[plan->copy_count++] = (chunks_copy){at, part.address, part.length};
        plan->offsets[chunk.end++] = at;
        chunk.size += part.length;
        at = (at + part.length + CHUNK_ALIGN - 1) / CHUNK_ALIGN * CHUNK_ALIGN;
    }
    chunk.end_copy = plan->copy_count;
    plan->chunks[plan->chunk_count++] = chunk;
}

static PyObject *host_chunks(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer parts;
    uint64_t room, smallest, left = 0;
    if (!PyArg_ParseTuple(args, "y*O&O&:chunks", &parts, to_u64, &room, to_u64, &smallest))
        return NULL;
    size_t count = (size_t)parts.len / sizeof(km_part);
    chunks_plan plan = {.parts = parts.buf, .count = count};
    const char *wrong = parts.len % sizeof(km_part) ? "parts: not whole records" : NULL;
    for (size_t i = 0; i < count && !wrong; i++) {
        uint64_t length = chunks_part(&plan, i).length;
        if (length > room || left > UINT64_MAX / 4) wrong = "parts: one has no room in a chunk";
        left += length;
    }
    if (!wrong && room > UINT64_MAX / 4) wrong = "room: too large";
    PyObject *result = NULL;
    plan.offsets = malloc(count * sizeof *plan.offsets + 1);
    plan.chunks = malloc(count * sizeof *plan.chunks + 1);
    plan.copies = malloc(count * sizeof *plan.copies + 1);
    if (wrong) refuse(wrong);
    else if (!plan.offsets || !plan.chunks || !plan.copies)
        PyErr_NoMemory();
    else {
        for (size_t begin = 0; begin < count; begin = plan.chunks[plan.chunk_count - 1].end) {
            uint64_t target = left / 2 > smallest ? left / 2 : smallest;
            chunks_add(&plan, begin, target < room ? target : room);
            left -= plan.chunks[plan.chunk_count - 1].size;
        }
        result = Py_BuildValue("(y#y#y#)", (char *)plan.offsets,
                               (Py_ssize_t)(count * sizeof *plan.offsets), (char *)plan.chunks,
                               (Py_ssize_t)(plan.chunk_count * sizeof *plan.chunks),
                               (char *)plan.copies,
                               (Py_ssize_t)(plan.copy_count * sizeof *plan.copies));
    }
    free(plan.offsets);
    free(plan.chunks);
    free(plan.copies);
    PyBuffer_Release(&parts);
    return result;
}

// Bytes of all payloads, and of the largest.
static PyObject *host_payload_bytes(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer parts;
    if (!PyArg_ParseTuple(args, "y*:payload_bytes", &parts)) return NULL;
    PyObject *result = NULL;
    if (parts.len % sizeof(km_part)) refuse("parts: not whole records");
    else {
        chunks_plan plan = {.parts = parts.buf, .count = (size_t)parts.len / sizeof(km_part)};
        uint64_t sum = 0, most = 0;
        for (size_t i = 0; i < plan.count; i++) {
            uint64_t length = chunks_part(&plan, i).length;
            sum += length;
            if (length > most) most = length;
        }
        result = Py_BuildValue("(KK)", (unsigned long long)sum, (unsigned long long)most);
    }
    PyBuffer_Release(&parts);
    return result;
}

#endif
