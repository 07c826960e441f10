// kmesh._host.Region: a shared mapping as a Python object that can be viewed.
#ifndef KMESH_HOST_REGION_H
#define KMESH_HOST_REGION_H

#include <Python.h>
#include <sys/mman.h>

// A shared mapping. It is unmapped when it is closed and nobody views it.
typedef struct {
    PyObject_HEAD
    void *memory;  // NULL once unmapped
    size_t size;
    Py_ssize_t views;
    int writable, closed;
} region;

static void region_unmap(region *self) {
    if (self->memory && self->closed && !self->views) {
        munmap(self->memory, self->size);
        self->memory = NULL;
    }
}

static PyObject *region_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int fd, writable;
    Py_ssize_t size;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Region takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "inp:Region", &fd, &size, &writable)) return NULL;
    if (size < 1) {
        PyErr_SetString(PyExc_ValueError, "size: must be positive");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    region *self = (region *)alloc(type, 0);
    if (!self) return NULL;
    void *memory;
    Py_BEGIN_ALLOW_THREADS
    memory = mmap(NULL, (size_t)size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED,
                  fd, 0);
    Py_END_ALLOW_THREADS
    if (memory == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    self->memory = memory;
    self->size = (size_t)size;
    self->writable = writable;
    return (PyObject *)self;
}

static void region_dealloc(region *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    self->closed = 1;
    region_unmap(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *region_close(region *self, PyObject *ignored) {
    (void)ignored;
    self->closed = 1;
    region_unmap(self);
    Py_RETURN_NONE;
}

static PyObject *region_address(region *self, void *closure) {
    (void)closure;
    if (!self->closed) return PyLong_FromVoidPtr(self->memory);
    PyErr_SetString(PyExc_ValueError, "the mapping is closed");
    return NULL;
}

static PyObject *region_is_closed(region *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(self->closed);
}

static int region_getbuffer(region *self, Py_buffer *view, int flags) {
    if (self->closed) {
        view->obj = NULL;
        PyErr_SetString(PyExc_ValueError, "the mapping is closed");
        return -1;
    }
    if (PyBuffer_FillInfo(view, (PyObject *)self, self->memory, (Py_ssize_t)self->size,
                          !self->writable, flags))
        return -1;
    self->views++;
    return 0;
}

static void region_releasebuffer(region *self, Py_buffer *view) {
    (void)view;
    self->views--;
    region_unmap(self);
}

static PyMethodDef region_methods[] = {
    {"close", (PyCFunction)region_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef region_getset[] = {
    {"address", (getter)region_address, NULL, NULL, NULL},
    {"closed", (getter)region_is_closed, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot region_slots[] = {
    {Py_tp_new, region_new},
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_methods, region_methods},
    {Py_tp_getset, region_getset},
    {Py_bf_getbuffer, region_getbuffer},
    {Py_bf_releasebuffer, region_releasebuffer},
    {0, NULL},
};

static PyType_Spec region_spec = {
    .name = "kmesh._host.Region",
    .basicsize = sizeof(region),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = region_slots,
};

#endif
