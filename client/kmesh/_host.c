// Python's view of the native part: argument checks, buffers, the GIL. The work
// is in the headers beside this file. Stated for people in _host.pyi.
// The stable ABI of Python 3.11: one binary serves later releases too. Some releases of setuptools
// take no macros from pyproject.toml, so it is said here.
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "_host_args.h"
#include "_host_arrivals.h"
#include "_host_batch.h"
#include "_host_chunks.h"
#include "_host_codec.h"
#include "_host_index.h"
#include "_host_job.h"
#include "_host_leased.h"
#include "_host_nap.h"
#include "_host_paged.h"
#include "_host_region.h"
#include "_host_round.h"
#include "_host_sums.h"
#include "_host_tables.h"
#include "_host_tokens.h"

static PyObject *host_address(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "y*:address", &view)) return NULL;
    PyObject *result = PyLong_FromVoidPtr(view.buf);
    PyBuffer_Release(&view);
    return result;
}

// ---- sums -------------------------------------------------------------------

static PyObject *host_tile_sums(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t src, length, sums, root;
    if (!PyArg_ParseTuple(args, "O&O&O&:tile_sums", to_u64, &src, to_u64, &length, to_u64, &sums))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    root = km_tile_sums(pointer(src), length, pointer(sums));
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(root);
}

static PyObject *host_copy_with_sums(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t dst, src, length, sums, root;
    if (!PyArg_ParseTuple(args, "O&O&O&O&:copy_with_sums", to_u64, &dst, to_u64, &src, to_u64,
                          &length, to_u64, &sums))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    root = km_copy_with_sums(pointer(dst), pointer(src), length, pointer(sums));
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(root);
}

static PyObject *host_fold(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t sums, tiles, root;
    if (!PyArg_ParseTuple(args, "O&O&:fold", to_u64, &sums, to_u64, &tiles)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    root = km_fold(pointer(sums), tiles);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(root);
}

static PyObject *host_verify(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t src, length, sums, root;
    int good;
    if (!PyArg_ParseTuple(args, "O&O&O&O&:verify", to_u64, &src, to_u64, &length, to_u64, &sums,
                          to_u64, &root))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    good = km_verify(pointer(src), length, pointer(sums), root);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(good);
}

// ---- paged KV ---------------------------------------------------------------

// Takes copies of everything that Python could change while the GIL is free.
static const char *paged_open(km_paged *paged, const Py_buffer *layout, const Py_buffer *blocks,
                              unsigned char **memory) {
    size_t head = sizeof(km_layout), bases;
    if ((size_t)layout->len < head) return "layout: too short";
    memcpy(&paged->layout, layout->buf, head);
    if (__builtin_mul_overflow(paged->layout.layers, 16, &bases) ||
        (size_t)layout->len - head != bases)
        return "layout: length does not match its number of layers";
    if (!km_layout_ok(&paged->layout)) return "layout: a size is zero or too large";
    for (int i = 0; i < 2; i++) {
        const km_layout *l = &paged->layout;
        const char *wrong = km_order_wrong(&l->order[i], l->row_bytes, l->block_tokens);
        if (wrong) return wrong;
    }
    if (blocks->len % 8) return "blocks: not int64";
    *memory = malloc(bases + (size_t)blocks->len);
    if (!*memory) return "no memory";
    memcpy(*memory, (const char *)layout->buf + head, bases);
    memcpy(*memory + bases, blocks->buf, (size_t)blocks->len);
    paged->k_base = (const uint64_t *)*memory;
    paged->v_base = paged->k_base + paged->layout.layers;
    paged->blocks = (const int64_t *)(*memory + bases);
    paged->block_count = (uint64_t)blocks->len / 8;
    return NULL;
}

// Sums of the longest part are kept at paged->sums. False: no memory.
static int paged_reserve(km_paged *paged, size_t *room, size_t tiles) {
    if (tiles <= *room) return 1;
    uint64_t *larger = realloc(paged->sums, tiles * sizeof *larger);
    if (!larger) return 0;
    paged->sums = larger;
    *room = tiles;
    return 1;
}

enum { PAGED_SCATTER, PAGED_GATHER, PAGED_CHECK };

// Number of parts that failed, or -1: no memory.
static Py_ssize_t paged_run(km_paged *paged, const unsigned char *records, size_t count,
                            unsigned char *status, int what) {
    size_t room = 0;
    Py_ssize_t failed = 0;
    for (size_t i = 0; i < count && failed >= 0; i++) {
        km_part part;
        memcpy(&part, records + i * sizeof part, sizeof part);
        int result = km_part_check(paged, &part);
        if (result == KM_DONE && what != PAGED_CHECK) {
            if (what == PAGED_GATHER || paged_reserve(paged, &room, km_tiles(part.length)))
                result = km_part_run(paged, &part, what == PAGED_GATHER);
            else
                failed = -1;
        }
        status[i] = (unsigned char)result;
        if (failed >= 0) failed += result != KM_DONE;
    }
    free(paged->sums);
    return failed;
}

static PyObject *paged_call(PyObject *args, const char *format, int what) {
    Py_buffer layout, parts, blocks, status;
    if (!PyArg_ParseTuple(args, format, &layout, &parts, &blocks, &status)) return NULL;
    PyObject *result = NULL;
    km_paged paged = {0};
    unsigned char *memory = NULL;
    size_t count = (size_t)parts.len / sizeof(km_part);
    const char *wrong = paged_open(&paged, &layout, &blocks, &memory);
    if (!wrong && (size_t)parts.len % sizeof(km_part)) wrong = "spans: not whole records";
    if (!wrong && (size_t)status.len != count) wrong = "status: not one byte for each record";
    if (wrong) {
        refuse(wrong);
    } else {
        Py_ssize_t failed;
        Py_BEGIN_ALLOW_THREADS
        failed = paged_run(&paged, parts.buf, count, status.buf, what);
        Py_END_ALLOW_THREADS
        result = failed < 0 ? PyErr_NoMemory() : PyLong_FromSsize_t(failed);
    }
    free(memory);
    PyBuffer_Release(&layout);
    PyBuffer_Release(&parts);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&status);
    return result;
}

static PyObject *host_scatter(PyObject *module, PyObject *args) {
    (void)module;
    return paged_call(args, "y*y*y*w*:scatter", PAGED_SCATTER);
}

static PyObject *host_gather(PyObject *module, PyObject *args) {
    (void)module;
    return paged_call(args, "y*y*y*w*:gather", PAGED_GATHER);
}

static PyObject *host_check(PyObject *module, PyObject *args) {
    (void)module;
    return paged_call(args, "y*y*y*w*:check", PAGED_CHECK);
}

static PyObject *host_part_reads(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer parts, reads;
    uint64_t row;
    if (!PyArg_ParseTuple(args, "y*O&w*:part_reads", &parts, to_u64, &row, &reads)) return NULL;
    size_t count = (size_t)parts.len / sizeof(km_part);
    PyObject *result = NULL;
    if ((size_t)parts.len % sizeof(km_part)) refuse("spans: not whole records");
    else if ((size_t)reads.len != 8 * count) refuse("reads: not a u64 for each record");
    else {
        for (size_t i = 0; i < count; i++) {
            km_part part;
            memcpy(&part, (const char *)parts.buf + i * sizeof part, sizeof part);
            uint64_t read = km_part_reads(&part, row);
            memcpy((char *)reads.buf + i * sizeof read, &read, sizeof read);
        }
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&parts);
    PyBuffer_Release(&reads);
    return result;
}

// ---- jobs of the GPU's kernels -----------------------------------------------

typedef struct {
    Py_buffer layout, parts, groups, wanted, turns, options, memory, status;
} job_buffers;

// What the buffers mean, or what is wrong with them.
static const char *job_open(const job_buffers *b, const km_layout *layout, km_job_input *in) {
    size_t parts = 0, requests = 0, codes = 0, bases;
    if (__builtin_mul_overflow(layout->layers, 16, &bases) ||
        (size_t)b->layout.len - sizeof *layout != bases)
        return "layout: length does not match its number of layers";
    if (!km_layout_ok(layout)) return "layout: a size is zero or too large";
    if ((size_t)b->groups.len % sizeof(km_group)) return "groups: not whole records";
    const km_group *groups = b->groups.buf;
    size_t count = (size_t)b->groups.len / sizeof *groups;
    for (size_t g = 0; g < count; g++) {
        parts += groups[g].parts, requests += groups[g].requests;
        codes += (size_t)groups[g].parts * groups[g].requests;
    }
    if ((size_t)b->parts.len != parts * sizeof(km_part)) return "spans: not those of the groups";
    if ((size_t)b->wanted.len != requests * sizeof(km_wanted))
        return "wanted: not those of the groups";
    if ((size_t)b->status.len != codes) return "status: not one byte for each record and request";
    if ((size_t)b->options.len != sizeof in->options) return "options: wrong length";
    if ((uintptr_t)b->memory.buf % 16) return "memory: not aligned";
    in->layout = layout;
    in->bases = (const uint64_t *)((const char *)b->layout.buf + sizeof *layout);
    in->parts = b->parts.buf;
    in->groups = groups;
    in->group_count = count;
    in->wanted = b->wanted.buf;
    in->turns = b->turns.buf;
    in->turns_bytes = (size_t)b->turns.len;
    memcpy(&in->options, b->options.buf, sizeof in->options);
    in->status = b->status.buf;
    return NULL;
}

static PyObject *host_job(PyObject *module, PyObject *args) {
    (void)module;
    job_buffers b;
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*w*w*:job", &b.layout, &b.parts, &b.groups, &b.wanted,
                          &b.turns, &b.options, &b.memory, &b.status))
        return NULL;
    km_layout layout;
    km_job_input in;
    km_job_sizes sizes;
    const char *wrong = "layout: too short";
    if ((size_t)b.layout.len >= sizeof layout) {
        memcpy(&layout, b.layout.buf, sizeof layout);
        wrong = job_open(&b, &layout, &in);
    }
    if (!wrong) wrong = km_job_write(&in, b.memory.buf, (size_t)b.memory.len, &sizes);
    PyObject *result = NULL;
    if (wrong) refuse(wrong);
    else
        result = Py_BuildValue("(KKKKKKKKKK)", sizes.size, sizes.upload, sizes.vector, sizes.parts,
                               sizes.items, sizes.tiles, sizes.bytes, sizes.shared, sizes.units,
                               sizes.unit_shared);
    PyBuffer_Release(&b.layout);
    PyBuffer_Release(&b.parts);
    PyBuffer_Release(&b.groups);
    PyBuffer_Release(&b.wanted);
    PyBuffer_Release(&b.turns);
    PyBuffer_Release(&b.options);
    PyBuffer_Release(&b.memory);
    PyBuffer_Release(&b.status);
    return result;
}

// ---- index ------------------------------------------------------------------

static int index_open(km_index *index, uint64_t address, uint64_t size) {
    if (km_index_open(index, pointer(address), size)) return 1;
    refuse("index: its header does not fit its memory");
    return 0;
}

enum { HOST_SHORT_PROBE = 2048 };

static PyObject *host_index_probe(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t address, size, epoch;
    Py_buffer keys, mixes, slots;
    int prefix;
    if (!PyArg_ParseTuple(args, "O&O&O&y*y*w*p:index_probe", to_u64, &address, to_u64, &size,
                          to_u64, &epoch, &keys, &mixes, &slots, &prefix))
        return NULL;
    PyObject *result = NULL;
    km_index index;
    size_t key_count = (size_t)keys.len / 32, mix_count = (size_t)mixes.len / 8, room;
    if (keys.len % 32) refuse("keys: not 32 bytes each");
    else if (mixes.len % 8 || !mix_count) refuse("mixes: not u64 each, at least one");
    else if (__builtin_mul_overflow(key_count, mix_count * 4, &room) || room != (size_t)slots.len)
        refuse("slots: not one u32 for each key and mix");
    else if (room && (uintptr_t)slots.buf % 4) refuse("slots: not aligned");
    else {
        size_t hits = 0;
        // A short look takes less time than getting the GIL back from another thread may.
        PyThreadState *others = key_count * mix_count > HOST_SHORT_PROBE ? PyEval_SaveThread() : NULL;
        if (km_index_open(&index, pointer(address), size) && index.epoch == epoch)
            hits = km_index_probe(&index, keys.buf, key_count, mixes.buf, mix_count, slots.buf,
                                  prefix);
        else
            memset(slots.buf, 0, room);
        if (others) PyEval_RestoreThread(others);
        result = PyLong_FromSize_t(hits);
    }
    PyBuffer_Release(&keys);
    PyBuffer_Release(&mixes);
    PyBuffer_Release(&slots);
    return result;
}

static PyObject *index_write(PyObject *args, const char *format,
                             int (*write)(const km_index *, uint64_t, uint32_t)) {
    uint64_t address, size, tag, slot;
    km_index index;
    if (!PyArg_ParseTuple(args, format, to_u64, &address, to_u64, &size, to_u64, &tag, to_u64,
                          &slot))
        return NULL;
    if (tag <= KM_TOMBSTONE) return refuse("tag: 0 and 1 are none");
    if (slot >= UINT32_MAX) return refuse("slot: too large");
    if (!index_open(&index, address, size)) return NULL;
    return PyBool_FromLong(write(&index, tag, (uint32_t)slot));
}

static PyObject *host_index_insert(PyObject *module, PyObject *args) {
    (void)module;
    return index_write(args, "O&O&O&O&:index_insert", km_index_insert);
}

static PyObject *host_index_remove(PyObject *module, PyObject *args) {
    (void)module;
    return index_write(args, "O&O&O&O&:index_remove", km_index_remove);
}

static PyObject *host_load(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t address;
    int bits;
    if (!PyArg_ParseTuple(args, "O&i:load", to_u64, &address, &bits)) return NULL;
    if (bits == 32)
        return PyLong_FromUnsignedLong(
            __atomic_load_n((uint32_t *)pointer(address), __ATOMIC_ACQUIRE));
    if (bits == 64)
        return PyLong_FromUnsignedLongLong(
            __atomic_load_n((uint64_t *)pointer(address), __ATOMIC_ACQUIRE));
    return refuse("bits: 32 or 64");
}

static PyObject *host_store(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t address, value;
    int bits;
    if (!PyArg_ParseTuple(args, "O&iO&:store", to_u64, &address, &bits, to_u64, &value))
        return NULL;
    if (bits == 32 && value <= UINT32_MAX)
        __atomic_store_n((uint32_t *)pointer(address), (uint32_t)value, __ATOMIC_RELEASE);
    else if (bits == 64)
        __atomic_store_n((uint64_t *)pointer(address), value, __ATOMIC_RELEASE);
    else
        return refuse("bits: 32 or 64, and the value must fit");
    Py_RETURN_NONE;
}

// ---- module -----------------------------------------------------------------

static PyMethodDef host_methods[] = {
    {"address", host_address, METH_VARARGS, NULL},
    {"tile_sums", host_tile_sums, METH_VARARGS, NULL},
    {"copy_with_sums", host_copy_with_sums, METH_VARARGS, NULL},
    {"fold", host_fold, METH_VARARGS, NULL},
    {"verify", host_verify, METH_VARARGS, NULL},
    {"scatter", host_scatter, METH_VARARGS, NULL},
    {"gather", host_gather, METH_VARARGS, NULL},
    {"check", host_check, METH_VARARGS, NULL},
    {"part_reads", host_part_reads, METH_VARARGS, NULL},
    {"job", host_job, METH_VARARGS, NULL},
    {"round", host_round, METH_VARARGS, NULL},
    {"round_reads", host_round_reads, METH_VARARGS, NULL},
    {"index_probe", host_index_probe, METH_VARARGS, NULL},
    {"index_insert", host_index_insert, METH_VARARGS, NULL},
    {"index_remove", host_index_remove, METH_VARARGS, NULL},
    {"rows_find", host_rows_find, METH_VARARGS, NULL},
    {"rows_gather", host_rows_gather, METH_VARARGS, NULL},
    {"rows_pin", host_rows_pin, METH_VARARGS, NULL},
    {"rows_unpin", host_rows_unpin, METH_VARARGS, NULL},
    {"rows_link", host_rows_link, METH_VARARGS, NULL},
    {"rows_unlink", host_rows_unlink, METH_VARARGS, NULL},
    {"rows_place", host_rows_place, METH_VARARGS, NULL},
    {"leased_spans", host_leased_spans, METH_VARARGS, NULL},
    {"leased_extents", host_leased_extents, METH_VARARGS, NULL},
    {"leased_parts", host_leased_parts, METH_VARARGS, NULL},
    {"chunks", host_chunks, METH_VARARGS, NULL},
    {"payload_bytes", host_payload_bytes, METH_VARARGS, NULL},
    {"moved_bytes", host_moved_bytes, METH_VARARGS, NULL},
    {"pack_field", host_pack_field, METH_VARARGS, NULL},
    {"unpack_field", host_unpack_field, METH_VARARGS, NULL},
    {"recipe_check", host_recipe_check, METH_VARARGS, NULL},
    {"recipe_decode", host_recipe_decode, METH_VARARGS, NULL},
    {"recipe_tables", host_recipe_tables, METH_VARARGS, NULL},
    {"turn_rows", host_turn_rows, METH_VARARGS, NULL},
    {"rows_equal", host_rows_equal, METH_VARARGS, NULL},
    {"token_hashes", host_token_hashes, METH_VARARGS, NULL},
    {"token_words", host_token_words, METH_VARARGS, NULL},
    {"chain_keys", host_chain_keys, METH_VARARGS, NULL},
    {"nap", host_nap, METH_VARARGS, NULL},
    {"load", host_load, METH_VARARGS, NULL},
    {"store", host_store, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int host_exec(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &region_spec, NULL);
    if (!type) return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed ? -1 : PyModule_AddIntConstant(module, "TILE_BYTES", (long)KM_TILE);
}

static PyModuleDef_Slot host_slots[] = {
    {Py_mod_exec, host_exec},
    {0, NULL},
};

static struct PyModuleDef host_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kmesh._host",
    .m_size = 0,
    .m_methods = host_methods,
    .m_slots = host_slots,
};

PyMODINIT_FUNC PyInit__host(void) {
    return PyModuleDef_Init(&host_module);
}
