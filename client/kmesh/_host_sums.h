// Tile sums and roots, as docs/layout.md defines them. No Python in here.
#ifndef KMESH_HOST_SUMS_H
#define KMESH_HOST_SUMS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "KMesh's memory formats are little-endian, and so must the host be"
#endif

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

// One build that uses what the CPU has. Needs ifunc, so glibc.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(KMESH_NO_CLONES)
#define KM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KM_CLONES
#endif

#define KM_TILE ((size_t)65536)
#define KM_GOLDEN UINT64_C(0x9E3779B97F4A7C15)

enum { KM_LANES = 16, KM_ROW = KM_LANES * 4 };

typedef int32_t km_v8i __attribute__((vector_size(32)));
typedef int64_t km_v8l __attribute__((vector_size(64)));

// Words of a tile seen as rows of 16: word i is column i % 16 of row i / 16.
// `columns` holds the column sums; `running` adds `columns` after each row, so
// word (r, c) of R rows is in it R - r times. Adds alone, no products per word.
typedef struct {
    km_v8l columns[2], running[2];
    int64_t rows;
} km_sum;

static inline uint64_t km_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

KM_CLONES
static void km_sum_rows(km_sum *state, const unsigned char *data, size_t rows) {
    km_v8l c0 = state->columns[0], c1 = state->columns[1];
    km_v8l r0 = state->running[0], r1 = state->running[1];
    for (size_t r = 0; r < rows; r++, data += KM_ROW) {
        km_v8i w0, w1;
        memcpy(&w0, data, sizeof w0);
        memcpy(&w1, data + sizeof w0, sizeof w1);
        c0 += __builtin_convertvector(w0, km_v8l);
        c1 += __builtin_convertvector(w1, km_v8l);
        r0 += c0;
        r1 += c1;
    }
    state->columns[0] = c0, state->columns[1] = c1;
    state->running[0] = r0, state->running[1] = r1;
    state->rows += (int64_t)rows;
}

// The sum of a tile whose last bytes, less than a row, are at `rest`.
static uint64_t km_sum_end(const km_sum *state, const unsigned char *rest, size_t bytes) {
    int64_t sum = 0;
    for (int c = 0; c < KM_LANES; c++) {
        int64_t column = state->columns[c / 8][c % 8], running = state->running[c / 8][c % 8];
        sum += column * (2 * c + 1) + 2 * KM_LANES * (state->rows * column - running);
    }
    unsigned char padded[KM_ROW] = {0};
    memcpy(padded, rest, bytes);
    for (int c = 0; c < KM_LANES; c++) {
        int32_t word;
        memcpy(&word, padded + 4 * c, 4);
        sum += word * (2 * (state->rows * KM_LANES + c) + 1);
    }
    return (uint64_t)sum;
}

static uint64_t km_tile_sum(const unsigned char *tile, size_t bytes) {
    km_sum state = {0};
    size_t rows = bytes / KM_ROW;
    km_sum_rows(&state, tile, rows);
    return km_sum_end(&state, tile + rows * KM_ROW, bytes % KM_ROW);
}

static inline size_t km_tiles(size_t length) {
    return length / KM_TILE + (length % KM_TILE != 0);
}

static inline size_t km_tile_bytes(size_t length, size_t tile) {
    size_t left = length - tile * KM_TILE;
    return left < KM_TILE ? left : KM_TILE;
}

static inline uint64_t km_fold_one(uint64_t sum, size_t tile) {
    return km_mix(sum + ((uint64_t)tile + 1) * KM_GOLDEN);
}

static uint64_t km_fold(const uint64_t *sums, size_t tiles) {
    uint64_t root = 0;
    for (size_t t = 0; t < tiles; t++) root += km_fold_one(sums[t], t);
    return root;
}

static uint64_t km_tile_sums(const unsigned char *src, size_t length, uint64_t *sums) {
    uint64_t root = 0;
    for (size_t t = 0; t < km_tiles(length); t++) {
        sums[t] = km_tile_sum(src + t * KM_TILE, km_tile_bytes(length, t));
        root += km_fold_one(sums[t], t);
    }
    return root;
}

enum { KM_BOUNCE = 8192 };

// Stores around the cache where dst allows it: nobody reads it soon.
static void km_stream(unsigned char *dst, const unsigned char *src, size_t bytes) {
#if defined(__x86_64__)
    if (((uintptr_t)dst & 15) == 0) {
        size_t i = 0;
        for (; i + 64 <= bytes; i += 64) {
            const __m128i *from = (const __m128i *)(src + i);
            __m128i *to = (__m128i *)(dst + i);
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
        memcpy(dst + i, src + i, bytes - i);
        return;
    }
#endif
    memcpy(dst, src, bytes);
}

// Each byte of src is read once, so the sums are those of what dst gets even
// while somebody else writes to src.
static uint64_t km_copy_with_sums(unsigned char *dst, const unsigned char *src, size_t length,
                                  uint64_t *sums) {
    unsigned char bounce[KM_BOUNCE] __attribute__((aligned(64)));
    uint64_t root = 0;
    for (size_t t = 0; t < km_tiles(length); t++) {
        size_t bytes = km_tile_bytes(length, t);
        km_sum state = {0};
        for (size_t done = 0; done < bytes;) {
            size_t n = bytes - done < KM_BOUNCE ? bytes - done : KM_BOUNCE;
            memcpy(bounce, src, n);
            // The copy in `bounce` must not be optimised into second reads of src.
            __asm__ volatile("" : : "r"(bounce) : "memory");
            km_sum_rows(&state, bounce, n / KM_ROW);
            done += n;
            if (done == bytes) sums[t] = km_sum_end(&state, bounce + n / KM_ROW * KM_ROW, n % KM_ROW);
            km_stream(dst, bounce, n);
            src += n, dst += n;
        }
        root += km_fold_one(sums[t], t);
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
    return root;
}

static int km_verify(const unsigned char *src, size_t length, const uint64_t *sums, uint64_t root) {
    uint64_t folded = 0;
    for (size_t t = 0; t < km_tiles(length); t++) {
        // Read once: what is folded is what the tile is compared with.
        uint64_t stored = __atomic_load_n(&sums[t], __ATOMIC_RELAXED);
        if (km_tile_sum(src + t * KM_TILE, km_tile_bytes(length, t)) != stored) return 0;
        folded += km_fold_one(stored, t);
    }
    return folded == root;
}

#endif
