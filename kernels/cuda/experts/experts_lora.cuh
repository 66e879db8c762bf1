/* experts_lora.cuh: what adapters add to the products of experts (struct experts_lora). A launch before up and one before down
 * compute t = A x of every place; the plain products add scale * (B t) before they round. Orders, by the adapter alone: t has a
 * chain a lane over every 32nd column, then pairwise over lanes; B t is one chain over the rank. Bound by latency. */
#ifndef LLMPY_CUDA_EXPERTS_LORA_CUH
#define LLMPY_CUDA_EXPERTS_LORA_CUH

#include "../linear/lora.cuh"
#include "experts.cuh"

#define ADDED_WARPS 4u

/* slots: NULL: nothing is added. */
struct experts_added {
    const char *slots;
    size_t slot_bytes;
    const int32_t *row_slots;
    float *t; /* [n_routes][2][max_rank], by places */
    uint32_t max_rank;
    struct experts_lora_parts given;
    __device__ __forceinline__ const char *slot(const struct mixture &m, uint32_t place) const
    {
        const int32_t slot = row_slots[m.entries[place] / m.n_chosen];
        return slot < 0 ? NULL : slots + (size_t)(uint32_t)slot * slot_bytes;
    }
    __device__ __forceinline__ float *t_of(uint32_t place, uint32_t part) const
    {
        return t + ((size_t)place * 2 + part) * max_rank;
    }
    /* For row n of the expert's matrix. */
    __device__ __forceinline__ float value(const struct mixture &m, uint32_t expert, uint32_t place, uint32_t n) const
    {
        const char *from = slot(m, place);
        if (!from)
            return -0.0f; /* x + -0.0 has the bits of x */
        const uint32_t p = given.n_parts > 1 && n >= given.parts[0].n_rows;
        const struct lora_part &part = given.parts[p];
        from += expert * given.step;
        const uint32_t rank = *(const uint32_t *)(from + part.head);
        const float *b = (const float *)(from + part.b) + (n - part.first_row), *own = t_of(place, p);
        float sum = 0;
        for (uint32_t j = 0; j < rank; j++)
            sum = fmaf(own[j], b[(size_t)j * part.n_rows], sum);
        return rank ? *(const float *)(from + part.head + 4) * sum : -0.0f;
    }
};

/* Block (place, part). */
template <class T>
static __global__ void __launch_bounds__(32 * ADDED_WARPS) experts_shrink(struct mixture m, rows<T> x, uint32_t n_cols,
                                                                          const __grid_constant__ experts_added added)
{
    start_next();
    wait_for_input();
    const uint32_t place = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct lora_part &part = added.given.parts[blockIdx.y];
    const char *from = added.slot(m, place);
    if (!from)
        return;
    from += (uint32_t)route_at(m, m.entries[place])->expert * added.given.step;
    const uint32_t rank = *(const uint32_t *)(from + part.head);
    const T *row = x.at(place, 0);
    for (uint32_t j = warp; j < rank; j += ADDED_WARPS) {
        const float *a = (const float *)(from + part.a) + (size_t)j * n_cols;
        float sum = 0;
#pragma unroll 4
        for (uint32_t c = lane; c < n_cols; c += 32)
            sum = fmaf(a[c], to_float(row[c]), sum);
        for (uint32_t apart = 16; apart; apart /= 2)
            sum += __shfl_xor_sync(~0u, sum, apart);
        if (lane == 0)
            added.t_of(place, blockIdx.y)[j] = sum;
    }
}

#endif
