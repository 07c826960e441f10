// Head and tables of many recipes in one call: copied out of memory that others may write, then
// checked. The copies are what is used.
#ifndef KMESH_HOST_TABLES_H
#define KMESH_HOST_TABLES_H

#include "_host_args.h"
#include "_host_recipe.h"

typedef struct {
    uint64_t address, length;
} tables_place;

// Bytes before a recipe's literals, as its head says, which nobody has checked; `length` at most.
static uint64_t tables_bytes(const tables_place *place) {
    km_recipe_head head;
    if (place->length < sizeof head) return place->length;
    memcpy(&head, pointer(place->address), sizeof head);
    // What a head may not say must not overflow here; it is refused when it is checked.
    if (head.pairs > KM_HEAD_DIM_MAX || head.layer_end < head.layer_begin) return sizeof head;
    uint64_t layers = (uint64_t)(head.layer_end - head.layer_begin);
    uint64_t end = sizeof head + head.segments * (uint64_t)sizeof(km_recipe_segment) +
                   head.turns * (KM_TURN_HEAD + 8 * (uint64_t)head.pairs) +
                   head.lists * (uint64_t)sizeof(km_recipe_list) +
                   head.ops * (uint64_t)sizeof(km_recipe_op) +
                   2 * layers * sizeof(km_recipe_run) +
                   head.chunks * (uint64_t)sizeof(km_recipe_chunk);
    end = km_ceil(end, KM_RUN_ALIGN);
    return end < place->length ? end : place->length;
}

// The first field of a copy that is wrong; of a sound one, a form that is not moved as it lies.
// False: no memory.
static int tables_check(const unsigned char *copy, uint64_t have, uint64_t length,
                        const char **field) {
    km_recipe recipe;
    km_wrong wrong;
    if (!km_recipe_check(&recipe, copy, length, have, &wrong)) return 0;
    *field = wrong.field;
    if (*field) return 1;
    if (recipe.head->form != KM_FORM_ADDRESSABLE) *field = "cold";
    for (size_t i = 0; i < recipe.head->ops && !*field; i++)
        if (recipe.ops[i].kind > KM_OP_REF_ROT) *field = "xor";
    return 1;
}

// Copies and checks, one behind the other. -1: no memory; otherwise the bytes of all copies, which
// may be more than there is room for: `fields` says nothing then.
static int64_t tables_copy(const tables_place *places, size_t count, unsigned char *memory,
                           uint64_t room, uint64_t *offsets, const char **fields) {
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t have = tables_bytes(&places[i]);
        offsets[i] = at;
        at += km_ceil(have, KM_RUN_ALIGN);
        if (at > room) continue;
        memcpy(memory + offsets[i], pointer(places[i].address), have);
        if (!tables_check(memory + offsets[i], have, places[i].length, &fields[i])) return -1;
    }
    return (int64_t)at;
}

static PyObject *tables_answer(int64_t size, uint64_t room, size_t count, const char **fields) {
    PyObject *wrong = PyList_New(0);
    for (size_t i = 0; wrong && (uint64_t)size <= room && i < count; i++) {
        if (!fields[i]) continue;
        PyObject *one = Py_BuildValue("(ns)", (Py_ssize_t)i, fields[i]);
        if (!one || PyList_Append(wrong, one)) Py_CLEAR(wrong);
        Py_XDECREF(one);
    }
    return wrong ? Py_BuildValue("(LN)", (long long)size, wrong) : NULL;
}

static PyObject *host_recipe_tables(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer places, memory, offsets;
    if (!PyArg_ParseTuple(args, "y*w*w*:recipe_tables", &places, &memory, &offsets)) return NULL;
    size_t count = (size_t)places.len / sizeof(tables_place);
    PyObject *result = NULL;
    if ((size_t)places.len % sizeof(tables_place) || (uintptr_t)places.buf % 8)
        refuse("places: not an address and a length for each, aligned");
    else if ((size_t)offsets.len != 8 * count || (uintptr_t)offsets.buf % 8)
        refuse("offsets: not a u64 for each place, aligned");
    else if ((uintptr_t)memory.buf % 8) refuse("memory: not aligned to 8 bytes");
    else {
        const char **fields = calloc(count + 1, sizeof *fields);
        int64_t size = -1;
        if (fields) {
            Py_BEGIN_ALLOW_THREADS
            size = tables_copy(places.buf, count, memory.buf, (uint64_t)memory.len, offsets.buf,
                               fields);
            Py_END_ALLOW_THREADS
        }
        result = size < 0 ? PyErr_NoMemory()
                          : tables_answer(size, (uint64_t)memory.len, count, fields);
        free(fields);
    }
    PyBuffer_Release(&places);
    PyBuffer_Release(&memory);
    PyBuffer_Release(&offsets);
    return result;
}

#endif
