// Python's view of _host_place.h: tuples of columns and their checks. The GIL is kept, since the
// columns are the caller's: who places spans serves nobody yet.
#ifndef KMESH_HOST_ARRIVALS_H
#define KMESH_HOST_ARRIVALS_H

#include "_host_batch.h"
#include "_host_place.h"

typedef struct {
    const char *name;
    size_t size;
} host_named;

// Takes the buffers of a tuple, which has one for each name.
static int batch_take_all(host_batch *batch, PyObject *tuple, const host_named *named, int count,
                          int writable, km_column *out) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        refuse("columns: not a tuple of all of them");
        return 0;
    }
    for (int i = 0; i < count; i++)
        if (!batch_take(batch, PyTuple_GetItem(tuple, i), named[i].name, named[i].size, writable,
                        &out[i]))
            return 0;
    return 1;
}

static const host_named ground_named[] = {
    {"words 0", 8}, {"words 1", 8}, {"words 2", 8}, {"words 3", 8}, {"index", 4},
    {"owner", 4},   {"scope", 2},   {"space", 4},   {"tokens", 2},  {"start", 4},
    {"slab", 2},    {"tile", 4},    {"length", 4},  {"root", 8},    {"born", 4},
    {"used", 4},
};
static const host_named arrivals_named[] = {
    {"data", 1},   {"slots", 4}, {"kinds", 4},  {"which", 4},
    {"scopes", 2}, {"folds", 8}, {"spaces", 4},
};
enum { GROUND_COLUMNS = 16, ARRIVALS_COLUMNS = 7, GROUND_INDEX = 4, GROUND_OWNER = 5 };

// What the columns mean, or what is wrong with them.
static const char *ground_open(const km_column *c, km_ground *ground) {
    size_t rows = c[0].count;
    for (int i = 0; i < GROUND_COLUMNS; i++)
        if (i != GROUND_INDEX && i != GROUND_OWNER && c[i].count < rows) rows = c[i].count;
    *ground = (km_ground){.words = {c[0].at, c[1].at, c[2].at, c[3].at},
                          .index = c[4].at,
                          .owner = c[5].at,
                          .scope = c[6].at,
                          .space = c[7].at,
                          .tokens = c[8].at,
                          .start = c[9].at,
                          .slab = c[10].at,
                          .tile = c[11].at,
                          .length = c[12].at,
                          .root = c[13].at,
                          .born = c[14].at,
                          .used = c[15].at,
                          .rows = rows,
                          .mask = c[4].count - 1,
                          .tiles = c[5].count};
    if (!c[4].count || c[4].count & ground->mask) return "index: not a power of two";
    if (ground->tiles > UINT32_MAX) return "owner: too many tiles";
    return NULL;
}

static const char *arrivals_open(const km_column *c, km_arrivals *in) {
    *in = (km_arrivals){.data = c[0].at,
                        .slots = c[1].at,
                        .kinds = c[2].at,
                        .which = c[3].at,
                        .scopes = c[4].at,
                        .folds = c[5].at,
                        .spaces = c[6].at,
                        .records = c[1].count,
                        .count = c[3].count,
                        .kind_count = c[4].count};
    if (c[0].count != in->records * KM_RECORD || c[2].count != in->records)
        return "data, kinds: not one for each slot";
    if (c[5].count != in->kind_count || c[6].count != in->kind_count)
        return "folds, spaces: not one for each scope";
    return NULL;
}

static const char *terms_wrong(const km_terms *terms) {
    if (terms->slab > UINT16_MAX) return "slab: too large";
    if (!terms->sub_tokens || terms->span_tokens > UINT16_MAX) return "tokens: out of range";
    return terms->tick > UINT32_MAX ? "tick: too large" : NULL;
}

static PyObject *host_rows_place(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *ground_object, *arrivals_object, *held_object, *result = NULL;
    km_terms terms;
    if (!PyArg_ParseTuple(args, "OO(O&O&O&O&O&)O:rows_place", &ground_object, &arrivals_object,
                          to_u64, &terms.slab, to_u64, &terms.span_tokens, to_u64,
                          &terms.sub_tokens, to_u64, &terms.limit, to_u64, &terms.tick,
                          &held_object))
        return NULL;
    host_batch batch = {.count = 0};
    km_column columns[GROUND_COLUMNS], come[ARRIVALS_COLUMNS], held;
    km_ground ground;
    km_arrivals arrivals;
    if (batch_take_all(&batch, ground_object, ground_named, GROUND_COLUMNS, 1, columns) &&
        batch_take_all(&batch, arrivals_object, arrivals_named, ARRIVALS_COLUMNS, 0, come) &&
        batch_take(&batch, held_object, "held", 1, 1, &held)) {
        const char *wrong = ground_open(columns, &ground);
        if (!wrong) wrong = arrivals_open(come, &arrivals);
        if (!wrong) wrong = terms_wrong(&terms);
        if (!wrong && held.count != arrivals.count) wrong = "held: not a byte for each record";
        if (!wrong && !km_arrivals_within(&arrivals, ground.rows))
            wrong = "which: one is outside of the columns";
        if (!wrong && !km_place(&ground, &arrivals, &terms, held.at))
            wrong = "index: a row outside of the columns";
        result = wrong ? refuse(wrong) : Py_NewRef(Py_None);
    }
    batch_release(&batch);
    return result;
}

#endif
