/* One kernel for all linears of a layer, or a kernel for each: us a linear of one row.
 *
 *     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a benchmarks/persistent.cu -o /tmp/persistent && /tmp/persistent
 *
 * A chain of N_PHASES linears: y = W x, with x the values that all blocks have stored in the phase before. Blocks ask for their
 * rows of W before they wait for x, in both forms:
 *   launches: a kernel a phase, in a graph, started early (programmatic launch); it waits by griddepcontrol.wait
 *   one kernel: all phases; blocks wait for each other by a counter in memory
 * Each form must give the same last values. Prints us a phase, and the bytes of W over that time. */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

enum { N_PHASES = 112, WIDTH = 1024, N_THREADS = 256, N_WARPS = N_THREADS / 32, N_ROUNDS = 15 };
static const size_t WEIGHT_BYTES = (size_t)1 << 30; /* more than the L2 cache, so that weights come from memory */

#define CHECK(call) check(call, __LINE__)

static void check(cudaError_t code, int line)
{
    if (code != cudaSuccess) {
        fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(code));
        exit(1);
    }
}

struct chain {
    const __nv_bfloat16 *weights;
    float *values; /* [N_PHASES + 1, n_rows] */
    uint32_t *arrived;
    uint32_t rows_a_block, n_rows;
};

/* Asks for the rows of W that this block has in a phase. */
static __device__ void fetch(const chain &c, uint32_t phase, __nv_bfloat16 *to)
{
    const size_t rows = WEIGHT_BYTES / (WIDTH * sizeof *to), first = ((size_t)phase * c.n_rows) % (rows - c.n_rows);
    const char *from = (const char *)(c.weights + (first + (size_t)blockIdx.x * c.rows_a_block) * WIDTH);
    for (uint32_t at = threadIdx.x * 16; at < c.rows_a_block * WIDTH * sizeof *to; at += N_THREADS * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared((char *)to + at)),
                     "l"(from + at));
    asm volatile("cp.async.commit_group;");
}

/* Stores this block's values of a phase; its rows of W have been asked for, and x is there. */
static __device__ void compute(const chain &c, uint32_t phase, const __nv_bfloat16 *w)
{
    const float *x = c.values + (size_t)phase * c.n_rows;
    float mine[WIDTH / 32];
    for (uint32_t k = 0; k < WIDTH / 32; k++)
        mine[k] = __ldcg(&x[k * 32 + threadIdx.x % 32]);
    __syncthreads();
    for (uint32_t row = threadIdx.x / 32; row < c.rows_a_block; row += N_WARPS) {
        float sum = 0;
        for (uint32_t k = 0; k < WIDTH / 32; k++)
            sum = fmaf(mine[k], __bfloat162float(w[(size_t)row * WIDTH + k * 32 + threadIdx.x % 32]), sum);
        for (uint32_t lane = 16; lane; lane /= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, lane);
        if (threadIdx.x % 32 == 0)
            c.values[(size_t)(phase + 1) * c.n_rows + blockIdx.x * c.rows_a_block + row] = sum;
    }
}

static __global__ void __launch_bounds__(N_THREADS) one_phase(chain c, uint32_t phase)
{
    extern __shared__ __align__(16) __nv_bfloat16 w[];
    asm volatile("griddepcontrol.launch_dependents;");
    fetch(c, phase, w);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    compute(c, phase, w);
}

static __global__ void __launch_bounds__(N_THREADS) all_phases(chain c)
{
    extern __shared__ __align__(16) __nv_bfloat16 w[];
    const uint32_t half = c.rows_a_block * WIDTH;
    fetch(c, 0, w);
    for (uint32_t phase = 0; phase < N_PHASES; phase++) {
        if (phase + 1 < N_PHASES) {
            fetch(c, phase + 1, w + (phase + 1) % 2 * half);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        if (phase) {
            if (threadIdx.x == 0) {
                uint32_t seen;
                do {
                    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(c.arrived + phase) : "memory");
                } while (seen < gridDim.x);
            }
        }
        __syncthreads();
        compute(c, phase, w + phase % 2 * half);
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("red.release.gpu.add.u32 [%0], 1;" ::"l"(c.arrived + phase + 1) : "memory");
    }
}

static cudaGraphExec_t graph_of(cudaStream_t stream, chain c, uint32_t n_blocks, size_t shared, bool is_one)
{
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    if (is_one) {
        CHECK(cudaMemsetAsync(c.arrived, 0, (N_PHASES + 1) * sizeof *c.arrived, stream));
        void *arguments[] = {&c};
        CHECK(cudaLaunchCooperativeKernel((const void *)all_phases, n_blocks, N_THREADS, arguments, 2 * shared, stream));
    }
    for (uint32_t phase = 0; !is_one && phase < N_PHASES; phase++) {
        cudaLaunchAttribute early = {};
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = n_blocks, config.blockDim = N_THREADS, config.dynamicSmemBytes = shared, config.stream = stream;
        config.attrs = &early, config.numAttrs = phase > 0;
        CHECK(cudaLaunchKernelEx(&config, one_phase, c, phase));
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

static double median_us(cudaStream_t stream, cudaGraphExec_t graph)
{
    std::vector<float> times;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
    for (uint32_t round = 0; round < N_ROUNDS; round++) {
        float ms;
        CHECK(cudaEventRecord(begin, stream)), CHECK(cudaGraphLaunch(graph, stream)), CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end)), CHECK(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e3;
}

int main(void)
{
    cudaDeviceProp device;
    cudaStream_t stream;
    CHECK(cudaGetDeviceProperties(&device, 0)), CHECK(cudaStreamCreate(&stream));
    const uint32_t n_blocks = (uint32_t)device.multiProcessorCount;
    printf("%s, %u blocks, %d phases\nMB a phase   launches us (TB/s)   one kernel us (TB/s)\n", device.name, n_blocks, N_PHASES);
    std::vector<__nv_bfloat16> numbers(1 << 20);
    for (size_t i = 0; i < numbers.size(); i++)
        numbers[i] = __float2bfloat16(((float)(i * 2654435761u % 2001) - 1000) / 18000);
    char *weights;
    CHECK(cudaMalloc(&weights, WEIGHT_BYTES));
    for (size_t at = 0; at < WEIGHT_BYTES; at += numbers.size() * 2)
        CHECK(cudaMemcpy(weights + at, numbers.data(), numbers.size() * 2, cudaMemcpyHostToDevice));
    for (uint32_t rows_a_block : {8, 16, 24, 48}) {
        chain c = {(const __nv_bfloat16 *)weights, NULL, NULL, rows_a_block, rows_a_block * n_blocks};
        const size_t n_values = (size_t)(N_PHASES + 1) * c.n_rows, shared = (size_t)rows_a_block * WIDTH * 2;
        CHECK(cudaMalloc(&c.values, n_values * sizeof(float))), CHECK(cudaMalloc(&c.arrived, (N_PHASES + 1) * sizeof(uint32_t)));
        CHECK(cudaFuncSetAttribute(one_phase, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
        CHECK(cudaFuncSetAttribute(all_phases, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(2 * shared)));
        std::vector<float> ones(c.n_rows, 1), last[2];
        double us[2];
        for (int is_one = 0; is_one < 2; is_one++) {
            CHECK(cudaMemset(c.values, 0, n_values * sizeof(float)));
            CHECK(cudaMemcpy(c.values, ones.data(), ones.size() * sizeof(float), cudaMemcpyHostToDevice));
            us[is_one] = median_us(stream, graph_of(stream, c, n_blocks, shared, is_one)) / N_PHASES;
            last[is_one].resize(c.n_rows);
            CHECK(cudaMemcpy(last[is_one].data(), c.values + n_values - c.n_rows, c.n_rows * sizeof(float), cudaMemcpyDeviceToHost));
        }
        if (last[0] != last[1]) {
            fprintf(stderr, "the two forms differ\n");
            return 1;
        }
        const double bytes = (double)c.n_rows * WIDTH * 2;
        printf("%10.1f   %11.2f (%4.2f)   %13.2f (%4.2f)\n", bytes / 1e6, us[0], bytes / us[0] / 1e6, us[1], bytes / us[1] / 1e6);
        CHECK(cudaFree(c.values)), CHECK(cudaFree(c.arrived));
    }
    return 0;
}
