// Python's view of _host_rows.h: buffers and their checks. The GIL is kept, since the columns are
// the caller's, and no batch takes longer than a few microseconds.
#ifndef KMESH_HOST_BATCH_H
#define KMESH_HOST_BATCH_H

#include "_host_args.h"
#include "_host_rows.h"

// Rows as u32, and what else a batch was given, each of its own item size.
typedef struct {
    Py_buffer views[24];
    int count;
} host_batch;

static void batch_release(host_batch *batch) {
    while (batch->count) PyBuffer_Release(&batch->views[--batch->count]);
}

// Takes one more buffer, aligned, of items of `size` bytes (0: any of 1, 2, 4, 8).
static int batch_take(host_batch *batch, PyObject *object, const char *name, size_t size,
                      int writable, km_column *out) {
    Py_buffer *view = &batch->views[batch->count];
    if (PyObject_GetBuffer(object, view, PyBUF_ND | (writable ? PyBUF_WRITABLE : 0))) return 0;
    batch->count++;
    size_t item = (size_t)view->itemsize;
    if ((size && item != size) || (item != 1 && item != 2 && item != 4 && item != 8) ||
        (view->len && (uintptr_t)view->buf % item)) {
        PyErr_Format(PyExc_ValueError, "%s: items of a wrong size", name);
        return 0;
    }
    *out = (km_column){view->buf, (size_t)view->len / item, item};
    return 1;
}

static PyObject *batch_refuse(host_batch *batch, const char *message) {
    batch_release(batch);
    return refuse(message);
}

static PyObject *host_rows_find(PyObject *module, PyObject *args) {
    (void)module;
    static const char *const names[] = {"words 0", "words 1", "words 2", "words 3"};
    PyObject *index_object, *words[4], *scopes_object, *rows_object;
    Py_buffer keys;
    uint64_t fold, scope, limit;
    host_batch batch = {.count = 0};
    km_column index, word, scopes, rows;
    km_rows table;
    if (!PyArg_ParseTuple(args, "O(OOOO)Oy*O&O&O&O:rows_find", &index_object, &words[0], &words[1],
                          &words[2], &words[3], &scopes_object, &keys, to_u64, &fold, to_u64,
                          &scope, to_u64, &limit, &rows_object))
        return NULL;
    PyObject *result = NULL;
    if (!batch_take(&batch, index_object, "index", 4, 0, &index) ||
        !batch_take(&batch, scopes_object, "scopes", 2, 0, &scopes) ||
        !batch_take(&batch, rows_object, "rows", 4, 1, &rows))
        goto done;
    table = (km_rows){.index = index.at, .mask = index.count - 1, .scopes = scopes.at,
                      .rows = scopes.count, .limit = limit};
    for (int i = 0; i < 4; i++) {
        if (!batch_take(&batch, words[i], names[i], 8, 0, &word)) goto done;
        table.words[i] = word.at;
        if (word.count < table.rows) table.rows = word.count;
    }
    if (!index.count || index.count & table.mask) refuse("index: not a power of two");
    else if (scope > UINT16_MAX) refuse("scope: too large");
    else if ((size_t)keys.len != rows.count * 32) refuse("keys: not 32 bytes for each row");
    else {
        int64_t found = km_rows_find(&table, keys.buf, rows.count, fold, (uint16_t)scope, rows.at);
        result = found < 0 ? refuse("index: a row outside of the columns")
                           : PyLong_FromLongLong(found);
    }
done:
    batch_release(&batch);
    PyBuffer_Release(&keys);
    return result;
}

static PyObject *host_rows_gather(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *column_object, *rows_object, *out_object;
    uint64_t factor;
    host_batch batch = {.count = 0};
    km_column column, rows, out;
    if (!PyArg_ParseTuple(args, "OOOO&:rows_gather", &column_object, &rows_object, &out_object,
                          to_u64, &factor))
        return NULL;
    if (!batch_take(&batch, column_object, "column", 0, 0, &column) ||
        !batch_take(&batch, rows_object, "rows", 4, 0, &rows) ||
        !batch_take(&batch, out_object, "out", 0, 1, &out)) {
        batch_release(&batch);
        return NULL;
    }
    if (out.count != rows.count) return batch_refuse(&batch, "out: not one item for each row");
    if (!km_rows_within(rows.at, rows.count, column.count))
        return batch_refuse(&batch, "rows: one is outside of the column");
    km_rows_gather(&column, rows.at, rows.count, &out, factor);
    batch_release(&batch);
    Py_RETURN_NONE;
}

static PyObject *host_rows_pin(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *pins_object, *rows_object, *fresh_object;
    host_batch batch = {.count = 0};
    km_column pins, rows, fresh;
    if (!PyArg_ParseTuple(args, "OOO:rows_pin", &pins_object, &rows_object, &fresh_object))
        return NULL;
    if (!batch_take(&batch, pins_object, "pins", 4, 1, &pins) ||
        !batch_take(&batch, rows_object, "rows", 4, 0, &rows) ||
        !batch_take(&batch, fresh_object, "fresh", 4, 1, &fresh)) {
        batch_release(&batch);
        return NULL;
    }
    if (fresh.count < rows.count) return batch_refuse(&batch, "fresh: too short");
    if (!km_rows_within(rows.at, rows.count, pins.count))
        return batch_refuse(&batch, "rows: one is outside of the column");
    size_t found = km_rows_pin(pins.at, rows.at, rows.count, fresh.at);
    batch_release(&batch);
    return PyLong_FromSize_t(found);
}

static PyObject *host_rows_unpin(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *pins_object, *rows_object, *used_object, *idle_object;
    uint64_t tick;
    host_batch batch = {.count = 0};
    km_column pins, rows, used, idle;
    if (!PyArg_ParseTuple(args, "OOOO&O:rows_unpin", &pins_object, &rows_object, &used_object,
                          to_u64, &tick, &idle_object))
        return NULL;
    if (!batch_take(&batch, pins_object, "pins", 4, 1, &pins) ||
        !batch_take(&batch, rows_object, "rows", 4, 0, &rows) ||
        !batch_take(&batch, used_object, "used", 4, 1, &used) ||
        !batch_take(&batch, idle_object, "idle", 4, 1, &idle)) {
        batch_release(&batch);
        return NULL;
    }
    if (idle.count < rows.count) return batch_refuse(&batch, "idle: too short");
    if (tick > UINT32_MAX) return batch_refuse(&batch, "tick: too large");
    size_t limit = pins.count < used.count ? pins.count : used.count;
    if (!km_rows_within(rows.at, rows.count, limit))
        return batch_refuse(&batch, "rows: one is outside of the columns");
    int64_t found = km_rows_unpin(pins.at, rows.at, rows.count, used.at, (uint32_t)tick, idle.at);
    batch_release(&batch);
    return found < 0 ? refuse("rows: one has no pin") : PyLong_FromLongLong(found);
}

// `head` is NULL where rows are taken out.
static PyObject *rows_relink(PyObject *after_object, PyObject *before_object, const uint64_t *head,
                             PyObject *rows_object) {
    host_batch batch = {.count = 0};
    km_column after, before, rows;
    if (!batch_take(&batch, after_object, "after", 4, 1, &after) ||
        !batch_take(&batch, before_object, "before", 4, 1, &before) ||
        !batch_take(&batch, rows_object, "rows", 4, 0, &rows)) {
        batch_release(&batch);
        return NULL;
    }
    size_t limit = after.count < before.count ? after.count : before.count;
    if (head && *head >= limit) return batch_refuse(&batch, "head: outside of the columns");
    if (!km_rows_within(rows.at, rows.count, limit))
        return batch_refuse(&batch, "rows: one is outside of the columns");
    int good = head ? km_rows_link(after.at, before.at, limit, (uint32_t)*head, rows.at, rows.count)
                    : km_rows_unlink(after.at, before.at, limit, rows.at, rows.count);
    batch_release(&batch);
    if (!good) return refuse("a link leads out of the columns");
    Py_RETURN_NONE;
}

static PyObject *host_rows_link(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *after, *before, *rows;
    uint64_t head;
    if (!PyArg_ParseTuple(args, "OOO&O:rows_link", &after, &before, to_u64, &head, &rows))
        return NULL;
    return rows_relink(after, before, &head, rows);
}

static PyObject *host_rows_unlink(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *after, *before, *rows;
    if (!PyArg_ParseTuple(args, "OOO:rows_unlink", &after, &before, &rows)) return NULL;
    return rows_relink(after, before, NULL, rows);
}

static PyObject *host_pack_field(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t number;
    PyObject *column_object, *result = NULL;
    int fixed;
    host_batch batch = {.count = 0};
    km_column column;
    if (!PyArg_ParseTuple(args, "O&Op:pack_field", to_u64, &number, &column_object, &fixed))
        return NULL;
    if (!number || number >= 1 << 29) return refuse("number: no field has it");
    if (batch_take(&batch, column_object, "column", 0, 0, &column)) {
        uint64_t head = number << 3 | 2;
        size_t size = km_packed_size(&column, fixed);
        size_t all = km_varint_size(head) + km_varint_size(size) + size;
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)all);
        if (result) {
            unsigned char *out = (unsigned char *)PyBytes_AsString(result);
            out = km_varint_write(km_varint_write(out, head), size);
            km_packed_write(out, &column, fixed);
        }
    }
    batch_release(&batch);
    return result;
}

static PyObject *host_unpack_field(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t number;
    Py_buffer data;
    PyObject *out_object, *result = NULL;
    int fixed;
    host_batch batch = {.count = 0};
    km_unpacked found = {.count = 0};
    if (!PyArg_ParseTuple(args, "y*O&Op:unpack_field", &data, to_u64, &number, &out_object, &fixed))
        return NULL;
    if (batch_take(&batch, out_object, "out", 0, 1, &found.out)) {
        const unsigned char *at = data.buf;
        size_t size = fixed ? found.out.size : 0;
        result = km_unpack_field(at, at + data.len, number, size, &found)
                     ? PyLong_FromSize_t(found.count)
                     : refuse("no message with room for its values");
    }
    batch_release(&batch);
    PyBuffer_Release(&data);
    return result;
}

#endif
