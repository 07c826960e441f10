// Python's view of recipes; the work is in _host_decode.h and _host_recipe.h.
#ifndef KMESH_HOST_CODEC_H
#define KMESH_HOST_CODEC_H

#include "_host_args.h"
#include "_host_decode.h"

static PyObject *wrong_field(km_wrong wrong) {
    if (!wrong.field) Py_RETURN_NONE;
    return Py_BuildValue("(sK)", wrong.field, (unsigned long long)wrong.at);
}

static PyObject *host_recipe_check(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer file;
    uint64_t length = 0;
    if (!PyArg_ParseTuple(args, "y*|O&:recipe_check", &file, to_u64, &length)) return NULL;
    PyObject *result = NULL;
    if (!length) length = (uint64_t)file.len;
    if ((uintptr_t)file.buf % 8) refuse("recipe: not aligned to 8 bytes");
    else {
        km_recipe recipe;
        km_wrong wrong;
        int enough;
        Py_BEGIN_ALLOW_THREADS
        enough = km_recipe_check(&recipe, file.buf, length, (size_t)file.len, &wrong);
        Py_END_ALLOW_THREADS
        result = enough ? wrong_field(wrong) : PyErr_NoMemory();
    }
    PyBuffer_Release(&file);
    return result;
}

typedef struct {
    Py_buffer file, literals, segments, out;
} decode_buffers;

// What can't be decoded without leaving the memory that was named.
static const char *decode_wrong(const decode_buffers *b, const km_recipe *r, uint64_t begin,
                                uint64_t end) {
    if ((size_t)b->segments.len != 16 * (size_t)r->head->segments ||
        (b->segments.len && (uintptr_t)b->segments.buf % 8))
        return "segments: not an address and a length for each, aligned";
    if ((size_t)b->literals.len != r->head->literal_bytes) return "literals: wrong length";
    if (begin > end || end > r->run_count) return "runs: not a range of the recipe's";
    size_t run_bytes = r->head->tokens * r->token_bytes, bytes;
    if (__builtin_mul_overflow(run_bytes, end - begin, &bytes) || (size_t)b->out.len != bytes)
        return "out: not the size of the runs";
    if ((uintptr_t)b->out.buf % r->element_bytes) return "out: not aligned to its elements";
    const uint64_t *segments = b->segments.buf;
    for (size_t i = 0; i < r->head->segments; i++) {
        if (__builtin_mul_overflow(r->run_count * r->token_bytes, r->segments[i].tokens, &bytes) ||
            segments[2 * i + 1] != bytes)
            return "segments: wrong length";
        if (segments[2 * i] % r->element_bytes) return "segments: not aligned to their elements";
    }
    return NULL;
}

static PyObject *host_recipe_decode(PyObject *module, PyObject *args) {
    (void)module;
    decode_buffers b;
    uint64_t begin, end;
    if (!PyArg_ParseTuple(args, "y*y*y*O&O&w*:recipe_decode", &b.file, &b.literals, &b.segments,
                          to_u64, &begin, to_u64, &end, &b.out))
        return NULL;
    PyObject *result = NULL;
    km_recipe recipe;
    km_wrong wrong = KM_RIGHT;
    const char *refused = (uintptr_t)b.file.buf % 8 ? "recipe: not aligned to 8 bytes" : NULL;
    if (!refused) {
        int enough = km_recipe_structure(&recipe, b.file.buf, (size_t)b.file.len,
                                         (size_t)b.file.len, &wrong);
        if (!enough) PyErr_NoMemory();
        else if (wrong.field) result = wrong_field(wrong);
        else refused = decode_wrong(&b, &recipe, begin, end);
        if (enough && !wrong.field && !refused) {
            Py_BEGIN_ALLOW_THREADS
            wrong = km_recipe_decode(&recipe, b.literals.buf, b.segments.buf, begin, end, b.out.buf);
            Py_END_ALLOW_THREADS
            result = wrong_field(wrong);
        }
    }
    if (refused) refuse(refused);
    PyBuffer_Release(&b.file);
    PyBuffer_Release(&b.literals);
    PyBuffer_Release(&b.segments);
    PyBuffer_Release(&b.out);
    return result;
}

static PyObject *host_turn_rows(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer dst, src, turns;
    unsigned long row_bytes;
    int interleaved, element;
    if (!PyArg_ParseTuple(args, "w*y*ky*pi:turn_rows", &dst, &src, &row_bytes, &turns, &interleaved,
                          &element))
        return NULL;
    size_t size = km_element_bytes(element);
    km_turn turn = {turns.buf, (uint32_t)(turns.len / 8), (uint32_t)row_bytes, interleaved, element};
    const char *wrong = NULL;
    if (row_bytes > UINT32_MAX || turns.len % 8 || turns.len / 8 > KM_TURN_PAIRS ||
        !km_turn_ok(&turn))
        wrong = "turns: not what rows of this size and element can be turned by";
    else if (dst.len != src.len || (size_t)dst.len % row_bytes) wrong = "dst: not as many rows";
    else if (((uintptr_t)dst.buf | (uintptr_t)src.buf) % size || (uintptr_t)turns.buf % 4)
        wrong = "dst, src, turns: not aligned to their elements";
    if (!wrong) {
        Py_BEGIN_ALLOW_THREADS
        km_turn_rows(&turn, dst.buf, src.buf, (size_t)dst.len / row_bytes);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&dst);
    PyBuffer_Release(&src);
    PyBuffer_Release(&turns);
    if (wrong) return refuse(wrong);
    Py_RETURN_NONE;
}

static PyObject *host_rows_equal(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer a, b, equal;
    if (!PyArg_ParseTuple(args, "y*y*w*:rows_equal", &a, &b, &equal)) return NULL;
    const char *wrong = NULL;
    if (a.len != b.len || (equal.len ? a.len % equal.len : a.len)) wrong = "equal: not a byte a row";
    if (!wrong && equal.len) {
        Py_BEGIN_ALLOW_THREADS
        km_rows_equal(a.buf, b.buf, (size_t)equal.len, (size_t)(a.len / equal.len), equal.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    PyBuffer_Release(&equal);
    if (wrong) return refuse(wrong);
    Py_RETURN_NONE;
}

static PyObject *host_token_hashes(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer run, out;
    uint64_t heads;
    if (!PyArg_ParseTuple(args, "y*O&w*:token_hashes", &run, to_u64, &heads, &out)) return NULL;
    PyObject *result = NULL;
    size_t tokens = (size_t)out.len / 8, rows;
    if (out.len % 8 || (uintptr_t)out.buf % 8 || !tokens || !heads ||
        __builtin_mul_overflow(tokens, heads, &rows) || (size_t)run.len % rows)
        refuse("hashes: not a u64 for each token of whole heads");
    else {
        int enough;
        Py_BEGIN_ALLOW_THREADS
        enough = km_token_hashes(run.buf, heads, tokens, (size_t)run.len / rows, out.buf);
        Py_END_ALLOW_THREADS
        result = enough ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    PyBuffer_Release(&run);
    PyBuffer_Release(&out);
    return result;
}

#endif
