// Span payloads to paged KV, for all layers and all requests of a job in one launch.
#include "moving.cuh"
#include "units.cuh"

// Of a stage.
enum { UNIT_BYTES = 32768 };

// Items are cut from whole payloads; an entry is a page's address, its lowest bit set for a key that
// is to be turned.
template <bool TURN>
struct SpanRows {
    static const u32 UNROLL = 4;

    __device__ static void find(const Job *job, u32 index, Share &share) {
        share.item = item_at(job, index);
        share.rows = share.item.bytes / job->row_bytes;
        share.wanting = 32 - leading_zeros(share.item.part->requests);
    }

    __device__ static bool tile_wanted(const Job *job, const Part *part, u32 tile) {
        return ::tile_wanted(job, part, tile - part->tile_begin + part->first_tile);
    }

    __device__ static void address(const Job *job, const Share &share, u64 *table) {
        const Part *part = share.item.part;
        const u32 wanting = part->requests >> share.first;
        const Request *requests = request_of(job, part->request_begin + share.first);
#pragma unroll 2
        for (u32 row = lane(); row < share.rows; row += lanes()) {
            Place place = place_of(job, part, share.item.row + row);
            u32 at = (u32)part->position + place.token;
#pragma unroll 4
            for (u32 r = 0; r < share.requests; r++) {
                u64 entry = 0;
                if (place.wanted && wanting >> r & 1) {
                    entry = page_of(job, requests + r, place.base, at + requests[r].shift);
                    if (TURN && place.key && requests[r].turns != NONE) entry |= 1;
                }
                table[r * share.rows + row] = entry;
            }
        }
    }

    __device__ static u64 origin(const Job *) { return 0; }
    __device__ static u64 above(u64 entry) { return entry & ~(u64)1; }
    __device__ static bool turns(u64 entry) { return TURN && entry & 1; }

    __device__ static const float2 *turn(const Job *job, const Item &item, u32 request, u64) {
        const float2 *turns = (const float2 *)((const u8 *)job + job->turns);
        return turns + request_of(job, item.part->request_begin + request)->turns;
    }
};

// What can be moved in units first, then the rest.
template <typename V, bool TURN, bool UNITS>
__device__ inline void restore(const Job *job, u32 *results, Range range, u8 *shared) {
    typedef SpanRows<TURN> Rows;
    const u32 begin = items_before(job, range.begin), end = items_before(job, range.end);
    if (UNITS) {
        Ring<Vec16> ring(shared, job->unit_stages, UNIT_BYTES, job->unit_entries, UNIT_PRODUCERS);
        const Lot lot = {units_before(job, range.begin) + block(), units_before(job, range.end),
                         blocks()};
        move<UNIT_PRODUCERS, UnitProducer, UnitConsumers>(job, ring, range, lot, unit_summers());
        if (begin == end) {
            // The sums are known while pages are still written.
            const Crew crew = unit_summers();
            if (crew.has()) finish<Rows, 16>(job, results, range, shared, crew);
            return;
        }
        ring.end();
    }
    {
        Ring<V> ring(shared, job->stages, ITEM_BYTES, job->entries);
        const Lot lot = {begin + block(), end, blocks()};
        move<1, Producer<V, Rows>, Consumer<V, Rows>>(job, ring, range, lot,
                                               UNITS ? nobody() : all_consumers());
    }
    finish<Rows>(job, results, range, shared, everybody());
}

KM_UPLOAD_ENTRY(kmesh_restore_upload)

#ifndef KM_ENTRY
#define KM_ENTRY(name, vector, turn, units, threads, resident)             \
    extern "C" __global__ void __launch_bounds__(threads, resident)        \
        name(const Job *job, u32 *results, Range range) {                  \
        extern __shared__ __align__(1024) u8 shared[];                     \
        restore<vector, turn, units>(job, results, range, shared);         \
    }
#endif

KM_ENTRY(kmesh_restore_16, Vec16, false, false, 288, 4)
KM_ENTRY(kmesh_restore_4, Vec4, false, false, 288, 4)
KM_ENTRY(kmesh_restore_turn_16, Vec16, true, false, 288, 3)
KM_ENTRY(kmesh_restore_turn_4, Vec4, true, false, 288, 3)
KM_ENTRY(kmesh_restore_units_16, Vec16, false, true, 640, 1)
