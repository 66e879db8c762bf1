/* linear_sync_many.cuh: the linears of linear_sync.cuh for many rows of x. A block of four warps has a tile of X_ROWS rows of x
 * by W_ROWS rows of W, a warp a quarter of it. A stage is 64 columns of both. x is the operand of 16 rows here and W that of 8,
 * which gives the same bits. Where n_cols is no multiple of 64, zeros fill the last stage. Bound by the tensor
 * cores, which mma.sync keeps busy to some 60 % on an H200. */
#ifndef LLMPY_CUDA_LINEAR_SYNC_MANY_CUH
#define LLMPY_CUDA_LINEAR_SYNC_MANY_CUH

#include "linear_sync.cuh"

#define SYNC_MANY_THREADS 128u
#define SYNC_MANY_STAGES 3u
#define SYNC_BAND_ROWS 2048u /* of x that blocks walk before they go on to the next rows of W */

struct sync_tiles {
    uint32_t n_down, n_across; /* tiles of x, and of W */
};

/* The tile of x and of W that a block has: bands of x, each walked along W. */
template <uint32_t X_ROWS>
static __device__ __forceinline__ uint2 sync_tile_of(const struct sync_tiles &tiles, uint32_t block)
{
    const uint32_t band = SYNC_BAND_ROWS / X_ROWS, per_band = band * tiles.n_across, top = block / per_band * band;
    const uint32_t rest = block % per_band, height = min(band, tiles.n_down - top);
    return make_uint2(top + rest % height, rest / height);
}

/* Two neighbouring columns of a row of y. is_paired: their addresses are those of whole pairs. */
template <class T>
static __device__ __forceinline__ void sync_put_pair(const struct output &out, bool is_paired, uint32_t r, uint32_t n,
                                                     float low, float high)
{
    if (is_paired && r < out.n_rows && n < out.n_out) {
        const uint32_t both = pack(low, high, T());
        *(uint32_t *)((T *)out.y + (size_t)r * out.y_stride + n) = both;
        return;
    }
    put<T>(out, r, n, low);
    put<T>(out, r, n + 1, high);
}

/* Copies ROWS rows by 64 columns: a thread's rows lie 16 apart. copy_some: of its 16 bytes `n`, and zeros. */
template <uint32_t ROWS> struct sync_rows {
    const char *from;
    uint32_t offsets[ROWS / 16];

    __device__ __forceinline__ void copy(uint32_t to, uint32_t block) const
    {
#pragma unroll
        for (uint32_t i = 0; i < ROWS / 16; i++)
            copy_16(sync_chunk(to, threadIdx.x / 8 + i * 16, threadIdx.x % 8), from + offsets[i] + (size_t)block * 128);
    }
    __device__ __forceinline__ void copy_some(uint32_t to, uint32_t block, uint32_t n) const
    {
        for (uint32_t i = 0; i < ROWS / 16; i++)
            copy_bytes(sync_chunk(to, threadIdx.x / 8 + i * 16, threadIdx.x % 8),
                       n ? from + offsets[i] + (size_t)block * 128 : from, n);
    }
};

template <class T, uint32_t X_ROWS, uint32_t W_ROWS>
static __global__ void __launch_bounds__(SYNC_MANY_THREADS, 2)
linear_sync_many(const __grid_constant__ struct sync_product p, const struct sync_tiles tiles,
                 const __grid_constant__ struct output out)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const uint32_t data = shared_address(shared), stage_bytes = (X_ROWS + W_ROWS) * 128;
    const uint32_t n_x = X_ROWS / 32, n_w = W_ROWS / 16; /* of a warp: sixteens of rows of x, eights of rows of W */
    const uint2 tile = sync_tile_of<X_ROWS>(tiles, blockIdx.x);
    const uint32_t x_first = tile.x * X_ROWS, w_first = tile.y * (p.is_product ? W_ROWS / 2 : W_ROWS);
    sync_rows<X_ROWS> x;
    sync_rows<W_ROWS> w;
    start_next();
    x.from = p.x + x_first * p.x_row_bytes + threadIdx.x % 8 * 16;
#pragma unroll
    for (uint32_t i = 0; i < X_ROWS / 16; i++)
        x.offsets[i] = (min(x_first + threadIdx.x / 8 + i * 16, out.n_rows - 1) - x_first) * (uint32_t)p.x_row_bytes;
    /* A thread's rows of W are all of gate or all of up. */
    const uint32_t w_row = sync_w_row(p, w_first, threadIdx.x / 8);
    w.from = p.w + w_row * p.w_row_bytes + threadIdx.x % 8 * 16;
#pragma unroll
    for (uint32_t i = 0; i < W_ROWS / 16; i++)
        w.offsets[i] = (sync_w_row(p, w_first, threadIdx.x / 8 + i * 16) - w_row) * (uint32_t)p.w_row_bytes;
    wait_for_input();
    auto start = [&](uint32_t slot, uint32_t block) {
        const uint32_t to = data + slot * stage_bytes;
        if (block + 1 == p.n_blocks && p.tail_bytes) {
            const uint32_t n = min(max((int32_t)(p.tail_bytes - threadIdx.x % 8 * 16), 0), 16);
            x.copy_some(to, block, n);
            w.copy_some(to + X_ROWS * 128, block, n);
        } else if (block < p.n_blocks) {
            x.copy(to, block);
            w.copy(to + X_ROWS * 128, block);
        }
        copies_close();
    };
    for (uint32_t i = 0; i + 1 < SYNC_MANY_STAGES; i++)
        start(i, i);
    float sum[n_x][n_w][4] = {};
    uint32_t slot = 0, ahead = SYNC_MANY_STAGES - 1;
    const uint32_t x_row = warp / 2 * (X_ROWS / 2) + lane % 16, w_at = warp % 2 * (W_ROWS / 2) + lane / 16 * 8 + lane % 8;
    for (uint32_t block = 0; block < p.n_blocks; block++) {
        copies_wait<SYNC_MANY_STAGES - 2>();
        __syncthreads();
        start(ahead, block + SYNC_MANY_STAGES - 1);
        const uint32_t x_stage = data + slot * stage_bytes, w_stage = x_stage + X_ROWS * 128;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t a[n_x][4], b[n_w / 2][4];
#pragma unroll
            for (uint32_t i = 0; i < n_x; i++)
                load_matrices(a[i], sync_chunk(x_stage, x_row + i * 16, 2 * j + lane / 16));
#pragma unroll
            for (uint32_t i = 0; i < n_w / 2; i++)
                load_matrices(b[i], sync_chunk(w_stage, w_at + i * 16, 2 * j + lane / 8 % 2));
#pragma unroll
            for (uint32_t i = 0; i < n_x; i++)
#pragma unroll
                for (uint32_t k = 0; k < n_w; k++) {
                    const uint32_t both[2] = {b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]};
                    mma(sum[i][k], a[i], both, T());
                }
        }
        slot = slot + 1 == SYNC_MANY_STAGES ? 0 : slot + 1;
        ahead = ahead + 1 == SYNC_MANY_STAGES ? 0 : ahead + 1;
    }
    const bool is_sum = !out.is_float && !out.add && !out.bias && !out.delta;
    const bool is_paired = is_sum && out.n_out % 2 == 0 && out.y_stride % 2 == 0 && (size_t)out.y % 4 == 0;
#pragma unroll
    for (uint32_t i = 0; i < n_x; i++)
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t r = x_first + warp / 2 * (X_ROWS / 2) + i * 16 + half * 8 + g;
#pragma unroll
            for (uint32_t k = 0; k < n_w; k++) {
                const uint32_t column = warp % 2 * (W_ROWS / 2) + k * 8, i0 = 2 * half, i1 = i0 + 1;
                if (!p.is_product) {
                    sync_put_pair<T>(out, is_paired, r, w_first + column + 2 * t, sum[i][k][i0], sum[i][k][i1]);
                } else if (k % 2 == 0) {
                    sync_put_product<T>(out, r, w_first + column / 2 + 2 * t, sum[i][k][i0], sum[i][k + 1][i0]);
                    sync_put_product<T>(out, r, w_first + column / 2 + 2 * t + 1, sum[i][k][i1], sum[i][k + 1][i1]);
                }
            }
        }
}

/* ---- the host's side ----------------------------------------------------------------------------------------------------- */

typedef void (*sync_many_kernel)(struct sync_product, struct sync_tiles, struct output);

/* Tiles of x_rows by w_rows, and the microseconds that 64 columns take on an H200: of a block alone on a processor, and of as
 * many as it holds. */
struct sync_form {
    uint32_t x_rows, w_rows;
    float alone_us, full_us;
};
static const struct sync_form SYNC_FORMS[] = {{128, 128, 1.14f, 1.69f}, {64, 128, 0.63f, 1.20f}, {64, 64, 0.46f, 0.97f}};
#define N_SYNC_FORMS (sizeof SYNC_FORMS / sizeof *SYNC_FORMS)

template <class T> static sync_many_kernel sync_many_of(uint32_t form)
{
    return form == 0 ? linear_sync_many<T, 128, 128> : form == 1 ? linear_sync_many<T, 64, 128> : linear_sync_many<T, 64, 64>;
}

static inline uint32_t sync_many_bytes(const struct sync_form *form)
{
    return SYNC_MANY_STAGES * (form->x_rows + form->w_rows) * 128;
}

template <class T> static cudaError_t sync_many_open(void)
{
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < N_SYNC_FORMS && code == cudaSuccess; i++)
        code = allow_shared(sync_many_of<T>(i), sync_many_bytes(&SYNC_FORMS[i]));
    return code;
}

/* The form that takes the least time. */
static inline uint32_t sync_many_choose(const struct cuda *cuda, uint32_t n_rows, uint32_t n_w_rows)
{
    uint32_t best = 0;
    float least = 0;
    for (uint32_t i = 0; i < N_SYNC_FORMS; i++) {
        const struct sync_form *form = &SYNC_FORMS[i];
        const uint32_t side_by_side = cuda->processor_bytes / (sync_many_bytes(form) + 1024);
        const uint32_t n_tiles = ceil_div(n_rows, form->x_rows) * ceil_div(n_w_rows, form->w_rows);
        const uint32_t n_waves = n_tiles / (cuda->n_processors * side_by_side);
        const uint32_t rest = ceil_div(n_tiles - n_waves * cuda->n_processors * side_by_side, cuda->n_processors);
        const float more_us = side_by_side > 1 ? (form->full_us - form->alone_us) / (float)(side_by_side - 1) : 0;
        const float us = (float)n_waves * form->full_us + (rest ? form->alone_us + (float)(rest - 1) * more_us : 0);
        if (i == 0 || us < least) {
            least = us;
            best = i;
        }
    }
    return best;
}

template <class T>
static void sync_many_multiply(const struct cuda *cuda, const struct sync_product &p,
                               const struct output &out)
{
    const uint32_t i = sync_many_choose(cuda, out.n_rows, p.n_w_rows);
    const struct sync_form *form = &SYNC_FORMS[i];
    const struct sync_tiles tiles = {ceil_div(out.n_rows, form->x_rows), ceil_div(p.n_w_rows, form->w_rows)};
    launch(cuda, sync_many_of<T>(i), dim3(tiles.n_down * tiles.n_across), SYNC_MANY_THREADS, sync_many_bytes(form), p,
           tiles, out);
}

#endif
