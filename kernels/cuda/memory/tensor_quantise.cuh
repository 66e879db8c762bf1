/* tensor_quantise.cuh: rows of floats on the device, rounded to the types of csrc/base/quantise.h with its bits. A block takes
 * a row, a warp blocks of the type, a lane 4 adjacent columns of each (1 where a block has 32). FP8's scale is that of the
 * whole row, which is read twice. Bound by memory: 16 GB of bfloat16 and 8 GB of FP8 take 6 ms at 4 TB/s, if threads have
 * several loads in flight. And the count of values that cannot be rounded, which an update asks for before it writes: 4 ms. */
#ifndef LLMPY_CUDA_TENSOR_QUANTISE_CUH
#define LLMPY_CUDA_TENSOR_QUANTISE_CUH

extern "C" {
#include "../../../csrc/base/round_number.h"
}

#ifdef __CUDACC__
#include <cuda_fp8.h>
#endif

#define QUANTISE_THREADS 256u
#define QUANTISE_WARPS (QUANTISE_THREADS / 32)
#define LOADS_AT_ONCE 4u /* of a thread */
#define COUNT_VALUES (QUANTISE_THREADS * LOADS_AT_ONCE * 8) /* of a piece of tensor_sum_beyond */

/* Rows of floats of any strides. */
template <class S> struct float_rows {
    const S *data;
    int64_t row_stride, col_stride;
    uint32_t n_cols;
};

/* Adjacent values that are loaded at once. */
template <class S, uint32_t N> struct alignas(N * sizeof(S) < 16 ? N * sizeof(S) : 16) adjacent {
    S values[N];
};

/* Can all rows be loaded as adjacent<S, N>? */
template <uint32_t N, class S> static inline bool are_dense(const struct float_rows<S> &from)
{
    const size_t align = alignof(struct adjacent<S, N>);
    return from.col_stride == 1 && from.n_cols % N == 0 && (uintptr_t)from.data % align == 0 &&
           from.row_stride * (int64_t)sizeof(S) % (int64_t)align == 0;
}

/* Values of a row from column `first` on; 0 behind its end. */
template <bool IS_DENSE, class S, uint32_t N>
static __device__ __forceinline__ void load_values(const S *x, uint32_t first, const struct float_rows<S> &from,
                                                   float (&values)[N])
{
    if constexpr (IS_DENSE) {
        struct adjacent<S, N> in = {};
        if (first < from.n_cols)
            in = *(const struct adjacent<S, N> *)(x + first);
        for (uint32_t i = 0; i < N; i++)
            values[i] = to_float(in.values[i]);
    } else {
        for (uint32_t i = 0; i < N; i++)
            values[i] = first + i < from.n_cols ? to_float(x[(int64_t)(first + i) * from.col_stride]) : 0;
    }
}

/* Rows of blocks: as a file has them, or (is_split) as fp8_rows.cuh has them, `data` being the first row's numbers. */
struct block_rows {
    uint8_t *data;
    size_t row_bytes;
    bool is_split;
};

/* How a type is rounded: what of a block's lanes share, and the bits of a number. */
template <uint32_t DTYPE> struct rounding {
    static const bool is_fp8 = DTYPE == DTYPE_FP8, is_int4 = DTYPE == DTYPE_INT4_G128 || DTYPE == DTYPE_INT4_G32;
    static const uint32_t bits = is_int4 ? 4 : 8, n_values = DTYPE == DTYPE_INT4_G32 || DTYPE == DTYPE_INT8_G32 ? 32 : 128;
    static const uint32_t n_each = n_values / 32, header_bytes = 4, n_bytes = header_bytes + n_values * bits / 8;
};

struct largest_of {
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};

static __device__ __forceinline__ uint32_t magnitude_bits(float value)
{
    return round_bits(value) & 0x7fffffffu;
}

/* The header of a block of a warp's values; of_row: bits of the largest magnitude of the row. */
template <uint32_t DTYPE>
static __device__ __forceinline__ uint32_t quantise_header(const float (&values)[rounding<DTYPE>::n_each], uint32_t of_row)
{
    typedef rounding<DTYPE> how;
    if (how::is_fp8)
        return round_bits(round_scale(of_row, 448));
    int32_t low = 0, high = 0;
    for (uint32_t i = 0; i < how::n_each; i++) {
        const int32_t value = how::is_int4 ? round_ordered(round_bits(values[i])) : (int32_t)magnitude_bits(values[i]);
        low = min(low, value);
        high = max(high, value);
    }
    for (uint32_t lanes = 16; lanes; lanes /= 2) {
        low = min(low, (int32_t)__shfl_xor_sync(0xffffffffu, low, lanes));
        high = max(high, (int32_t)__shfl_xor_sync(0xffffffffu, high, lanes));
    }
    return how::is_int4 ? round_int4_header(low, high) : round_bits(round_scale((uint32_t)high, 127));
}

/* Not of FP8. */
template <uint32_t DTYPE> static __device__ __forceinline__ uint32_t quantise_number(float value, uint32_t header)
{
    typedef rounding<DTYPE> how;
    return how::is_int4 ? round_int4(value, header) : round_int8(value / round_float(header));
}

/* Stores a lane's numbers, packed into a word. All lanes of the warp call it. */
template <uint32_t DTYPE>
static __device__ __forceinline__ void quantise_store(uint8_t *numbers, uint32_t lane, uint32_t packed)
{
    const uint32_t n_bits = rounding<DTYPE>::n_each * rounding<DTYPE>::bits;
    if (n_bits == 32)
        ((uint32_t *)numbers)[lane] = packed;
    else if (n_bits == 16)
        ((uint16_t *)numbers)[lane] = (uint16_t)packed;
    else if (n_bits == 8)
        numbers[lane] = (uint8_t)packed;
    else {
        packed |= __shfl_down_sync(0xffffffffu, packed, 1) << 4;
        if (lane % 2 == 0)
            numbers[lane / 2] = (uint8_t)packed;
    }
}

/* The first one in the lower byte. The device's conversion has the bits of round_e4m3. */
static __device__ __forceinline__ uint32_t round_two_e4m3(float first, float second)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
#else
    return round_e4m3(first) | (uint32_t)round_e4m3(second) << 8;
#endif
}

/* The numbers of a lane's n values, the first one lowest; 0 behind the row's end. */
template <uint32_t DTYPE>
static __device__ __forceinline__ uint32_t quantise_numbers(const float (&values)[rounding<DTYPE>::n_each], uint32_t n,
                                                            uint32_t header)
{
    typedef rounding<DTYPE> how;
    uint32_t packed = 0;
    if constexpr (how::is_fp8) {
        const float scale = round_float(header);
        for (uint32_t i = 0; i < how::n_each; i += 2) /* a value behind the row's end is 0, and so is its number */
            packed |= round_two_e4m3(values[i] / scale, values[i + 1] / scale) << i * how::bits;
    } else {
        for (uint32_t i = 0; i < how::n_each; i++)
            if (i < n)
                packed |= quantise_number<DTYPE>(values[i], header) << i * how::bits;
    }
    return packed;
}

/* Bits of the largest magnitude of a row. All threads of the block call it. */
template <bool IS_DENSE, class S>
static __device__ __forceinline__ uint32_t largest_of_row(const S *x, const struct float_rows<S> &from)
{
    const uint32_t n = IS_DENSE ? 4 : 1;
    uint32_t most = 0;
    for (uint32_t c = threadIdx.x * n; c < from.n_cols; c += QUANTISE_THREADS * LOADS_AT_ONCE * n) {
        float values[LOADS_AT_ONCE][n];
#pragma unroll
        for (uint32_t l = 0; l < LOADS_AT_ONCE; l++)
            load_values<IS_DENSE>(x, c + l * QUANTISE_THREADS * n, from, values[l]);
#pragma unroll
        for (uint32_t l = 0; l < LOADS_AT_ONCE; l++)
            for (uint32_t i = 0; i < n; i++)
                most = max(most, magnitude_bits(values[l][i]));
    }
    return block_reduce(most, largest_of());
}

/* IS_DENSE: are_dense<n_each> of the type. */
template <class S, uint32_t DTYPE, bool IS_DENSE>
static __global__ void __launch_bounds__(QUANTISE_THREADS)
tensor_write_rounded(const struct float_rows<S> from, const struct block_rows to)
{
    typedef rounding<DTYPE> how;
    const S *x = from.data + (int64_t)blockIdx.x * from.row_stride;
    uint8_t *row = to.data + blockIdx.x * to.row_bytes;
    const uint32_t lane = threadIdx.x % 32, n_blocks = (from.n_cols + how::n_values - 1) / how::n_values;
    const uint32_t of_row = how::is_fp8 ? largest_of_row<IS_DENSE>(x, from) : 0;
    for (uint32_t start = threadIdx.x / 32; start < n_blocks; start += QUANTISE_WARPS * LOADS_AT_ONCE) {
        float values[LOADS_AT_ONCE][how::n_each];
#pragma unroll
        for (uint32_t l = 0; l < LOADS_AT_ONCE; l++)
            load_values<IS_DENSE>(x, (start + l * QUANTISE_WARPS) * how::n_values + lane * how::n_each, from, values[l]);
#pragma unroll
        for (uint32_t l = 0; l < LOADS_AT_ONCE; l++) {
            const uint32_t b = start + l * QUANTISE_WARPS, first = b * how::n_values + lane * how::n_each;
            if (b >= n_blocks)
                break;
            const uint32_t header = quantise_header<DTYPE>(values[l], of_row);
            const uint32_t n = first < from.n_cols ? from.n_cols - first : 0;
            const uint32_t packed = quantise_numbers<DTYPE>(values[l], n, header);
            if (lane == 0)
                *(to.is_split ? (uint32_t *)row - 1 - b : (uint32_t *)(row + b * how::n_bytes)) = header;
            quantise_store<DTYPE>(to.is_split ? row + b * how::n_values : row + b * how::n_bytes + how::header_bytes, lane,
                                  packed);
        }
    }
}

/* Adds to *count how many values of dense rows have magnitudes whose bits are above `most`. Blocks take pieces of rows in turn.
 * `from`: are_dense<8>, but n_cols columns. */
template <class S>
static __global__ void __launch_bounds__(QUANTISE_THREADS)
tensor_sum_beyond(const struct float_rows<S> from, uint32_t n_rows, uint32_t most, unsigned long long *count)
{
    const uint32_t in_row = (from.n_cols + COUNT_VALUES - 1) / COUNT_VALUES;
    uint32_t n = 0;
    for (uint32_t piece = blockIdx.x; piece < in_row * n_rows; piece += gridDim.x) {
        const S *x = from.data + (int64_t)(piece / in_row) * from.row_stride;
        const uint32_t first = piece % in_row * COUNT_VALUES + threadIdx.x * 8;
        float values[LOADS_AT_ONCE][8];
#pragma unroll
        for (uint32_t l = 0; l < LOADS_AT_ONCE; l++)
            load_values<true>(x, first + l * QUANTISE_THREADS * 8, from, values[l]);
#pragma unroll
        for (uint32_t l = 0; l < LOADS_AT_ONCE; l++)
            for (uint32_t i = 0; i < 8; i++)
                n += magnitude_bits(values[l][i]) > most;
    }
    n = block_reduce(n, add_of());
    if (threadIdx.x == 0 && n)
        atomicAdd(count, (unsigned long long)n);
}

#endif
