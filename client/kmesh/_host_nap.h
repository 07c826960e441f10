// A short sleep.
#ifndef KMESH_HOST_NAP_H
#define KMESH_HOST_NAP_H

#include "_host_args.h"

#include <sys/prctl.h>
#include <time.h>

static PyObject *host_nap(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t nanoseconds;
    if (!PyArg_ParseTuple(args, "O&:nap", to_u64, &nanoseconds)) return NULL;
    if (nanoseconds >= 1000000000) return refuse("nanoseconds: a second or more");
    struct timespec span = {0, (long)nanoseconds};
    Py_BEGIN_ALLOW_THREADS
    // What the kernel may add to a thread's sleep is more than these take; where it can't be
    // asked, it stays.
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    if (slack > 1) prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    nanosleep(&span, NULL);
    if (slack > 1) prctl(PR_SET_TIMERSLACK, (unsigned long)slack, 0, 0, 0);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#endif
