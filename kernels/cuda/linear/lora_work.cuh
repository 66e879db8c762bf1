/* lora_work.cuh: what the kernels of lora.cu share: tiles of rows of one adapter, and the parts of a matrix. */
#ifndef LLMPY_CUDA_LORA_WORK_CUH
#define LLMPY_CUDA_LORA_WORK_CUH

#include "../core/launch.cuh"

#define TILE 8u  /* rows, as many as an mma takes */
#define PARTS 8u /* of a launch */

/* A list on the device: LORA_ROWS rows in the order of their slots, the number of tiles, the tiles. */
#define LIST_TILES (LORA_ROWS + 4)

struct lora_tile {
    int32_t slot; /* -1: no adapter */
    uint32_t first, n_rows, unused;
};

struct lora_place {
    uint32_t first_row, n_rows, first_block; /* of lora_expand */
    uint32_t number;                         /* in the matrix */
    size_t head, a, b;
};

struct lora_work {
    const char *slots;
    size_t slot_bytes;
    const int32_t *list;
    float *t, *delta;
    const float *base_bias; /* of the linear, or NULL */
    uint32_t delta_stride, n_cols, n_chunks, max_rank, n_parts, n_here; /* n_chunks: of columns; n_here: in places */
    struct lora_place places[PARTS];
    __device__ __forceinline__ bool has_tile(uint32_t i) const { return i < (uint32_t)list[LORA_ROWS]; }
    __device__ __forceinline__ lora_tile tile(uint32_t i) const { return *(const lora_tile *)(list + LIST_TILES + 4 * i); }
    __device__ __forceinline__ const char *slot(const lora_tile &tile) const
    {
        return slots + (size_t)(uint32_t)tile.slot * slot_bytes;
    }
    /* The sums of a chunk of columns. */
    __device__ __forceinline__ float *t_of(uint32_t row, uint32_t part, uint32_t chunk) const
    {
        return t + (((size_t)row * n_parts + part) * n_chunks + chunk) * max_rank;
    }
};

template <bool IS_ALIGNED, class T>
static __device__ __forceinline__ void load_four(const T *from, uint32_t column, uint32_t n_columns, float (&x)[4])
{
    if constexpr (IS_ALIGNED) {
        struct alignas(4 * sizeof(T)) four {
            T values[4];
        } v = *(const four *)(from + column);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            x[i] = to_float(v.values[i]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            x[i] = column + i < n_columns ? to_float(from[column + i]) : 0.0f;
    }
}

#endif
