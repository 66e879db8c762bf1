/* wgmma.cuh: the instructions of sm_90a that the kernels on tensor cores share: barriers in shared memory, boxes copied by
 * tensor maps, and wgmma m64nNk16 with both operands in shared memory, K-major in the 128-byte swizzle. */
#ifndef LLMPY_CUDA_WGMMA_CUH
#define LLMPY_CUDA_WGMMA_CUH

#include "common.cuh"

#include <cuda.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Two values of a two-byte type, each rounded once, as registers of the tensor cores hold them. */
static __device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}

static __device__ __forceinline__ uint32_t pack(float low, float high, __half)
{
    __half2 pair = __floats2half2_rn(low, high);
    return *(uint32_t *)&pair;
}

static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t n_arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(barrier), "r"(n_arrivals));
}

/* Initialises n barriers; all threads of the block call it. One lane of each warp works, because lanes of one warp would take
 * turns. */
static __device__ __forceinline__ void barriers_init(uint32_t first, uint32_t n, uint32_t n_arrivals)
{
    if (threadIdx.x % 32 == 0)
        for (uint32_t i = threadIdx.x / 32; i < n; i += blockDim.x / 32)
            barrier_init(first + 8 * i, n_arrivals);
}

/* Makes initialised barriers visible to the copy engine. Threads of the block still need a __syncthreads(). */
static __device__ __forceinline__ void barriers_made(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t n_bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(n_bytes) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(barrier) : "memory");
}

/* Counts n arrivals at once. */
static __device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t n)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(n) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase)
{
    asm volatile("{.reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1; @p bra DONE; bra WAIT; DONE: }"
                 :
                 : "r"(barrier), "r"(phase)
                 : "memory");
}

/* True if the phase has ended. Does not wait. */
static __device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t phase)
{
    uint32_t has_ended;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p,[%1],%2; selp.b32 %0,1,0,p;}"
                 : "=r"(has_ended)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return has_ended;
}

static __device__ __forceinline__ void map_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* For data that is read once: L2 evicts it first. */
static __device__ __forceinline__ uint64_t policy_read_once(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
    return policy;
}

#define COPY(n) "cp.async.bulk.tensor." #n "d.shared::cluster.global.mbarrier::complete_tx::bytes"

/* The box at (row, block). */
static __device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap *map, uint32_t row, uint32_t block,
                                                uint32_t barrier)
{
    asm volatile(COPY(3) " [%0],[%1,{%2,%3,%4}],[%5];" ::"r"(target), "l"(map), "r"(0), "r"(row), "r"(block), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void copy_box(uint32_t target, const CUtensorMap *map, uint32_t row, uint32_t block,
                                                uint32_t barrier, uint64_t policy)
{
    asm volatile(COPY(3) ".L2::cache_hint [%0],[%1,{%2,%3,%4}],[%5],%6;" ::"r"(target), "l"(map), "r"(0), "r"(row), "r"(block),
                 "r"(barrier), "l"(policy)
                 : "memory");
}

/* The box of pairs of eight rows at (pair, block). */
static __device__ __forceinline__ void copy_pairs(uint32_t target, const CUtensorMap *map, uint32_t pair, uint32_t block,
                                                  uint32_t barrier, uint64_t policy)
{
    asm volatile(COPY(5) ".L2::cache_hint [%0],[%1,{%2,%2,%2,%3,%4}],[%5],%6;" ::"r"(target), "l"(map), "r"(0), "r"(pair),
                 "r"(block), "r"(barrier), "l"(policy)
                 : "memory");
}

#undef COPY

/* Bytes in sixteens, from and to multiples of 16. */
static __device__ __forceinline__ void copy_bytes(uint32_t target, const void *from, uint32_t n_bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(target),
                 "l"(from), "r"(n_bytes), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void copy_bytes(uint32_t target, const void *from, uint32_t n_bytes, uint32_t barrier,
                                                  uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;"
                 :
                 : "r"(target), "l"(from), "r"(n_bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

/* Makes the thread's writes to shared memory visible to the copy engine and the tensor cores. */
static __device__ __forceinline__ void shared_written(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_begin(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Until at most PENDING groups are unfinished. */
template <uint32_t PENDING> static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Products that have ended, as values that may be read: no read may be moved before the wait. */
template <uint32_t N> static __device__ __forceinline__ void wgmma_made(float (&d)[N])
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i]));
}

template <uint32_t N> static __device__ __forceinline__ void wgmma_made(int32_t (&d)[N])
{
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        asm volatile("" : "+r"(d[i]));
}

/* Describes rows of 128 bytes, of which each eight starts on a multiple of 1024 bytes, eight_bytes after the one before; the
 * next 16 columns are 2 further on. */
static __device__ __forceinline__ uint64_t wgmma_rows(uint32_t address, uint32_t eight_bytes = 1024)
{
    return (uint64_t)1 << 62 | (uint64_t)(eight_bytes / 16) << 32 | (uint64_t)1 << 16 | address >> 4;
}

/* Describes a row as it lies in memory as the first of eight, each of which begins 16 bytes behind the one before. An address
 * in a cluster names its block in the upper bits, where other fields of the description are. */
static __device__ __forceinline__ uint64_t one_row(uint32_t address)
{
    return (uint64_t)1 << 32 | (uint64_t)1 << 16 | (address & 0x3ffff) >> 4;
}

/* d += A B^T for 64 rows of A and N = 2 * size of d of B, 16 columns. d[4 * i + j]: row 16 * warp + lane / 4 + j / 2 * 8,
 * column 8 * i + lane % 4 * 2 + j % 2. */
#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define WGMMA(n, type) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " "
#define WGMMA_OF(ctype, type)                                                                                             \
    static __device__ __forceinline__ void wgmma(float (&d)[4], uint64_t a, uint64_t b, ctype)                            \
    {                                                                                                                     \
        asm volatile(WGMMA(8, type) "{%0,%1,%2,%3},%4,%5,1,1,1,0,0;" : SUMS4(0) : "l"(a), "l"(b));                        \
    }                                                                                                                     \
    static __device__ __forceinline__ void wgmma(float (&d)[8], uint64_t a, uint64_t b, ctype)                            \
    {                                                                                                                     \
        asm volatile(WGMMA(16, type) "{%0,%1,%2,%3,%4,%5,%6,%7},%8,%9,1,1,1,0,0;"                                         \
                     : SUMS4(0), SUMS4(4)                                                                                 \
                     : "l"(a), "l"(b));                                                                                   \
    }                                                                                                                     \
    static __device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, ctype)                           \
    {                                                                                                                     \
        asm volatile(WGMMA(32, type) "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},%16,%17,1,1,1,0,0;"         \
                     : SUMS16(0)                                                                                          \
                     : "l"(a), "l"(b));                                                                                   \
    }                                                                                                                     \
    static __device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, ctype)                           \
    {                                                                                                                     \
        asm volatile(WGMMA(64, type) "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                            \
                                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"                  \
                                     "%32,%33,1,1,1,0,0;"                                                                 \
                     : SUMS16(0), SUMS16(16)                                                                              \
                     : "l"(a), "l"(b));                                                                                   \
    }
WGMMA_OF(__nv_bfloat16, bf16)
WGMMA_OF(__half, f16)
#undef WGMMA_OF
#undef WGMMA
#undef SUMS16
#undef SUMS4

#endif
