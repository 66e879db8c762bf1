/* Weights under their names: y[r][c] = round(x[r][c]), or for vectors y = x + offset, x a tensor of any strides in f32, f16 or
 * bf16; and the sum of mix64(i, bits of y[i]) over a weight, modulo 2^64, so that no order matters. Where x has the type of y
 * its bits are copied. Values are exact but for the one rounding. A tensor on the device takes one launch, on the stream that
 * produced it. A tensor on the host is copied to its place, or to a bucket on the device if it must be converted, and from
 * there. A rank copies pieces of a tensor on another device to its bucket. Bound by memory: 16 GB of bfloat16 that are read and
 * written take 8 ms at 4 TB/s on an H200; from pinned memory by the link, 55 GB/s on PCIe 5 x16. */
#include "../core/eight.cuh"
#include "../core/fp8_rows.cuh"
#include "../core/packed.cuh"
#include "../core/weight_format.cuh"
#include "tensor_quantise.cuh"

extern "C" {
#include "../../../csrc/base/mix.h"
}

#include <type_traits>

#define BUCKET_BYTES ((size_t)32 << 20)
#define THREADS 256u
#define EIGHTS 4u /* of a thread of tensor_write_eights */
#define TILE 32u
#define TILE_ROWS 8u /* rows of threads of tensor_write_tiles */
#define COUNT_BLOCKS 1024u /* of tensor_sum_beyond: seven for each of 132 processors */

/* ---- on the device ------------------------------------------------------------------------------------------------------- */

/* How an element becomes one of the weight. */
struct rule {
    float offset;
    bool adds; /* the offset, even one of 0, which makes -0 a 0 */
};

template <class T, class S> static __device__ __forceinline__ T stored_as(S x, const struct rule &rule)
{
    if constexpr (std::is_same<S, T>::value)
        if (!rule.adds)
            return x;
    float value = to_float(x);
    return round_to<T>(rule.adds ? value + rule.offset : value);
}

/* x: [n_rows][n_cols] items, y: the same with rows y_stride items apart. */
template <class S, class T> struct copy_job {
    const S *x;
    T *y;
    int64_t row_stride, col_stride;
    size_t y_stride, n_cols;
    uint32_t n_rows;
    struct rule rule;
};

/* Rows on 16 bytes, of whole eights, one after the other in x. Blocks: [parts of a row][rows]. */
template <class S, class T> static __global__ void __launch_bounds__(THREADS) tensor_write_eights(const copy_job<S, T> job)
{
    size_t first = ((size_t)blockIdx.x * THREADS * EIGHTS + threadIdx.x) * 8;
    for (uint32_t row = blockIdx.y; row < job.n_rows; row += gridDim.y) {
        const S *x = job.x + (int64_t)row * job.row_stride;
        T *y = job.y + row * job.y_stride;
        struct eight<S> in[EIGHTS];
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS; i++)
            if (first + i * THREADS * 8 < job.n_cols)
                in[i] = *(const struct eight<S> *)(x + first + i * THREADS * 8);
#pragma unroll
        for (uint32_t i = 0; i < EIGHTS; i++) {
            struct eight<T> out;
#pragma unroll
            for (uint32_t k = 0; k < 8; k++)
                out.values[k] = stored_as<T>(in[i].values[k], job.rule);
            if (first + i * THREADS * 8 < job.n_cols)
                *(struct eight<T> *)(y + first + i * THREADS * 8) = out;
        }
    }
}

/* Any strides, columns nearer to each other than rows. Blocks: [parts of a row][rows]. */
template <class S, class T> static __global__ void __launch_bounds__(THREADS) tensor_write_items(const copy_job<S, T> job)
{
    size_t column = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (column >= job.n_cols)
        return;
    for (uint32_t row = blockIdx.y; row < job.n_rows; row += gridDim.y)
        job.y[row * job.y_stride + column] =
            stored_as<T>(job.x[(int64_t)row * job.row_stride + (int64_t)column * job.col_stride], job.rule);
}

/* Any strides, rows nearer to each other than columns: read along a column, written along a row. Blocks: [column tiles][row
 * tiles] of [TILE][TILE_ROWS] threads. */
template <class S, class T>
static __global__ void __launch_bounds__(TILE *TILE_ROWS) tensor_write_tiles(const copy_job<S, T> job)
{
    __shared__ T tile[TILE][TILE + 1];
    size_t first_column = (size_t)blockIdx.x * TILE;
    for (uint32_t first_row = blockIdx.y * TILE; first_row < job.n_rows; first_row += gridDim.y * TILE) {
        uint32_t row = first_row + threadIdx.x;
        for (uint32_t c = threadIdx.y; c < TILE; c += TILE_ROWS)
            if (row < job.n_rows && first_column + c < job.n_cols)
                tile[c][threadIdx.x] = stored_as<T>(
                    job.x[(int64_t)row * job.row_stride + (int64_t)(first_column + c) * job.col_stride], job.rule);
        __syncthreads();
        for (uint32_t r = threadIdx.y; r < TILE; r += TILE_ROWS)
            if (first_row + r < job.n_rows && first_column + threadIdx.x < job.n_cols)
                job.y[(first_row + r) * job.y_stride + first_column + threadIdx.x] = tile[threadIdx.x][r];
        __syncthreads();
    }
}

static __device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
static __device__ __forceinline__ uint32_t bits_of(__half x) { return __half_as_ushort(x); }
static __device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }
static __device__ __forceinline__ uint32_t infinity_of(float) { return 0x7f800000u; }
static __device__ __forceinline__ uint32_t infinity_of(__half) { return 0x7c00u; }
static __device__ __forceinline__ uint32_t infinity_of(__nv_bfloat16) { return 0x7f80u; }

static __device__ __forceinline__ void add_to(struct tensor_sum *total, unsigned long long sum, unsigned long long n)
{
    sum = block_reduce(sum, add_of());
    n = block_reduce(n, add_of());
    if (threadIdx.x)
        return;
    atomicAdd((unsigned long long *)&total->sum, sum);
    atomicAdd((unsigned long long *)&total->n_non_finite, n);
}

/* Number of an element in the checkpoint's tensor. */
struct numbering {
    uint64_t first, row_step, col_step;
};

/* The bits of a magnitude. */
static __device__ __forceinline__ uint32_t magnitude_of(uint32_t bits, float) { return bits & 0x7fffffffu; }
template <class T> static __device__ __forceinline__ uint32_t magnitude_of(uint32_t bits, T) { return bits & 0x7fffu; }

/* A block takes rows in turn. most: bits of the largest magnitude that is not counted; 0: that of the largest finite number. */
template <class T, class S>
static __global__ void __launch_bounds__(THREADS)
tensor_sum_rows(const copy_job<S, T> job, const struct numbering number, uint32_t most, struct tensor_sum *total)
{
    unsigned long long sum = 0, n = 0;
    most = most ? most : infinity_of(T()) - 1;
    for (uint32_t row = blockIdx.y; row < job.n_rows; row += gridDim.y)
        for (size_t c = (size_t)blockIdx.x * THREADS + threadIdx.x; c < job.n_cols; c += (size_t)gridDim.x * THREADS) {
            S x = job.x[(int64_t)row * job.row_stride + (int64_t)c * job.col_stride];
            uint32_t bits = bits_of(stored_as<T>(x, job.rule));
            sum += mix64(number.first + row * number.row_step + c * number.col_step, bits);
            n += magnitude_of(bits, T()) > most;
        }
    add_to(total, sum, n);
}

template <class W>
static __global__ void __launch_bounds__(THREADS)
tensor_sum_quantised(const uint8_t *rows, size_t row_bytes, uint32_t n_rows, uint32_t n_cols, const struct numbering number,
                     struct tensor_sum *total)
{
    unsigned long long sum = 0, n = 0;
    for (uint32_t row = blockIdx.y; row < n_rows; row += gridDim.y)
        for (uint32_t c = blockIdx.x * THREADS + threadIdx.x; c < n_cols; c += gridDim.x * THREADS) {
            uint32_t bits = bits_of(W::value(rows + row * row_bytes, c));
            sum += mix64(number.first + row * number.row_step + c * number.col_step, bits);
            n += (bits & 0x7f800000u) == 0x7f800000u;
        }
    add_to(total, sum, n);
}

/* ---- launches ------------------------------------------------------------------------------------------------------------ */

/* A weight's rows as they lie. */
struct target {
    char *data;
    uint32_t dtype, n_rows;
    size_t row_bytes, n_cols;
    struct rule rule;
    struct numbering number;
};

static struct target target_of(const struct tensor_place &place)
{
    struct numbering number = {place.first_index, place.row_step, place.col_step};
    if (!place.matrix)
        return {(char *)place.vector, DTYPE_F32, 1, place.n_values * sizeof(float), place.n_values, {place.offset, true},
                number};
    const struct cuda_part &part = place.matrix->parts[place.part];
    char *data = part.data + place.first_row * part.row_bytes;
    return {data, part.dtype, place.n_rows, part.row_bytes, place.matrix->n_cols, {0, false}, number};
}

/* The same place in the matrix that holds its part. */
static struct tensor_place place_in_run(struct tensor_place place)
{
    if (place.matrix)
        place.matrix = matrix_with_part(place.matrix, &place.part);
    return place;
}

static size_t item_bytes(uint32_t dtype)
{
    return dtype == DTYPE_F32 ? 4 : 2;
}

static uint32_t at_most(size_t n, uint32_t most)
{
    return n < most ? (uint32_t)n : most;
}

template <class S, class T> static copy_job<S, T> job_of(const struct tensor_view &view, const struct target &to)
{
    return {(const S *)view.data, (T *)to.data, view.row_stride, view.col_stride, to.row_bytes / sizeof(T), view.n_cols,
            view.n_rows, to.rule};
}

template <class S, class T> static void launch_copy(cudaStream_t stream, copy_job<S, T> job)
{
    bool is_dense = job.col_stride == 1 || job.n_cols == 1;
    if (is_dense && job.row_stride == (int64_t)job.n_cols && job.y_stride == job.n_cols) { /* one long row */
        job.n_cols *= job.n_rows;
        job.n_rows = 1;
    }
    bool has_places = job.row_stride * (int64_t)sizeof(S) % 16 == 0 && job.y_stride * sizeof(T) % 16 == 0;
    bool is_aligned = (uintptr_t)job.x % 16 == 0 && (uintptr_t)job.y % 16 == 0 && job.n_cols % 8 == 0 &&
                      (job.n_rows == 1 || has_places);
    uint32_t n_rows = at_most(job.n_rows, 65535);
    if (is_dense && is_aligned) {
        dim3 grid((uint32_t)((job.n_cols + 8 * EIGHTS * THREADS - 1) / (8 * EIGHTS * THREADS)), n_rows);
        tensor_write_eights<S, T><<<grid, THREADS, 0, stream>>>(job);
    } else if (job.n_rows == 1 || llabs(job.col_stride) <= llabs(job.row_stride)) {
        dim3 grid((uint32_t)((job.n_cols + THREADS - 1) / THREADS), n_rows);
        tensor_write_items<S, T><<<grid, THREADS, 0, stream>>>(job);
    } else {
        dim3 grid((uint32_t)((job.n_cols + TILE - 1) / TILE), at_most(ceil_div(job.n_rows, TILE), 65535));
        tensor_write_tiles<S, T><<<grid, dim3(TILE, TILE_ROWS), 0, stream>>>(job);
    }
}

template <class S, class T>
static void launch_sum(cudaStream_t stream, const copy_job<S, T> &job, const struct numbering &number, uint32_t most,
                       struct tensor_sum *total)
{
    dim3 grid(at_most((job.n_cols + THREADS - 1) / THREADS, job.n_rows == 1 ? 1024 : 4), at_most(job.n_rows, 4096));
    tensor_sum_rows<T, S><<<grid, THREADS, 0, stream>>>(job, number, most, total);
}

/* Calls f with values of the types of a view and of its target. */
template <class F> static void visit_types(const struct tensor_view &view, const struct target &to, F f)
{
    visit_type(view.dtype, [&](auto from) { visit_type(to.dtype, [&](auto stored) { f(from, stored); }); });
}

/* ---- streams ------------------------------------------------------------------------------------------------------------- */

/* An update uses several streams; later work waits for earlier work. */
static cudaError_t use_stream(struct cuda *cuda, cudaStream_t stream)
{
    struct tensor_state *state = &cuda->tensors;
    cudaError_t code = cudaSuccess;
    if (!state->written)
        code = cudaEventCreateWithFlags(&state->written, cudaEventDisableTiming | cudaEventBlockingSync);
    if (code == cudaSuccess && state->is_used && state->stream != stream) {
        code = cudaEventRecord(state->written, state->stream);
        if (code == cudaSuccess)
            code = cudaStreamWaitEvent(stream, state->written, 0);
    }
    state->stream = stream;
    state->is_used = true;
    return code;
}

void cuda_tensors_close(struct cuda *cuda)
{
    if (cuda->tensors.written)
        cudaEventDestroy(cuda->tensors.written);
}

enum rc cuda_tensor_finish(void *ctx, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    struct tensor_state *state = &cuda->tensors;
    device_scope scope(cuda->device);
    if (!state->is_used)
        return RC_OK;
    cudaError_t code = cudaEventRecord(state->written, state->stream);
    if (code == cudaSuccess)
        code = cudaEventSynchronize(state->written);
    state->is_used = false;
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "tensor_finish");
}

/* ---- from the host ------------------------------------------------------------------------------------------------------- */

static bool is_pinned(const void *memory)
{
    cudaPointerAttributes attributes = {};
    cudaError_t code = cudaPointerGetAttributes(&attributes, memory);
    if (code != cudaSuccess)
        cudaGetLastError();
    return code == cudaSuccess && attributes.type == cudaMemoryTypeHost;
}

/* Rows of a view, one item after the other, into host memory. */
static void gather(const struct tensor_view &view, uint32_t first, uint32_t n, char *to)
{
    size_t item = item_bytes(view.dtype);
    for (uint32_t r = first; r < first + n; r++)
        for (uint32_t c = 0; c < view.n_cols; c++, to += item)
            memcpy(to, (const char *)view.data + (ptrdiff_t)item * (r * view.row_stride + c * view.col_stride), item);
}

/* Rows one after the other, maybe with gaps between them. */
static bool is_dense(const struct tensor_view &view)
{
    return (view.col_stride == 1 || view.n_cols == 1) && (view.row_stride >= (int64_t)view.n_cols || view.n_rows == 1);
}

/* Some of a host view's rows into device memory, target_bytes apart. */
static enum rc upload_rows(struct cuda *cuda, const struct tensor_view &view, uint32_t first, uint32_t n, char *target,
                           size_t target_bytes, struct err *err)
{
    size_t row_bytes = view.n_cols * item_bytes(view.dtype);
    int64_t apart = view.row_stride * (int64_t)item_bytes(view.dtype);
    const char *rows = (const char *)view.data + (ptrdiff_t)apart * first;
    if (is_dense(view) && is_pinned(rows)) {
        size_t step = n == 1 ? row_bytes : (size_t)apart;
        cudaError_t code = step == row_bytes && target_bytes == row_bytes
                               ? cudaMemcpyAsync(target, rows, n * row_bytes, cudaMemcpyHostToDevice, cuda->stream)
                               : cudaMemcpy2DAsync(target, target_bytes, rows, step, row_bytes, n, cudaMemcpyHostToDevice,
                                                   cuda->stream);
        return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "tensor_write");
    }
    if (is_dense(view) && (apart == (int64_t)row_bytes || n == 1))
        return cuda_upload_rows(cuda, target, target_bytes, rows, row_bytes, n, err);
    char *packed = (char *)mem_alloc(n * row_bytes);
    if (!packed)
        return err_set(err, RC_MEMORY, "tensor_write: no memory for %zu bytes", n * row_bytes);
    gather(view, first, n, packed);
    enum rc rc = cuda_upload_rows(cuda, target, target_bytes, packed, row_bytes, n, err);
    cudaStreamSynchronize(cuda->stream); /* a small copy may still read memory that is freed now */
    mem_free(packed);
    return rc;
}

/* ---- from another device ------------------------------------------------------------------------------------------------- */

/* The device of a view in device memory. Only a rank meets views on a device that is not its own. */
static int device_of(const struct cuda *cuda, const struct tensor_view &view)
{
    cudaPointerAttributes attributes = {};
    if (!cuda->team || cudaPointerGetAttributes(&attributes, view.data) != cudaSuccess ||
        attributes.type != cudaMemoryTypeDevice) {
        cudaGetLastError();
        return cuda->device;
    }
    return attributes.device;
}

/* Lets work that is enqueued later on `waiting` wait for the work of `stream`, which may be of another device. */
static cudaError_t order(int device, cudaStream_t stream, int waiting_device, cudaStream_t waiting)
{
    cudaEvent_t event = NULL;
    device_scope scope(device);
    cudaError_t code = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    code = code ? code : cudaEventRecord(event, stream);
    if (code == cudaSuccess) {
        device_scope waiting_scope(waiting_device);
        code = cudaStreamWaitEvent(waiting, event, 0);
    }
    if (event)
        cudaEventDestroy(event);
    return code;
}

/* Some rows of a view on another device, as they lie in the bucket: lines along the smaller stride, without what lies between
 * the lines. */
struct lines {
    struct tensor_view piece; /* data NULL: the strides are negative, or lines overlap or are too long */
    size_t line_bytes, n_lines, apart_bytes;
};

static struct lines lines_of(const struct tensor_view &view, uint32_t first_row, char *bucket)
{
    const size_t item = item_bytes(view.dtype);
    const bool is_by_rows = view.n_rows == 1 || (view.n_cols > 1 && view.col_stride <= view.row_stride);
    const int64_t inner = is_by_rows ? view.col_stride : view.row_stride;
    const int64_t outer = is_by_rows ? view.row_stride : view.col_stride;
    const uint32_t left = view.n_rows - first_row;
    struct lines l = {view, 0, 0, (size_t)outer * item};
    l.piece.data = NULL;
    if (inner < 0)
        return l;
    const uint64_t row = is_by_rows ? ((view.n_cols - 1) * inner + 1) * item : view.n_cols * inner * item;
    const uint64_t at_once = row > BUCKET_BYTES ? 0 : row ? BUCKET_BYTES / row : left;
    l.piece.n_rows = at_once < left ? (uint32_t)at_once : left;
    const uint32_t n_inner = is_by_rows ? view.n_cols : l.piece.n_rows;
    const int64_t span = (n_inner - 1) * inner + 1;
    l.n_lines = is_by_rows ? l.piece.n_rows : view.n_cols;
    l.line_bytes = (size_t)span * item;
    (is_by_rows ? l.piece.row_stride : l.piece.col_stride) = span;
    if (at_once && (l.n_lines == 1 || outer >= span))
        l.piece.data = bucket;
    return l;
}

/* Calls f with pieces of a view on another device, when they lie in the bucket. */
template <class F>
static enum rc each_fetched(struct cuda *cuda, const struct tensor_view &view, int device, F f, struct err *err)
{
    const char *from = (const char *)view.data;
    enum rc rc = RC_OK;
    for (uint32_t row = 0; row < view.n_rows && !rc;) {
        const struct lines l = lines_of(view, row, cuda->tensors.bucket);
        if (!l.piece.data)
            return err_set(err, RC_UNSUPPORTED, "tensor: wanted contiguous rows of at most %zu bytes on cuda:%d for the rank "
                           "on cuda:%d, have %u columns with strides %lld and %lld; call contiguous()", BUCKET_BYTES, device,
                           cuda->device, view.n_cols, (long long)view.row_stride, (long long)view.col_stride);
        cudaMemcpy3DPeerParms copy = {};
        copy.srcDevice = device;
        copy.dstDevice = cuda->device;
        copy.srcPtr = make_cudaPitchedPtr((void *)(from + row * view.row_stride * (int64_t)item_bytes(view.dtype)),
                                          l.n_lines == 1 ? l.line_bytes : l.apart_bytes, l.line_bytes, l.n_lines);
        copy.dstPtr = make_cudaPitchedPtr(cuda->tensors.bucket, l.line_bytes, l.line_bytes, l.n_lines);
        copy.extent = make_cudaExtent(l.line_bytes, l.n_lines, 1);
        const cudaError_t code = cudaMemcpy3DPeerAsync(&copy, cuda->stream);
        if (code != cudaSuccess)
            return cuda_fail(err, code, "tensor");
        f(l.piece, row);
        rc = launched(err, "tensor");
        row += l.piece.n_rows;
    }
    return rc;
}

/* ---- pieces -------------------------------------------------------------------------------------------------------------- */

/* Calls f with the view, or for one in host memory or on another device with pieces of it that lie in the bucket, and the first
 * row of each. */
template <class F>
static enum rc each_piece(struct cuda *cuda, const struct tensor_view &view, int device, F f, struct err *err)
{
    if (!view.is_host && device == cuda->device) {
        f(view, 0);
        return launched(err, "tensor");
    }
    size_t row_bytes = view.n_cols * item_bytes(view.dtype);
    if (row_bytes > BUCKET_BYTES)
        return err_set(err, RC_UNSUPPORTED, "tensor: wanted rows of at most %zu bytes, have %zu", BUCKET_BYTES, row_bytes);
    enum rc rc = cuda->tensors.bucket ? RC_OK : cuda_take(cuda, MEMORY_WORK, BUCKET_BYTES, &cuda->tensors.bucket, err);
    if (rc || !view.is_host)
        return rc ? rc : each_fetched(cuda, view, device, f, err);
    uint32_t at_once = (uint32_t)(BUCKET_BYTES / row_bytes);
    for (uint32_t row = 0; row < view.n_rows && !rc; row += at_once) {
        uint32_t n = view.n_rows - row < at_once ? view.n_rows - row : at_once;
        rc = upload_rows(cuda, view, row, n, cuda->tensors.bucket, row_bytes, err);
        if (rc)
            break;
        struct tensor_view piece = {cuda->tensors.bucket, view.dtype, n, view.n_cols, (int64_t)view.n_cols, 1, false};
        f(piece, row);
        rc = launched(err, "tensor");
    }
    return rc;
}

/* ---- operations ---------------------------------------------------------------------------------------------------------- */

/* Where a call works on a view, and which stream has produced the view. Both are the same but for a view on another device, and
 * for one that is rounded: then the context's stream reads it, after the producer's work and before what the producer does
 * later. */
struct work {
    cudaStream_t stream, producer;
    int device;
};

static struct work work_of(struct cuda *cuda, const struct tensor_view *view, void *stream, bool is_rounded)
{
    if (!view || view->is_host)
        return {cuda->stream, cuda->stream, cuda->device};
    const cudaStream_t producer = stream ? (cudaStream_t)stream : cudaStreamLegacy;
    const int device = device_of(cuda, *view);
    return {device == cuda->device && !is_rounded ? producer : cuda->stream, producer, device};
}

static cudaError_t begin_work(struct cuda *cuda, const struct work &work)
{
    const cudaError_t code = use_stream(cuda, work.stream);
    return code || work.stream == work.producer ? code : order(work.device, work.producer, cuda->device, work.stream);
}

static cudaError_t end_work(struct cuda *cuda, const struct work &work)
{
    return work.stream == work.producer ? cudaSuccess : order(cuda->device, work.stream, work.device, work.producer);
}

/* ---- rounded to quantised types ------------------------------------------------------------------------------------------ */

/* Calls f with a type that tensors are rounded to; false: it is another one. */
template <class F> static bool visit_rounding(uint32_t dtype, F f)
{
    switch (dtype) {
    case DTYPE_FP8: f(std::integral_constant<uint32_t, DTYPE_FP8>()); return true;
    case DTYPE_INT8_G128: f(std::integral_constant<uint32_t, DTYPE_INT8_G128>()); return true;
    case DTYPE_INT8_G32: f(std::integral_constant<uint32_t, DTYPE_INT8_G32>()); return true;
    case DTYPE_INT4_G128: f(std::integral_constant<uint32_t, DTYPE_INT4_G128>()); return true;
    case DTYPE_INT4_G32: f(std::integral_constant<uint32_t, DTYPE_INT4_G32>()); return true;
    default: return false;
    }
}

/* Rounds rows first_row ... of a view on the device to blocks. */
static enum rc round_rows(struct cuda *cuda, const struct tensor_view &view, uint32_t first_row, uint32_t n_rows,
                          uint32_t dtype, const struct block_rows &to, struct err *err)
{
    const bool has_type = visit_rounding(dtype, [&](auto type) {
        visit_type(view.dtype, [&](auto x) {
            using S = decltype(x);
            const struct float_rows<S> from = {(const S *)view.data + first_row * view.row_stride, view.row_stride,
                                               view.col_stride, view.n_cols};
            constexpr uint32_t dtype = type();
            auto *kernel = are_dense<rounding<dtype>::n_each>(from) ? tensor_write_rounded<S, dtype, true>
                                                                    : tensor_write_rounded<S, dtype, false>;
            kernel<<<n_rows, QUANTISE_THREADS, 0, cuda->stream>>>(from, to);
        });
    });
    return has_type ? launched(err, "tensor_write")
                    : err_set(err, RC_UNSUPPORTED, "tensor_write: wanted a weight of floats or of a type that is rounded to");
}

/* Where chunks of rounded rows lie before they are packed or summed: as the weight's kernels read them. */
struct chunk {
    struct block_rows rows;
    uint32_t n_rows;
};

static enum rc take_chunk(struct cuda *cuda, uint32_t dtype, uint32_t n_cols, bool is_split, uint32_t n_rows,
                          struct chunk *chunk, struct err *err)
{
    char *rows = NULL;
    chunk->n_rows = n_rows;
    chunk->rows.is_split = is_split;
    chunk->rows.row_bytes = is_split ? fp8_row_bytes(n_cols) : dtype_row_bytes(dtype, n_cols);
    enum rc rc = cuda_packed_room(cuda, chunk->rows.row_bytes, &chunk->n_rows, &rows, err);
    chunk->rows.data = (uint8_t *)rows + (is_split ? fp8_lead_bytes(n_cols) : 0);
    return rc;
}

/* Writes rows of a view on the device to their place from its row first_row on. */
static enum rc round_to_place(struct cuda *cuda, const struct tensor_view &view, const struct tensor_place &place,
                              uint32_t first_row, struct err *err)
{
    const struct cuda_part &part = place.matrix->parts[place.part];
    const uint32_t first = place.first_row + first_row;
    if (!place.matrix->is_packed)
        return round_rows(cuda, view, 0, view.n_rows, part.dtype,
                          {(uint8_t *)part.data + first * part.row_bytes, part.row_bytes, has_fp8_rows(part.dtype)}, err);
    enum rc rc = RC_OK;
    struct chunk chunk;
    for (uint32_t row = 0; row < view.n_rows && !rc; row += chunk.n_rows) {
        rc = take_chunk(cuda, part.dtype, view.n_cols, false, view.n_rows - row, &chunk, err);
        rc = rc ? rc : round_rows(cuda, view, row, chunk.n_rows, part.dtype, chunk.rows, err);
        rc = rc ? rc : cuda_packed_store(cuda, place.matrix, part.first_row + first + row, chunk.n_rows, err);
    }
    return rc;
}

static enum rc write_rounded(struct cuda *cuda, const struct tensor_view &from, const struct tensor_place &place, void *stream,
                             struct err *err)
{
    const struct work work = work_of(cuda, &from, stream, true);
    cudaError_t code = begin_work(cuda, work);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "tensor_write");
    linear_changed(place.matrix);
    enum rc rounded = RC_OK;
    enum rc rc = each_piece(
        cuda, from, work.device,
        [&](const struct tensor_view &piece, uint32_t first_row) {
            rounded = rounded ? rounded : round_to_place(cuda, piece, place, first_row, err);
        },
        err);
    rc = rounded ? rounded : rc;
    code = rc ? cudaSuccess : end_work(cuda, work);
    return code == cudaSuccess ? rc : cuda_fail(err, code, "tensor_write");
}

enum rc cuda_matrix_rows(void *ctx, const struct matrix_rows_args *args, struct err *)
{
    (void)ctx;
    uint32_t part = args->part;
    const struct matrix *matrix = matrix_with_part(args->matrix, &part);
    const bool is_in_rows = !matrix->is_packed && is_float_type(matrix->parts[part].dtype);
    *args->rows = is_in_rows ? matrix->parts[part].data : NULL;
    *args->row_bytes = matrix->parts[part].row_bytes;
    return RC_OK;
}

/* Are these the rows that they would be written to? */
static bool is_written(const struct tensor_view &from, const struct target &to)
{
    return from.data == to.data && from.dtype == to.dtype && !to.rule.adds && from.col_stride == 1 &&
           (size_t)from.row_stride * item_bytes(from.dtype) == to.row_bytes;
}

enum rc cuda_tensor_write(void *ctx, const struct tensor_write_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct tensor_view &from = args->from;
    const struct tensor_place place = place_in_run(args->to);
    struct target to = target_of(place);
    if (!is_float_type(to.dtype))
        return write_rounded(cuda, from, place, args->stream, err);
    const struct work work = work_of(cuda, &from, args->stream, false);
    cudaError_t code = begin_work(cuda, work);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "tensor_write");
    if (is_written(from, to))
        return RC_OK;
    if (from.is_host && from.dtype == to.dtype && !to.rule.adds && is_dense(from))
        return upload_rows(cuda, from, 0, from.n_rows, to.data, to.row_bytes, err);
    const enum rc rc = each_piece(
        cuda, from, work.device,
        [&](const struct tensor_view &piece, uint32_t first_row) {
            struct target rows = to;
            rows.data += first_row * to.row_bytes;
            visit_types(piece, rows, [&](auto x, auto y) {
                launch_copy(work.stream, job_of<decltype(x), decltype(y)>(piece, rows));
            });
        },
        err);
    code = rc ? cudaSuccess : end_work(cuda, work);
    return code == cudaSuccess ? rc : cuda_fail(err, code, "tensor_write");
}

/* The contents of a weight. */
static void sum_stored(cudaStream_t stream, const struct target &of, struct tensor_sum *total)
{
    if (!is_float_type(of.dtype)) {
        visit_weight(of.dtype, [&](auto type) {
            dim3 grid(at_most((of.n_cols + THREADS - 1) / THREADS, 4), at_most(of.n_rows, 4096));
            tensor_sum_quantised<decltype(type)><<<grid, THREADS, 0, stream>>>(
                (const uint8_t *)of.data, of.row_bytes, of.n_rows, (uint32_t)of.n_cols, of.number, total);
        });
        return;
    }
    struct tensor_view own = {of.data, of.dtype, of.n_rows, (uint32_t)of.n_cols,
                              (int64_t)(of.row_bytes / item_bytes(of.dtype)), 1, false};
    struct target as_is = of;
    as_is.rule = {0, false};
    visit_type(of.dtype, [&](auto x) {
        launch_sum(stream, job_of<decltype(x), decltype(x)>(own, as_is), of.number, 0, total);
    });
}

/* The same for a packed matrix, some rows at a time. */
static enum rc sum_packed(struct cuda *cuda, cudaStream_t stream, const struct tensor_place &place, const struct target &of,
                          struct tensor_sum *total, struct err *err)
{
    const struct cuda_part &part = place.matrix->parts[place.part];
    enum rc rc = RC_OK;
    for (uint32_t row = 0, n; row < of.n_rows && !rc; row += n) {
        struct target piece = of;
        n = of.n_rows - row;
        rc = cuda_packed_rows(cuda, place.matrix, part.first_row + place.first_row + row, &n, &piece.data, err);
        piece.n_rows = n;
        piece.row_bytes = part.file_row_bytes;
        piece.number.first += row * of.number.row_step;
        if (!rc)
            sum_stored(stream, piece, total);
    }
    return rc;
}

/* What a quantised weight would hold after a write of a view on the device. */
static enum rc sum_rounded(struct cuda *cuda, const struct tensor_view &view, const struct target &of, struct tensor_sum *total,
                           struct err *err)
{
    enum rc rc = RC_OK;
    struct chunk chunk;
    for (uint32_t row = 0; row < view.n_rows && !rc; row += chunk.n_rows) {
        rc = take_chunk(cuda, of.dtype, view.n_cols, has_fp8_rows(of.dtype), view.n_rows - row, &chunk, err);
        rc = rc ? rc : round_rows(cuda, view, row, chunk.n_rows, of.dtype, chunk.rows, err);
        struct target piece = of;
        piece.data = (char *)chunk.rows.data;
        piece.row_bytes = chunk.rows.row_bytes;
        piece.n_rows = chunk.n_rows;
        piece.number.first += row * of.number.row_step;
        if (!rc)
            sum_stored(cuda->stream, piece, total);
    }
    return rc;
}

/* Counts values of a view on the device that cannot be rounded. False: its rows are not dense. */
static bool count_beyond(cudaStream_t stream, const struct tensor_view &view, struct tensor_sum *total)
{
    const uint64_t n_values = (uint64_t)view.n_rows * view.n_cols;
    const bool is_one = view.row_stride == (int64_t)view.n_cols && n_values <= INT32_MAX; /* one long row */
    const uint32_t n_rows = is_one ? 1 : view.n_rows, n_cols = is_one ? (uint32_t)n_values : view.n_cols;
    bool is_dense = false;
    visit_type(view.dtype, [&](auto x) {
        using S = decltype(x);
        const struct float_rows<S> from = {(const S *)view.data, is_one ? 0 : view.row_stride, view.col_stride, n_cols};
        is_dense = are_dense<8>(from);
        if (is_dense)
            tensor_sum_beyond<<<COUNT_BLOCKS, QUANTISE_THREADS, 0, stream>>>(
                from, n_rows, ROUND_MOST, (unsigned long long *)&total->n_non_finite);
    });
    return is_dense;
}

/* Sums a view as the weight would hold it; for a quantised weight and a view of the host, or a check, as given. */
static enum rc sum_view(struct cuda *cuda, const struct work &work, const struct tensor_sum_args *args, struct target of,
                        struct err *err)
{
    struct tensor_sum *total = cuda->tensors.total;
    const bool is_quantised = !is_float_type(of.dtype);
    const uint32_t most = is_quantised && args->is_check ? ROUND_MOST : 0;
    enum rc rounded = RC_OK;
    const enum rc rc = each_piece(
        cuda, *args->from, work.device,
        [&](const struct tensor_view &piece, uint32_t first_row) {
            struct target rows = of;
            rows.number.first += first_row * of.number.row_step;
            if (is_quantised && args->is_check && count_beyond(work.stream, piece, total))
                return;
            if (is_quantised && !args->is_check && !args->from->is_host) {
                rounded = rounded ? rounded : sum_rounded(cuda, piece, rows, total, err);
                return;
            }
            rows.dtype = is_quantised ? (uint32_t)DTYPE_F32 : of.dtype;
            visit_types(piece, rows, [&](auto x, auto y) {
                launch_sum(work.stream, job_of<decltype(x), decltype(y)>(piece, rows), rows.number, most, total);
            });
        },
        err);
    return rounded ? rounded : rc;
}

enum rc cuda_tensor_sum(void *ctx, const struct tensor_sum_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    struct tensor_state *state = &cuda->tensors;
    device_scope scope(cuda->device);
    const struct tensor_place place = place_in_run(args->of);
    struct target of = target_of(place);
    const struct work work = work_of(cuda, args->from, args->stream, !is_float_type(of.dtype));
    cudaStream_t stream = work.stream;
    enum rc rc = state->total ? RC_OK : cuda_take(cuda, MEMORY_WORK, sizeof *state->total, &state->total, err);
    cudaError_t code = rc ? cudaSuccess : begin_work(cuda, work);
    if (!rc && code == cudaSuccess)
        code = cudaMemsetAsync(state->total, 0, sizeof *state->total, stream);
    if (rc || code != cudaSuccess)
        return rc ? rc : cuda_fail(err, code, "tensor_sum");
    if (args->from)
        rc = sum_view(cuda, work, args, of, err);
    else {
        if (place.matrix && place.matrix->is_packed)
            rc = sum_packed(cuda, stream, place, of, state->total, err);
        else
            sum_stored(stream, of, state->total);
        rc = rc ? rc : launched(err, "tensor_sum");
    }
    if (rc)
        return rc;
    code = cudaMemcpyAsync(args->result, state->total, sizeof *state->total, cudaMemcpyDeviceToHost, stream);
    if (code == cudaSuccess)
        code = cudaStreamSynchronize(stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "tensor_sum");
}
