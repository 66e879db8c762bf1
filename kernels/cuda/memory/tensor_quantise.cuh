/* tensor_quantise.cuh: rows of floats on the device, rounded to the types of csrc/base/quantise.h with its bits. A block takes
 * a row, a warp a block of the type at a time, a lane 4 adjacent columns (1 where a block has 32). FP8's scale is that of the
 * whole row, which is read twice. Bound by memory: 16 GB of bfloat16 and 8 GB of FP8 take 6 ms at 4 TB/s. */
#ifndef LLMPY_CUDA_TENSOR_QUANTISE_CUH
#define LLMPY_CUDA_TENSOR_QUANTISE_CUH

extern "C" {
#include "../../../csrc/base/round_number.h"
}

#define QUANTISE_THREADS 256u

/* Rows of floats of any strides. */
template <class S> struct float_rows {
    const S *data;
    int64_t row_stride, col_stride;
    uint32_t n_cols;
};

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

template <uint32_t DTYPE> static __device__ __forceinline__ uint32_t quantise_number(float value, uint32_t header)
{
    typedef rounding<DTYPE> how;
    return how::is_int4 ? round_int4(value, header)
                        : (how::is_fp8 ? round_e4m3 : round_int8)(value / round_float(header));
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

template <class S, uint32_t DTYPE>
static __global__ void __launch_bounds__(QUANTISE_THREADS)
tensor_write_rounded(const struct float_rows<S> from, const struct block_rows to)
{
    typedef rounding<DTYPE> how;
    const S *x = from.data + (int64_t)blockIdx.x * from.row_stride;
    uint8_t *row = to.data + blockIdx.x * to.row_bytes;
    const uint32_t lane = threadIdx.x % 32, n_blocks = (from.n_cols + how::n_values - 1) / how::n_values;
    uint32_t of_row = 0;
    for (uint32_t c = threadIdx.x; how::is_fp8 && c < from.n_cols; c += QUANTISE_THREADS)
        of_row = max(of_row, magnitude_bits(to_float(x[(int64_t)c * from.col_stride])));
    if (how::is_fp8)
        of_row = block_reduce(of_row, largest_of());
    for (uint32_t b = threadIdx.x / 32; b < n_blocks; b += QUANTISE_THREADS / 32) {
        const uint32_t first = b * how::n_values + lane * how::n_each;
        float values[how::n_each];
        for (uint32_t i = 0; i < how::n_each; i++)
            values[i] = first + i < from.n_cols ? to_float(x[(int64_t)(first + i) * from.col_stride]) : 0;
        const uint32_t header = quantise_header<DTYPE>(values, of_row);
        uint32_t packed = 0;
        for (uint32_t i = 0; i < how::n_each; i++)
            if (first + i < from.n_cols)
                packed |= quantise_number<DTYPE>(values[i], header) << i * how::bits;
        if (lane == 0)
            *(to.is_split ? (uint32_t *)row - 1 - b : (uint32_t *)(row + b * how::n_bytes)) = header;
        quantise_store<DTYPE>(to.is_split ? row + b * how::n_values : row + b * how::n_bytes + how::header_bytes, lane, packed);
    }
}

#endif
