// Keys of a chain: BLAKE3 of the key before and of a span's tokens. No Python in here.
#ifndef KMESH_HOST_CHAIN_H
#define KMESH_HOST_CHAIN_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// As they stand: put together in vectors, the words of one block take three times as long.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-tree-slp-vectorize")
#endif

enum { KM_KEY = 32, KM_B3_BLOCK = 64, KM_B3_CHUNK = 1024 };
enum { KM_B3_CHUNK_START = 1, KM_B3_CHUNK_END = 2, KM_B3_PARENT = 4, KM_B3_ROOT = 8 };

static const uint32_t km_b3_iv[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                     0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

// Words are little-endian in memory.
static inline uint32_t km_le32(uint32_t word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_bswap32(word);
#else
    return word;
#endif
}

#define KM_B3_TURN(x, n) ((x) >> (n) | (x) << (32 - (n)))
#define KM_B3_G(a, b, c, d, x, y)                                   \
    a += b + m[x], d = KM_B3_TURN(d ^ a, 16), c += d, b = KM_B3_TURN(b ^ c, 12); \
    a += b + m[y], d = KM_B3_TURN(d ^ a, 8), c += d, b = KM_B3_TURN(b ^ c, 7)
#define KM_B3_ROUND(i0, i1, i2, i3, i4, i5, i6, i7, i8, i9, ia, ib, ic, id, ie, jf) \
    KM_B3_G(v0, v4, v8, vc, i0, i1);                                                \
    KM_B3_G(v1, v5, v9, vd, i2, i3);                                                \
    KM_B3_G(v2, v6, va, ve, i4, i5);                                                \
    KM_B3_G(v3, v7, vb, vf, i6, i7);                                                \
    KM_B3_G(v0, v5, va, vf, i8, i9);                                                \
    KM_B3_G(v1, v6, vb, vc, ia, ib);                                                \
    KM_B3_G(v2, v7, v8, vd, ic, id);                                                \
    KM_B3_G(v3, v4, v9, ve, ie, jf)

// The chaining value after one block of 64 bytes, of which `length` count.
static inline void km_b3_compress(uint32_t cv[8], const uint32_t m[16], uint64_t counter,
                                  uint32_t length, uint32_t flags) {
    uint32_t v0 = cv[0], v1 = cv[1], v2 = cv[2], v3 = cv[3], v4 = cv[4], v5 = cv[5], v6 = cv[6],
             v7 = cv[7], v8 = km_b3_iv[0], v9 = km_b3_iv[1], va = km_b3_iv[2], vb = km_b3_iv[3],
             vc = (uint32_t)counter, vd = (uint32_t)(counter >> 32), ve = length, vf = flags;
    KM_B3_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    KM_B3_ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8);
    KM_B3_ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1);
    KM_B3_ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6);
    KM_B3_ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4);
    KM_B3_ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7);
    KM_B3_ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13);
    cv[0] = v0 ^ v8, cv[1] = v1 ^ v9, cv[2] = v2 ^ va, cv[3] = v3 ^ vb;
    cv[4] = v4 ^ vc, cv[5] = v5 ^ vd, cv[6] = v6 ^ ve, cv[7] = v7 ^ vf;
}

// The chaining value of at most 1,024 bytes; `root`: they are all there is.
static inline void km_b3_chunk(const unsigned char *data, size_t length, uint64_t counter,
                               uint32_t root, uint32_t cv[8]) {
    uint32_t flags = KM_B3_CHUNK_START, m[16];
    memcpy(cv, km_b3_iv, sizeof km_b3_iv);
    for (;;) {
        size_t here = length < KM_B3_BLOCK ? length : KM_B3_BLOCK;
        if (here < KM_B3_BLOCK) memset(m, 0, sizeof m);
        memcpy(m, data, here);
        for (int i = 0; i < 16; i++) m[i] = km_le32(m[i]);
        if (here == length) flags |= KM_B3_CHUNK_END | root;
        km_b3_compress(cv, m, counter, (uint32_t)here, flags);
        if (here == length) return;
        data += here, length -= here, flags = 0;
    }
}

// The same of any number of bytes: a binary tree over chunks, whose left side is full.
static void km_b3_tree(const unsigned char *data, size_t length, uint64_t counter, uint32_t root,
                       uint32_t cv[8]) {
    if (length <= KM_B3_CHUNK) {
        km_b3_chunk(data, length, counter, root, cv);
        return;
    }
    size_t left = KM_B3_CHUNK;
    while (2 * left < length) left *= 2;
    uint32_t both[16];
    km_b3_tree(data, left, counter, 0, both);
    km_b3_tree(data + left, length - left, counter + left / KM_B3_CHUNK, 0, both + 8);
    memcpy(cv, km_b3_iv, sizeof km_b3_iv);
    km_b3_compress(cv, both, 0, KM_B3_BLOCK, KM_B3_PARENT | root);
}

// Spans behind the same parent whose keys are known.
typedef struct {
    const unsigned char *words, *keys;
    size_t spans;
} km_chain_known;

// Keys of `spans` spans of `step` bytes each, behind `parent`. `scratch` has room for a key and one
// span; `keys` for all of them.
static void km_chain(const unsigned char *parent, const unsigned char *words, size_t spans,
                     size_t step, km_chain_known known, unsigned char *scratch,
                     unsigned char *keys) {
    size_t same = 0, most = known.spans < spans ? known.spans : spans;
    while (same < most && !memcmp(words + same * step, known.words + same * step, step)) same++;
    if (same) {
        memcpy(keys, known.keys, same * KM_KEY);
        parent = keys + (same - 1) * KM_KEY;
    }
    for (size_t i = same; i < spans; i++) {
        uint32_t cv[8];
        memcpy(scratch, parent, KM_KEY);
        memcpy(scratch + KM_KEY, words + i * step, step);
        if (KM_KEY + step <= KM_B3_CHUNK) km_b3_chunk(scratch, KM_KEY + step, 0, KM_B3_ROOT, cv);
        else
            km_b3_tree(scratch, KM_KEY + step, 0, KM_B3_ROOT, cv);
        for (int w = 0; w < 8; w++) cv[w] = km_le32(cv[w]);
        parent = keys + i * KM_KEY;
        memcpy(keys + i * KM_KEY, cv, KM_KEY);
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

#endif
