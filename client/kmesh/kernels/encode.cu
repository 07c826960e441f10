// Recipes out of payloads: what a recipe's tables do not refer to is written down, and all of it is
// decoded and compared. The file is docs/recipe-format.md's, and lies in memory as it will be kept.
#include "turning.cuh"

// As kmesh/codec/passes.py writes it. Offsets are from its beginning if nothing else is said.
struct Encoding {
    u64 payload, file, literals;  // addresses
    u64 literal_bytes;
    u64 segments, differences;    // Source of each segment in the file; Difference
    u64 sums, stored_sums;        // of the tiles of the payload and of the literals
    u64 compared;                 // bytes; behind it, elements that differ
    u64 counts;                   // u32 for each run and token: elements that differ
    u32 runs, heads, tokens, row_bytes;
    u32 rows, item_rows, items, differences_count;
    u32 worth;                    // a token with no more differing elements is worth a difference
    u32 lists_at, ops_at, runs_at, turns_at, turn_bytes;  // in the file
    u32 rotary_dim, interleaved, element;
    Divisor by_tokens, by_heads, by_vectors;
};

struct Source { u64 address; u32 tokens, spare; };
// An op of one run that is a difference: its number in the run's list.
struct Difference { u32 run, op; };

struct RecipeList { u32 first, count; };
struct RecipeOp {
    u8 kind, code;
    unsigned short turn;
    u32 segment, token, tokens, source, data, size, reserved;
};
struct RecipeRun {
    u32 list, reserved;
    u64 offset, length;
};
enum { LITERAL = 1, XOR = 4, TURN_HEAD = 8, UNIT = 16 };

static const u32 MOST_ROWS = 256, CHUNK = 16384;

template <typename T>
__device__ inline T *in(const Encoding *job, u64 offset) {
    return (T *)((u8 *)job + offset);
}

template <typename T>
__device__ inline const T *in_file(const Encoding *job, u64 offset) {
    return (const T *)(job->file + offset);
}

// A row of the payload.
struct Row {
    u32 run, head, token;
    __device__ Row(const Encoding *job, u32 index) {
        u32 of_head = job->by_tokens.divide(index);
        token = index - of_head * job->by_tokens.value;
        run = job->by_heads.divide(of_head);
        head = of_head - run * job->by_heads.value;
    }
    __device__ u32 counter(const Encoding *job) const { return run * job->tokens + token; }
    __device__ u64 of_segment(const Encoding *job, u64 address, u32 tokens, u32 source) const {
        return address + (((u64)run * job->heads + head) * tokens + source) * job->row_bytes;
    }
};

// What a row is compared with; 0 is nothing.
struct Other {
    u64 row;
    const float2 *turns;
    u32 counter;
};

__device__ inline const RecipeOp *op_of(const Encoding *job, const Row &row) {
    RecipeList list =
        in_file<RecipeList>(job, job->lists_at)[in_file<RecipeRun>(job, job->runs_at)[row.run].list];
    const RecipeOp *ops = in_file<RecipeOp>(job, job->ops_at) + list.first;
    u32 low = 0, high = list.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (ops[middle].token <= row.token) low = middle;
        else high = middle;
    }
    return ops + low;
}

__device__ inline u64 data_of(const Encoding *job, u32 run, const RecipeOp *op) {
    return job->literals + in_file<RecipeRun>(job, job->runs_at)[run].offset + (u64)op->data * UNIT;
}

__device__ inline Other referred(const Encoding *job, const Row &row, const RecipeOp *op) {
    const Source *segment = in<Source>(job, job->segments) + op->segment;
    u32 source = op->source + row.token - op->token;
    Other other = {row.of_segment(job, segment->address, segment->tokens, source), 0,
                   row.counter(job)};
    if (op->turn) {
        u64 at = job->turns_at + (u64)(op->turn - 1) * job->turn_bytes + TURN_HEAD;
        other.turns = in_file<float2>(job, at);
    }
    return other;
}

// Where a row's bytes are written out in the file.
__device__ inline u64 literal(const Encoding *job, const Row &row, const RecipeOp *op) {
    u64 within = (u64)row.head * op->tokens + row.token - op->token;
    return data_of(job, row.run, op) + within * job->row_bytes;
}

__device__ inline Other decoded(const Encoding *job, u32 index) {
    Row row(job, index);
    const RecipeOp *op = op_of(job, row);
    if (op->kind == LITERAL) return Other{literal(job, row, op), 0, row.counter(job)};
    if (op->kind == XOR) return Other{0, 0, 0};
    return referred(job, row, op);
}

// A vector of a row as it is wanted; `own` is what the base has there.
template <typename V>
__device__ inline V wanted(const Encoding *job, const Other &other, u32 within, const V &own) {
    if (!other.turns) return own;
    return turned_vector(job, (const u8 *)other.row, within, own, other.turns);
}

template <typename V>
__device__ inline u32 differing(const V &one, const V &other, u32 element) {
    u32 found = 0;
#pragma unroll
    for (u32 w = 0; w < sizeof(V) / 4; w++) {
        u32 difference = one.word[w] ^ other.word[w];
        if (element == FLOAT32) found += difference != 0;
        else found += ((difference & 0xFFFF) != 0) + (difference >> 16 != 0);
    }
    return found;
}

__device__ inline void give(const Sums &taken, u64 *sums) {
    for (u32 i = 0; i < (taken.straddles ? 2 : 1); i++) {
        u64 all = warp_sum(taken.sum[i]);
        if (lane() == 0) add(sums + i, all);
    }
}

struct Tally {
    u64 compared, differing;
};

__device__ inline void give(const Encoding *job, const Tally &tally) {
    u64 *to = in<u64>(job, job->compared);
    u64 compared = warp_sum(tally.compared), differing = warp_sum(tally.differing);
    if (lane() != 0) return;
    add(to, compared);
    if (differing) add(to + 1, differing);
}

// One item: whole rows, whose others are known.
template <typename V>
__device__ inline void compare(const Encoding *job, const Other *others, const Item &item,
                               Tally &tally) {
    const u32 in_row = job->by_vectors.value, count = item.bytes / sizeof(V), at_once = 2;
    const V *payload = (const V *)(job->payload + item.begin);
    Sums sums(item);
    for (u32 begin = thread(); begin < count; begin += at_once * threads()) {
        V mine[at_once], own[at_once];
#pragma unroll
        for (u32 k = 0; k < at_once; k++) {
            u32 i = begin + k * threads();
            if (i >= count) continue;
            u32 row = job->by_vectors.divide(i), within = (i - row * in_row) * sizeof(V);
            u64 from = others[row].row;
            mine[k] = load_once(payload + i);
            if (from) own[k] = load((const V *)(from + within));
        }
#pragma unroll
        for (u32 k = 0; k < at_once; k++) {
            u32 i = begin + k * threads();
            if (i >= count) continue;
            u32 row = job->by_vectors.divide(i), within = (i - row * in_row) * sizeof(V);
            Other other = others[row];
            sums.take(mine[k], i * (sizeof(V) / 4));
            if (!other.row) continue;
            tally.compared += sizeof(V);
            u32 found = differing(mine[k], wanted(job, other, within, own[k]), job->element);
            if (!found) continue;
            tally.differing += found;
            add(in<u32>(job, job->counts) + other.counter, found);
        }
    }
    give(sums, in<u64>(job, job->sums) + item.begin / TILE);
}

// Decodes all that is no difference, and compares.
template <typename V>
__device__ inline void verify(const Encoding *job) {
    __shared__ Other others[MOST_ROWS];
    Tally tally = {0, 0};
    for (u32 at = block(); at < job->items; at += blocks()) {
        u32 first = at * job->item_rows;
        u32 left = job->rows - first, rows = left < job->item_rows ? left : job->item_rows;
        barrier();
        for (u32 r = thread(); r < rows; r += threads()) others[r] = decoded(job, first + r);
        barrier();
        Item item;
        item.begin = (u64)first * job->row_bytes;
        item.bytes = rows * job->row_bytes;
        compare<V>(job, others, item, tally);
    }
    give(job, tally);
}

// A stretch of the literal area, and what lies there: bytes from one address on, or zeros (0).
struct Stretch {
    u64 begin, end, from;

    __device__ Stretch() : begin(0), end(0), from(0) {}

    // The one that the byte at `at` is in.
    __device__ Stretch(const Encoding *job, u64 at) {
        const RecipeRun *runs = in_file<RecipeRun>(job, job->runs_at);
        u32 number = 0;
        // Runs and ops without data begin where the next one does: the last that begins is it.
        for (u32 high = job->runs; high - number > 1;) {
            u32 middle = (number + high) / 2;
            if (runs[middle].offset <= at) number = middle;
            else high = middle;
        }
        const RecipeRun run = runs[number];
        begin = run.offset + run.length, from = 0;
        end = number + 1 < job->runs ? runs[number + 1].offset : job->literal_bytes;
        if (at >= begin) return;
        const RecipeList list = in_file<RecipeList>(job, job->lists_at)[run.list];
        const RecipeOp *ops = in_file<RecipeOp>(job, job->ops_at) + list.first;
        const u32 unit = (u32)((at - run.offset) / UNIT);
        u32 low = 0;
        for (u32 high = list.count; high - low > 1;) {
            u32 middle = (low + high) / 2;
            if (ops[middle].data <= unit) low = middle;
            else high = middle;
        }
        const RecipeOp op = ops[low];
        begin = run.offset + (u64)op.data * UNIT, end = begin + (u64)op.size * UNIT;
        if (op.kind != LITERAL) {
            from = job->literals + begin;
            return;
        }
        const u32 size = op.tokens * job->row_bytes, head = (u32)(at - begin) / size;
        begin += (u64)head * size;
        if (head >= job->heads) return;
        end = begin + size;
        u64 row = (u64)(number * job->heads + head) * job->tokens + op.token;
        from = job->payload + row * job->row_bytes;
    }
};

// Writes the literal area but for differences, which are there, and sums it.
template <typename V>
__device__ inline void gather(const Encoding *job) {
    const u32 at_once = 4;
    for (u64 begin = (u64)block() * CHUNK; begin < job->literal_bytes;
         begin += (u64)blocks() * CHUNK) {
        const u64 left = job->literal_bytes - begin;
        Item item;
        item.begin = begin;
        item.bytes = left < CHUNK ? (u32)left : CHUNK;
        Sums sums(item);
        Stretch stretch;
        const u32 count = item.bytes / sizeof(V);
        V *to = (V *)(job->literals + begin);
        for (u32 first = thread(); first < count; first += at_once * threads()) {
            V v[at_once];
#pragma unroll
            for (u32 k = 0; k < at_once; k++) {
                u32 i = first + k * threads();
                if (i >= count) continue;
                u64 at = begin + i * sizeof(V);
                if (at >= stretch.end) stretch = Stretch(job, at);
                if (stretch.from) v[k] = load_once((const V *)(stretch.from + at - stretch.begin));
                else v[k] = V{};
            }
#pragma unroll
            for (u32 k = 0; k < at_once; k++) {
                u32 i = first + k * threads();
                if (i >= count) continue;
                store_once(to + i, v[k]);
                sums.take(v[k], i * (sizeof(V) / 4));
            }
        }
        give(sums, in<u64>(job, job->stored_sums) + begin / TILE);
    }
}

// An op that is a difference, by one warp: each lane has 32 elements, which is one word of the
// bitmap. It is written, or the payload is compared with what it gives.
template <bool writes>
__device__ inline void difference(const Encoding *job, const Difference &which) {
    const u32 bytes = job->element == FLOAT32 ? 4 : 2, in_row = job->row_bytes / bytes;
    const RecipeRun &run = in_file<RecipeRun>(job, job->runs_at)[which.run];
    RecipeList list = in_file<RecipeList>(job, job->lists_at)[run.list];
    const RecipeOp *op = in_file<RecipeOp>(job, job->ops_at) + list.first + which.op;
    const u32 elements = op->tokens * job->heads * in_row, words = (elements + 31) / 32;
    u32 *bitmap = (u32 *)data_of(job, which.run, op);
    u8 *data = (u8 *)(bitmap + words);
    // A payload that changed has more elements that differ than there is room for.
    const u32 room = (u32)(((u64)op->size * UNIT - 4 * (u64)words) / bytes);
    auto put = [&](u32 at, u32 value) {
        if (at >= room) return;
        if (bytes == 4) ((u32 *)data)[at] = value;
        else ((unsigned short *)data)[at] = (unsigned short)value;
    };
    Tally tally = {0, 0};
    u32 before = 0;
    for (u32 begin = 0; begin < words; begin += lanes()) {
        u32 word = begin + lane(), bits = 0, all;
        const u32 first = 32 * word, end = word < words ? elements - first : 0;
        // The element of a word that is wanted without its difference, and that of the payload.
        auto look = [&](u32 e, u32 *mine) {
            u32 i = first + e, of_head = i / in_row, index = i - of_head * in_row;
            u32 head = of_head / op->tokens, token = op->token + of_head - head * op->tokens;
            Row row(job, (which.run * job->heads + head) * job->tokens + token);
            Other other = referred(job, row, op);
            u64 at = (which.run * job->heads + head) * (u64)job->tokens + token;
            *mine = element_of((const u8 *)(job->payload + at * job->row_bytes), index, bytes);
            u32 own = other.turns ? turned_element(job, (const u8 *)other.row, index, other.turns)
                                  : element_of((const u8 *)other.row, index, bytes);
            return Other{own, 0, other.counter};
        };
        if (!writes && end) bits = bitmap[word];
        for (u32 e = 0; writes && e < 32 && e < end; e++) {
            u32 mine, own = (u32)look(e, &mine).row;
            bits |= (u32)(mine != own) << e;
        }
        u32 at = before + warp_before(ones(bits), &all);
        if (writes && end) bitmap[word] = bits;
        for (u32 e = 0; e < 32 && e < end; e++) {
            bool there = bits >> e & 1;
            if (writes && !there) continue;
            u32 mine;
            Other other = look(e, &mine);
            u32 own = (u32)other.row;
            if (writes) {
                put(at++, mine ^ own);
                continue;
            }
            if (there && at < room) own ^= element_of(data, at, bytes);
            at += there;
            if (mine == own) continue;
            tally.differing++;
            add(in<u32>(job, job->counts) + other.counter, 1u);
        }
        before += all;
    }
    for (u32 at = before + lane(); writes && at < room; at += lanes()) put(at, 0);
    if (writes) return;
    if (lane() == 0) tally.compared = (u64)elements * bytes;
    give(job, tally);
}

// All ops that are differences.
template <bool writes>
__device__ inline void differences(const Encoding *job) {
    const u32 warps = threads() / lanes();
    for (u32 at = block() * warps + thread() / lanes(); at < job->differences_count;
         at += blocks() * warps)
        difference<writes>(job, in<Difference>(job, job->differences)[at]);
}

// For the host: for each run a bit for each token that is as it should be, and then one for each that
// is worth a difference.
__device__ inline void tell(const Encoding *job, u32 *results) {
    const u32 step = threads() * blocks(), from = block() * threads() + thread();
    const u32 words = (job->tokens + 31) / 32;
    u32 *worth = results + job->runs * words;
    for (u32 i = from; i < job->runs * words; i += step) {
        u32 run = i / words, first = (i - run * words) * 32, same = 0, near = 0;
        const u32 *counts = in<u32>(job, job->counts) + (u64)run * job->tokens + first;
        for (u32 t = 0; t < 32 && first + t < job->tokens; t++) {
            same |= (u32)(counts[t] == 0) << t;
            near |= (u32)(counts[t] - 1 < job->worth) << t;
        }
        tell_host(results + i, same);
        tell_host(worth + i, near);
    }
    system_fence();
}

#ifndef KM_ENTRY
#define KM_ENTRY(name, call)                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 4) name(const Encoding *job, u32 *results) { \
        call;                                                                                   \
    }
#endif

KM_ENTRY(kmesh_encode_pack, differences<true>(job))
KM_ENTRY(kmesh_encode_gather_16, gather<Vec16>(job))
KM_ENTRY(kmesh_encode_gather_4, gather<Vec4>(job))
KM_ENTRY(kmesh_encode_verify_16, verify<Vec16>(job))
KM_ENTRY(kmesh_encode_verify_4, verify<Vec4>(job))
KM_ENTRY(kmesh_encode_unpack, differences<false>(job))
KM_ENTRY(kmesh_encode_tell, tell(job, results))
