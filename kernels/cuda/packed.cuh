/* packed.cuh: MXFP4 weights of experts as tensor cores want them. Eight rows by 64 columns are 272 bytes: two words for every
 * lane (row lane / 4), each of 8 values of one block of 32 columns, then two bytes for every row, its blocks' exponents. A word
 * has columns 2 t and 2 t + 1 (t = lane % 4), 8 further on, 16, and 24: what a lane holds of its row in two k16 steps. The
 * first of two columns is in the low half; bits lie so that a few operations make bfloat16 of them. Blocks of 64 columns come
 * one after the other, of each all eights of rows. A value is its 4-bit float (e2m1), read as the bits of a bfloat16 2^126
 * times smaller, times 2^(exponent - 1), whose bits are those of the byte: exact, so exponents end at 128. */
#ifndef LLMPY_CUDA_PACKED_CUH
#define LLMPY_CUDA_PACKED_CUH

#include "common.cuh"

#define PACKED_BYTES 272u   /* of eight rows by 64 columns */
#define PACKED_EXPONENT 126 /* of the file's byte to the one that is kept */

/* Bits of a 4-bit float in a half word, of the columns of turn 0 to 3. */
static __device__ __forceinline__ uint32_t pack_bits(uint32_t q, uint32_t turn)
{
    uint32_t sign = q >> 3, rest = q & 7;
    if (turn < 3)
        return (sign << 15 | rest << 6) >> 3 * turn;
    return sign << 14 | (rest & 4) << 11 | (rest & 3) << 10;
}

static __device__ __forceinline__ uint32_t unpack_bits(uint32_t half, uint32_t turn)
{
    if (turn == 3)
        half = (half << 1 & 0x8000) | (half >> 4 & 0x00C0) | (half >> 5 & 0x0100);
    else
        half <<= 3 * turn;
    return (half >> 12 & 8) | (half >> 6 & 7);
}

/* matrix.cu: rows of blocks as a file has them, from the host and back. */
enum rc cuda_packed_write(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows, const void *data,
                          struct err *err);
enum rc cuda_packed_read(struct cuda *cuda, const struct matrix *matrix, uint32_t row, void *blocks, struct err *err);

static __device__ __forceinline__ uint32_t times_pairs(uint32_t bits, uint32_t scale)
{
    __nv_bfloat162 product = __hmul2(*(__nv_bfloat162 *)&bits, *(__nv_bfloat162 *)&scale);
    return *(uint32_t *)&product;
}

/* The values of a word, by turns; exponent: the byte. */
static __device__ __forceinline__ void unpack_word(uint32_t word, uint32_t exponent, uint32_t &a, uint32_t &b, uint32_t &c,
                                                   uint32_t &d)
{
    const uint32_t mask = 0x81C081C0u, scale = exponent * 0x00800080u;
    a = times_pairs(word & mask, scale);
    b = times_pairs(word << 3 & mask, scale);
    c = times_pairs(word << 6 & mask, scale);
    d = times_pairs((word << 1 & 0x80008000u) | (word >> 4 & 0x00C000C0u) | (word >> 5 & 0x01000100u), scale);
}

static __device__ __forceinline__ uint32_t load_shared_word(uint32_t address)
{
    uint32_t word;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

/* A panel: two eights of rows, one behind the other. a[i]: what mma.sync and wgmma take of the k16 step i. */
struct packed_panel {
    static const uint32_t bytes = 2 * PACKED_BYTES;
    static __device__ __forceinline__ void load(uint32_t panel, uint32_t (&a)[4][4])
    {
        const uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t eight = panel + i * PACKED_BYTES;
            uint32_t words[2], exponents;
            asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(eight + lane * 8) : "memory");
            asm volatile("{.reg .u16 h; ld.shared.u16 h,[%1]; cvt.u32.u16 %0,h;}"
                         : "=r"(exponents)
                         : "r"(eight + 256 + lane / 4 * 2)
                         : "memory");
            unpack_word(words[0], exponents & 0xff, a[0][i], a[0][2 + i], a[1][i], a[1][2 + i]);
            unpack_word(words[1], exponents >> 8, a[2][i], a[2][2 + i], a[3][i], a[3][2 + i]);
        }
    }
};

#endif
