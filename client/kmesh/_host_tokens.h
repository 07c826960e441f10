// Python's view of token ids and of the keys made of them; the work is in _host_chain.h.
#ifndef KMESH_HOST_TOKENS_H
#define KMESH_HOST_TOKENS_H

#include "_host_args.h"
#include "_host_chain.h"

// Bytes of tokens that are hashed in less time than getting the GIL back may take.
enum { HOST_SHORT_CHAIN = 1 << 20 };

static int token_word(PyObject *item, uint32_t *word) {
    unsigned long value = PyLong_AsUnsignedLong(item);
    if (value == (unsigned long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return 0;
        PyErr_Clear();
        // numpy's integers, say. Their code may drop the list's reference to them.
        Py_INCREF(item);
        PyObject *index = PyNumber_Index(item);
        Py_DECREF(item);
        if (!index) return 0;
        value = PyLong_AsUnsignedLong(index);
        Py_DECREF(index);
        if (value == (unsigned long)-1 && PyErr_Occurred()) return 0;
    }
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a token id does not fit in 32 bits");
        return 0;
    }
    *word = km_le32((uint32_t)value);
    return 1;
}

static PyObject *host_token_words(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *ids;
    if (!PyArg_ParseTuple(args, "O:token_words", &ids)) return NULL;
    int list = PyList_Check(ids);
    PyObject *items = list ? Py_NewRef(ids) : PySequence_Tuple(ids);
    if (!items) return NULL;
    Py_ssize_t count = list ? PyList_Size(items) : PyTuple_Size(items);
    PyObject *result = PyBytes_FromStringAndSize(NULL, 4 * count);
    char *words = result ? PyBytes_AsString(result) : NULL;
    for (Py_ssize_t i = 0; result && i < count; i++) {
        // Of a list that an item's own code made shorter, the rest is an IndexError.
        PyObject *item = list ? PyList_GetItem(items, i) : PyTuple_GetItem(items, i);
        uint32_t word = 0;
        if (item && token_word(item, &word)) memcpy(words + 4 * i, &word, sizeof word);
        else
            Py_CLEAR(result);
    }
    Py_DECREF(items);
    return result;
}

static PyObject *host_chain_keys(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer parent, words, known_words = {0}, known_keys = {0};
    uint64_t step;
    if (!PyArg_ParseTuple(args, "y*y*O&|y*y*:chain_keys", &parent, &words, to_u64, &step,
                          &known_words, &known_keys))
        return NULL;
    PyObject *result = NULL;
    size_t length = (size_t)words.len, spans = (size_t)known_keys.len / KM_KEY;
    if (parent.len != KM_KEY) refuse("parent: not a key");
    else if (!step || step > SIZE_MAX - KM_KEY || length % step)
        refuse("words: not whole spans of that many bytes");
    else if (known_keys.len % KM_KEY || (size_t)known_words.len / step < spans)
        refuse("known: not a key for each span");
    else {
        km_chain_known known = {known_words.buf, known_keys.buf, spans};
        unsigned char *scratch = length ? malloc(KM_KEY + (size_t)step) : NULL;
        if (length && !scratch) PyErr_NoMemory();
        else
            result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(length / step * KM_KEY));
        if (result) {
            PyThreadState *others = length > HOST_SHORT_CHAIN ? PyEval_SaveThread() : NULL;
            km_chain(parent.buf, words.buf, length / step, step, known, scratch,
                     (unsigned char *)PyBytes_AsString(result));
            if (others) PyEval_RestoreThread(others);
        }
        free(scratch);
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&words);
    PyBuffer_Release(&known_words);
    PyBuffer_Release(&known_keys);
    return result;
}

#endif
