// Keys turned by a distance: kernel version 1 of docs/recipe-format.md, the bits of
// kmesh.kernels.reference.turn. Products and sums are rounded one by one, so this must be
// compiled without contraction (-ffp-contract=off). No Python in here.
#ifndef KMESH_HOST_TURN_H
#define KMESH_HOST_TURN_H

#include "_host_sums.h"

enum { KM_BFLOAT16 = 1, KM_FLOAT16 = 2, KM_FLOAT32 = 3 };

#if defined(__FAST_MATH__)
#error "turned keys are bits, which -ffast-math changes"
#endif

#define KM_INLINE static inline __attribute__((always_inline))

// `turns` are (cosine, sine) for each pair; pairs are (2i, 2i + 1) or (i, i + pairs).
typedef struct {
    const float *turns;
    uint32_t pairs, row_bytes;
    int interleaved, element;
} km_turn;

KM_INLINE float km_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

KM_INLINE uint32_t km_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

KM_INLINE float km_widen_bfloat16(uint16_t x) {
    return km_float((uint32_t)x << 16);
}

KM_INLINE uint16_t km_narrow_bfloat16(float value) {
    uint32_t wide = km_bits(value), rounded = wide + 0x7FFF + (wide >> 16 & 1);
    return (wide & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (uint16_t)(rounded >> 16);
}

// The exponent is moved by a product with 2^112, which is exact and makes subnormal numbers right.
KM_INLINE float km_widen_float16(uint16_t x) {
    uint32_t magnitude = (uint32_t)(x & 0x7FFF) << 13;
    uint32_t finite = km_bits(km_float(magnitude) * km_float((127u + 112u) << 23));
    uint32_t wide = (x & 0x7C00) == 0x7C00 ? magnitude | 0x7F800000 : finite;
    return km_float(wide | (uint32_t)(x & 0x8000) << 16);
}

KM_INLINE uint16_t km_narrow_float16(float value) {
    uint32_t wide = km_bits(value), magnitude = wide & 0x7FFFFFFF;
    // Adding a half leaves the bits of a subnormal result, rounded, at the end of the sum.
    uint32_t small = km_bits(km_float(magnitude) + 0.5f) - km_bits(0.5f);
    uint32_t normal = (magnitude + 0xC8000FFF + (magnitude >> 13 & 1)) >> 13;
    uint32_t half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x47800000 ? 0x7C00 : half;
    half |= wide >> 16 & 0x8000;
    return (uint16_t)(magnitude > 0x7F800000 ? 0x7FFF : half);
}

KM_INLINE float km_widen_float32(uint32_t x) {
    return km_float(x);
}

KM_INLINE uint32_t km_narrow_float32(float value) {
    uint32_t wide = km_bits(value);
    return (wide & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFFFFFF : wide;
}

// One row whose pairs are (i, i + pairs): two halves, which do not overlap.
#define KM_TURN_HALVES(TYPE, WIDEN, NARROW)                                                        \
    {                                                                                              \
        TYPE *restrict x = dst, *restrict y = dst + pairs;                                         \
        const TYPE *restrict from_x = src, *restrict from_y = src + pairs;                         \
        for (size_t i = 0; i < pairs; i++) {                                                       \
            float a = WIDEN(from_x[i]), b = WIDEN(from_y[i]);                                      \
            x[i] = NARROW(a * cosines[i] - b * sines[i]);                                          \
            y[i] = NARROW(b * cosines[i] + a * sines[i]);                                          \
        }                                                                                          \
    }

#define KM_TURN_NEIGHBOURS(WIDEN, NARROW)                                                          \
    for (size_t i = 0; i < pairs; i++) {                                                           \
        float a = WIDEN(src[2 * i]), b = WIDEN(src[2 * i + 1]);                                    \
        dst[2 * i] = NARROW(a * cosines[i] - b * sines[i]);                                        \
        dst[2 * i + 1] = NARROW(b * cosines[i] + a * sines[i]);                                    \
    }

#define KM_TURN_ROWS(NAME, TYPE, WIDEN, NARROW)                                                    \
    KM_CLONES                                                                                      \
    static void NAME(TYPE *restrict dst, const TYPE *restrict src, size_t rows, size_t elements,   \
                     const float *restrict cosines, const float *restrict sines, size_t pairs,     \
                     int interleaved) {                                                            \
        for (size_t r = 0; r < rows; r++, dst += elements, src += elements) {                      \
            if (interleaved) KM_TURN_NEIGHBOURS(WIDEN, NARROW)                                     \
            else KM_TURN_HALVES(TYPE, WIDEN, NARROW)                                               \
            memcpy(dst + 2 * pairs, src + 2 * pairs, (elements - 2 * pairs) * sizeof *dst);        \
        }                                                                                          \
    }

KM_TURN_ROWS(km_turn_bfloat16, uint16_t, km_widen_bfloat16, km_narrow_bfloat16)
KM_TURN_ROWS(km_turn_float16, uint16_t, km_widen_float16, km_narrow_float16)
KM_TURN_ROWS(km_turn_float32, uint32_t, km_widen_float32, km_narrow_float32)

enum { KM_TURN_PAIRS = 4096 };

static inline size_t km_element_bytes(int element) {
    return element == KM_FLOAT32 ? 4 : element == KM_BFLOAT16 || element == KM_FLOAT16 ? 2 : 0;
}

static int km_turn_ok(const km_turn *turn) {
    size_t size = km_element_bytes(turn->element);
    return size && turn->pairs && turn->pairs <= KM_TURN_PAIRS && turn->row_bytes % size == 0 &&
           2 * (size_t)turn->pairs <= turn->row_bytes / size;
}

// dst and src hold `rows` rows each, aligned to their elements, and do not overlap.
static void km_turn_rows(const km_turn *turn, void *dst, const void *src, size_t rows) {
    size_t pairs = turn->pairs, elements = turn->row_bytes / km_element_bytes(turn->element);
    float cosines[pairs], sines[pairs];
    for (size_t i = 0; i < pairs; i++)
        cosines[i] = turn->turns[2 * i], sines[i] = turn->turns[2 * i + 1];
    if (turn->element == KM_BFLOAT16)
        km_turn_bfloat16(dst, src, rows, elements, cosines, sines, pairs, turn->interleaved);
    else if (turn->element == KM_FLOAT16)
        km_turn_float16(dst, src, rows, elements, cosines, sines, pairs, turn->interleaved);
    else km_turn_float32(dst, src, rows, elements, cosines, sines, pairs, turn->interleaved);
}

#endif
