/* copies.cuh: copies from global to shared memory by cp.async, which every device of compute capability 8.0 or later has. A
 * thread starts copies, closes them into a group, and waits until at most n of its latest groups are under way. Other threads
 * see the data after a barrier. */
#ifndef LLMPY_CUDA_COPIES_CUH
#define LLMPY_CUDA_COPIES_CUH

#include "common.cuh"

#define COPIES_MOST 7u /* groups that copies_wait leaves under way, at most */

static __device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}

/* Copies 16 bytes, or writes zeros and reads nothing. */
static __device__ __forceinline__ void copy_16_if(uint32_t to, const void *from, bool is_there)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

/* Copies n of 16 bytes, and writes zeros for the rest. */
static __device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, uint32_t n)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}

static __device__ __forceinline__ void copies_close(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <uint32_t N> static __device__ __forceinline__ void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

static __device__ __forceinline__ void copies_wait(uint32_t n)
{
    switch (n) {
    case 0: return copies_wait<0>();
    case 1: return copies_wait<1>();
    case 2: return copies_wait<2>();
    case 3: return copies_wait<3>();
    case 4: return copies_wait<4>();
    case 5: return copies_wait<5>();
    case 6: return copies_wait<6>();
    default: return copies_wait<COPIES_MOST>();
    }
}

#endif
