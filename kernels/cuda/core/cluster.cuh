/* cluster.cuh: the blocks of a cluster: their numbers, their barrier, and access to each other's shared memory. */
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

/* Waits for all blocks of the cluster. After barriers_made, it makes every block's barriers usable by the others. */
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

/* The two halves of the cluster's barrier: after cluster_wait, a thread may overwrite data that other threads read before
 * their cluster_arrive. */
static __device__ __forceinline__ void cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/* Stores a value in a block's shared memory. A barrier of the same block counts the bytes. */
static __device__ __forceinline__ void send(uint32_t to, float value, uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0],%1,[%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}

#endif
