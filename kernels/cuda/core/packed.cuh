/* packed.cuh: MXFP4 weights of experts in the order of the tensor cores' operands. Eight rows by 64 columns are 272 bytes: two
 * words for every lane (row lane / 4), each with 8 values of one block of 32 columns, then two bytes for every row, the
 * exponents of its blocks. A word has columns 2 t and 2 t + 1 (t = lane % 4), and the same columns + 8, + 16 and + 24: the
 * values of the row that a lane holds in two k16 steps. The first of two columns is in the low half. The order of the bits
 * lets a few operations make bfloat16 values. The matrix is a sequence of blocks of 64 columns, each with all eights of rows.
 * A value is its 4-bit float (e2m1), read as the bits of a bfloat16 2^126 times smaller, times 2^(exponent - 1), whose bits
 * are those of the byte: exact, so exponents end at 128. */
#ifndef LLMPY_CUDA_PACKED_CUH
#define LLMPY_CUDA_PACKED_CUH

#include "common.cuh"

#define PACKED_BYTES 272u   /* of eight rows by 64 columns */
#define PACKED_EXPONENT 126 /* of the file's byte to the one that is kept */

/* The two values of a turn, 0 to 3, each as the bits 15 and 8 to 6 of its half word. */
static __device__ __forceinline__ uint32_t packed_pair(uint32_t word, uint32_t turn)
{
    const uint32_t mask = 0x81C081C0u;
    switch (turn) {
    case 0: return word & mask;
    case 1: return word << 4 & mask;
    case 2: return __funnelshift_l(word, word, 10) & mask;
    default: return (word << 6 & 0x80C080C0u) | (word >> 2 & 0x01000100u);
    }
}

/* The bits of a pair in its word: the inverse of packed_pair. */
static __device__ __forceinline__ uint32_t pack_pair(uint32_t pair, uint32_t turn)
{
    switch (turn) {
    case 0: return pair;
    case 1: return pair >> 4;
    case 2: return __funnelshift_r(pair, pair, 10);
    default: return (pair & 0x80C080C0u) >> 6 | (pair & 0x01000100u) << 2;
    }
}

/* matrix.cu: rows of blocks as a file has them, from the host and back. The matrix is of MXFP4, or lies in the units of
 * units.cuh. */
enum rc cuda_packed_write(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, const void *data,
                          struct err *err);
/* Memory of the device for rows as a file has them, at most *n_rows, until the next call of these functions; and the pack of
 * such rows from there. */
enum rc cuda_packed_room(struct cuda *cuda, size_t row_bytes, uint32_t *n_rows, char **rows, struct err *err);
enum rc cuda_packed_store(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, struct err *err);
/* Unpacks rows, at most *n_rows, into memory of the device that the next call overwrites. Sets *n_rows and the address. */
enum rc cuda_packed_rows(struct cuda *cuda, const struct matrix *matrix, uint32_t first_row, uint32_t *n_rows, char **rows,
                         struct err *err);
enum rc cuda_packed_read(struct cuda *cuda, const struct matrix *matrix, uint32_t row, void *blocks, struct err *err);

static __device__ __forceinline__ uint32_t times_pairs(uint32_t bits, uint32_t scale)
{
    __nv_bfloat162 product = __hmul2(*(__nv_bfloat162 *)&bits, *(__nv_bfloat162 *)&scale);
    return *(uint32_t *)&product;
}

/* Unpacks a word into its four pairs of values. exponent: the stored byte. */
static __device__ __forceinline__ void unpack_word(uint32_t word, uint32_t exponent, uint32_t &a, uint32_t &b, uint32_t &c,
                                                   uint32_t &d)
{
    const uint32_t scale = exponent * 0x00800080u;
    a = times_pairs(packed_pair(word, 0), scale);
    b = times_pairs(packed_pair(word, 1), scale);
    c = times_pairs(packed_pair(word, 2), scale);
    d = times_pairs(packed_pair(word, 3), scale);
}

/* Reads a lane's two words of eight rows, and their exponents. */
static __device__ __forceinline__ void packed_read(uint32_t at, uint32_t exponents_at, uint32_t *words, uint32_t *exponents)
{
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(at) : "memory");
    asm volatile("ld.shared.u8 %0,[%1];" : "=r"(exponents[0]) : "r"(exponents_at) : "memory");
    asm volatile("ld.shared.u8 %0,[%1+1];" : "=r"(exponents[1]) : "r"(exponents_at) : "memory");
}

/* A panel: two eights of rows that follow each other. a[k]: operand A of wgmma for the k16 step k. */
struct packed_panel {
    static const uint32_t bytes = 2 * PACKED_BYTES;
    static __device__ __forceinline__ void load(uint32_t panel, uint32_t (&a)[4][4])
    {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t eight = panel + i * PACKED_BYTES;
            uint32_t words[2], exponents[2];
            packed_read(eight + lane * 8, eight + 256 + lane / 4 * 2, words, exponents);
            unpack_word(words[0], exponents[0], a[0][i], a[0][2 + i], a[1][i], a[1][2 + i]);
            unpack_word(words[1], exponents[1], a[2][i], a[2][2 + i], a[3][i], a[3][2 + i]);
        }
    }
};

#endif
