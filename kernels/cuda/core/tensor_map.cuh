/* tensor_map.cuh: descriptions of matrices for the copy engine of sm_90 (TMA). A map divides rows of two-byte values into
 * blocks of 64 columns: its dimensions are {64, rows, blocks}. A copied box of some rows by some blocks is [block][row][128 B]
 * in shared memory, in the 128-byte swizzle. The copy engine fills zeros outside the matrix. The driver encodes maps; its
 * encoder is looked up at run time. */
#ifndef LLMPY_CUDA_TENSOR_MAP_CUH
#define LLMPY_CUDA_TENSOR_MAP_CUH

#include "common.cuh"

#include <cuda.h>
#include <string.h>

typedef decltype(&cuTensorMapEncodeTiled) map_encoder;

static inline enum rc map_encoder_find(map_encoder *encoder, struct err *err)
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult result;
    cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (code != cudaSuccess || result != cudaDriverEntryPointSuccess)
        return cuda_fail(err, code != cudaSuccess ? code : cudaErrorSymbolNotFound, "open");
    *encoder = (map_encoder)found;
    return RC_OK;
}

/* True if rows start on multiples of 16 bytes, as the copy engine requires. */
static inline bool map_fits(const void *data, size_t row_bytes)
{
    return (uintptr_t)data % 16 == 0 && row_bytes % 16 == 0;
}

struct map_dims {
    uint32_t n;                /* of dimensions beside the columns of a block */
    uint64_t size[4];          /* rows, ..., blocks */
    uint64_t stride_bytes[4];
    uint32_t box[4];
};

/* The innermost dimension of a box, if it is not 64 columns in the 128-byte swizzle. */
struct map_form {
    CUtensorMapDataType type;
    uint32_t n_values; /* of two bytes */
    CUtensorMapSwizzle swizzle;
};

static inline CUtensorMapDataType map_type(uint32_t dtype)
{
    return dtype == DTYPE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

static inline enum rc map_make_as(map_encoder encode, struct map_form form, const void *data, const struct map_dims *dims,
                                  struct tensor_map *map, struct err *err)
{
    cuuint64_t size[5] = {form.n_values}, strides[4];
    cuuint32_t box[5] = {form.n_values}, steps[5] = {1, 1, 1, 1, 1};
    for (uint32_t i = 0; i < dims->n; i++) {
        size[i + 1] = dims->size[i];
        strides[i] = dims->stride_bytes[i];
        box[i + 1] = dims->box[i];
    }
    CUtensorMap made; /* the driver requires an address that is a multiple of 64 bytes */
    static_assert(sizeof made == sizeof *map, "a map's size");
    CUresult code = encode(&made, form.type, dims->n + 1, (void *)data, size, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, form.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code != CUDA_SUCCESS)
        return err_set(err, RC_INTERNAL, "linear: wanted a tensor map, have the driver's error %d", (int)code);
    memcpy(map, &made, sizeof *map);
    return RC_OK;
}

static inline enum rc map_make(map_encoder encode, uint32_t dtype, const void *data, const struct map_dims *dims,
                               struct tensor_map *map, struct err *err)
{
    return map_make_as(encode, {map_type(dtype), 64, CU_TENSOR_MAP_SWIZZLE_128B}, data, dims, map, err);
}

static inline CUtensorMap map_of(const struct tensor_map *map)
{
    CUtensorMap made;
    memcpy(&made, map, sizeof made);
    return made;
}

#endif
