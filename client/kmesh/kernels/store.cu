// Paged KV to span payloads, with the sums of what was written.
#include "paged.cuh"
#include "upload.cuh"

template <typename V>
__device__ inline void gather(const Job *job, const Item &item, Sums *sums) {
    const u32 vectors = item.bytes / sizeof(V), in_row = job->by_vectors.value, at_once = 4;
    const Part *part = item.part;
    const Request *request = request_of(job, part->request_begin);
    V *payload = (V *)(part->address + item.begin);
    for (u32 begin = thread(); begin < vectors; begin += at_once * threads()) {
        V v[at_once];
        bool wanted[at_once];
#pragma unroll
        for (u32 k = 0; k < at_once; k++) {
            u32 i = begin + k * threads();
            wanted[k] = false;
            if (i >= vectors) continue;
            u32 row = job->by_vectors.divide(i), within = (i - row * in_row) * sizeof(V);
            Place place = place_of(job, part, item.row + row);
            wanted[k] = place.wanted;
            u32 at = (u32)part->position + place.token + request->shift;
            if (place.wanted)
                v[k] = load_once((const V *)(page_of(job, request, place.base, at) + within));
        }
#pragma unroll
        for (u32 k = 0; k < at_once; k++) {
            if (!wanted[k]) continue;
            u32 i = begin + k * threads();
            sums->take(v[k], i * (sizeof(V) / 4));
            store_once(payload + i, v[k]);
        }
    }
}

// Each byte is read once, so the sums are those of what was written. The last block tells them.
template <typename V>
__device__ inline void store(const Job *job, u64 *results, u32 *last) {
    for (u32 at = block(); at < job->items_count; at += blocks()) {
        Item item = item_at(job, at);
        if (!item.wanted[0] && !item.wanted[1]) continue;
        Sums sums(item);
        gather<V>(job, item, &sums);
        sums.give(job, item);
    }
    // Payloads may be the host's memory.
    system_fence();
    barrier();
    if (thread() == 0) *last = count((u32 *)((u8 *)job + job->counters)) + 1 == blocks();
    barrier();
    if (!*last) return;
    fence();
    const volatile u64 *sums = (const volatile u64 *)((const u8 *)job + job->sums);
    for (u32 t = thread(); t < job->tiles_count; t += threads())
        *(volatile u64 *)(results + t) = sums[t];
    system_fence();
}

KM_UPLOAD_ENTRY(kmesh_store_upload)

#ifndef KM_ENTRY
#define KM_ENTRY(name, vector)                                                                \
    extern "C" __global__ void __launch_bounds__(256, 4) name(const Job *job, u64 *results) { \
        __shared__ u32 last;                                                                  \
        store<vector>(job, results, &last);                                                   \
    }
#endif

KM_ENTRY(kmesh_store_16, Vec16)
KM_ENTRY(kmesh_store_4, Vec4)
