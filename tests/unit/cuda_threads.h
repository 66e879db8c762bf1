// cuda_threads.h: the threads of one block on the host: each has a stack of its own, and they take turns at every barrier and
// exchange between lanes. So a kernel that uses no more than these is compiled and run without a device.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define LLMPY_CUDA_COMMON_CUH // in place of common.cuh and CUDA's headers
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(n)
#define __shared__ static
#define STACK_BYTES 65536

using std::max;
using std::min;

struct place {
    uint32_t x;
};
static place threadIdx, blockIdx, blockDim, gridDim;

struct host_thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    uint32_t slot;  // what the thread offers to others of its warp
    uint32_t meetings;
    bool is_done;
};
static std::vector<host_thread> host_threads;
static ucontext_t host_main;
static std::function<void()> host_kernel;

static void take_turns(void)
{
    const uint32_t own = threadIdx.x;
    swapcontext(&host_threads[own].context, &host_main);
    threadIdx.x = own;
}

static void __syncthreads(void)
{
    const uint32_t meeting = ++host_threads[threadIdx.x].meetings;
    for (;;) {
        bool all = true;
        for (const host_thread &thread : host_threads)
            all = all && (thread.is_done || thread.meetings >= meeting);
        if (all)
            return;
        take_turns();
    }
}

static uint32_t exchange(uint32_t value, uint32_t lane)
{
    host_threads[threadIdx.x].slot = value;
    take_turns();
    const uint32_t other = threadIdx.x / 32 * 32 + lane;
    const uint32_t found = lane < 32 ? host_threads[other].slot : value;
    take_turns();
    return found;
}

static uint32_t __shfl_xor_sync(uint32_t, uint32_t value, uint32_t mask)
{
    return exchange(value, threadIdx.x % 32 ^ mask);
}

static uint32_t __shfl_down_sync(uint32_t, uint32_t value, uint32_t lanes)
{
    return exchange(value, threadIdx.x % 32 + lanes);
}

template <class T> static void atomicAdd(T *to, T value)
{
    *to += value;
}

static void host_entry(void)
{
    host_kernel();
    host_threads[threadIdx.x].is_done = true;
}

// Runs a kernel on n_blocks blocks of n_threads threads.
static void run_blocks(uint32_t n_blocks, uint32_t n_threads, const std::function<void()> &kernel)
{
    host_kernel = kernel;
    blockDim.x = n_threads;
    gridDim.x = n_blocks;
    for (blockIdx.x = 0; blockIdx.x < n_blocks; blockIdx.x++) {
        host_threads = std::vector<host_thread>(n_threads);
        for (host_thread &thread : host_threads) {
            thread.stack.reset(new char[STACK_BYTES]);
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.get();
            thread.context.uc_stack.ss_size = STACK_BYTES;
            thread.context.uc_link = &host_main;
            makecontext(&thread.context, host_entry, 0);
        }
        for (bool runs = true; runs;) {
            runs = false;
            for (threadIdx.x = 0; threadIdx.x < n_threads; threadIdx.x++) {
                const uint32_t own = threadIdx.x;
                if (!host_threads[own].is_done)
                    swapcontext(&host_main, &host_threads[own].context);
                threadIdx.x = own;
                runs = runs || !host_threads[own].is_done;
            }
        }
    }
}
