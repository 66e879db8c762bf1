/* unit_reader.cuh: unit_reader<DTYPE>, what a lane reads of a unit in shared memory (units.cuh): operand A of its steps, and
 * the scales of its two rows, lane / 4 and 8 further on. A reader is led through a unit in this order:
 *
 *   begin(unit)               a unit at this address
 *     load(unit, half)        the numbers of four steps
 *       enter(unit, group)    before a group's first step
 *         unpack(i, a)        step i of the four, as bfloat16, which holds the numbers exactly
 *       scale, minimum(is second row)
 *
 * A number u of up to seven bits becomes 128 + u by two bits of an exponent, then u less the zero by a subtraction. A signed
 * byte becomes 128 + its lower seven bits, less 128 or, if it is negative, 256. */
#ifndef LLMPY_CUDA_UNIT_READER_CUH
#define LLMPY_CUDA_UNIT_READER_CUH

#include "../core/shared.cuh"
#include "../core/units.cuh"

/* (word & mask) | bits, as one instruction. */
template <uint32_t MASK, uint32_t BITS> static __device__ __forceinline__ uint32_t masked(uint32_t word)
{
    uint32_t both;
    asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(both) : "r"(word), "n"(MASK), "n"(BITS));
    return both;
}
template <uint32_t MASK> static __device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t bits)
{
    uint32_t both;
    asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(both) : "r"(word), "n"(MASK), "r"(bits));
    return both;
}

/* 128 + u of the lowest numbers of four bits of both halves of a word. */
static __device__ __forceinline__ uint32_t unit_nibbles(uint32_t word)
{
    return masked<0x000f000f, 0x43004300>(word);
}

static __device__ __forceinline__ uint32_t unit_subtract(uint32_t a, uint32_t b)
{
    const __nv_bfloat162 rest = __hsub2(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b);
    return *(const uint32_t *)&rest;
}

/* The words of four steps. */
static __device__ __forceinline__ void unit_load(uint32_t (&words)[4], uint32_t address)
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ uint2 unit_load_two(uint32_t address)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ float unit_half(uint32_t word, bool is_second)
{
    return __half2float(__ushort_as_half((unsigned short)(is_second ? word >> 16 : word & 0xffff)));
}

/* d times a byte of a word, exactly, where d has 11 bits: d (2^23 + byte) - d 2^23, rounded once. */
template <uint32_t BYTE> static __device__ __forceinline__ float unit_times_byte(float d, uint32_t word)
{
    return fmaf(d, __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 | BYTE)), d * -0x1p23f);
}

/* Operand A of ones: its products are sums of x. */
static __device__ __forceinline__ void units_ones(uint32_t (&a)[4])
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        a[i] = 0x3f803f80;
}

/* A float32 scale with a zero in its lowest byte, which the numbers of four bits are less. */
template <uint32_t DTYPE> struct unit_reader {
    static constexpr bool has_minima = false;
    uint32_t words[4], headers[2];

    static __device__ __forceinline__ float scale_of(uint32_t header) { return __uint_as_float(header & 0xffffff00u); }
    static __device__ __forceinline__ uint32_t zeros(uint32_t header) /* 128 + zero, twice */
    {
        return 0x43004300u + (header & 0xff) * 0x00010001u;
    }
    __device__ __forceinline__ void begin(uint32_t) {}
    __device__ __forceinline__ void load(uint32_t unit, uint32_t half)
    {
        unit_load(words, unit + half * 512 + threadIdx.x % 32 * 16);
    }
    __device__ __forceinline__ void enter(uint32_t unit, uint32_t group)
    {
        const uint32_t from = unit + unit_numbers_bytes(DTYPE) + group * 64 + threadIdx.x % 32 / 4 * 4;
        headers[0] = load_word(from);
        headers[1] = load_word(from + 32);
    }
    __device__ __forceinline__ void unpack(uint32_t i, uint32_t (&a)[4]) const
    {
        const uint32_t low = zeros(headers[0]), high = zeros(headers[1]);
        a[0] = unit_subtract(unit_nibbles(words[i]), low);
        a[1] = unit_subtract(unit_nibbles(words[i] >> 4), high);
        a[2] = unit_subtract(unit_nibbles(words[i] >> 8), low);
        a[3] = unit_subtract(unit_nibbles(words[i] >> 12), high);
    }
    __device__ __forceinline__ float scale(bool is_second) const { return scale_of(headers[is_second]); }
    __device__ __forceinline__ float minimum(bool) const { return 0; }
};

template <> struct unit_reader<DTYPE_Q8_0> {
    static constexpr bool has_minima = false;
    uint32_t words[2][4], scales[4], header;

    __device__ __forceinline__ void begin(uint32_t unit)
    {
        unit_load(scales, unit + unit_numbers_bytes(DTYPE_Q8_0) + threadIdx.x % 32 / 4 * 16);
    }
    __device__ __forceinline__ void load(uint32_t unit, uint32_t half)
    {
        unit_load(words[0], unit + half * 1024 + threadIdx.x % 32 * 16);
        unit_load(words[1], unit + half * 1024 + 512 + threadIdx.x % 32 * 16);
    }
    __device__ __forceinline__ void enter(uint32_t, uint32_t group) { header = scales[group]; }
    static __device__ __forceinline__ uint32_t signed_pair(uint32_t word)
    {
        return unit_subtract(masked<0x007f007f, 0x43004300>(word), masked<0x00800080, 0x43004300>(word));
    }
    __device__ __forceinline__ void unpack(uint32_t i, uint32_t (&a)[4]) const
    {
        const uint32_t first = words[i / 2][i % 2 * 2], second = words[i / 2][i % 2 * 2 + 1];
        a[0] = signed_pair(first);
        a[1] = signed_pair(first >> 8);
        a[2] = signed_pair(second);
        a[3] = signed_pair(second >> 8);
    }
    __device__ __forceinline__ float scale(bool is_second) const { return unit_half(header, is_second); }
    __device__ __forceinline__ float minimum(bool) const { return 0; }
};

template <> struct unit_reader<DTYPE_Q4_K> {
    static constexpr bool has_minima = true;
    uint32_t words[4], bytes[4], header;
    float d[2], dmin[2];

    __device__ __forceinline__ void begin(uint32_t unit)
    {
        const uint32_t from = unit + unit_numbers_bytes(DTYPE_Q4_K), g = threadIdx.x % 32 / 4;
        unit_load(bytes, from + g * 16);
        set_scales(unit_load_two(from + 128 + g * 8));
    }
    __device__ __forceinline__ void set_scales(uint2 both)
    {
        d[0] = unit_half(both.x, false);
        d[1] = unit_half(both.y, false);
        dmin[0] = unit_half(both.x, true);
        dmin[1] = unit_half(both.y, true);
    }
    __device__ __forceinline__ void load(uint32_t unit, uint32_t half)
    {
        unit_load(words, unit + half * 512 + threadIdx.x % 32 * 16);
    }
    __device__ __forceinline__ void enter(uint32_t, uint32_t group) { header = bytes[group]; }
    __device__ __forceinline__ void unpack(uint32_t i, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
            a[j] = unit_subtract(unit_nibbles(words[i] >> 4 * j), 0x43004300);
    }
    __device__ __forceinline__ float scale(bool is_second) const
    {
        return is_second ? unit_times_byte<2>(d[1], header) : unit_times_byte<0>(d[0], header);
    }
    __device__ __forceinline__ float minimum(bool is_second) const
    {
        return is_second ? unit_times_byte<3>(dmin[1], header) : unit_times_byte<1>(dmin[0], header);
    }
};

template <> struct unit_reader<DTYPE_Q6_K> {
    static constexpr bool has_minima = false;
    uint32_t words[4], high[2], bytes[4], header;
    float d[2];

    __device__ __forceinline__ void begin(uint32_t unit)
    {
        const uint32_t from = unit + unit_numbers_bytes(DTYPE_Q6_K), g = threadIdx.x % 32 / 4;
        set_scales(load_word(from + 128 + g * 4));
        unit_load(bytes, from + g * 16);
    }
    __device__ __forceinline__ void set_scales(uint32_t both)
    {
        d[0] = unit_half(both, false);
        d[1] = unit_half(both, true);
    }
    __device__ __forceinline__ void load(uint32_t unit, uint32_t half)
    {
        unit_load(words, unit + half * 512 + threadIdx.x % 32 * 16);
        const uint2 both = unit_load_two(unit + 1024 + half * 256 + threadIdx.x % 32 * 8);
        high[0] = both.x;
        high[1] = both.y;
    }
    __device__ __forceinline__ void enter(uint32_t, uint32_t group) { header = bytes[group / 2] >> group % 2 * 16; }
    __device__ __forceinline__ void unpack(uint32_t i, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t at = 2 * (j + i % 2 * 4), upper = at < 4 ? high[i / 2] << (4 - at) : high[i / 2] >> (at - 4);
            a[j] = unit_subtract(masked<0x00300030>(upper, unit_nibbles(words[i] >> 4 * j)), 0x43204320);
        }
    }
    /* d times a signed byte has at most 18 bits. */
    __device__ __forceinline__ float scale(bool is_second) const
    {
        return d[is_second] * (float)(int8_t)(header >> 8 * is_second);
    }
    __device__ __forceinline__ float minimum(bool) const { return 0; }
};

#endif
