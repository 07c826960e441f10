// What a round reads of host memory, for whoever copies it before. No Python in here.
#ifndef KMESH_HOST_READS_H
#define KMESH_HOST_READS_H

#include "_host_claims.h"
#include "_host_turn.h"

// Whose memory has order 0 is the host's. `number` is of a base, or (behind all bases) of a member.
typedef struct {
    uint64_t address, length, number;
} km_read;

static int km_read_order(const void *a, const void *b) {
    const km_read *x = a, *y = b;
    if (x->address != y->address) return x->address < y->address ? -1 : 1;
    return x->length < y->length ? -1 : x->length > y->length;
}

static uint64_t km_base_bytes(const km_base *b) {
    uint64_t layers = (uint64_t)b->layer_end - b->layer_begin;
    uint64_t heads = (uint64_t)b->head_end - b->head_begin;
    uint64_t element = km_element_bytes(b->dtype);
    if (b->layer_end < b->layer_begin || b->head_end < b->head_begin) return 0;
    return 2 * layers * heads * b->segment.tokens * b->head_dim * element;
}

// Lets each reach to the next one where that begins on the tile behind it, as in a slab, and at most
// `gap` bytes are between them: they are one copy then. Between slabs there are sums, so none reaches
// into the next.
static void km_reads_join(km_read *reads, size_t count, uint64_t gap) {
    for (size_t i = 0; i + 1 < count; i++) {
        uint64_t step = km_tiles(reads[i].length) * KM_TILE;
        if (reads[i + 1].address - reads[i].address == step && step - reads[i].length <= gap)
            reads[i].length = step;
    }
}

// Each once, in the order of addresses, to `reads`, which has room for all; returns how many there
// are. `numbers` says for each base and member which it is; KM_NOBODY: none.
static size_t km_reads_find(const km_base *bases, size_t base_count, const km_member *members,
                            size_t member_count, uint64_t gap, km_read *reads,
                            uint32_t *numbers) {
    size_t count = 0, found = 0;
    for (size_t b = 0; b < base_count; b++) {
        numbers[b] = KM_NOBODY;
        if (!bases[b].order) reads[count++] = (km_read){bases[b].address, km_base_bytes(&bases[b]), b};
    }
    for (size_t m = 0; m < member_count; m++) {
        numbers[base_count + m] = KM_NOBODY;
        if (!members[m].order)
            reads[count++] = (km_read){members[m].part.address, members[m].part.length, base_count + m};
    }
    qsort(reads, count, sizeof *reads, km_read_order);
    for (size_t i = 0; i < count; i++) {
        if (!i || km_read_order(&reads[found - 1], &reads[i])) reads[found++] = reads[i];
        numbers[reads[i].number] = (uint32_t)found - 1;
    }
    km_reads_join(reads, found, gap);
    return found;
}

#endif
