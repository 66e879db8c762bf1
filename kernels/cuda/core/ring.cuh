/* ring.cuh: a ring of stages in shared memory. The fetching side fills a stage by the copy engine, the reading side multiplies
 * what is in it. Both walk the stages in order, each with its own place. A stage has two barriers:
 *
 *   full   opens when every fetching thread has said how many bytes it expects, and these bytes are there
 *   empty  opens when every reading warp has released the stage
 *
 * A barrier tells a round from the round before, so a side is never two rounds ahead of the other. */
#ifndef LLMPY_CUDA_RING_CUH
#define LLMPY_CUDA_RING_CUH

#include "wgmma.cuh"

/* A stage, and the parity of its round. */
struct ring_place {
    uint32_t stage, phase;
};
#define RING_FETCH {0, 1} /* the first place of the fetching side, which finds every stage empty in the first round */
#define RING_READ {0, 0}  /* that of the reading side */

struct ring {
    uint32_t data, full, empty; /* addresses: the stages, and the barriers, eight bytes a stage */
    uint32_t n_stages, stage_bytes;

    /* By the whole block, before barriers_made. */
    __device__ __forceinline__ void make_barriers(uint32_t n_fetching, uint32_t n_reading) const
    {
        barriers_init(full, n_stages, n_fetching);
        barriers_init(empty, n_stages, n_reading);
    }
    __device__ __forceinline__ void next(struct ring_place &at) const
    {
        if (++at.stage == n_stages) {
            at.stage = 0;
            at.phase ^= 1;
        }
    }
    __device__ __forceinline__ uint32_t data_of(const struct ring_place &at) const
    {
        return data + at.stage * stage_bytes;
    }
    __device__ __forceinline__ uint32_t full_of(const struct ring_place &at) const
    {
        return full + 8 * at.stage;
    }

    /* ---- the fetching side ---- */

    __device__ __forceinline__ void wait_empty(const struct ring_place &at) const
    {
        barrier_wait(empty + 8 * at.stage, at.phase);
    }
    /* Waits for room. The barrier to which the copies count n_bytes. */
    __device__ __forceinline__ uint32_t expect(const struct ring_place &at, uint32_t n_bytes) const
    {
        wait_empty(at);
        barrier_expect(full_of(at), n_bytes);
        return full_of(at);
    }
    /* Waits until the reading side has released everything. */
    __device__ __forceinline__ void drain(struct ring_place at) const
    {
        for (uint32_t i = 0; i < n_stages; i++, next(at))
            wait_empty(at);
    }

    /* ---- the reading side ---- */

    __device__ __forceinline__ void wait_full(const struct ring_place &at) const
    {
        barrier_wait(full_of(at), at.phase);
    }
    __device__ __forceinline__ bool is_full(const struct ring_place &at) const
    {
        return barrier_test(full_of(at), at.phase);
    }
    __device__ __forceinline__ void release(uint32_t stage) const
    {
        barrier_arrive(empty + 8 * stage);
    }
};

/* Limits how many stages a fetching thread asks for beyond those that it has seen arrive. The ring's `full` counts this thread
 * alone. */
struct ring_pace {
    struct ring_place there;
    uint32_t n_asked;
    __device__ __forceinline__ void hold(const struct ring &ring, uint32_t n_ahead)
    {
        if (n_asked++ < n_ahead)
            return;
        ring.wait_full(there);
        ring.next(there);
    }
};

#endif
