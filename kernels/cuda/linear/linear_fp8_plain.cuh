/* linear_fp8_plain.cuh: the linears of linear_fp8.cuh by mma.sync of any device, for any number of rows of x. A warp has 16
 * rows of W by 8 rows of x; lane g = lane / 4, t = lane % 4 holds rows g and g + 8 of W, row g of x.
 *
 *   numbers   p
 *   s8        exact, the bits of all other kernels
 *   e4m3      products widened to float16, which is exact, in eight k16 steps from zero with float32 sums. These keep more bits
 *             than the sums of sm_90a, so on devices that run this code all rows come here
 *
 * Bound by latency. */
#ifndef LLMPY_CUDA_LINEAR_FP8_PLAIN_CUH
#define LLMPY_CUDA_LINEAR_FP8_PLAIN_CUH

#include "../core/e4m3.cuh"
#include "../core/mma.cuh"
#include "linear.cuh"
#include "linear_fp8.cuh"

/* The products of a slab; low, high, x: a lane's rows from the slab's first column on. Which column a place of an operand
 * stands for does not matter, if it is the same one in both: here a lane's four bytes are the two pairs of a k16 step. */
static __device__ __forceinline__ void fp8_plain_slab(float (&p)[4], const uint8_t *low, const uint8_t *high, const uint8_t *x,
                                                      struct e4m3)
{
    for (uint32_t i = 0; i < 4; i++)
        p[i] = 0;
#pragma unroll
    for (uint32_t k = 0; k < FP8_SLAB; k += 16) {
        const uint2 first = widen_e4m3(*(const uint32_t *)(low + k)), second = widen_e4m3(*(const uint32_t *)(high + k));
        const uint2 own = widen_e4m3(*(const uint32_t *)(x + k));
        const uint32_t a[4] = {first.x, second.x, first.y, second.y}, b[2] = {own.x, own.y};
        mma(p, a, b, __half());
    }
}

static __device__ __forceinline__ void fp8_plain_slab(float (&p)[4], const uint8_t *low, const uint8_t *high, const uint8_t *x,
                                                      struct s8)
{
    int32_t sum[4] = {};
#pragma unroll
    for (uint32_t k = 0; k < FP8_SLAB; k += 32) {
        const uint32_t a[4] = {*(const uint32_t *)(low + k), *(const uint32_t *)(high + k), *(const uint32_t *)(low + k + 16),
                               *(const uint32_t *)(high + k + 16)};
        const uint32_t b[2] = {*(const uint32_t *)(x + k), *(const uint32_t *)(x + k + 16)};
        mma(sum, a, b);
    }
    for (uint32_t i = 0; i < 4; i++)
        p[i] = (float)sum[i];
}

/* Two rows of W, and one of x, of which a lane multiplies its columns. scale(slab, i): the scale of row 2 t + i % 2 of x. */
template <class N, class S>
static __device__ __forceinline__ void fp8_plain_sums(float (&sum)[4], const uint8_t *low, const uint8_t *high,
                                                      const uint8_t *x, uint32_t n_slabs, S scale)
{
    const uint32_t own = threadIdx.x % 4 * 4;
    for (uint32_t slab = 0; slab < n_slabs; slab++) {
        const float w[2] = {*((const float *)low - 1 - slab), *((const float *)high - 1 - slab)};
        const uint32_t first = slab * FP8_SLAB + own;
        float p[4];
        fp8_plain_slab(p, low + first, high + first, x + first, N());
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            sum[i] = fmaf(p[i], scale(slab, i) * w[i / 2], sum[i]);
    }
}

template <class T, class N>
static __global__ void __launch_bounds__(32)
linear_fp8_plain(const char *w, size_t w_row_bytes, struct fp8_rows x, uint32_t n_slabs, struct output out)
{
    const uint32_t g = threadIdx.x / 4, t = threadIdx.x % 4, n = blockIdx.x * 16 + g, first = blockIdx.y * 8;
    /* Rows beyond the last read the last row; their sums are not stored. */
    const uint8_t *low = (const uint8_t *)w + min(n, out.n_out - 1) * w_row_bytes;
    const uint8_t *high = (const uint8_t *)w + min(n + 8, out.n_out - 1) * w_row_bytes;
    const uint8_t *row = x.numbers + (size_t)min(first + g, out.n_rows - 1) * x.row_bytes;
    const float *scales = x.scales + first + 2 * t;
    float sum[4] = {};
    start_next();
    wait_for_input();
    fp8_plain_sums<N>(sum, low, high, row, n_slabs,
                      [&](uint32_t slab, uint32_t i) { return scales[(size_t)slab * x.n_padded + i % 2]; });
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        put<T>(out, first + 2 * t + i % 2, n + i / 2 * 8, sum[i]);
}

#endif
