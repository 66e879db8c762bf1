/* packets.cuh: stores and loads of packets (meeting.cuh), and the meeting of blocks that store packets alone. */
#ifndef LLMPY_CUDA_PACKETS_CUH
#define LLMPY_CUDA_PACKETS_CUH

#include "meeting.cuh"

/* A packet: 8 bytes of data, each half with the number. The halves are stored and loaded as one, the packet maybe not. */
static __device__ __forceinline__ void packet_store(uint4 *slot, uint2 data, uint32_t number)
{
    const uint64_t high = (uint64_t)number << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0],{%1,%2};" ::"l"(slot), "l"(high | data.x), "l"(high | data.y) : "memory");
}

/* Returns whether the packet has come. */
static __device__ __forceinline__ bool packet_load(const uint4 *slot, uint2 *data, uint32_t number)
{
    uint64_t x, y;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0,%1},[%2];" : "=l"(x), "=l"(y) : "l"(slot) : "memory");
    *data = make_uint2((uint32_t)x, (uint32_t)y);
    return (uint32_t)(x >> 32) == number && (uint32_t)(y >> 32) == number;
}

/* A rank that has not come; this rank: all have. */
static __device__ __noinline__ uint32_t find_late(const struct meeting &m, uint32_t number)
{
    for (uint32_t r = 0; r < m.n_ranks; r++)
        if (r != m.rank && (int32_t)(load_fresh(&m.state->flags[r][blockIdx.x]) - number) < 0)
            return r;
    return m.rank;
}

/* x in packets to all other ranks; packet i goes to slot at + i * blockDim.x, so those of neighbours lie side by side. */
template <class T>
static __device__ __forceinline__ void send(const struct meeting &m, uint32_t number, uint32_t at, const T &x)
{
    uint2 data[sizeof(T) / sizeof(uint2)];
    memcpy(data, &x, sizeof x);
    for (uint32_t i = 1; i < m.n_ranks; i++) { /* from this rank on: not all ranks store to the same one at a time */
        const uint32_t r = m.rank + i < m.n_ranks ? m.rank + i : m.rank + i - m.n_ranks;
        uint4 *slot = m.slots[r]->packets[number % 2][blockIdx.x] + at;
#pragma unroll
        for (uint32_t p = 0; p < sizeof(T) / sizeof(uint2); p++)
            packet_store(slot + p * blockDim.x, data[p], number);
    }
}

/* What another rank has sent to this one. After a failure x is incomplete. */
template <class T>
static __device__ __forceinline__ void receive(const struct meeting &m, uint32_t number, uint32_t at, T *x)
{
    const uint4 *slot = m.slots[m.rank]->packets[number % 2][blockIdx.x] + at;
    uint2 data[sizeof(T) / sizeof(uint2)];
    uint64_t start = 0;
    for (uint32_t turn = 1;; turn++) {
        bool is_there = true;
#pragma unroll
        for (uint32_t p = 0; p < sizeof(T) / sizeof(uint2); p++)
            is_there &= packet_load(slot + p * blockDim.x, &data[p], number);
        if (is_there)
            break;
        if (turn % TURNS)
            continue;
        start = start ? start : clock_ns();
        if (gives_up(m, find_late(m, number), start))
            break;
    }
    memcpy(x, data, sizeof data);
}

/* All threads of the block call it when they have sent. */
static __device__ __forceinline__ void come(const struct meeting &m, uint32_t number)
{
    const uint32_t t = threadIdx.x;
    free_slots(m, number);
    if (t < m.n_ranks && t != m.rank)
        flag_store_relaxed(m.flags[t] + blockIdx.x, number);
    __syncthreads(); /* all threads have read the count */
    if (!t)
        m.state->met[blockIdx.x] = number;
}

/* All threads of the block call it when they have received. Ranks that have nothing to send come, too. A packet says that its
 * rank has come, so of two ranks a block waits for a flag only if it has got none. One thread's start_next() speaks for its
 * block, so it comes behind the waits of all threads. */
static __device__ __forceinline__ void await_ranks(const struct meeting &m, uint32_t number, bool has_received)
{
    if (!__syncthreads_or(has_received) || m.n_ranks > 2) {
        if (threadIdx.x < m.n_ranks && threadIdx.x != m.rank)
            flag_wait<false>(m, threadIdx.x, number);
        __syncthreads();
    }
    start_next();
}

#endif
