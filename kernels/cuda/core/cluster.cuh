/* cluster.cuh: blocks of a cluster: who they are, their barrier, and each other's shared memory. */
#ifndef LLMPY_CUDA_CLUSTER_CUH
#define LLMPY_CUDA_CLUSTER_CUH

#include "common.cuh"

static __device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0,%%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ uint32_t cluster_first(void)
{
    uint32_t index;
    asm volatile("mov.u32 %0,%%clusterid.x;" : "=r"(index));
    return index;
}

static __device__ __forceinline__ uint32_t cluster_step(void)
{
    uint32_t n;
    asm volatile("mov.u32 %0,%%nclusterid.x;" : "=r"(n));
    return n;
}

/* After barriers_made: every block's barriers are there. */
static __device__ __forceinline__ void cluster_meet(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The same place in another block's shared memory. */
static __device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank)
{
    uint32_t result;
    asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(result) : "r"(address), "r"(rank));
    return result;
}

static __device__ __forceinline__ void barrier_arrive_in(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _,[%0];" ::"r"(barrier) : "memory");
}

/* The two halves of the clusters' barrier: what a thread has read before it arrives, others may write over when they have
 * waited. */
static __device__ __forceinline__ void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/* A value to a block's shared memory, whose barrier counts its bytes; both addresses are in that block. */
static __device__ __forceinline__ void send(uint32_t to, float value, uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0],%1,[%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}

#endif
