/* sample_greedy.cuh: calls whose tasks all want the greatest logit of consecutive rows and nothing else. Many small blocks
 * share a row; each reads its part once and joins its result into two words of memory, and the last block of a row writes the
 * result. The greatest value with its lowest id does not depend on the order. Bound by reading the rows: 32 rows of 151936 ids
 * take 4.3 us at 4.5 TB/s, 7 us measured. Included by sample.cu. */
#ifndef LLMPY_CUDA_SAMPLE_GREEDY_CUH
#define LLMPY_CUDA_SAMPLE_GREEDY_CUH

#include "../core/launch.cuh"
#include "sample_row.cuh"

#define GREEDY_THREADS 256u
#define GREEDY_LOADS 4u
#define GREEDY_BLOCKS 1056u /* that 132 processors hold */

/* The result of a row's blocks so far; zeros between launches. */
struct greedy_row {
    unsigned long long best; /* the value's bits in ascending order, then the complement of its id; 0: none above -inf */
    uint32_t n_bad, n_arrived;
};

static __device__ __forceinline__ unsigned long long greedy_key(float z, uint32_t id)
{
    uint32_t bits = __float_as_uint(z + 0.0f); /* one zero */
    bits ^= bits >> 31 ? ~0u : 0x80000000u;
    return z > -INFINITY ? (unsigned long long)bits << 32 | ~id : 0;
}

static __device__ __forceinline__ unsigned long long greedy_join(unsigned long long a, unsigned long long b)
{
    return a > b ? a : b;
}

/* Ids from `first` on of a row, a multiple of 4. */
static __device__ unsigned long long greedy_scan(const struct sample_call &call, const float *row, uint32_t first, bool *is_bad)
{
    const uint32_t end = min(first + call.segment, call.vocab_size);
    const bool is_vector = (uintptr_t)row % 16 == 0;
    float most = -INFINITY;
    uint32_t id = 0;
    for (uint32_t base = first + 4 * threadIdx.x; base < end; base += 4 * GREEDY_LOADS * GREEDY_THREADS) {
        float v[GREEDY_LOADS][4];
#pragma unroll
        for (uint32_t i = 0; i < GREEDY_LOADS; i++) {
            uint32_t at = base + 4 * i * GREEDY_THREADS;
            float4 four = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
            if (is_vector && at + 4 <= end)
                four = *(const float4 *)(row + at);
            v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
            for (uint32_t j = 0; j < 4 && at < end && !(is_vector && at + 4 <= end); j++)
                v[i][j] = at + j < end ? row[at + j] : -INFINITY;
        }
#pragma unroll
        for (uint32_t i = 0; i < GREEDY_LOADS; i++)
#pragma unroll
            for (uint32_t j = 0; j < 4; j++) {
                uint32_t at = base + 4 * i * GREEDY_THREADS + j;
                *is_bad |= !(v[i][j] < INFINITY);
                bool is_more = v[i][j] > most && at < call.limit;
                most = is_more ? v[i][j] : most;
                id = is_more ? at : id;
            }
    }
    return greedy_key(most, id);
}

/* A part of a row a block; tasks[i] is of row i of call.logits. */
static __global__ void __launch_bounds__(GREEDY_THREADS, 8)
sample_greatest(const __grid_constant__ struct sample_call call, struct greedy_row *rows)
{
    __shared__ unsigned long long warps[GREEDY_THREADS / 32];
    const uint32_t task = blockIdx.y;
    bool is_bad = false;
    start_next();
    wait_for_input();
    const float *row = call.logits + (size_t)task * call.vocab_stride;
    unsigned long long best = greedy_scan(call, row, blockIdx.x * call.segment, &is_bad);
    for (uint32_t apart = 16; apart; apart /= 2)
        best = greedy_join(best, __shfl_xor_sync(~0u, best, apart));
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = best;
    uint32_t n_bad = (uint32_t)__syncthreads_count(is_bad);
    if (threadIdx.x)
        return;
    for (uint32_t i = 1; i < GREEDY_THREADS / 32; i++)
        best = greedy_join(best, warps[i]);
    atomicMax(&rows[task].best, best);
    atomicAdd(&rows[task].n_bad, n_bad);
    __threadfence();
    if (atomicInc(&rows[task].n_arrived, gridDim.x - 1) + 1 < gridDim.x)
        return;
    __threadfence();
    best = atomicExch(&rows[task].best, 0);
    n_bad = atomicExch(&rows[task].n_bad, 0);
    struct sample_result result = {};
    result.status = n_bad ? SAMPLE_NON_FINITE : best ? SAMPLE_OK : SAMPLE_NONE_ALLOWED;
    result.id = result.status == SAMPLE_OK ? (int32_t)~(uint32_t)best : 0;
    result.kept_mass = 1;
    if (call.sampled && result.status == SAMPLE_OK)
        call.sampled[task] = result.id;
    store_result(&call.results[task], result);
}

/* Does every task want the greatest logit of its row alone, and are the rows consecutive? */
static bool is_all_greedy(const struct staged_task *tasks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if ((tasks[i].flags & ~(~0u << TASK_MODE_SHIFT)) != (TASK_GREEDY | TASK_KEPT) ||
            tasks[i].logits_row != tasks[0].logits_row + i)
            return false;
    return true;
}

/* call: as for the general kernel. */
static void launch_greedy(const struct cuda *cuda, struct sample_call call, uint32_t first_row, uint32_t n_tasks)
{
    uint32_t n_parts = GREEDY_BLOCKS / n_tasks < 8 ? 8 : GREEDY_BLOCKS / n_tasks;
    uint32_t share = ceil_div(call.vocab_size, n_parts), least = 4 * GREEDY_THREADS;
    call.segment = (share > least ? share + 3 : least) & ~3u;
    call.logits += (size_t)first_row * call.vocab_stride;
    launch(cuda, sample_greatest, dim3(ceil_div(call.vocab_size, call.segment), n_tasks), GREEDY_THREADS, 0, call,
           (struct greedy_row *)cuda->greedy);
}

#endif
