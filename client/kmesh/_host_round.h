// Python's view of rounds; the work is in _host_claims.h, _host_strands.h and _host_round_job.h.
#ifndef KMESH_HOST_ROUND_H
#define KMESH_HOST_ROUND_H

#include "_host_args.h"
#include "_host_reads.h"
#include "_host_round_job.h"

enum { ROUND_BUFFERS = 7 };

// Memory of the last round's tables; whoever has the GIL may take it, and leave it here.
static km_grown round_kept[KM_ROUND_TABLES];

// What the buffers mean, or what is wrong with them: layout, wanted, members, bases, options, memory,
// status.
static const char *round_open(const Py_buffer *b, km_layout *layout, km_round *r) {
    size_t bases;
    if ((size_t)b[0].len < sizeof *layout) return "layout: too short";
    memcpy(layout, b[0].buf, sizeof *layout);
    if (__builtin_mul_overflow(layout->layers, 16, &bases) ||
        (size_t)b[0].len - sizeof *layout != bases)
        return "layout: length does not match its number of layers";
    if (!km_layout_ok(layout)) return "layout: a size is zero or too large";
    if ((size_t)b[1].len % sizeof(km_wanted)) return "wanted: not whole records";
    if ((size_t)b[2].len % sizeof(km_member)) return "members: not whole records";
    if ((size_t)b[3].len % sizeof(km_base)) return "bases: not whole records";
    if ((size_t)b[4].len != sizeof r->options) return "options: wrong length";
    for (int i = 1; i < 4; i++)
        if (b[i].len && (uintptr_t)b[i].buf % 8) return "records: not aligned to 8 bytes";
    if ((uintptr_t)b[5].buf % 16) return "memory: not aligned";
    r->layout = layout;
    r->bases = (const uint64_t *)((const char *)b[0].buf + sizeof *layout);
    r->wanted = b[1].buf, r->requests = (size_t)b[1].len / sizeof(km_wanted);
    r->members = b[2].buf, r->member_count = (size_t)b[2].len / sizeof(km_member);
    r->segments = b[3].buf, r->segment_count = (size_t)b[3].len / sizeof(km_base);
    memcpy(&r->options, b[4].buf, sizeof r->options);
    r->status = b[6].buf;
    if ((size_t)b[6].len != r->member_count) return "status: not one byte for each member";
    if (r->member_count + r->segment_count >= KM_JOB_LIMIT) return "members: too many";
    for (size_t m = 0; m < r->member_count; m++) {
        if (r->members[m].request >= r->requests) return "members: a request that is not there";
        if (r->members[m].tables % 8) return "members: tables that are not aligned to 8 bytes";
    }
    return km_job_layout_wrong(layout);
}

// Plans without the GIL. False: no memory.
static int round_run(km_round *r, const Py_buffer *memory, km_round_sizes *sizes) {
    int enough;
    Py_BEGIN_ALLOW_THREADS
    enough = km_round_start(r) && km_round_plan(r);
    if (enough && !r->wrong)
        r->wrong = km_round_write(r, memory->buf, (size_t)memory->len, sizes);
    Py_END_ALLOW_THREADS
    return enough;
}

static PyObject *host_round(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer b[ROUND_BUFFERS];
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*w*w*:round", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5],
                          &b[6]))
        return NULL;
    km_layout layout;
    km_round round = {0};
    km_round_sizes sizes = {0};
    PyObject *result = NULL;
    int enough = 1;
    km_round_reuse(&round, round_kept);
    round.wrong = round_open(b, &layout, &round);
    if (!round.wrong) enough = round_run(&round, &b[5], &sizes);
    if (!enough) PyErr_NoMemory();
    else if (round.wrong) refuse(round.wrong);
    else
        result = Py_BuildValue(
            "(KKKKKKKKKKiy#y#)", sizes.size, sizes.upload, sizes.vector, sizes.parts, sizes.items,
            sizes.tiles, sizes.bytes, sizes.shared, sizes.blocks, sizes.drawn,
            round.pairs != 0,
            round.uses.count ? (const char *)round.uses.at : "",
            (Py_ssize_t)(round.uses.count * sizeof(km_use)),
            round.orders.count ? (const char *)round.orders.at : "",
            (Py_ssize_t)(round.parts.count * sizeof(uint64_t)));
    km_round_close(&round, round_kept);
    for (int i = 0; i < ROUND_BUFFERS; i++) PyBuffer_Release(&b[i]);
    return result;
}

static PyObject *host_round_reads(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer members, bases;
    uint64_t gap;
    if (!PyArg_ParseTuple(args, "y*y*O&:round_reads", &members, &bases, to_u64, &gap)) return NULL;
    size_t member_count = (size_t)members.len / sizeof(km_member);
    size_t base_count = (size_t)bases.len / sizeof(km_base), count = member_count + base_count;
    km_read *reads = NULL;
    uint32_t *numbers = NULL;
    PyObject *result = NULL;
    if ((size_t)members.len % sizeof(km_member) || (size_t)bases.len % sizeof(km_base))
        refuse("records: not whole ones");
    else if ((members.len && (uintptr_t)members.buf % 8) || (bases.len && (uintptr_t)bases.buf % 8))
        refuse("records: not aligned to 8 bytes");
    else if (!(reads = malloc((count + 1) * sizeof *reads)) ||
             !(numbers = malloc((count + 1) * sizeof *numbers)))
        PyErr_NoMemory();
    else {
        size_t found =
            km_reads_find(bases.buf, base_count, members.buf, member_count, gap, reads, numbers);
        result = Py_BuildValue("(y#y#)", (char *)reads, (Py_ssize_t)(found * sizeof *reads),
                               (char *)numbers, (Py_ssize_t)(count * sizeof *numbers));
    }
    free(reads);
    free(numbers);
    PyBuffer_Release(&members);
    PyBuffer_Release(&bases);
    return result;
}

#endif
