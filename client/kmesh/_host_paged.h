// Spans to and from paged KV. No Python in here.
#ifndef KMESH_HOST_PAGED_H
#define KMESH_HOST_PAGED_H

#include "_host_order.h"

enum { KM_DONE = 0, KM_BAD_ROOT = 1, KM_BAD_TILE = 2, KM_BAD_BLOCK = 3, KM_BAD_RECORD = 4 };

// As kmesh.kernels.host.PagedLayout packs it; then k_base[layers], v_base[layers].
typedef struct {
    uint64_t layers, heads, row_bytes, block_tokens, num_blocks;
    uint64_t block_stride, head_stride, token_stride;
    km_order order[2];  // of K and V
} km_layout;

// As kmesh.kernels.host.SpanPart packs it.
typedef struct {
    uint64_t address, sums_address, root, length;
    uint64_t tokens, token_begin, token_end, position;
    uint64_t src_heads, src_head_begin, dst_head_begin, heads;
    uint64_t src_layers, src_layer_begin, dst_layer_begin, layers;
} km_part;

typedef struct {
    km_layout layout;
    const uint64_t *k_base, *v_base;
    const int64_t *blocks;
    uint64_t block_count;
    uint64_t *sums;  // room for the sums of the longest part
} km_paged;

static int km_range_ok(uint64_t begin, uint64_t count, uint64_t limit) {
    return begin <= limit && count <= limit - begin;
}

// Whether the farthest byte of a layer has an address at all.
static int km_layout_ok(const km_layout *l) {
    if (!l->layers || !l->heads || !l->row_bytes || !l->block_tokens || !l->num_blocks) return 0;
    uint64_t blocks, heads, tokens, end;
    return !__builtin_mul_overflow(l->num_blocks - 1, l->block_stride, &blocks) &&
           !__builtin_mul_overflow(l->heads - 1, l->head_stride, &heads) &&
           !__builtin_mul_overflow(l->block_tokens - 1, l->token_stride, &tokens) &&
           !__builtin_add_overflow(blocks, heads, &end) &&
           !__builtin_add_overflow(end, tokens, &end) &&
           !__builtin_add_overflow(end, l->row_bytes, &end) && end <= INT64_MAX;
}

// Whether what a part says of its payload fits together.
static int km_source_ok(const km_part *s, uint64_t row) {
    if (s->token_begin > s->token_end || s->token_end > s->tokens ||
        !km_range_ok(s->src_head_begin, s->heads, s->src_heads) ||
        !km_range_ok(s->src_layer_begin, s->layers, s->src_layers))
        return 0;
    uint64_t size = 2;
    return !__builtin_mul_overflow(size, s->src_layers, &size) &&
           !__builtin_mul_overflow(size, s->src_heads, &size) &&
           !__builtin_mul_overflow(size, s->tokens, &size) &&
           !__builtin_mul_overflow(size, row, &size) && size == s->length;
}

static int km_part_check(const km_paged *p, const km_part *s) {
    const km_layout *l = &p->layout;
    if (!km_source_ok(s, l->row_bytes) || !km_range_ok(s->dst_head_begin, s->heads, l->heads) ||
        !km_range_ok(s->dst_layer_begin, s->layers, l->layers))
        return KM_BAD_RECORD;
    if (s->token_begin == s->token_end) return KM_DONE;
    uint64_t end;
    if (__builtin_add_overflow(s->position, s->token_end, &end)) return KM_BAD_BLOCK;
    uint64_t first = (s->position + s->token_begin) / l->block_tokens;
    uint64_t last = (end - 1) / l->block_tokens;
    if (last >= p->block_count) return KM_BAD_BLOCK;
    for (uint64_t b = first; b <= last; b++)
        if (p->blocks[b] < 0 || (uint64_t)p->blocks[b] >= l->num_blocks) return KM_BAD_BLOCK;
    return KM_DONE;
}

// Bytes of the tiles that hold a byte that the part wants: a reader reads these whole, as it verifies
// them. None of a part that contradicts itself. Visits the wanted bytes in payload order.
static uint64_t km_part_reads(const km_part *s, uint64_t row) {
    if (!km_source_ok(s, row)) return 0;
    uint64_t head = s->tokens * row, begin = s->token_begin * row, end = s->token_end * row;
    uint64_t planes = 2 * s->layers, runs = s->heads, step = head, pitch = s->src_heads * head;
    // Else its planes, or heads, may be as many as it likes.
    if (begin == end || !s->heads || !s->layers) return 0;
    // What lies back to back is one run.
    if (end - begin == head) {
        end = runs * head, runs = 1;
        if (s->heads == s->src_heads) end *= planes, planes = 1;
    }
    // So is, to tiles, what lies so near that none is between: the rest take one tile each at least.
    if (step - (end - begin) < KM_TILE && runs > 1) end += (runs - 1) * step, runs = 1;
    if (runs == 1 && pitch - (end - begin) < KM_TILE && planes > 1)
        end += (planes - 1) * pitch, planes = 1;
    uint64_t at = 2 * s->src_layer_begin * pitch + s->src_head_begin * head, read = 0, next = 0;
    for (uint64_t plane = 0; plane < planes; plane++, at += pitch)
        for (uint64_t run = 0; run < runs; run++) {
            uint64_t from = (at + run * step + begin) / KM_TILE * KM_TILE;
            uint64_t to = ((at + run * step + end - 1) / KM_TILE + 1) * KM_TILE;
            if (from < next) from = next;
            if (to > s->length) to = s->length;
            if (from < to) read += to - from, next = to;
        }
    return read;
}

static inline void km_move(unsigned char *paged, unsigned char *payload, size_t n, int out) {
    if (out) km_stream(payload, paged, n);
    else km_stream(paged, payload, n);
}

// Bytes [begin, end) of one head's tokens; byte 0 is that of the span's token 0.
KM_CLONES
static void km_move_run(const km_paged *p, const km_part *s, const km_order *order,
                        uint64_t head_base, size_t begin, size_t end, unsigned char *payload,
                        int out) {
    const km_layout *l = &p->layout;
    size_t row = l->row_bytes;
    uint64_t token = s->position + begin / row;
    uint64_t block = token / l->block_tokens, slot = token % l->block_tokens;
    size_t inside = begin % row;
    int in_one = order->atom || l->token_stride == row;
    while (begin < end) {
        unsigned char *base =
            (unsigned char *)(uintptr_t)(head_base + (uint64_t)p->blocks[block] * l->block_stride);
        if (in_one) {
            size_t n = (l->block_tokens - slot) * row - inside;
            if (n > end - begin) n = end - begin;
            if (order->atom) km_order_move(order, base, row, slot, inside, payload, n, out);
            else km_move(base + slot * row + inside, payload, n, out);
            payload += n, begin += n;
        } else {
            for (; slot < l->block_tokens && begin < end; slot++) {
                size_t n = row - inside;
                if (n > end - begin) n = end - begin;
                km_move(base + slot * l->token_stride + inside, payload, n, out);
                payload += n, begin += n, inside = 0;
            }
        }
        block++, slot = 0, inside = 0;
    }
}

// Visits the wanted bytes in payload order, so tiles come in order too. A tile
// is summed when the first wanted byte in it is met, and copied out of cache.
static int km_part_move(const km_paged *p, const km_part *s, int out) {
    const km_layout *l = &p->layout;
    unsigned char *payload = (unsigned char *)(uintptr_t)s->address;
    size_t row = l->row_bytes, head_bytes = s->tokens * row;
    size_t run_begin = s->token_begin * row, run_end = s->token_end * row;
    size_t summed = SIZE_MAX;
    for (uint64_t layer = 0; layer < s->layers; layer++)
        for (uint64_t plane = 0; plane < 2; plane++)
            for (uint64_t head = 0; head < s->heads; head++) {
                const uint64_t *bases = plane ? p->v_base : p->k_base;
                uint64_t head_base = bases[s->dst_layer_begin + layer] +
                                     (s->dst_head_begin + head) * l->head_stride;
                size_t at = (((s->src_layer_begin + layer) * 2 + plane) * s->src_heads +
                             s->src_head_begin + head) * head_bytes;
                for (size_t begin = run_begin; begin < run_end;) {
                    size_t end = run_end;
                    if (!out) {
                        size_t tile = (at + begin) / KM_TILE;
                        if (tile != summed) {
                            size_t bytes = km_tile_bytes(s->length, tile);
                            if (km_tile_sum(payload + tile * KM_TILE, bytes) != p->sums[tile])
                                return KM_BAD_TILE;
                            summed = tile;
                        }
                        size_t tile_end = (tile + 1) * KM_TILE - at;
                        if (end > tile_end) end = tile_end;
                    }
                    km_move_run(p, s, &l->order[plane], head_base, begin, end, payload + at + begin, out);
                    begin = end;
                }
            }
    return KM_DONE;
}

static int km_part_run(const km_paged *p, const km_part *s, int out) {
    int status = km_part_check(p, s);
    if (status != KM_DONE || s->token_begin == s->token_end || !s->heads || !s->layers)
        return status;
    if (!out) {
        // A copy: what is folded here is what each tile is compared with.
        size_t tiles = km_tiles(s->length);
        memcpy(p->sums, (const void *)(uintptr_t)s->sums_address, tiles * sizeof *p->sums);
        if (km_fold(p->sums, tiles) != s->root) return KM_BAD_ROOT;
    }
    status = km_part_move(p, s, out);
    km_stream_end();
    if (!out && status == KM_DONE) {
        // Each tile was read twice, to sum it and to copy it. If the range went to another
        // span between the two, its sums were taken back before (km_revoke).
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        size_t tiles = km_tiles(s->length);
        memcpy(p->sums, (const void *)(uintptr_t)s->sums_address, tiles * sizeof *p->sums);
        if (km_fold(p->sums, tiles) != s->root) return KM_BAD_TILE;
    }
    return status;
}

#endif
