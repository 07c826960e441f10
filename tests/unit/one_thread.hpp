// Stand-ins for client/kmesh/kernels/device.cuh: one thread to a block, blocks one after the other.
#define KMESH_DEVICE_CUH
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define KM_APART
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Vec16 { u32 word[4]; };
struct Vec4 { u32 word[1]; };
struct float2 { float x, y; };

static const size_t SHARED = 1 << 19;
static u32 this_block, all_blocks;
static u32 thread() { return 0; }
static u32 threads() { return 1; }
static u32 block() { return this_block; }
static u32 blocks() { return all_blocks; }
static void barrier() {}
static void warp_barrier() {}
static const bool ALONE = true;
enum { PER_CONSUMER = 2048, UNIT_PRODUCERS = 1 };
static u32 consumers(u32 = 1) { return 1; }
static u32 consumer() { return 0; }
static bool produces(u32 = 1) { return true; }
static u32 producer(u32) { return 0; }
struct Crew {
    u32 count;
    u32 thread() const { return 0; }
    u32 threads() const { return 1; }
    bool has() const { return count; }
    void barrier() const {}
};
static Crew nobody() { return {0}; }
static Crew everybody() { return {1}; }
static Crew all_consumers() { return {1}; }
static Crew unit_writers() { return {1}; }
static Crew unit_summers() { return {1}; }
static void fence() {}
static void system_fence() {}
static u32 leading_zeros(u32 bits) { return (u32)__builtin_clz(bits); }
static u32 high_product(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
static float product(float a, float b) { return a * b; }
static float plus(float a, float b) { return a + b; }
static float minus(float a, float b) { return a - b; }
static float from_bits(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
static u32 to_bits(float f) { u32 bits; memcpy(&bits, &f, 4); return bits; }
static float from_half(u32 bits) {
    uint16_t narrow = (uint16_t)bits;
    _Float16 half;
    memcpy(&half, &narrow, 2);
    return (float)half;
}
static u32 to_half(float f) {
    _Float16 half = (_Float16)f;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static void add(u64 *sum, u64 value) { *sum += value; }
static inline void add(u32 *sum, u32 value) { *sum += value; }
static u32 count(u32 *counter) { return (*counter)++; }
static u64 warp_sum(u64 value) { return value; }
static u32 lane() { return 0; }
static u32 lanes() { return 1; }
static inline u32 ones(u32 bits) { return (u32)__builtin_popcount(bits); }
static inline u32 warp_before(u32 value, u32 *all) { *all = value; return 0; }

template <typename V> static V load(const V *from) { V v; memcpy(&v, from, sizeof v); return v; }
template <typename V> static V load_once(const V *from) { return load(from); }
template <typename V> static void store_once(V *to, V v) { memcpy(to, &v, sizeof v); }
static u64 load_fresh(const u64 *from) { return *from; }
static u64 load_shared_word(const u64 *from) { return *from; }
static void tell_host(u32 *to, u32 value) { *to = value; }

struct Cursor {
    u32 stage = 0, parities = 0;
    Cursor() {}
    Cursor(u32 turn, u32 count) : stage(turn % count) {
        parities = (turn / count & 1) << stage;
    }
    u32 parity() const { return parities >> stage & 1; }
    void turn() { parities ^= 1u << stage; }
    void next(u32 count) { stage = stage + 1 == count ? 0 : stage + 1; }
};

enum { AFTER_BARRIERS = 496 };

// As long as a stage is not waited for, it holds rubbish. Whoever would wait for ever aborts.
template <typename V>
struct Ring {
    static const u32 BARRIERS = AFTER_BARRIERS + 16, HEAD = 128;
    struct Run { const u8 *from; u32 to, bytes; };
    struct State { std::vector<Run> runs; u32 full = 0, empty = 0; };
    u8 *memory;
    u32 count, data, entries, stage_bytes;
    mutable std::vector<State> states;

    Ring(u8 *memory_, u32 count_, u32 data_, u32 entries_, u32 = 1)
        : memory(memory_), count(count_), data(data_), entries(entries_),
          stage_bytes(data_ + HEAD + entries_ * 8), states(count_) {
        if (16 * count > AFTER_BARRIERS || BARRIERS + (size_t)count * stage_bytes > SHARED) abort();
        memset(memory, 0xA5, BARRIERS);
    }
    void end() const {}
    u8 *stage(const Cursor &at) const { return memory + BARRIERS + (size_t)at.stage * stage_bytes; }
    void *head(const Cursor &at) const { return stage(at) + data; }
    u64 *table(const Cursor &at) const { return (u64 *)(stage(at) + data + HEAD); }
    State &state(const Cursor &at) const { return states[at.stage]; }
    void wait_empty(const Cursor &at) const {
        if (state(at).empty != at.parity()) abort();
        memset(head(at), 0xA5, HEAD + entries * 8);
    }
    void fill(const Cursor &at, const u8 *from, u32 bytes, u32 runs = 1, u64 stride = 0,
              u32 pitch = 0) const {
        if (!state(at).runs.empty() || bytes % sizeof(V)) abort();
        memset(stage(at), 0xA5, data);
        for (u32 i = 0; i < runs; i++) {
            if ((u64)i * pitch + bytes > data || (i && pitch < bytes)) abort();
            state(at).runs.push_back({from + i * stride, i * pitch, bytes});
        }
    }
    void ready(const Cursor &at) const { state(at).full ^= 1; }
    void wait_full(const Cursor &at) const {
        State &one = state(at);
        if (one.full == at.parity()) abort();
        for (const Run &run : one.runs) memcpy(stage(at) + run.to, run.from, run.bytes);
        one.runs.clear();
    }
    void release(const Cursor &at) const { state(at).empty ^= 1; }
};
