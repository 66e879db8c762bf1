/* launch.cuh: starts kernels, and orders a kernel after the kernel before it.
 *
 * Launches are dependent: a kernel started by launch() may begin while the kernel before it still runs. So each of its threads
 * calls wait_for_input() before it reads or writes anything that a kernel of this step writes, and no block ends without that
 * call: a grid that ended early would let its successor overtake its predecessor. start_next() says that the next kernel may
 * be scheduled; called at the top, its blocks take up the room that this grid leaves. Weights are constant during a step, so a
 * kernel may read them before the wait. The counts and routes of one row's experts are read before it, too; their comments say
 * why that is safe.
 *
 * The code for compute_80 has no dependent launches: a kernel starts when the kernel before it has ended.
 *
 * Kernels that load or check weights run outside a step and are started with <<<>>>. */
#ifndef LLMPY_CUDA_LAUNCH_CUH
#define LLMPY_CUDA_LAUNCH_CUH

#include "common.cuh"

#define SHARED_BYTES 232448u /* of a block, at most, on sm_90a; cuda->shared_bytes on any device */

/* Where and how a kernel runs; cluster: blocks of a cluster, all in x, or 0: the kernel has no clusters. */
struct launch_config {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};

    launch_config(dim3 grid, uint32_t threads, size_t shared_bytes, uint32_t cluster)
    {
        config.gridDim = grid;
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = shared_bytes;
        config.attrs = attributes;
        if (!cluster)
            return;
        attributes[0].id = cudaLaunchAttributeClusterDimension;
        attributes[0].val.clusterDim.x = cluster;
        attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
        config.numAttrs = 1;
    }
    launch_config(const launch_config &) = delete; /* config points into it */
    void depend(void)
    {
        cudaLaunchAttribute *dependent = &attributes[config.numAttrs++];
        dependent->id = cudaLaunchAttributeProgrammaticStreamSerialization;
        dependent->val.programmaticStreamSerializationAllowed = 1;
    }
};

/* Starts a kernel that calls wait_for_input() itself. launched() returns errors. */
template <class... P, class... A>
static void launch_clusters(const struct cuda *cuda, void (*kernel)(P...), dim3 grid, uint32_t cluster, uint32_t threads,
                            size_t shared_bytes, A... args)
{
    launch_config how(grid, threads, shared_bytes, cluster);
    if (!cuda->is_portable)
        how.depend();
    how.config.stream = cuda->stream;
    cudaLaunchKernelEx(&how.config, kernel, P(args)...);
}

template <class... P, class... A>
static void launch(const struct cuda *cuda, void (*kernel)(P...), dim3 grid, uint32_t threads, size_t shared_bytes, A... args)
{
    launch_clusters(cuda, kernel, grid, 0, threads, shared_bytes, args...);
}

/* Starts a kernel whose blocks wait for each other, so that all of them run at a time; for devices without clusters. */
template <class... P, class... A>
static void launch_together(const struct cuda *cuda, void (*kernel)(P...), dim3 grid, uint32_t threads, A... args)
{
    launch_config how(grid, threads, 0, 0);
    how.attributes[0].id = cudaLaunchAttributeCooperative;
    how.attributes[0].val.cooperative = 1;
    how.config.numAttrs = 1;
    how.config.stream = cuda->stream;
    cudaLaunchKernelEx(&how.config, kernel, P(args)...);
}

/* Lets a kernel have more than 48 KB of dynamic shared memory. */
template <class K> static cudaError_t allow_shared(K kernel, uint32_t n_bytes = SHARED_BYTES)
{
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes);
}

/* Clusters of so many blocks, each with all shared memory of a processor, that run at a time. */
template <class K>
static cudaError_t count_clusters(K kernel, uint32_t n_processors, uint32_t cluster, uint32_t threads, uint32_t *n_clusters)
{
    const launch_config how(dim3(n_processors / cluster * cluster), threads, SHARED_BYTES, cluster);
    int n = 0;
    cudaError_t code = cudaOccupancyMaxActiveClusters(&n, kernel, &how.config);
    *n_clusters = (uint32_t)n;
    return code;
}

static __device__ __forceinline__ void wait_for_input(void)
{
#if IS_SM_90A
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void start_next(void)
{
#if IS_SM_90A
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#endif
