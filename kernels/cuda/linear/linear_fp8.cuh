/* linear_fp8.cuh: linears of FP8 or INT8 weights and activations of the same type, what linear_fp8_few.cuh and
 * linear_fp8_many.cuh share.
 *
 * A slab is 128 columns, of which a row of W has one scale. The activations get one, too, by fp8_quantise:
 *
 *   x_scale[r][s] = max(max over slab s of |x[r][k]| / largest, 2^-126)      x8[r][k] = round(x[r][k] * (1 / x_scale[r][s]))
 *   y[r][n] = fold over s = 0, 1, ... of sum = fmaf(p, x_scale[r][s] * w_scale[n][s], sum), from 0
 *
 * where p is the sum of the products of the slab, and the product of the scales is rounded. This order is the definition: all
 * kernels and numbers of rows follow it, so they give equal bits.
 *
 *   numbers   largest   round                   p
 *   e4m3      448       to nearest even         the tensor cores' sum, four k32 steps from zero
 *   s8        127       to nearest even         exact in int32; at most 128 * 127^2, which float32 holds exactly
 *
 * The tensor cores keep 13 bits below the largest product of e4m3 of a step; a new sum every slab makes the error of the sums
 * 2e-4 of the result, against 2e-3 of bfloat16. A NaN or an infinity among the activations of a slab makes their scale one, so
 * the outputs of the row are not finite. */
#ifndef LLMPY_CUDA_LINEAR_FP8_CUH
#define LLMPY_CUDA_LINEAR_FP8_CUH

#include "../core/eight.cuh"
#include "../core/fp8_rows.cuh"
#include "../core/launch.cuh"
#include "../core/ring.cuh"
#include "../core/shared.cuh"
#include "../core/tensor_map.cuh"

#include <cuda_fp8.h>

#define FP8_QUANTISERS 256u
#define FP8_LANES 16u       /* threads of a slab of a row */
#define FP8_TURNS 4u        /* slabs of a thread that are read together */
#define FP8_PADDED 128u     /* rows of x of many are padded to so many in x_scale */
#define FP8_CHUNK 4u        /* slabs whose scales of a row of W are fetched together, 16 bytes */

/* Rows of x as bytes, row_bytes apart, and their scales [slab][n_padded]. */
struct fp8_rows {
    uint8_t *numbers;
    float *scales;
    uint32_t row_bytes, n_padded;
};

/* The types of numbers: four, rounded to nearest even; and the sum of a slab as a float. */
struct e4m3 {
    typedef float sum;
    static constexpr float largest = 448;
    static __device__ __forceinline__ uint32_t four(const float *x)
    {
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x[0], x[1]), __NV_SATFINITE, __NV_E4M3);
        return low | (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(x[2], x[3]), __NV_SATFINITE, __NV_E4M3) << 16;
    }
};

struct s8 {
    typedef int32_t sum;
    static constexpr float largest = 127;
    static __device__ __forceinline__ uint32_t four(const float *x)
    {
        uint32_t all = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            all |= (uint32_t)(__float2int_rn(x[i]) & 0xff) << 8 * i;
        return all;
    }
};

/* Calls f with the type of the numbers of a matrix. */
template <class F> static auto visit_numbers(const struct matrix *matrix, F f)
{
    return matrix->parts[0].dtype == DTYPE_INT8_G128 ? f(s8()) : f(e4m3());
}

/* By the FP8_LANES threads of a slab, each with eight of its values. Magnitudes are compared as bits, in which a NaN is the
 * largest. */
template <class N>
static __device__ __forceinline__ void fp8_round_slab(float (&values)[8], uint32_t row, uint32_t slab,
                                                      const struct fp8_rows &to)
{
    const uint32_t lane = threadIdx.x % FP8_LANES, lanes = 0xffffu << threadIdx.x % 32 / FP8_LANES * FP8_LANES;
    uint32_t most = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        most = max(most, __float_as_uint(fabsf(values[i])));
#pragma unroll
    for (uint32_t apart = FP8_LANES / 2; apart; apart /= 2)
        most = max(most, __shfl_xor_sync(lanes, most, apart));
    const float wanted = __uint_as_float(most) / N::largest, scale = wanted < 0x1p-126f ? 0x1p-126f : wanted;
    const float inverse = 1.0f / scale;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        values[i] = values[i] * inverse;
    *(uint2 *)(to.numbers + (size_t)row * to.row_bytes + slab * FP8_SLAB + lane * 8) =
        make_uint2(N::four(values), N::four(values + 4));
    if (lane == 0)
        to.scales[(size_t)slab * to.n_padded + row] = scale;
}

/* Rounds slabs first, first + step, ... of a row, FP8_TURNS at a time; FP8_LANES threads have a slab. load(column, values)
 * reads eight values from a column on, zeros beyond the row. */
template <class N, class LOAD>
static __device__ __forceinline__ void fp8_round_slabs(uint32_t row, uint32_t first, uint32_t step, uint32_t n_slabs,
                                                       const struct fp8_rows &to, LOAD load)
{
    const uint32_t lane = threadIdx.x % FP8_LANES;
    for (; first < n_slabs; first += FP8_TURNS * step) {
        float values[FP8_TURNS][8];
#pragma unroll
        for (uint32_t i = 0; i < FP8_TURNS; i++)
            load((first + i * step) * FP8_SLAB + lane * 8, values[i]);
#pragma unroll
        for (uint32_t i = 0; i < FP8_TURNS; i++)
            if (first + i * step < n_slabs)
                fp8_round_slab<N>(values[i], row, first + i * step, to);
    }
}

/* Blocks: [rows][parts of a row]. Bound by the bytes of x; of few rows by the launch. */
template <class T, class N, bool IS_ALIGNED>
static __global__ void __launch_bounds__(FP8_QUANTISERS) linear_fp8_quantise(rows<T> x, uint32_t n_slabs, struct fp8_rows to)
{
    start_next();
    wait_for_input();
    fp8_round_slabs<N>(blockIdx.x, (blockIdx.y * FP8_QUANTISERS + threadIdx.x) / FP8_LANES,
                       gridDim.y * (FP8_QUANTISERS / FP8_LANES), n_slabs, to, [&](uint32_t column, float (&values)[8]) {
                           load_part<IS_ALIGNED>(x.at(blockIdx.x, 0), column, x.width, values);
                       });
}

/* ---- sums ---------------------------------------------------------------------------------------------------------------- */

/* Warpgroups that do not take turns. */
struct no_turns {
    __device__ __forceinline__ void take(void) const {}
    __device__ __forceinline__ void pass(void) const {}
};

/* Sums n_slabs slabs that come in stages of so many. Two stages of sums are under way: while one is folded, the tensor cores
 * make the other. multiply(sums, place, slab) starts the products of a stage whose first slab is `slab`, and
 * fold(sums, place, slab) adds those of a finished one and gives it back. turns: between the products of one warpgroup and
 * those of the next. */
template <uint32_t SLABS, class S, class M, class F, class T = no_turns>
static __device__ __forceinline__ void fp8_sum_stages(S &even, S &odd, const struct ring &ring, struct ring_place &at,
                                                      uint32_t n_slabs, M multiply, F fold, T turns = T())
{
    uint32_t slab = 0;
    for (; slab + SLABS < n_slabs; slab += 2 * SLABS) {
        struct ring_place next = at;
        ring.next(next);
        turns.take();
        multiply(even, at, slab);
        multiply(odd, next, slab + SLABS);
        turns.pass();
        wgmma_wait<1>();
        fold(even, at, slab);
        wgmma_wait<0>();
        fold(odd, next, slab + SLABS);
        at = next;
        ring.next(at);
    }
    if (slab >= n_slabs)
        return;
    turns.take();
    multiply(even, at, slab);
    turns.pass();
    wgmma_wait<0>();
    fold(even, at, slab);
    ring.next(at);
}

/* The same for two warpgroups that take turns, with slabs of a stage each: fold_both(sums, sums, place, place, slab) adds two
 * slabs while the products of the other warpgroup are made. */
template <class S, class M, class F, class B, class T>
static __device__ __forceinline__ void fp8_sum_jointly(S &even, S &odd, const struct ring &ring, struct ring_place &at,
                                                       uint32_t n_slabs, M multiply, F fold, B fold_both, T turns)
{
    uint32_t slab = 0;
    for (; slab + 1 < n_slabs; slab += 2) {
        struct ring_place next = at;
        ring.next(next);
        turns.take();
        multiply(even, at, slab);
        multiply(odd, next, slab + 1);
        turns.pass();
        wgmma_wait<0>();
        fold_both(even, odd, at, next, slab);
        at = next;
        ring.next(at);
    }
    if (slab >= n_slabs)
        return;
    turns.take();
    multiply(even, at, slab);
    turns.pass();
    wgmma_wait<0>();
    fold(even, at, slab);
    ring.next(at);
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

/* How the few-row kernel reads a matrix: tiles of tile_rows rows, as numbers in stages of some slabs, and their scales. */
struct fp8_form {
    struct skinny_form numbers;
    struct tensor_map scales;
};

/* Of a matrix whose products round their activations to 8 bits. */
struct fp8_matrix {
    struct fp8_form forms[2][3]; /* as sums and as gate | up; for up to 16, 32 and 64 rows of x */
    const struct matrix *matrix;
    struct fp8_matrix *next;     /* in the context's list */
    bool is_shared;              /* 64 rows share their scales, by the last comparison */
    bool is_of_rows;             /* ... or else all slabs of a row do */
    bool is_compared;            /* they have been compared since they were written */
    uint32_t was;                /* bits of both, as the last comparison found them; recorded graphs count on it */
};

/* The map of the scales of a matrix whose first row's first scale is at data: boxes of the chunks of box_rows rows. */
static inline enum rc fp8_scale_map(map_encoder encode, uint32_t dtype, const void *data, uint64_t row_bytes, uint32_t n_rows,
                             uint32_t n_chunks, bool is_pairs, uint32_t box_rows, struct tensor_map *map, struct err *err)
{
    const uint32_t half = n_rows / 2;
    const struct map_dims plain = {2, {n_rows, n_chunks}, {row_bytes, 16}, {box_rows, 1}};
    const struct map_dims pairs = {4, {8, 2, half / 8, n_chunks}, {row_bytes, half * row_bytes, 8 * row_bytes, 16},
                                   {8, 2, box_rows / 16, 1}};
    return map_make_as(encode, {map_type(dtype), 8, CU_TENSOR_MAP_SWIZZLE_NONE}, data, is_pairs ? &pairs : &plain, map, err);
}

/* Memory for the activations of one linear, of the most rows and the most columns of all matrices. */
struct fp8_memory {
    uint8_t *numbers;
    float *scales;
    size_t numbers_bytes, scales_bytes;
    struct fp8_matrix *first; /* of the matrices that use it */
};

static inline uint32_t fp8_most_rows(const struct cuda *cuda)
{
    const struct backend_options *o = &cuda->options;
    const uint32_t n = o->max_rows > o->max_logits_rows ? o->max_rows : o->max_logits_rows;
    return ceil_div(n, FP8_PADDED) * FP8_PADDED;
}

static inline enum rc fp8_grow(struct cuda *cuda, void **memory, size_t *have, size_t wanted, struct err *err)
{
    if (wanted <= *have)
        return RC_OK;
    cuda_give(cuda, *memory);
    *memory = NULL;
    *have = 0;
    enum rc rc = cuda_take(cuda, MEMORY_WORK, wanted, memory, err);
    *have = rc ? 0 : wanted;
    return rc;
}

/* Makes room for the activations of a matrix of n_cols columns. */
static inline enum rc fp8_make_room(struct cuda *cuda, struct fp8_memory *memory, uint32_t n_cols, struct err *err)
{
    const size_t n_slabs = fp8_slabs(n_cols), most = fp8_most_rows(cuda);
    enum rc rc = fp8_grow(cuda, (void **)&memory->numbers, &memory->numbers_bytes, most * n_slabs * FP8_SLAB, err);
    /* The last stage of a row's scales is fetched whole. */
    const size_t scales_bytes = (n_slabs + FP8_CHUNK) * most * sizeof(float);
    return rc ? rc : fp8_grow(cuda, (void **)&memory->scales, &memory->scales_bytes, scales_bytes, err);
}

#define FP8_QUANTISERS_EACH 8u /* blocks of a processor that read few rows together, at most */

/* Rounds the rows of x to the numbers of a matrix. Of few rows many blocks have a part each. */
static inline struct fp8_rows fp8_quantise(const struct cuda *cuda, const struct fp8_memory *memory,
                                           const struct matrix *matrix, const struct view *x, uint32_t n_rows,
                                           uint32_t n_padded)
{
    const uint32_t n_slabs = fp8_slabs(x->width);
    const struct fp8_rows to = {memory->numbers, memory->scales, n_slabs * FP8_SLAB, n_padded};
    const uint32_t n_turns = ceil_div(n_slabs, FP8_QUANTISERS / FP8_LANES);
    const uint32_t n_room = FP8_QUANTISERS_EACH * cuda->n_processors / n_rows;
    const uint32_t n_parts = n_room < 1 ? 1 : n_room < n_turns ? n_room : n_turns;
    const auto start = [&](auto value, auto number) {
        using T = decltype(value);
        using N = decltype(number);
        launch(cuda, has_eights<T>(*x) ? linear_fp8_quantise<T, N, true> : linear_fp8_quantise<T, N, false>,
               dim3(n_rows, n_parts), FP8_QUANTISERS, 0, rows<T>(*x), n_slabs, to);
    };
    visit_numbers(matrix, [&](auto number) {
        cuda->dtype == DTYPE_F16 ? start(__half(), number) : start(__nv_bfloat16(), number);
    });
    return to;
}

#endif
