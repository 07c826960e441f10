// Stand-ins for client/kmesh/kernels/device.cuh: one thread to a block, blocks one after the other.
#define KMESH_DEVICE_CUH
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __device__
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Vec16 { u32 word[4]; };
struct Vec4 { u32 word[1]; };
struct float2 { float x, y; };

static u32 this_block, all_blocks;
static u32 thread() { return 0; }
static u32 threads() { return 1; }
static u32 block() { return this_block; }
static u32 blocks() { return all_blocks; }
static void barrier() {}
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
static u32 count(u32 *counter) { return (*counter)++; }
static u64 warp_sum(u64 value) { return value; }
static u32 lane() { return 0; }
static u32 lanes() { return 1; }

template <typename V> static V load(const V *from) { V v; memcpy(&v, from, sizeof v); return v; }
template <typename V> static V load_once(const V *from) { return load(from); }
template <typename V> static void store_once(V *to, V v) { memcpy(to, &v, sizeof v); }
static u64 load_shared_word(const u64 *from) { return *from; }
static void tell_host(u32 *to, u32 value) { *to = value; }

// As long as a stage is not waited for, it holds rubbish; its phases are those of the device's.
template <typename V>
struct Ring {
    u8 *stages;
    u32 count, stage_bytes;
    struct { const u8 *from; u32 bytes, phase; } pending[64];

    Ring(u8 *memory, u32 count_, u32 stage_bytes_)
        : stages(memory + 1024), count(count_), stage_bytes(stage_bytes_) {
        for (auto &one : pending) one = {nullptr, 0, 0};
    }
    u8 *stage(u32 index) const { return stages + (size_t)index * stage_bytes; }
    void fill(u32 index, const u8 *from, u32 bytes) {
        if (pending[index].from || bytes > stage_bytes) abort();
        memset(stage(index), 0xA5, stage_bytes);
        pending[index].from = from;
        pending[index].bytes = bytes;
    }
    void wait(u32 index, u32 parity) {
        auto &one = pending[index];
        if (!one.from || one.phase != parity) abort();
        memcpy(stage(index), one.from, one.bytes);
        one.from = nullptr;
        one.phase ^= 1;
    }
};
