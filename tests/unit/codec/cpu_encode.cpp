// The code of the kernels that encode, compiled for the CPU. Blocks run one after the other, each
// by as many threads as are asked for, of which each is a warp of its own.
#include <pthread.h>

#include <thread>

#include "one_thread.hpp"

static thread_local u32 own_thread, own_block;
static u32 all_threads;
static pthread_barrier_t all_here;

template <typename T>
static void add_at_once(T *sum, T value) {
    __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

#define thread() own_thread
#define threads() all_threads
#define block() own_block
#define barrier() pthread_barrier_wait(&all_here)
#define add add_at_once
#define __shared__ static

template <typename Call>
static void run(u32 blocks, u32 threads_, Call call) {
    all_blocks = blocks, all_threads = threads_;
    pthread_barrier_init(&all_here, nullptr, threads_);
    auto all = [=](u32 number) {
        own_thread = number;
        for (own_block = 0; own_block < blocks; own_block++) {
            call();
            barrier();
        }
    };
    std::vector<std::thread> others;
    for (u32 i = 1; i < threads_; i++) others.emplace_back(all, i);
    all(0);
    for (std::thread &one : others) one.join();
    pthread_barrier_destroy(&all_here);
}

#define KM_ENTRY(name, call)                                                          \
    extern "C" void name(const Encoding *job, u32 *results, u32 blocks, u32 threads_) { \
        (void)results;                                                                \
        run(blocks, threads_, [=] { call; });                                         \
    }
#include "encode.cu"
