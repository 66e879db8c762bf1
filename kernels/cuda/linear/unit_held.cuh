/* unit_held.cuh: unit_held<DTYPE>, a lane's part of a unit (units.cuh) on its way from global memory, in registers. A lane's
 * words lie as operand A wants them, so shared memory is not needed. unit_reader.cuh then turns them into operands:
 *
 *   fetch(numbers, header)    starts the loads: of the lane's first 16 bytes of numbers, and of what lies at header_of(lane)
 *   begin, load, enter        what the reader has of the same name, from these registers */
#ifndef LLMPY_CUDA_UNIT_HELD_CUH
#define LLMPY_CUDA_UNIT_HELD_CUH

#include "../core/streams.cuh"
#include "unit_reader.cuh"

/* The numbers of types of four bits. */
struct held_nibbles {
    uint32_t words[2][4];

    __device__ __forceinline__ void fetch_numbers(const uint8_t *numbers)
    {
        stream_16(words[0], numbers);
        stream_16(words[1], numbers + 512);
    }
    template <class R> __device__ __forceinline__ void load(R &to, uint32_t half) const
    {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            to.words[i] = words[half][i];
    }
};

template <uint32_t N> static __device__ __forceinline__ void take_words(uint32_t (&to)[N], const uint32_t (&from)[N])
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        to[i] = from[i];
}

/* Groups with float32 scales. */
template <uint32_t DTYPE> struct unit_held : held_nibbles {
    uint32_t headers[unit_groups(DTYPE)][2];

    static __device__ __forceinline__ uint32_t header_of(uint32_t lane) { return unit_numbers_bytes(DTYPE) + lane / 4 * 4; }
    __device__ __forceinline__ void fetch(const uint8_t *numbers, const uint8_t *header)
    {
        fetch_numbers(numbers);
#pragma unroll
        for (uint32_t i = 0; i < unit_groups(DTYPE) * 2; i++)
            headers[i / 2][i % 2] = stream_4(header + i * 32);
    }
    __device__ __forceinline__ void begin(unit_reader<DTYPE> &) const {}
    __device__ __forceinline__ void enter(unit_reader<DTYPE> &to, uint32_t group) const
    {
        take_words(to.headers, headers[group]);
    }
};

template <> struct unit_held<DTYPE_Q8_0> {
    uint32_t words[4][4], scales[4];

    static __device__ __forceinline__ uint32_t header_of(uint32_t lane)
    {
        return unit_numbers_bytes(DTYPE_Q8_0) + lane / 4 * 16;
    }
    __device__ __forceinline__ void fetch(const uint8_t *numbers, const uint8_t *header)
    {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            stream_16(words[i], numbers + i * 512);
        stream_16(scales, header);
    }
    __device__ __forceinline__ void begin(unit_reader<DTYPE_Q8_0> &to) const { take_words(to.scales, scales); }
    __device__ __forceinline__ void load(unit_reader<DTYPE_Q8_0> &to, uint32_t half) const
    {
        take_words(to.words[0], words[half * 2]);
        take_words(to.words[1], words[half * 2 + 1]);
    }
    __device__ __forceinline__ void enter(unit_reader<DTYPE_Q8_0> &to, uint32_t group) const { to.enter(0, group); }
};

template <> struct unit_held<DTYPE_Q4_K> : held_nibbles {
    uint32_t bytes[4], both[2];

    static __device__ __forceinline__ uint32_t header_of(uint32_t lane)
    {
        return unit_numbers_bytes(DTYPE_Q4_K) + lane / 4 * 16;
    }
    __device__ __forceinline__ void fetch(const uint8_t *numbers, const uint8_t *header)
    {
        fetch_numbers(numbers);
        stream_16(bytes, header);
        stream_8(both, header + 128 - threadIdx.x % 32 / 4 * 8);
    }
    __device__ __forceinline__ void begin(unit_reader<DTYPE_Q4_K> &to) const
    {
        take_words(to.bytes, bytes);
        to.set_scales(make_uint2(both[0], both[1]));
    }
    __device__ __forceinline__ void enter(unit_reader<DTYPE_Q4_K> &to, uint32_t group) const { to.enter(0, group); }
};

template <> struct unit_held<DTYPE_Q6_K> : held_nibbles {
    uint32_t high[2][2], bytes[4], both;

    static __device__ __forceinline__ uint32_t header_of(uint32_t lane)
    {
        return unit_numbers_bytes(DTYPE_Q6_K) + lane / 4 * 16;
    }
    __device__ __forceinline__ void fetch(const uint8_t *numbers, const uint8_t *header)
    {
        const uint32_t lane = threadIdx.x % 32;
        fetch_numbers(numbers);
        stream_8(high[0], numbers + 1024 - lane * 8);
        stream_8(high[1], numbers + 1280 - lane * 8);
        stream_16(bytes, header);
        both = stream_4(header + 128 - lane / 4 * 12);
    }
    __device__ __forceinline__ void begin(unit_reader<DTYPE_Q6_K> &to) const
    {
        take_words(to.bytes, bytes);
        to.set_scales(both);
    }
    __device__ __forceinline__ void load(unit_reader<DTYPE_Q6_K> &to, uint32_t half) const
    {
        held_nibbles::load(to, half);
        take_words(to.high, high[half]);
    }
    __device__ __forceinline__ void enter(unit_reader<DTYPE_Q6_K> &to, uint32_t group) const { to.enter(0, group); }
};

#endif
