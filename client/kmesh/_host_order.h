// Planes of pages in which a token's row is not contiguous: rows of tokens to and from them. No
// Python in here.
#ifndef KMESH_HOST_ORDER_H
#define KMESH_HOST_ORDER_H

#include "_host_sums.h"

// As kmesh.kernels.host.PlaneOrder packs it. No atom: tokens are rows, token_stride apart.
typedef struct {
    uint64_t atom, tile_tokens, tile_stride, group_atoms, group_stride, atom_stride;
} km_order;

// Columns are taken by lines of the payload; what is turned at a time stays in the nearest cache.
enum { KM_LINE = 64, KM_ORDER_BYTES = 16384, KM_ORDER_TOKENS = KM_ORDER_BYTES / KM_LINE };

static const char *km_order_wrong(const km_order *o, uint64_t row, uint64_t block_tokens) {
    if (!o->atom) return NULL;
    if ((o->atom != 2 && o->atom != 4) || row % o->atom) return "atoms: only of 2 or 4 bytes";
    if (!o->tile_tokens || block_tokens % o->tile_tokens) return "tiles: a block is not some";
    if (!o->group_atoms || row / o->atom % o->group_atoms) return "groups: a row is not some";
    uint64_t sizes[4][2] = {{o->tile_tokens, o->atom},
                            {block_tokens / o->tile_tokens - 1, o->tile_stride},
                            {row / o->atom / o->group_atoms - 1, o->group_stride},
                            {o->group_atoms - 1, o->atom_stride}};
    uint64_t reach = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t bytes;
        if (__builtin_mul_overflow(sizes[i][0], sizes[i][1], &bytes) ||
            __builtin_add_overflow(reach, bytes, &reach) || reach > INT64_MAX / 4)
            return "order: too large";
    }
    return NULL;
}

// Copies around the cache when whole lines are written: nobody reads them at
// once, and lines that are overwritten need not be read first.
static inline void km_stream(unsigned char *dst, const unsigned char *src, size_t bytes) {
#if defined(__x86_64__)
    if ((((uintptr_t)dst | bytes) & 63) == 0) {
        for (size_t i = 0; i < bytes; i += 64) {
            const __m128i *from = (const __m128i *)(src + i);
            __m128i *to = (__m128i *)(dst + i);
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a);
            _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c);
            _mm_stream_si128(to + 3, d);
        }
        return;
    }
#endif
    memcpy(dst, src, bytes);
}

// A matrix of atoms: rows lie `pitch` bytes apart.
typedef struct {
    unsigned char *at;
    size_t pitch;
} km_matrix;

#define KM_CROSS_EACH(TYPE)                                                                        \
    for (size_t c = first; c < cols; c++)                                                          \
        for (size_t r = 0; r < rows; r++)                                                          \
            memcpy(dst.at + c * dst.pitch + r * sizeof(TYPE),                                      \
                   src.at + r * src.pitch + c * sizeof(TYPE), sizeof(TYPE));

// dst[c][r] = src[r][c], for columns from `first` on.
static inline void km_cross_each(km_matrix dst, km_matrix src, size_t rows, size_t first,
                                 size_t cols, size_t atom) {
    if (atom == 4) KM_CROSS_EACH(uint32_t)
    else KM_CROSS_EACH(uint16_t)
}

#if defined(__x86_64__)
static inline __m128i km_load(km_matrix m, size_t row, size_t byte) {
    return _mm_loadu_si128((const __m128i *)(m.at + row * m.pitch + byte));
}

static inline void km_save(km_matrix m, size_t row, size_t byte, __m128i value) {
    _mm_storeu_si128((__m128i *)(m.at + row * m.pitch + byte), value);
}

// Four rows and four columns.
static inline void km_cross_4(km_matrix dst, km_matrix src, size_t r, size_t c) {
    __m128i x[4], y[4];
    for (int i = 0; i < 4; i++) x[i] = km_load(src, r + i, 4 * c);
    for (int i = 0; i < 2; i++) {
        y[2 * i] = _mm_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        km_save(dst, c + 2 * i, 4 * r, _mm_unpacklo_epi64(y[i], y[i + 2]));
        km_save(dst, c + 2 * i + 1, 4 * r, _mm_unpackhi_epi64(y[i], y[i + 2]));
    }
}

// Eight rows and eight columns.
static inline void km_cross_8(km_matrix dst, km_matrix src, size_t r, size_t c) {
    __m128i x[8], y[8];
    for (int i = 0; i < 8; i++) x[i] = km_load(src, r + i, 2 * c);
    for (int i = 0; i < 4; i++) {
        y[i] = _mm_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        y[i + 4] = _mm_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        x[2 * i] = _mm_unpacklo_epi32(y[2 * i], y[2 * i + 1]);
        x[2 * i + 1] = _mm_unpackhi_epi32(y[2 * i], y[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        int from = i / 2 * 4 + i % 2;
        km_save(dst, c + 2 * i, 2 * r, _mm_unpacklo_epi64(x[from], x[from + 2]));
        km_save(dst, c + 2 * i + 1, 2 * r, _mm_unpackhi_epi64(x[from], x[from + 2]));
    }
}

// Two rows to rows of two, by eight columns, and back; columns that were done.
static inline size_t km_zip(km_matrix dst, km_matrix src, size_t cols) {
    size_t c = 0;
    for (; c + 8 <= cols; c += 8) {
        __m128i x = km_load(src, 0, 2 * c), y = km_load(src, 1, 2 * c);
        km_save(dst, c, 0, _mm_unpacklo_epi16(x, y));
        km_save(dst, c + 4, 0, _mm_unpackhi_epi16(x, y));
    }
    return c;
}

static inline size_t km_unzip(km_matrix dst, km_matrix src, size_t rows) {
    size_t r = 0;
    for (; r + 8 <= rows; r += 8) {
        __m128i x = km_load(src, r, 0), y = km_load(src, r + 4, 0);
        __m128i low = _mm_srai_epi32(_mm_slli_epi32(x, 16), 16);
        __m128i more = _mm_srai_epi32(_mm_slli_epi32(y, 16), 16);
        km_save(dst, 0, 2 * r, _mm_packs_epi32(low, more));
        km_save(dst, 1, 2 * r, _mm_packs_epi32(_mm_srai_epi32(x, 16), _mm_srai_epi32(y, 16)));
    }
    return r;
}
#endif

// dst[c][r] = src[r][c]
KM_CLONES
static void km_cross(km_matrix dst, km_matrix src, size_t rows, size_t cols, size_t atom) {
#if defined(__x86_64__)
    if (atom == 2 && rows == 2 && dst.pitch == 4) {
        km_cross_each(dst, src, rows, km_zip(dst, src, cols), cols, atom);
        return;
    }
    if (atom == 2 && cols == 2 && src.pitch == 4) {
        size_t done = km_unzip(dst, src, rows);
        km_matrix right = {dst.at + 2 * done, dst.pitch}, rest = {src.at + 4 * done, 4};
        km_cross_each(right, rest, rows - done, 0, cols, atom);
        return;
    }
    size_t side = 16 / atom, whole = cols / side * side, r = 0;
    for (; r + side <= rows; r += side) {
        if (atom == 4)
            for (size_t c = 0; c < whole; c += 4) km_cross_4(dst, src, r, c);
        else
            for (size_t c = 0; c < whole; c += 8) km_cross_8(dst, src, r, c);
    }
    km_matrix below = {dst.at + r * atom, dst.pitch}, rest = {src.at + r * src.pitch, src.pitch};
    km_cross_each(dst, src, r, whole, cols, atom);
    km_cross_each(below, rest, rows - r, 0, cols, atom);
#else
    km_cross_each(dst, src, rows, 0, cols, atom);
#endif
}

static inline void km_stream_lines(km_matrix dst, km_matrix src, size_t lines, size_t bytes) {
    if (dst.pitch == bytes && src.pitch == bytes) bytes *= lines, lines = 1;
    for (size_t i = 0; i < lines; i++)
        km_stream(dst.at + i * dst.pitch, src.at + i * src.pitch, bytes);
}

static inline unsigned char *km_order_tile(const km_order *o, unsigned char *block, uint64_t slot) {
    return block + slot / o->tile_tokens * o->tile_stride + slot % o->tile_tokens * o->atom;
}

// Asks for the lines behind these: who reads many short runs at once is not seen coming.
static inline void km_order_ahead(km_matrix lines, size_t count, size_t bytes) {
    if (lines.pitch < KM_LINE) return;
    for (size_t i = count; i < 2 * count; i++)
        for (size_t at = 0; at < bytes; at += KM_LINE)
            __builtin_prefetch(lines.at + i * lines.pitch + at);
}

// Some atoms of one group, of tokens from `slot` on. Rows of the payload are filled where they are
// to be; lines of a page are turned first and then written as a whole.
static inline void km_order_columns(const km_order *o, unsigned char *page, uint64_t slot,
                                    size_t tokens, size_t cols, km_matrix rows,
                                    unsigned char *turned, int out) {
    size_t atom = o->atom, inside = slot % o->tile_tokens;
    for (page += slot / o->tile_tokens * o->tile_stride; tokens; page += o->tile_stride) {
        size_t n = o->tile_tokens - inside < tokens ? o->tile_tokens - inside : tokens;
        km_matrix lines = {page + inside * atom, o->atom_stride};
        if (out) {
            km_order_ahead(lines, cols, n * atom);
            km_cross(rows, lines, cols, n, atom);
        } else {
            km_matrix dense = {turned, n * atom};
            km_cross(dense, rows, n, cols, atom);
            km_stream_lines(lines, dense, cols, n * atom);
        }
        inside = 0, tokens -= n, rows.at += n * rows.pitch;
    }
}

// Some tokens of a block, whole rows of them.
static void km_order_tokens(const km_order *o, unsigned char *block, size_t row, uint64_t slot,
                            size_t tokens, unsigned char *payload, int out) {
    unsigned char turned[KM_ORDER_BYTES] __attribute__((aligned(KM_LINE)));
    size_t line = KM_LINE / o->atom;
    km_matrix rows = {payload, row};
    // What is streamed should be long, and a row may be longer than there is room.
    int streams = out && tokens * row <= sizeof turned;
    if (streams) rows.at = turned;
    for (size_t group = 0; group * o->atom < row; group += o->group_atoms)
        for (size_t a = 0; a < o->group_atoms; a += line) {
            size_t cols = o->group_atoms - a < line ? o->group_atoms - a : line;
            unsigned char *page =
                block + group / o->group_atoms * o->group_stride + a * o->atom_stride;
            km_matrix here = {rows.at + (group + a) * o->atom, row};
            km_order_columns(o, page, slot, tokens, cols, here, turned, out);
        }
    if (streams) km_stream(payload, turned, tokens * row);
}

// Bytes [begin, end) of one token's row.
static void km_order_part(const km_order *o, unsigned char *tile, unsigned char *payload,
                          size_t begin, size_t end, int out) {
    for (size_t at = begin; at < end; at += o->atom, payload += o->atom) {
        uint64_t a = at / o->atom;
        unsigned char *page = tile + a / o->group_atoms * o->group_stride +
                              a % o->group_atoms * o->atom_stride;
        if (out) memcpy(payload, page, o->atom);
        else memcpy(page, payload, o->atom);
    }
}

// `bytes` bytes of a block's tokens from byte `inside` of slot `slot` on.
static void km_order_move(const km_order *o, unsigned char *block, size_t row, uint64_t slot,
                          size_t inside, unsigned char *payload, size_t bytes, int out) {
    if (inside) {
        size_t n = row - inside < bytes ? row - inside : bytes;
        km_order_part(o, km_order_tile(o, block, slot), payload, inside, inside + n, out);
        payload += n, bytes -= n, slot++;
    }
    size_t most = out && row <= KM_ORDER_BYTES / KM_LINE ? KM_ORDER_BYTES / row : KM_ORDER_TOKENS;
    while (bytes >= row) {
        size_t tokens = bytes / row < most ? bytes / row : most;
        km_order_tokens(o, block, row, slot, tokens, payload, out);
        payload += tokens * row, bytes -= tokens * row, slot += tokens;
    }
    if (bytes) km_order_part(o, km_order_tile(o, block, slot), payload, 0, bytes, out);
}

#endif
