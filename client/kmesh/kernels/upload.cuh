// What each program has for its jobs.
#pragma once
#include "device.cuh"

// Of the job: parts that one launch moves, or vectors that it brings.
struct Range { u32 begin, end; };

// A job, of so many vectors, from where the host wrote it. The copy engine would bring it behind all
// that it has been asked for, on whatever stream.
__device__ inline void upload(Vec16 *job, const Vec16 *written, Range vectors) {
    const u32 step = threads() * blocks();
    for (u32 i = vectors.begin + block() * threads() + thread(); i < vectors.end; i += step)
        job[i] = load_once(written + i);
}

#ifndef KM_UPLOAD_ENTRY
#define KM_UPLOAD_ENTRY(name)                                                            \
    extern "C" __global__ void name(Vec16 *job, const Vec16 *written, Range vectors) { \
        upload(job, written, vectors);                                                   \
    }
#endif
