// cuda_values.cc: the CUDA backend's weight formats, compiled for the host, beside their definition (dtype.c).
#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" {
#include "../../csrc/base/dtype.h"
}

#define LLMPY_CUDA_COMMON_CUH // in place of common.cuh and CUDA's headers: what the formats use of them
#define __device__
#define __forceinline__ inline
#define __NV_E4M3 0

struct __half {
    uint16_t bits;
};
struct __nv_bfloat16 {
    uint16_t bits;
};

static __half __ushort_as_half(unsigned short bits)
{
    return {bits};
}

static float __half2float(__half half)
{
    float value;
    dtype_to_float(DTYPE_F16, &half, &value, 1);
    return value;
}

static float __uint_as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static __half __nv_cvt_fp8_to_halfraw(uint8_t, int) // FP8 is not compared
{
    return {0};
}

static float to_float(float value)
{
    return value;
}

static float to_float(__half half)
{
    return __half2float(half);
}

static float to_float(__nv_bfloat16 half)
{
    return __uint_as_float((uint32_t)half.bits << 16);
}

#include "../../kernels/cuda/core/weight_format.cuh"

extern "C" void values_of_row(uint32_t dtype, const uint8_t *row, uint32_t n, float *values)
{
    visit_weight(dtype, [&](auto weight) {
        for (uint32_t k = 0; k < n; k++)
            values[k] = decltype(weight)::value(row, k);
    });
}
