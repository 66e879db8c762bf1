/* linear_w4.cuh: linears of 4-bit weights in groups and bfloat16 activations: what linear_w4_few.cuh and linear_w4_many.cuh
 * share, and the plain kernel for x that the copy engine cannot read. Weights lie as int4_units.cuh says.
 *
 * A slab is 128 columns. The tensor cores multiply x by q - zero, which bfloat16 holds exactly:
 *
 *   groups of 128: sum = fmaf(p, scale, sum) for each slab, ascending, from 0
 *   groups of 32:  v = fmaf(p, scale, v) for each group of a slab, from 0; sum = sum + v for each slab, from 0
 *
 * where p is a group's chain of k16 steps from zero. This order is the definition: all kernels and numbers of rows follow it,
 * and mma.sync gives the bits of wgmma, so they give equal bits. Slabs are independent until they are added, so warps share
 * them out. Weights are exact, unlike in bfloat16, which rounds them by 2e-3. */
#ifndef LLMPY_CUDA_LINEAR_W4_CUH
#define LLMPY_CUDA_LINEAR_W4_CUH

#include "../core/int4_units.cuh"
#include "../core/launch.cuh"
#include "../core/mma.cuh"
#include "../core/ring.cuh"
#include "../core/shared.cuh"
#include "linear.cuh"

#include <type_traits>

/* ---- numbers ------------------------------------------------------------------------------------------------------------- */

/* 128 + q of the lowest numbers of both halves of a word, as bfloat16. */
static __device__ __forceinline__ uint32_t w4_numbers(uint32_t word)
{
    uint32_t both;
    asm("lop3.b32 %0,%1,0x000f000f,0x43004300,0xea;" : "=r"(both) : "r"(word)); /* (word & mask) | 128 */
    return both;
}

/* 128 + zero, twice. */
static __device__ __forceinline__ uint32_t w4_zeros(uint32_t header)
{
    return 0x43004300u + (header & 0xff) * 0x00010001u;
}

static __device__ __forceinline__ float w4_scale(uint32_t header)
{
    return __uint_as_float(header & 0xffffff00u);
}

static __device__ __forceinline__ uint32_t w4_subtract(uint32_t a, uint32_t b)
{
    const __nv_bfloat162 rest = __hsub2(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b);
    return *(const uint32_t *)&rest;
}

/* Operand A of a step. low, high: w4_zeros of rows lane / 4 and 8 further on. */
static __device__ __forceinline__ void w4_unpack(uint32_t word, uint32_t low, uint32_t high, uint32_t (&a)[4])
{
    a[0] = w4_subtract(w4_numbers(word), low);
    a[1] = w4_subtract(w4_numbers(word >> 4), high);
    a[2] = w4_subtract(w4_numbers(word >> 8), low);
    a[3] = w4_subtract(w4_numbers(word >> 12), high);
}

/* The words of four steps. */
static __device__ __forceinline__ void w4_load(uint32_t (&words)[4], uint32_t address)
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

/* Adds a group's or a slab's sums of four outputs: rows lane / 4, twice, then 8 further on, twice. */
static __device__ __forceinline__ void w4_add(float (&sum)[4], const float (&p)[4], float low, float high)
{
    sum[0] = fmaf(p[0], low, sum[0]);
    sum[1] = fmaf(p[1], low, sum[1]);
    sum[2] = fmaf(p[2], high, sum[2]);
    sum[3] = fmaf(p[3], high, sum[3]);
}

/* ---- any x --------------------------------------------------------------------------------------------------------------- */

/* A warp has a panel by 8 rows of x. Blocks: [panels][eights of rows]. Bound by latency. */
template <uint32_t DTYPE>
static __global__ void __launch_bounds__(32)
linear_w4_plain(const struct int4_units w, rows<__nv_bfloat16> x, uint32_t n_cols, struct output out)
{
    const uint32_t lane = threadIdx.x, g = lane / 4, t = lane % 4, groups = unit_groups(DTYPE), steps = 8 / groups;
    const uint16_t *row = (const uint16_t *)x.at(min(blockIdx.y * 8 + g, out.n_rows - 1), 0);
    const uint8_t *unit = w.data + (size_t)blockIdx.x * w.n_slabs * unit_bytes(DTYPE);
    start_next();
    wait_for_input();
    float sum[4] = {};
    for (uint32_t slab = 0; slab < w.n_slabs; slab++, unit += unit_bytes(DTYPE)) {
        float v[4] = {};
        for (uint32_t group = 0; group < groups; group++) {
            const uint32_t *headers = (const uint32_t *)(unit + UNIT_WORDS_BYTES) + group * 16;
            const uint32_t low = headers[g], high = headers[g + 8];
            float p[4] = {};
            for (uint32_t step = group * steps; step < (group + 1) * steps; step++) {
                const uint32_t k = slab * UNIT_COLUMNS + step * 16 + 2 * t;
                const uint32_t b[2] = {pair_at(row, k, n_cols, false), pair_at(row, k + 8, n_cols, false)};
                uint32_t a[4];
                w4_unpack(((const uint32_t *)unit)[step / 4 * 128 + lane * 4 + step % 4], w4_zeros(low), w4_zeros(high), a);
                mma(p, a, b, __nv_bfloat16());
            }
            w4_add(groups == 1 ? sum : v, p, w4_scale(low), w4_scale(high));
        }
        for (uint32_t i = 0; i < 4 && groups > 1; i++)
            sum[i] = sum[i] + v[i];
    }
    for (uint32_t i = 0; i < 4; i++)
        put<__nv_bfloat16>(out, blockIdx.y * 8 + 2 * t + i % 2, w.row_of(blockIdx.x, g + i / 2 * 8), sum[i]);
}

/* Calls f with the type of a matrix that lies in units. */
template <class F> static void visit_int4(uint32_t dtype, F f)
{
    if (dtype == DTYPE_INT4_G128)
        f(std::integral_constant<uint32_t, DTYPE_INT4_G128>());
    else
        f(std::integral_constant<uint32_t, DTYPE_INT4_G32>());
}

static void w4_plain_multiply(const struct cuda *cuda, const struct matrix *matrix, const struct view *x,
                              const struct output &out)
{
    visit_int4(matrix->parts[0].dtype, [&](auto type) {
        const struct int4_units w = units_of(matrix);
        launch(cuda, linear_w4_plain<type()>, dim3(w.n_panels(), ceil_div(out.n_rows, 8)), 32, 0, w, rows<__nv_bfloat16>(*x),
               matrix->n_cols, out);
    });
}

#endif
