/* Weight matrices with dummy values, filled on the device, and the conversion of experts' MXFP4 into packed.cuh's order, of
 * weights of linears into units.cuh's, and back.
 *
 * Dummy values: element (r, c) of a part is csrc/base/dummy.h's value of (key, s, c), rounded once to the part's type; s is
 * the row's number in the checkpoint's tensor. MXFP4 has dummy blocks. Bound by the hash, some 20 instructions a value: the
 * 8.0e9 weights of Llama-3-8B take 8 ms on an H200, behind which their 16 GB of writes (4 ms) hide.
 *
 * Packed: rows are copied to the device as the file has them, some megabytes at a time, and a thread orders a block of 32
 * values, or four numbers of units. Bound by that copy. */
#include "../core/units.cuh"
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

/* A row of a matrix in units of a type. */
template <uint32_t DTYPE> struct unit_row {
    static constexpr uint32_t bits = unit_type_of(DTYPE).bits;
    uint8_t *units; /* of its panel */
    uint32_t r, half;
    __device__ unit_row(const struct matrix_units &of, uint32_t row)
    {
        uint32_t panel;
        of.find(row, panel, r);
        units = of.data + (size_t)panel * of.n_slabs * unit_bytes(DTYPE);
        half = r / 8;
    }
    __device__ uint8_t *unit(uint32_t k) const { return units + (size_t)(k / UNIT_COLUMNS) * unit_bytes(DTYPE); }
    static __device__ uint32_t step(uint32_t k) { return k % UNIT_COLUMNS / 16; }
    __device__ uint32_t lane(uint32_t k) const { return r % 8 * 4 + k % 8 / 2; }
    /* Of 4 bits: the word of column k. */
    __device__ uint32_t *nibbles(uint32_t k) const
    {
        return (uint32_t *)unit(k) + step(k) / 4 * 128 + lane(k) * 4 + step(k) % 4;
    }
    static constexpr uint32_t pair_shift = 16; /* of columns k and k + 1 in a word */
    __device__ uint32_t nibble_shift(uint32_t k) const { return k % 2 * pair_shift + k / 8 % 2 * 8 + half * 4; }
    /* Of 6 bits: the word of the upper two. */
    __device__ uint32_t *upper(uint32_t k) const
    {
        return (uint32_t *)(unit(k) + 1024) + step(k) / 4 * 64 + lane(k) * 2 + step(k) % 4 / 2;
    }
    __device__ uint32_t upper_shift(uint32_t k) const
    {
        return k % 2 * pair_shift + step(k) % 2 * 8 + k / 8 % 2 * 4 + half * 2;
    }
    /* Of 8 bits. */
    __device__ uint8_t *byte(uint32_t k) const
    {
        return unit(k) + step(k) / 2 * 512 + lane(k) * 16 + step(k) % 2 * 8 + k / 8 % 2 * 4 + k % 2 * 2 + half;
    }
    __device__ uint32_t number(uint32_t k) const
    {
        if (bits == 8)
            return *byte(k);
        const uint32_t low = *nibbles(k) >> nibble_shift(k) & 15;
        return bits == 4 ? low : low | (*upper(k) >> upper_shift(k) & 3) << 4;
    }
    /* Sets columns k, k + 1, k + 8 and k + 9, where k is even and its bit 3 is 0. Other rows have bits of the same words. */
    __device__ void put_numbers(uint32_t k, const uint32_t (&q)[4]) const
    {
        uint32_t low = 0, high = 0, low_mask = 0, high_mask = 0;
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t at = k + i % 2 + i / 2 * 8;
            if (bits == 8)
                *byte(at) = (uint8_t)q[i];
            low |= (q[i] & 15) << nibble_shift(at);
            low_mask |= 15u << nibble_shift(at);
            high |= q[i] >> 4 << upper_shift(at);
            high_mask |= 3u << upper_shift(at);
        }
        if (bits < 8) {
            atomicAnd(nibbles(k), ~low_mask);
            atomicOr(nibbles(k), low);
        }
        if (bits == 6) {
            atomicAnd(upper(k), ~high_mask);
            atomicOr(upper(k), high);
        }
    }
    __device__ uint8_t *headers(uint32_t k) const { return unit(k) + unit_numbers_bytes(DTYPE); }
};

static __device__ __forceinline__ uint16_t half_bits(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

/* A type's blocks in a file: number v of one; what scales the group that begins at its value v (of a missing block, NULL:
 * zeros) into a row of units at column k; and byte i of the block that the row has at column k. */
template <uint32_t DTYPE> struct file_block { /* int4 */
    typedef struct unit_row<DTYPE> row;
    static const uint32_t group = weight_format<DTYPE>::n_values;
    static __device__ uint32_t *header(const row &of, uint32_t k)
    {
        return (uint32_t *)of.headers(k) + k % UNIT_COLUMNS / group * 16 + of.r;
    }
    static __device__ uint32_t number(const uint8_t *b, uint32_t v) { return b[4 + v / 2] >> v % 2 * 4 & 15; }
    static __device__ void put_group(const row &to, uint32_t k, const uint8_t *b, uint32_t)
    {
        *header(to, k) = b ? *(const uint32_t *)b : 0;
    }
    static __device__ uint32_t byte(const row &from, uint32_t k, uint32_t i)
    {
        const uint32_t first = k + 2 * (i - 4);
        return i < 4 ? *header(from, k) >> 8 * i : from.number(first) | from.number(first + 1) << 4;
    }
};

template <> struct file_block<DTYPE_Q4_0> {
    typedef struct unit_row<DTYPE_Q4_0> row;
    static const uint32_t group = 32;
    static __device__ float *header(const row &of, uint32_t k)
    {
        return (float *)of.headers(k) + k % UNIT_COLUMNS / 32 * 16 + of.r;
    }
    static __device__ uint32_t number(const uint8_t *b, uint32_t v) { return b[2 + v % 16] >> v / 16 * 4 & 15; }
    static __device__ void put_group(const row &to, uint32_t k, const uint8_t *b, uint32_t)
    {
        *header(to, k) = b ? __uint_as_float((__float_as_uint(half_at(b)) & 0xffffff00u) | 8) : 0.0f;
    }
    static __device__ uint32_t byte(const row &from, uint32_t k, uint32_t i)
    {
        const uint32_t header = __float_as_uint(*file_block::header(from, k)) & 0xffffff00u;
        uint32_t half = __half_as_ushort(__float2half_rn(__uint_as_float(header)));
        /* ptxas 13.0 turns a store of the low byte of a conversion into a conversion to uint8. */
        asm volatile("" : "+r"(half));
        return i < 2 ? half >> 8 * i : from.number(k + i - 2) | from.number(k + 14 + i) << 4;
    }
};

template <> struct file_block<DTYPE_Q8_0> {
    typedef struct unit_row<DTYPE_Q8_0> row;
    static const uint32_t group = 32;
    static __device__ uint16_t *header(const row &of, uint32_t k)
    {
        return (uint16_t *)of.headers(k) + of.r % 8 * 8 + k % UNIT_COLUMNS / 32 * 2 + of.half;
    }
    static __device__ uint32_t number(const uint8_t *b, uint32_t v) { return b[2 + v]; }
    static __device__ void put_group(const row &to, uint32_t k, const uint8_t *b, uint32_t)
    {
        *header(to, k) = b ? half_bits(b) : 0;
    }
    static __device__ uint32_t byte(const row &from, uint32_t k, uint32_t i)
    {
        return i < 2 ? *header(from, k) >> 8 * i : from.number(k + i - 2);
    }
};

template <> struct file_block<DTYPE_Q4_K> {
    typedef struct unit_row<DTYPE_Q4_K> row;
    static const uint32_t group = 32;
    static __device__ uint8_t *header(const row &of, uint32_t k) /* scale, minimum */
    {
        return of.headers(k) + of.r % 8 * 16 + k % UNIT_COLUMNS / 32 * 4 + of.half * 2;
    }
    static __device__ uint16_t *factors(const row &of, uint32_t k) /* d, dmin */
    {
        return (uint16_t *)(of.headers(k) + 128) + of.r % 8 * 4 + of.half * 2;
    }
    static __device__ uint32_t number(const uint8_t *b, uint32_t v)
    {
        return b[16 + v / 64 * 32 + v % 32] >> v / 32 % 2 * 4 & 15;
    }
    static __device__ void put_group(const row &to, uint32_t k, const uint8_t *b, uint32_t v)
    {
        int scale = 0, minimum = 0;
        if (b)
            k_scale(b + 4, v / 32, &scale, &minimum);
        header(to, k)[0] = (uint8_t)scale;
        header(to, k)[1] = (uint8_t)minimum;
        for (uint32_t i = 0; i < 2 && k % UNIT_COLUMNS == 0; i++)
            factors(to, k)[i] = b ? half_bits(b + 2 * i) : 0;
    }
    /* Byte i of the 12 that hold scales and minima. */
    static __device__ uint32_t packed(const row &from, uint32_t k, uint32_t i)
    {
        const uint32_t j = i % 4, at = k + 32 * j, after = at + 128;
        const uint32_t which = i / 4 % 2; /* of bytes 0 to 7: the scale, or the minimum */
        if (i < 8)
            return header(from, at)[which] | header(from, after)[which] >> 4 << 6;
        return (header(from, after)[0] & 15) | header(from, after)[1] << 4;
    }
    static __device__ uint32_t byte(const row &from, uint32_t k, uint32_t i)
    {
        if (i < 4)
            return factors(from, k)[i / 2] >> i % 2 * 8;
        if (i < 16)
            return packed(from, k, i - 4);
        const uint32_t first = k + (i - 16) / 32 * 64 + i % 16 + (i - 16) % 32 / 16 * 16;
        return from.number(first) | from.number(first + 32) << 4;
    }
};

template <> struct file_block<DTYPE_Q6_K> {
    typedef struct unit_row<DTYPE_Q6_K> row;
    static const uint32_t group = 16;
    static __device__ uint8_t *header(const row &of, uint32_t k)
    {
        return of.headers(k) + of.r % 8 * 16 + k % UNIT_COLUMNS / 16 * 2 + of.half;
    }
    static __device__ uint16_t *factor(const row &of, uint32_t k)
    {
        return (uint16_t *)(of.headers(k) + 128) + of.r % 8 * 2 + of.half;
    }
    static __device__ uint32_t number(const uint8_t *b, uint32_t v)
    {
        const uint32_t half = v / 128, part = v % 128 / 32, l = v % 32;
        const uint32_t low = b[64 * half + part % 2 * 32 + l] >> part / 2 * 4 & 15;
        return low | (b[128 + 32 * half + l] >> part * 2 & 3) << 4;
    }
    static __device__ void put_group(const row &to, uint32_t k, const uint8_t *b, uint32_t v)
    {
        *header(to, k) = b ? b[192 + v / 16] : 0;
        if (k % UNIT_COLUMNS == 0)
            *factor(to, k) = b ? half_bits(b + 208) : 0;
    }
    static __device__ uint32_t byte(const row &from, uint32_t k, uint32_t i)
    {
        if (i >= 208)
            return *factor(from, k) >> 8 * (i - 208);
        if (i >= 192)
            return *header(from, k + 16 * (i - 192));
        if (i >= 128) { /* the upper bits of four parts */
            const uint32_t first = k + (i - 128) / 32 * 128 + i % 32;
            uint32_t all = 0;
            for (uint32_t part = 0; part < 4; part++)
                all |= from.number(first + part * 32) >> 4 << 2 * part;
            return all;
        }
        const uint32_t first = k + i / 64 * 128 + i % 64; /* the lower ones of this part and of the second behind it */
        return (from.number(first) & 15) | (from.number(first + 64) & 15) << 4;
    }
};

/* A block packs row first_row + blockIdx.x. */
template <class W>
static __global__ void matrix_pack_units(const uint8_t *rows, uint32_t n_blocks, const struct matrix_units units,
                                         uint32_t first_row)
{
    typedef file_block<W::dtype> file;
    const uint8_t *row = rows + (size_t)blockIdx.x * n_blocks * W::n_bytes;
    const struct unit_row<W::dtype> to(units, first_row + blockIdx.x);
    const uint32_t n_cols = units.n_slabs * UNIT_COLUMNS;
    auto block_of = [&](uint32_t k) {
        return k / W::n_values < n_blocks ? row + (size_t)(k / W::n_values) * W::n_bytes : NULL;
    };
    for (uint32_t i = threadIdx.x; i < n_cols / 4; i += blockDim.x) {
        const uint32_t k = i / 4 * 16 + i % 4 * 2, v = k % W::n_values;
        uint32_t q[4] = {};
        for (uint32_t j = 0; j < 4 && block_of(k); j++)
            q[j] = file::number(block_of(k), v + j % 2 + j / 2 * 8);
        to.put_numbers(k, q);
    }
    for (uint32_t k = threadIdx.x * file::group; k < n_cols; k += blockDim.x * file::group)
        file::put_group(to, k, block_of(k), k % W::n_values);
}

template <class W>
static __global__ void matrix_unpack_units(const struct matrix_units units, uint32_t first_row, uint32_t n_blocks,
                                           uint8_t *rows)
{
    const struct unit_row<W::dtype> from(units, first_row + blockIdx.x);
    uint8_t *row = rows + (size_t)blockIdx.x * n_blocks * W::n_bytes;
    for (uint32_t i = threadIdx.x; i < n_blocks * W::n_bytes; i += blockDim.x)
        row[i] = (uint8_t)file_block<W::dtype>::byte(from, i / W::n_bytes * W::n_values, i % W::n_bytes);
}

/* Calls f with the format of a type that lies in units; does nothing for other types. */
template <class F> static void visit_units(uint32_t dtype, F f)
{
    visit_weight(dtype, [&](auto weight) {
        using W = decltype(weight);
        if constexpr (lies_in_units(W::dtype))
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

enum rc cuda_packed_room(struct cuda *cuda, size_t row_bytes, uint32_t *n_rows, char **rows, struct err *err)
{
    enum rc rc = open_packing(cuda, err);
    if (!rc && row_bytes > PACKING_BYTES)
        return err_set(err, RC_UNSUPPORTED, "tensor: wanted rows of at most %zu bytes, have %zu", PACKING_BYTES, row_bytes);
    if (!rc)
        *n_rows = min(*n_rows, (uint32_t)(PACKING_BYTES / row_bytes));
    *rows = cuda->experts->packing;
    return rc;
}

static uint32_t packing_rows(const struct matrix *matrix)
{
    return (uint32_t)(PACKING_BYTES / matrix->parts[0].file_row_bytes);
}

static enum rc pack_units(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, struct err *err)
{
    visit_units(matrix->parts[0].dtype, [&](auto weight) {
        using W = decltype(weight);
        matrix_pack_units<W><<<n_rows, 256, 0, cuda->stream>>>(
            (const uint8_t *)cuda->experts->packing, ceil_div(matrix->n_cols, W::n_values), units_of(matrix), first_row);
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
        return err_set(err, RC_UNSUPPORTED,
                       "matrix_write: wanted MXFP4 weights of at most 12 (exponents of %u), have larger "
                       "ones; convert the checkpoint to bfloat16",
                       254 - PACKED_EXPONENT);
    return RC_OK;
}

/* Packs the rows in `packing` into rows first_row ... of the matrix. */
enum rc cuda_packed_store(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, struct err *err)
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
        rc = rc ? rc : cuda_packed_store(cuda, matrix, first_row + row, n, err);
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
        rc = cuda_packed_store(cuda, matrix, first_row, rows.n_rows, err);
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
    matrix = matrix_with_part(matrix, &part);
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
