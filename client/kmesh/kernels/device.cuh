// What the kernels need of the machine. The tests put one-thread stand-ins in its place.
#ifndef KMESH_DEVICE_CUH
#define KMESH_DEVICE_CUH

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Of what is rarely run: not between what always is.
#define KM_APART __noinline__

struct __align__(16) Vec16 { u32 word[4]; };
struct Vec4 { u32 word[1]; };

__device__ inline u32 thread() { return threadIdx.x; }
__device__ inline u32 threads() { return blockDim.x; }
__device__ inline u32 block() { return blockIdx.x; }
__device__ inline u32 blocks() { return gridDim.x; }
__device__ inline void barrier() { __syncthreads(); }
__device__ inline void warp_barrier() { __syncwarp(); }

// The first warps consume what the last ones produce. A unit has up to 2048 vectors; 256 threads
// write it, and the next warps sum it meanwhile. What a unit's producer looks up takes longer than
// moving a unit, so there are several.
enum { ALONE = 0, PER_CONSUMER = 8, UNIT_SUMMERS = 8, UNIT_PRODUCERS = 4 };
__device__ inline u32 consumers(u32 producers = 1) { return blockDim.x - 32 * producers; }
__device__ inline u32 consumer() { return threadIdx.x; }
__device__ inline bool produces(u32 producers = 1) { return threadIdx.x >= consumers(producers); }
__device__ inline u32 producer(u32 producers) { return (threadIdx.x - consumers(producers)) / 32; }

// Some of a block's threads, which wait for each other and for nobody else.
struct Crew {
    u32 first, count;
    __device__ u32 thread() const { return threadIdx.x - first; }
    __device__ u32 threads() const { return count; }
    __device__ bool has() const { return thread() < count; }
    __device__ void barrier() const {
        if (count == blockDim.x) __syncthreads();
        // Not aligned: a warp's threads may come one by one.
        else asm volatile("barrier.sync 1, %0;" ::"r"(count) : "memory");
    }
};
__device__ inline Crew nobody() { return Crew{0, 0}; }
__device__ inline Crew everybody() { return Crew{0, blockDim.x}; }
__device__ inline Crew all_consumers() { return Crew{0, consumers()}; }
__device__ inline Crew unit_writers() {
    return Crew{0, blockDim.x - 32 * (UNIT_SUMMERS + UNIT_PRODUCERS)};
}
__device__ inline Crew unit_summers() { return Crew{unit_writers().count, 32 * UNIT_SUMMERS}; }
__device__ inline void fence() { __threadfence(); }
__device__ inline void system_fence() { __threadfence_system(); }
__device__ inline u32 leading_zeros(u32 bits) { return __clz((int)bits); }
__device__ inline u32 high_product(u32 a, u32 b) { return __umulhi(a, b); }
// Products and sums that are rounded one by one and keep subnormal numbers, whatever a compiler was
// told, so that every implementation gets the same bits.
__device__ inline float product(float a, float b) {
    float value;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
}
__device__ inline float plus(float a, float b) {
    float value;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
}
__device__ inline float minus(float a, float b) {
    float value;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
    return value;
}
__device__ inline float from_bits(u32 bits) { return __uint_as_float(bits); }
__device__ inline u32 to_bits(float value) { return __float_as_uint(value); }

__device__ inline float from_half(u32 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
    return value;
}

__device__ inline u32 to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline void add(u64 *sum, u64 value) { atomicAdd(sum, value); }
__device__ inline void add(u32 *sum, u32 value) { atomicAdd(sum, value); }

// The value before.
__device__ inline u32 count(u32 *counter) { return atomicAdd(counter, 1u); }

// Sum over the warp. Three sums of numbers so small that 32 of them fit 32 bits.
__device__ inline u64 warp_sum(u64 value) {
    u32 low = __reduce_add_sync(0xFFFFFFFFu, (u32)value & 0x3FFFFFu);
    u32 middle = __reduce_add_sync(0xFFFFFFFFu, (u32)(value >> 22) & 0x1FFFFFu);
    u32 high = __reduce_add_sync(0xFFFFFFFFu, (u32)(value >> 43));
    return low + ((u64)middle << 22) + ((u64)high << 43);
}
__device__ inline u32 lane() { return threadIdx.x % 32; }
__device__ inline u32 lanes() { return 32; }
__device__ inline u32 ones(u32 bits) { return (u32)__popc(bits); }

// Sum over the lanes before this one; `all` becomes that over the warp.
__device__ inline u32 warp_before(u32 value, u32 *all) {
    u32 sum = value;
    for (u32 step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (lane() >= step) sum += other;
    }
    *all = __shfl_sync(0xFFFFFFFFu, sum, 31);
    return sum - value;
}

__device__ inline Vec16 load(const Vec16 *from) {
    uint4 v = *(const uint4 *)from;
    return Vec16{{v.x, v.y, v.z, v.w}};
}
__device__ inline Vec4 load(const Vec4 *from) { return Vec4{{*(const u32 *)from}}; }

// Of memory that is read once, and may be the host's.
__device__ inline Vec16 load_once(const Vec16 *from) {
    uint4 v = __ldcs((const uint4 *)from);
    return Vec16{{v.x, v.y, v.z, v.w}};
}
__device__ inline Vec4 load_once(const Vec4 *from) { return Vec4{{__ldcs((const u32 *)from)}}; }
// Of what other blocks have written in this launch.
__device__ inline u64 load_fresh(const u64 *from) { return __ldcg(from); }
__device__ inline u64 load_shared_word(const u64 *from) { return *(const volatile u64 *)from; }

__device__ inline void store_once(Vec16 *to, Vec16 v) {
    __stcs((uint4 *)to, make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
}
__device__ inline void store_once(Vec4 *to, Vec4 v) { __stcs((u32 *)to, v.word[0]); }
__device__ inline void tell_host(u32 *to, u32 value) { *(volatile u32 *)to = value; }

// Where in a ring somebody is.
struct Cursor {
    u32 stage, parities;
    __device__ Cursor() : stage(0), parities(0) {}
    // Where somebody is who has been at that many stages of so many.
    __device__ Cursor(u32 turn, u32 count) : stage(turn % count) {
        parities = (turn / count & 1) << stage;
    }
    __device__ u32 parity() const { return parities >> stage & 1; }
    __device__ void turn() { parities ^= 1u << stage; }
    __device__ void next(u32 count) { stage = stage + 1 == count ? 0 : stage + 1; }
};

// Of a block's shared memory: room for the barriers of 31 stages.
enum { AFTER_BARRIERS = 496 };

// Stages of shared memory, each with a barrier that says that it was filled and one that says that
// all have read it. From compute capability 9.0 on, one thread asks the bulk copy engine for a
// whole stage; before that, and for vectors that are too small for it, the producing warp's threads
// copy it vector by vector. Neither waits for the bytes.
template <typename V>
struct Ring {
    u8 *memory;
    u32 count, data, entries, stage_bytes;

    static const u32 BARRIERS = AFTER_BARRIERS + 16, HEAD = 128;

#if !defined(KM_NO_BULK) && __CUDA_ARCH__ >= 900
    static const bool bulk = sizeof(V) == 16;
#else
    static const bool bulk = false;
#endif

    // Stages of so many bytes and addresses.
    __device__ Ring(u8 *memory_, u32 count_, u32 data_, u32 entries_, u32 producers = 1)
        : memory(memory_), count(count_), data(data_), entries(entries_),
          stage_bytes(data_ + HEAD + entries_ * 8) {
        if (thread() == 0) {
            for (u32 i = 0; i < count; i++) {
                start(full(i), bulk ? 1 : 33);
                start(empty(i), consumers(producers) / 32);
            }
            asm volatile("fence.acq_rel.cta;" ::: "memory");
#if __CUDA_ARCH__ >= 900
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        }
        barrier();
    }

    __device__ u8 *stage(const Cursor &at) const {
        return memory + BARRIERS + (u64)at.stage * stage_bytes;
    }
    __device__ void *head(const Cursor &at) const { return stage(at) + data; }
    __device__ u64 *table(const Cursor &at) const { return (u64 *)(stage(at) + data + HEAD); }

    // By all threads, when nobody waits any more: the memory may be another ring's.
    __device__ void end() const {
        barrier();
        for (u32 i = thread(); i < 2 * count; i += threads())
            asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(address_of(memory + 8 * i))
                         : "memory");
        barrier();
    }

    // By the producing warp: until all have read what was in the stage.
    __device__ void wait_empty(const Cursor &at) const {
        wait(empty(at.stage), at.parity() ^ 1);
        warp_barrier();
    }

    // By the producing warp: asks for bytes, in runs that lie `stride` bytes apart and come to lie
    // `pitch` bytes apart.
    __device__ void fill(const Cursor &at, const u8 *from, u32 bytes, u32 runs = 1, u64 stride = 0,
                         u32 pitch = 0) const {
        u32 to = address_of(stage(at));
        u64 source = __cvta_generic_to_global(from);
        if constexpr (bulk) {
            for (u32 i = lane(); i < runs; i += 32)
                fill_bulk(full(at.stage), to + i * pitch, source + i * stride, bytes);
        } else {
            for (; runs; runs--, to += pitch, source += stride)
                for (u32 i = lane() * (u32)sizeof(V); i < bytes; i += 32 * (u32)sizeof(V))
                    if constexpr (sizeof(V) == 16)
                        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i),
                                     "l"(source + i)
                                     : "memory");
                    else
                        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + i),
                                     "l"(source + i)
                                     : "memory");
        }
    }

    // By the producing warp: the stage is full as soon as its bytes have come.
    __device__ void ready(const Cursor &at) const {
        u32 full_ = full(at.stage);
        if constexpr (!bulk)
            asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full_) : "memory");
        if (lane() == 0) arrive(full_);
    }

    // By the consuming threads.
    __device__ void wait_full(const Cursor &at) const { wait(full(at.stage), at.parity()); }

    // By a consuming warp: it has read the stage.
    __device__ void release(const Cursor &at) const {
        warp_barrier();
        if (lane() == 0) arrive(empty(at.stage));
    }

    __device__ static u32 address_of(const void *shared) {
        return (u32)__cvta_generic_to_shared(shared);
    }
    __device__ u32 full(u32 index) const { return address_of(memory + 16 * index); }
    __device__ u32 empty(u32 index) const { return full(index) + 8; }

    __device__ static void start(u32 at, u32 arrivals) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
    }

    __device__ static void arrive(u32 at) {
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(at)
                     : "memory");
    }

    // Payloads are read once: they should not push the pages out of the second-level cache.
    __device__ static void fill_bulk(u32 ready, u32 to, u64 source, u32 bytes) {
#if __CUDA_ARCH__ >= 900
        u64 once;
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(ready),
                     "r"(bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1], %2, [%3], %4;" ::"r"(to),
            "l"(source), "r"(bytes), "r"(ready), "l"(once)
            : "memory");
#endif
    }

    __device__ static void wait(u32 at, u32 parity) {
        u32 done = 0;
        while (!done) {
#if __CUDA_ARCH__ >= 900
            asm volatile(
                "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 "
                "%0, 1, 0, p; }"
                : "=r"(done)
                : "r"(at), "r"(parity)
                : "memory");
#else
            asm volatile(
                "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, "
                "0, p; }"
                : "=r"(done)
                : "r"(at), "r"(parity)
                : "memory");
#endif
        }
    }
};

#endif
