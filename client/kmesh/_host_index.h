// The shared index, as docs/architecture.md defines it. No Python in here.
#ifndef KMESH_HOST_INDEX_H
#define KMESH_HOST_INDEX_H

#include "_host_sums.h"

enum { KM_INDEX_HEADER = 4096, KM_PROBE_LIMIT = 64, KM_EMPTY = 0, KM_TOMBSTONE = 1 };

typedef struct {
    char magic[8];
    uint32_t format, entry_bytes;
    uint64_t epoch, capacity, version;
    uint32_t poisoned, slab_count;
    uint64_t live;
} km_index_header;

// `word` is slot | check << 32, stored and loaded as one.
typedef struct {
    uint64_t tag, word;
} km_index_entry;

typedef struct {
    km_index_header *header;
    km_index_entry *entries;
    uint64_t mask, epoch;
} km_index;

// False when the header does not fit the memory behind it. Read once: a header
// that changes later cannot move the bounds.
static int km_index_open(km_index *index, void *memory, size_t size) {
    if (size < KM_INDEX_HEADER) return 0;
    index->header = memory;
    index->entries = (km_index_entry *)((char *)memory + KM_INDEX_HEADER);
    index->epoch = __atomic_load_n(&index->header->epoch, __ATOMIC_RELAXED);
    uint64_t capacity = __atomic_load_n(&index->header->capacity, __ATOMIC_RELAXED);
    index->mask = capacity - 1;
    return capacity && !(capacity & index->mask) &&
           capacity <= (size - KM_INDEX_HEADER) / sizeof(km_index_entry);
}

static inline uint64_t km_index_word(uint64_t tag, uint64_t epoch, uint32_t slot) {
    uint64_t check = km_mix((tag ^ epoch ^ slot * KM_GOLDEN) + KM_GOLDEN);
    return slot | check << 32;
}

static inline uint64_t km_index_tag(uint64_t key, uint64_t mix) {
    uint64_t tag = key ^ mix;
    return tag > KM_TOMBSTONE ? tag : 2;
}

static inline uint64_t km_index_steps(const km_index *index) {
    return index->mask < KM_PROBE_LIMIT ? index->mask + 1 : KM_PROBE_LIMIT;
}

// Slot + 1, or 0 for a miss.
static uint32_t km_index_find(const km_index *index, uint64_t tag) {
    uint64_t steps = km_index_steps(index);
    for (uint64_t i = 0; i < steps; i++) {
        km_index_entry *entry = &index->entries[(tag + i) & index->mask];
        uint64_t seen = __atomic_load_n(&entry->tag, __ATOMIC_ACQUIRE);
        if (seen == KM_EMPTY) return 0;
        if (seen != tag) continue;
        uint64_t word = __atomic_load_n(&entry->word, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&entry->tag, __ATOMIC_RELAXED) != tag) return 0;
        return word == km_index_word(tag, index->epoch, (uint32_t)word) ? (uint32_t)word + 1 : 0;
    }
    return 0;
}

static uint64_t km_key_word(const unsigned char *keys, size_t key) {
    uint64_t word;
    memcpy(&word, keys + key * 32, 8);
    return word;
}

enum { KM_AHEAD = 24 };

static size_t km_index_probe(const km_index *index, const unsigned char *keys, size_t key_count,
                             const unsigned char *mixes, size_t mix_count, uint32_t *slots,
                             int prefix) {
    size_t pairs = key_count * mix_count, hits = 0;
    memset(slots, 0, pairs * sizeof *slots);
    if (__atomic_load_n(&index->header->poisoned, __ATOMIC_ACQUIRE)) return 0;
    size_t fetched_key = 0, fetched_mix = 0, at = 0;
    for (size_t key = 0; key < key_count; key++) {
        int whole = 1;
        for (size_t m = 0; m < mix_count; m++, at++) {
            uint64_t mix;
            while (fetched_key < key_count &&
                   fetched_key * mix_count + fetched_mix < at + KM_AHEAD) {
                memcpy(&mix, mixes + fetched_mix * 8, 8);
                uint64_t ahead = km_index_tag(km_key_word(keys, fetched_key), mix);
                __builtin_prefetch(&index->entries[ahead & index->mask]);
                if (++fetched_mix == mix_count) fetched_mix = 0, fetched_key++;
            }
            memcpy(&mix, mixes + m * 8, 8);
            slots[at] = km_index_find(index, km_index_tag(km_key_word(keys, key), mix));
            whole &= slots[at] != 0;
        }
        if (whole) hits++;
        else if (prefix) break;
    }
    // Poisoned while we looked: what was read may be of ranges that are reused.
    if (!__atomic_load_n(&index->header->poisoned, __ATOMIC_ACQUIRE)) return hits;
    memset(slots, 0, pairs * sizeof *slots);
    return 0;
}

static void km_index_set_word(km_index_entry *entry, uint64_t word) {
    __atomic_store_n(&entry->word, word, __ATOMIC_RELEASE);
}

static int km_index_insert(const km_index *index, uint64_t tag, uint32_t slot) {
    km_index_entry *free_entry = NULL;
    uint64_t word = km_index_word(tag, index->epoch, slot), steps = km_index_steps(index);
    for (uint64_t i = 0; i < steps; i++) {
        km_index_entry *entry = &index->entries[(tag + i) & index->mask];
        if (entry->tag == tag) {
            km_index_set_word(entry, word);
            return 1;
        }
        if (entry->tag <= KM_TOMBSTONE && !free_entry) free_entry = entry;
        if (entry->tag == KM_EMPTY) break;
    }
    if (!free_entry) return 0;
    km_index_set_word(free_entry, word);
    __atomic_store_n(&free_entry->tag, tag, __ATOMIC_RELEASE);
    __atomic_store_n(&index->header->live, index->header->live + 1, __ATOMIC_RELAXED);
    return 1;
}

static int km_index_remove(const km_index *index, uint64_t tag, uint32_t slot) {
    uint64_t steps = km_index_steps(index);
    for (uint64_t i = 0; i < steps; i++) {
        uint64_t at = (tag + i) & index->mask;
        km_index_entry *entry = &index->entries[at];
        if (entry->tag == KM_EMPTY) return 0;
        if (entry->tag != tag) continue;
        if ((uint32_t)entry->word != slot) return 0;
        __atomic_store_n(&entry->tag, KM_TOMBSTONE, __ATOMIC_RELEASE);
        __atomic_store_n(&index->header->live, index->header->live - 1, __ATOMIC_RELAXED);
        // A chain ends at an empty entry anyway: tombstones before one are not needed.
        for (uint64_t n = 0; n <= index->mask; n++, at = (at - 1) & index->mask) {
            if (index->entries[at].tag != KM_TOMBSTONE) break;
            if (index->entries[(at + 1) & index->mask].tag != KM_EMPTY) break;
            __atomic_store_n(&index->entries[at].tag, KM_EMPTY, __ATOMIC_RELEASE);
        }
        return 1;
    }
    return 0;
}

#endif
