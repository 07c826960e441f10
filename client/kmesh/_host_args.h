// What every function for Python needs to read its arguments.
#ifndef KMESH_HOST_ARGS_H
#define KMESH_HOST_ARGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

// "O&" converter: unlike "K", it refuses what is negative or too large.
static int to_u64(PyObject *object, void *out) {
    unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) return 0;
    *(uint64_t *)out = value;
    return 1;
}

static void *pointer(uint64_t address) {
    return (void *)(uintptr_t)address;
}

static PyObject *refuse(const char *message) {
    PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

#endif
