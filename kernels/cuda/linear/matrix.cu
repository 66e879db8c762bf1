/* Weight matrices with dummy values, filled on the device, and the conversion of experts' MXFP4 into packed.cuh's order, of
 * 4-bit weights (groups, Q4_0) into int4_units.cuh's, and back.
 *
 * Dummy values: element (r, c) of a part is csrc/base/dummy.h's value of (key, s, c), rounded once to the part's type; s is
 * the row's number in the checkpoint's tensor. MXFP4 has dummy blocks. Bound by the hash, some 20 instructions a value: the
 * 8.0e9 weights of Llama-3-8B take 8 ms on an H200, behind which their 16 GB of writes (4 ms) hide.
 *
 * Packed: rows are copied to the device as the file has them, some megabytes at a time, and a thread orders a block of 32
 * values, or the eight bits of four columns of units. Bound by that copy. */
#include "../core/int4_units.cuh"
#include "../core/packed.cuh"
#include "../core/weight_format.cuh"
#include "../experts/experts.cuh"

extern "C" {
#include "../../../csrc/base/dummy.h"
}

#define PACKING_BYTES ((size_t)8 << 20)
#define BLOCK_VALUES (weight_format<DTYPE_MXFP4>::n_values)
#define BLOCK_BYTES (weight_format<DTYPE_MXFP4>::n_bytes)

template <class T>
static __global__ void matrix_fill_rows(char *data, size_t row_bytes, uint32_t n_cols, struct row_run rows, uint64_t key)
{
    uint64_t row_key = dummy_row(key, (uint32_t)(rows.source_row + blockIdx.x * rows.step));
    T *row = (T *)(data + blockIdx.x * row_bytes);
    for (uint32_t c = threadIdx.x; c < n_cols; c += blockDim.x)
        row[c] = round_to<T>(dummy_value(row_key, c));
}

static __global__ void matrix_fill_blocks(uint8_t *data, size_t row_bytes, uint32_t n_cols, struct row_run rows, uint64_t key)
{
    uint64_t row_key = dummy_row(key, (uint32_t)(rows.source_row + blockIdx.x * rows.step));
    for (uint32_t i = threadIdx.x; i < n_cols / BLOCK_VALUES; i += blockDim.x)
        dummy_mxfp4(row_key, i, data + blockIdx.x * row_bytes + i * BLOCK_BYTES);
}

/* The words of a block of 32 columns of a row in a packed matrix, two apart, and its exponent. */
struct packed_place {
    uint32_t *words;
    uint8_t *exponent;
    __device__ packed_place(char *data, uint32_t n_eights, uint32_t row, uint32_t block)
    {
        char *eight = data + ((size_t)(block / 2) * n_eights + row / 8) * PACKED_BYTES;
        words = (uint32_t *)eight + row % 8 * 8 + block % 2;
        exponent = (uint8_t *)eight + 256 + row % 8 * 2 + block % 2;
    }
};

/* Of a 4-bit float: sign at bit 15, the rest from bit 6 on. */
static __device__ __forceinline__ uint32_t value_bits(uint32_t q)
{
    return q >> 3 << 15 | (q & 7) << 6;
}

static __device__ __forceinline__ uint32_t value_of(uint32_t bits)
{
    return (bits >> 12 & 8) | (bits >> 6 & 7);
}

/* A block packs row blockIdx.x. too_large is set to 1 if an exponent cannot be packed. */
static __global__ void matrix_pack_rows(const uint8_t *rows, uint32_t n_blocks, char *data, uint32_t n_eights,
                                        uint32_t first_row, uint32_t *too_large)
{
    for (uint32_t i = threadIdx.x; i < n_blocks; i += blockDim.x) {
        const uint8_t *from = rows + ((size_t)blockIdx.x * n_blocks + i) * BLOCK_BYTES;
        struct packed_place to(data, n_eights, first_row + blockIdx.x, i);
        if (from[0] > 254 - PACKED_EXPONENT)
            *too_large = 1;
        *to.exponent = (uint8_t)(from[0] + PACKED_EXPONENT);
        for (uint32_t t = 0; t < 4; t++) {
            uint32_t word = 0;
            for (uint32_t j = 0; j < 2; j++) { /* the bytes of two columns from 2 t + 8 j on, and from 16 further on */
                const uint8_t *both = from + 1 + 2 * t + 8 * j;
                word |= pack_pair(value_bits(both[0] & 15) | value_bits(both[1] & 15) << 16, j);
                word |= pack_pair(value_bits(both[0] >> 4) | value_bits(both[1] >> 4) << 16, 2 + j);
            }
            to.words[2 * t] = word;
        }
    }
}

/* A block unpacks row first_row + blockIdx.x. */
static __global__ void matrix_unpack_rows(char *data, uint32_t n_eights, uint32_t first_row, uint32_t n_blocks, uint8_t *rows)
{
    const uint32_t row = first_row + blockIdx.x;
    uint8_t *out = rows + (size_t)blockIdx.x * n_blocks * BLOCK_BYTES;
    for (uint32_t i = threadIdx.x; i < n_blocks; i += blockDim.x) {
        struct packed_place from(data, n_eights, row, i);
        uint8_t *to = out + i * BLOCK_BYTES;
        to[0] = (uint8_t)(*from.exponent - PACKED_EXPONENT);
        for (uint32_t j = 0; j < 16; j++) {
            uint32_t word = from.words[j % 8 / 2 * 2], low = packed_pair(word, j / 8), high = packed_pair(word, 2 + j / 8);
            to[1 + j] = (uint8_t)(value_of(low >> j % 2 * 16) | value_of(high >> j % 2 * 16) << 4);
        }
    }
}

/* ---- units --------------------------------------------------------------------------------------------------------------- */

/* A row of a matrix in units. */
struct unit_row {
    uint8_t *units; /* of its panel */
    uint32_t r, unit_bytes;
    __device__ unit_row(const struct int4_units &of, uint32_t row, uint32_t dtype) : unit_bytes(::unit_bytes(dtype))
    {
        uint32_t panel;
        of.find(row, panel, r);
        units = of.data + (size_t)panel * of.n_slabs * unit_bytes;
    }
    /* Which has columns k, k + 1, k + 8 and k + 9, where bit 3 of k is 0. */
    __device__ uint32_t *word(uint32_t k) const
    {
        const uint32_t step = k % UNIT_COLUMNS / 16, lane = r % 8 * 4 + k % 8 / 2;
        return (uint32_t *)(units + (size_t)(k / UNIT_COLUMNS) * unit_bytes) + step / 4 * 128 + lane * 4 + step % 4;
    }
    __device__ uint32_t number(uint32_t k) const
    {
        return *word(k & ~9u) >> (r / 8 * 4 + k / 8 % 2 * 8 + k % 2 * 16) & 15;
    }
    __device__ uint32_t *header(uint32_t k, uint32_t group) const
    {
        return (uint32_t *)(units + (size_t)(k / UNIT_COLUMNS) * unit_bytes + UNIT_WORDS_BYTES) +
               k % UNIT_COLUMNS / group * 16 + r;
    }
};

/* The bytes of a file's block: where numbers begin, the two columns of a byte, its header as units have it. */
template <uint32_t DTYPE> struct unit_block { /* int4 */
    static const uint32_t numbers_at = 4, columns_apart = 1;
    static __device__ uint32_t column(uint32_t byte) { return 2 * byte; }
    static __device__ uint32_t header(const uint8_t *block) { return *(const uint32_t *)block; }
    static __device__ void put_header(uint8_t *block, uint32_t header) { *(uint32_t *)block = header; }
};
template <> struct unit_block<DTYPE_Q4_0> {
    static const uint32_t numbers_at = 2, columns_apart = 16;
    static __device__ uint32_t column(uint32_t byte) { return byte; }
    static __device__ uint32_t header(const uint8_t *block) { return (__float_as_uint(half_at(block)) & 0xffffff00u) | 8; }
    static __device__ void put_header(uint8_t *block, uint32_t header)
    {
        /* Not byte by byte: ptxas 13.0 turns the store of a conversion's low byte into a conversion to uint8. */
        *(__half *)block = __float2half_rn(__uint_as_float(header & 0xffffff00u));
    }
};

/* Number v of a file's block. */
template <class W> static __device__ __forceinline__ uint32_t unit_number(const uint8_t *block, uint32_t v)
{
    typedef unit_block<W::dtype> form;
    const bool is_high = v / form::columns_apart % 2;
    return block[form::numbers_at + (form::columns_apart == 1 ? v / 2 : v % 16)] >> 4 * is_high & 15;
}

/* A block packs row first_row + blockIdx.x. Two rows share the bytes of a word, so they are set by atomic operations. */
template <class W>
static __global__ void matrix_pack_units(const uint8_t *rows, uint32_t n_blocks, const struct int4_units units,
                                         uint32_t first_row)
{
    const uint8_t *row = rows + (size_t)blockIdx.x * n_blocks * W::n_bytes;
    const struct unit_row to(units, first_row + blockIdx.x, W::dtype);
    const uint32_t shift = to.r / 8 * 4, n_cols = units.n_slabs * UNIT_COLUMNS;
    for (uint32_t i = threadIdx.x; i < n_cols / 4; i += blockDim.x) {
        const uint32_t k = i / 4 * 16 + i % 4 * 2, block = k / W::n_values, v = k % W::n_values;
        const uint8_t *from = row + (size_t)block * W::n_bytes;
        uint32_t bits = 0;
        if (block < n_blocks)
            bits = unit_number<W>(from, v) | unit_number<W>(from, v + 8) << 8 | unit_number<W>(from, v + 1) << 16 |
                   unit_number<W>(from, v + 9) << 24;
        atomicAnd(to.word(k), ~(0x0f0f0f0fu << shift));
        atomicOr(to.word(k), bits << shift);
    }
    for (uint32_t block = threadIdx.x; block < n_cols / W::n_values; block += blockDim.x)
        *to.header(block * W::n_values, W::n_values) =
            block < n_blocks ? unit_block<W::dtype>::header(row + (size_t)block * W::n_bytes) : 0;
}

template <class W>
static __global__ void matrix_unpack_units(const struct int4_units units, uint32_t first_row, uint32_t n_blocks, uint8_t *rows)
{
    uint8_t *row = rows + (size_t)blockIdx.x * n_blocks * W::n_bytes;
    const struct unit_row from(units, first_row + blockIdx.x, W::dtype);
    typedef unit_block<W::dtype> form;
    for (uint32_t i = threadIdx.x; i < n_blocks * W::n_values / 2; i += blockDim.x) {
        const uint32_t block = i / (W::n_values / 2), byte = i % (W::n_values / 2);
        const uint32_t k = block * W::n_values + form::column(byte);
        row[(size_t)block * W::n_bytes + form::numbers_at + byte] =
            (uint8_t)(from.number(k) | from.number(k + form::columns_apart) << 4);
    }
    for (uint32_t block = threadIdx.x; block < n_blocks; block += blockDim.x)
        form::put_header(row + (size_t)block * W::n_bytes, *from.header(block * W::n_values, W::n_values));
}

/* Calls f with the format of a type that lies in units; does nothing for other types. */
template <class F> static void visit_units(uint32_t dtype, F f)
{
    visit_weight(dtype, [&](auto weight) {
        using W = decltype(weight);
        if constexpr (is_int4(W::dtype))
            f(weight);
    });
}

/* ---- rows on the host ---------------------------------------------------------------------------------------------------- */

static enum rc open_packing(struct cuda *cuda, struct err *err)
{
    if (cuda->experts->packing)
        return RC_OK;
    return cuda_take(cuda, MEMORY_WORK, PACKING_BYTES + sizeof(uint32_t), &cuda->experts->packing, err);
}

static uint32_t packing_rows(const struct matrix *matrix)
{
    return (uint32_t)(PACKING_BYTES / matrix->parts[0].file_row_bytes);
}

static enum rc pack_units(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, struct err *err)
{
    visit_units(matrix->parts[0].dtype, [&](auto weight) {
        using W = decltype(weight);
        matrix_pack_units<W><<<n_rows, 256, 0, cuda->stream>>>((const uint8_t *)cuda->experts->packing,
                                                               ceil_div(matrix->n_cols, W::n_values), units_of(matrix),
                                                               first_row);
    });
    return launched(err, "matrix_write");
}

static enum rc pack_mxfp4(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, struct err *err)
{
    uint32_t *flag = (uint32_t *)(cuda->experts->packing + PACKING_BYTES), too_large = 0;
    cudaError_t code = cudaMemsetAsync(flag, 0, sizeof *flag, cuda->stream);
    matrix_pack_rows<<<n_rows, 64, 0, cuda->stream>>>((const uint8_t *)cuda->experts->packing, matrix->n_cols / BLOCK_VALUES,
                                              matrix->data, matrix->n_rows / 8, first_row, flag);
    code = code ? code : cudaMemcpyAsync(&too_large, flag, sizeof too_large, cudaMemcpyDeviceToHost, cuda->stream);
    code = code ? code : cudaStreamSynchronize(cuda->stream);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "matrix_write");
    if (too_large)
        return err_set(err, RC_UNSUPPORTED, "matrix_write: wanted MXFP4 weights of at most 12 (exponents of %u), have larger "
                       "ones; convert the checkpoint to bfloat16", 254 - PACKED_EXPONENT);
    return RC_OK;
}

/* Packs the rows in `packing` into rows first_row ... of the matrix. */
static enum rc pack_chunk(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, struct err *err)
{
    return matrix->parts[0].dtype == DTYPE_MXFP4 ? pack_mxfp4(cuda, matrix, first_row, n_rows, err)
                                                 : pack_units(cuda, matrix, first_row, n_rows, err);
}

enum rc cuda_packed_write(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, const void *data,
                          struct err *err)
{
    const size_t row_bytes = matrix->parts[0].file_row_bytes;
    enum rc rc = open_packing(cuda, err);
    for (uint32_t row = 0, n; row < n_rows && !rc; row += n) {
        n = min(n_rows - row, packing_rows(matrix));
        rc = cuda_upload_rows(cuda, cuda->experts->packing, row_bytes, (const char *)data + row * row_bytes, row_bytes, n, err);
        rc = rc ? rc : pack_chunk(cuda, matrix, first_row + row, n, err);
    }
    return rc;
}

enum rc cuda_packed_rows(struct cuda *cuda, const struct matrix *matrix, uint32_t first_row, uint32_t *n_rows, char **rows,
                         struct err *err)
{
    enum rc rc = open_packing(cuda, err);
    if (rc)
        return rc;
    *n_rows = min(*n_rows, packing_rows(matrix));
    *rows = cuda->experts->packing;
    if (matrix->parts[0].dtype == DTYPE_MXFP4)
        matrix_unpack_rows<<<*n_rows, 256, 0, cuda->stream>>>(matrix->data, matrix->n_rows / 8, first_row,
                                                              matrix->n_cols / BLOCK_VALUES, (uint8_t *)*rows);
    visit_units(matrix->parts[0].dtype, [&](auto weight) {
        using W = decltype(weight);
        matrix_unpack_units<W><<<*n_rows, 256, 0, cuda->stream>>>(units_of(matrix), first_row,
                                                                  ceil_div(matrix->n_cols, W::n_values), (uint8_t *)*rows);
    });
    return launched(err, "matrix_read");
}

enum rc cuda_packed_read(struct cuda *cuda, const struct matrix *matrix, uint32_t row, void *blocks, struct err *err)
{
    uint32_t n_rows = 1;
    char *from;
    enum rc rc = cuda_packed_rows(cuda, matrix, row, &n_rows, &from, err);
    if (rc)
        return rc;
    cudaError_t code = cudaMemcpyAsync(blocks, from, matrix->parts[0].file_row_bytes, cudaMemcpyDeviceToHost, cuda->stream);
    code = code ? code : cudaStreamSynchronize(cuda->stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "matrix_read");
}

static enum rc fill_packed(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, struct row_run rows, uint64_t key,
                           struct err *err)
{
    enum rc rc = open_packing(cuda, err);
    for (uint32_t left = rows.n_rows; left && !rc; left -= rows.n_rows) {
        rows.n_rows = min(left, packing_rows(matrix));
        matrix_fill_blocks<<<rows.n_rows, 64, 0, cuda->stream>>>((uint8_t *)cuda->experts->packing,
                                                                 matrix->parts[0].file_row_bytes, matrix->n_cols, rows, key);
        rc = pack_chunk(cuda, matrix, first_row, rows.n_rows, err);
        rows.source_row += rows.n_rows * rows.step;
        first_row += rows.n_rows;
    }
    return rc;
}

enum rc cuda_matrix_fill(void *ctx, struct matrix *matrix, uint32_t part, const struct row_run *rows, uint64_t key,
                         struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct cuda_part *p = &matrix->parts[part];
    if (!cuda_type_of(p->dtype)->is_fillable)
        return err_set(err, RC_UNSUPPORTED, "matrix_fill: wanted floats or MXFP4, have %s", dtype_info(p->dtype)->name);
    if (!rows->n_rows)
        return RC_OK;
    if (matrix->is_packed)
        return fill_packed(cuda, matrix, p->first_row + rows->first_row, *rows, key, err);
    char *data = p->data + rows->first_row * p->row_bytes;
    if (p->dtype == DTYPE_MXFP4)
        matrix_fill_blocks<<<rows->n_rows, 64, 0, cuda->stream>>>((uint8_t *)data, p->row_bytes, matrix->n_cols, *rows, key);
    else
        visit_type(p->dtype, [&](auto type) {
            matrix_fill_rows<decltype(type)>
                <<<rows->n_rows, 256, 0, cuda->stream>>>(data, p->row_bytes, matrix->n_cols, *rows, key);
        });
    return launched(err, "matrix_fill");
}
