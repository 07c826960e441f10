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
#include <immintrin.h>
#endif

// One build that uses what the CPU has. Needs ifunc, so glibc.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(KMESH_NO_CLONES)
#define KM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define KM_CLONES
#endif

#define KM_TILE ((size_t)65536)
#define KM_GOLDEN UINT64_C(0x9E3779B97F4A7C15)

enum { KM_ROW = 64, KM_ROW_WORDS = 16, KM_AHEAD_BYTES = 8192, KM_COPY_AHEAD_BYTES = 4096 };

// Words of a tile seen as rows of 16, two words to a lane: word i is column
// i % 16 of row i / 16. With u = v + 2^31, which is not negative:
//   lanes    sums of lanes mod 2^64, so sums of even columns + 2^32 · those of odd
//   odd      sums of odd columns, by which the even ones are got out of `lanes`
//   running_ adds the above after each row, so row r of R is in it R - r times
// That is one xor, one shift and four adds for 16 words, and no product.
typedef struct {
    uint64_t lanes[8], odd[8], running_lanes[8], running_odd[8];
    uint64_t rows;
} km_sum;

static inline uint64_t km_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

// Adds rows for vectors of one width, and copies them to `dst` too unless that is NULL. A row that
// is copied is taken into registers once, which the asm sees to: what is stored is what is summed,
// and compilers like to load what they add a second time. Aligned copies go around the cache: nobody
// reads them soon, and lines that are overwritten need not be read first. Prefetching past the end
// harms nobody; hardware prefetchers stop at the page's end.
#define KM_ROWS(NAME, TARGET, VECTOR, REGISTER, STREAM)                                            \
    TARGET static inline __attribute__((always_inline)) void NAME##_add(                           \
        km_sum *state, unsigned char *dst, const unsigned char *src, size_t rows, int stream) {    \
        enum { COUNT = KM_ROW / sizeof(VECTOR) };                                                  \
        VECTOR lanes[COUNT], odd[COUNT], running_lanes[COUNT], running_odd[COUNT];                 \
        memcpy(lanes, state->lanes, KM_ROW), memcpy(odd, state->odd, KM_ROW);                      \
        memcpy(running_lanes, state->running_lanes, KM_ROW);                                       \
        memcpy(running_odd, state->running_odd, KM_ROW);                                           \
        for (size_t at = 0; at < rows * KM_ROW; at += KM_ROW) {                                    \
            __builtin_prefetch(src + at + (dst ? KM_COPY_AHEAD_BYTES : KM_AHEAD_BYTES));           \
            for (int i = 0; i < COUNT; i++) {                                                      \
                VECTOR words;                                                                      \
                memcpy(&words, src + at + i * sizeof words, sizeof words);                         \
                if (dst) {                                                                         \
                    unsigned char *to = dst + at + i * sizeof words;                               \
                    __asm__ volatile("" : "+" REGISTER(words));                                    \
                    if (stream) STREAM(to, words);                                                 \
                    else memcpy(to, &words, sizeof words);                                         \
                }                                                                                  \
                words ^= UINT64_C(0x8000000080000000);                                             \
                lanes[i] += words;                                                                 \
                odd[i] += words >> 32;                                                             \
                running_lanes[i] += lanes[i];                                                      \
                running_odd[i] += odd[i];                                                          \
            }                                                                                      \
        }                                                                                          \
        memcpy(state->lanes, lanes, KM_ROW), memcpy(state->odd, odd, KM_ROW);                      \
        memcpy(state->running_lanes, running_lanes, KM_ROW);                                       \
        memcpy(state->running_odd, running_odd, KM_ROW);                                           \
        state->rows += rows;                                                                       \
    }                                                                                              \
    TARGET static void NAME##_sum(km_sum *state, const unsigned char *src, size_t rows) {          \
        NAME##_add(state, NULL, src, rows, 0);                                                     \
    }                                                                                              \
    TARGET static void NAME##_copy(km_sum *state, unsigned char *dst, const unsigned char *src,    \
                                   size_t rows) {                                                  \
        if ((uintptr_t)dst % sizeof(VECTOR) == 0) NAME##_add(state, dst, src, rows, 1);            \
        else NAME##_add(state, dst, src, rows, 0);                                                 \
    }

typedef uint64_t km_v2 __attribute__((vector_size(16)));

#if defined(__x86_64__)
typedef uint64_t km_v4 __attribute__((vector_size(32)));
typedef uint64_t km_v8 __attribute__((vector_size(64)));
#define KM_STREAM_16(to, words) _mm_stream_si128((__m128i *)(to), (__m128i)(words))
#define KM_STREAM_32(to, words) _mm256_stream_si256((__m256i *)(to), (__m256i)(words))
#define KM_STREAM_64(to, words) _mm512_stream_si512((__m512i *)(to), (__m512i)(words))
KM_ROWS(km_rows_16, , km_v2, "x", KM_STREAM_16)
KM_ROWS(km_rows_32, __attribute__((target("avx2"))), km_v4, "x", KM_STREAM_32)
KM_ROWS(km_rows_64, __attribute__((target("avx512f"))), km_v8, "v", KM_STREAM_64)
#define KM_BY_WIDTH(WHAT, ...)                                                                     \
    do {                                                                                           \
        if (__builtin_cpu_supports("avx512f")) km_rows_64_##WHAT(__VA_ARGS__);                     \
        else if (__builtin_cpu_supports("avx2")) km_rows_32_##WHAT(__VA_ARGS__);                   \
        else km_rows_16_##WHAT(__VA_ARGS__);                                                       \
    } while (0)
#else
#if defined(__aarch64__)
#define KM_REGISTER "w"
#else
#define KM_REGISTER "m"
#endif
#define KM_STREAM_16(to, words) memcpy(to, &(words), sizeof(words))
KM_ROWS(km_rows_16, , km_v2, KM_REGISTER, KM_STREAM_16)
#define KM_BY_WIDTH(WHAT, ...) km_rows_16_##WHAT(__VA_ARGS__)
#endif

// The sum of a tile whose last bytes, less than a row, are at `rest`.
static uint64_t km_sum_end(const km_sum *state, const unsigned char *rest, size_t bytes) {
    uint64_t rows = state->rows, words = rows * KM_ROW_WORDS;
    // Σ (v + 2^31)(2i + 1) is asked for as Σ v(2i + 1), and Σ (2i + 1) is a square.
    uint64_t sum = -(words * words << 31);
    for (int lane = 0; lane < 8; lane++) {
        uint64_t odd = state->odd[lane], running_odd = state->running_odd[lane];
        uint64_t even = state->lanes[lane] - (odd << 32);
        uint64_t running_even = state->running_lanes[lane] - (running_odd << 32);
        uint64_t by_row = rows * (even + odd) - running_even - running_odd;
        sum += even * (uint64_t)(4 * lane + 1) + odd * (uint64_t)(4 * lane + 3);
        sum += by_row * (2 * KM_ROW_WORDS);
    }
    unsigned char padded[KM_ROW] = {0};
    memcpy(padded, rest, bytes);
    for (uint64_t c = 0; c < KM_ROW_WORDS; c++) {
        int32_t word;
        memcpy(&word, padded + 4 * c, 4);
        sum += (uint64_t)(int64_t)word * (2 * (words + c) + 1);
    }
    return sum;
}

static uint64_t km_tile_sum(const unsigned char *tile, size_t bytes) {
    km_sum state = {0};
    size_t rows = bytes / KM_ROW;
    KM_BY_WIDTH(sum, &state, tile, rows);
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

// What was streamed is visible to others before anything that comes later.
static inline void km_stream_end(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Takes back what dst held: no byte of it changes before every sum of it has.
static void km_revoke(uint64_t *sums, size_t tiles) {
    for (size_t t = 0; t < tiles; t++) __atomic_store_n(&sums[t], ~sums[t], __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    km_stream_end();
}

// Each byte of src is read once, so the sums are those of what dst gets even
// while somebody else writes to src.
static uint64_t km_copy_with_sums(unsigned char *dst, const unsigned char *src, size_t length,
                                  uint64_t *sums) {
    uint64_t root = 0;
    km_revoke(sums, km_tiles(length));
    for (size_t t = 0; t < km_tiles(length); t++) {
        size_t bytes = km_tile_bytes(length, t), rest = bytes % KM_ROW;
        unsigned char last[KM_ROW];
        km_sum state = {0};
        KM_BY_WIDTH(copy, &state, dst, src, bytes / KM_ROW);
        memcpy(last, src + bytes - rest, rest);
        __asm__ volatile("" : : "r"(last) : "memory");
        memcpy(dst + bytes - rest, last, rest);
        sums[t] = km_sum_end(&state, last, rest);
        root += km_fold_one(sums[t], t);
        src += bytes, dst += bytes;
    }
    km_stream_end();
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
