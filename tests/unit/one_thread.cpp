// The kernels' own code, compiled for the CPU.
#include "one_thread.hpp"

static u8 shared_memory[SHARED] __attribute__((aligned(1024)));

#define RUN(call)                                                            \
    for (all_blocks = n, this_block = 0; this_block < n; this_block++) call;

#define KM_UPLOAD_ENTRY(name)                                                          \
    extern "C" void name(Vec16 *job, const Vec16 *written, u32 n, Range vectors) { \
        RUN(upload(job, written, vectors))                                           \
    }

#define KM_ENTRY(name, vector, turn, units, threads, resident)              \
    extern "C" void name(const Job *job, u32 *results, u32 n, Range range) { \
        RUN((restore<vector, turn, units>(job, results, range, shared_memory))) \
    }
#include "restore.cu"
#undef KM_ENTRY

#define KM_ENTRY(name, vector, threads, resident)                           \
    extern "C" void name(const Job *job, u32 *results, u32 n, Range range) { \
        RUN((restore_round<vector>(job, results, range, shared_memory)))     \
    }
#define KM_FETCH_ENTRY(name)                                                                \
    extern "C" void name(const Fetched *pieces, Vec16 *found, u32 n, Range range) { \
        RUN(fetch(pieces, found, range))                                                    \
    }
#include "round.cu"
#undef KM_ENTRY

static u32 last_block;
#define KM_ENTRY(name, vector)                                              \
    extern "C" void name(const Job *job, u64 *results, u32 n) {             \
        RUN((store<vector>(job, results, &last_block)))                     \
    }
#include "store.cu"
