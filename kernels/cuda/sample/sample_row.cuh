/* sample_row.cuh: how a cluster of blocks holds one row of logits: each block a segment of consecutive ids in shared memory,
 * read once. Devices without clusters have the blocks' memory in global memory, and a counter there at which the blocks meet;
 * all else is the same, and so are all bits. Thread t of a block has the ids 4 g .. 4 g + 3 of its segment for g = t, t +
 * THREADS, ..., which are the four outputs of one counter of the noise. The threads' results are joined in one fixed tree:
 * lanes, warps, then blocks in their order. Included by sample.cu and sample_select.cuh. */
#ifndef LLMPY_CUDA_SAMPLE_ROW_CUH
#define LLMPY_CUDA_SAMPLE_ROW_CUH

#include "../core/common.cuh"

#include <float.h>
#include <string.h>

#define THREADS 512u
#define WARPS (THREADS / 32)
#define CLUSTER 8u
#define JOIN_WORDS 8u
#define N_BINS 512u
#define MAX_SEGMENT 53248u /* ids that fit shared memory beside a struct sample_block */
#define SPREAD_IDS 256u    /* ids of a segment among which all blocks look for a threshold by themselves */

/* A task in pinned memory. Fields that few tasks use are in struct task_lists. */
struct alignas(64) staged_task {
    uint64_t seed;
    float temperature, top_p, min_p;
    uint32_t top_k, logits_row, position, sample_index;
    int32_t target;
    uint32_t flags, n_top, top_at; /* top_at: place in the call's top_* */
    uint32_t lists;                /* TASK_LISTS: bytes from the call's lists to its struct task_lists */
};
enum task_flag {
    TASK_SCORE = 1, TASK_GREEDY = 2, TASK_LOGPROBS = 4, TASK_LISTS = 8, /* it has lists or penalties */
    TASK_EDITED = 16,     /* step 2 changes something */
    TASK_REMOVES = 32,    /* step 4 removes more than the ids from vocab_limit on */
    TASK_KEPT = 64,       /* steps 4 to 8 are wanted */
    TASK_TRUNCATED = 128, /* step 6 is */
    TASK_MASKED = 256,    /* a mask lies behind the lists */
    TASK_MODE_SHIFT = 9
};

/* Padded, so that two stores write it. */
struct alignas(32) staged_result {
    struct sample_result result;
    uint32_t unused;
};

static __device__ __forceinline__ void store_result(struct staged_result *to, const struct sample_result &result)
{
    uint4 halves[2] = {};
    memcpy(halves, &result, sizeof result);
    ((uint4 *)to)[0] = halves[0];
    ((uint4 *)to)[1] = halves[1];
}

/* Lists lie behind one another from `first` on: bias, seen, banned, allowed, and the mask. */
struct task_lists {
    uint32_t first, n_bias, n_seen, n_banned, n_allowed;
    float repetition_penalty, presence_penalty, frequency_penalty;
};

/* One call: the arguments that its tasks share. */
struct sample_call {
    const float *logits;
    uint32_t vocab_size, vocab_stride, limit, segment; /* segment: ids of a block, a multiple of 4 */
    const struct staged_task *tasks;                   /* pinned host memory */
    const char *lists;                                 /* device memory */
    uint32_t n_banned;                                 /* of the engine; they open the lists */
    struct staged_result *results;                     /* pinned, and so are top_* */
    int32_t *top_ids, *top_ranks;
    float *top_values;
    int32_t *sampled;                                  /* device memory */
    uint32_t n_tasks;
    char *rooms;                                       /* without sm_90a: the blocks' memory, room_bytes each ... */
    uint32_t room_bytes;
    uint32_t *meetings;                                /* ... and how often blocks have come to each cluster's meetings */
};

/* A block's memory; its segment of the row lies behind it. */
struct sample_block {
    struct staged_task task;
    struct task_lists lists;
    uint32_t joined[2][CLUSTER][JOIN_WORDS], warps[WARPS][JOIN_WORDS];
    unsigned long long histograms[2][N_BINS], above[WARPS];
    unsigned long long need, equal; /* of the chosen bin: the mass still needed from it, and its mass */
    uint32_t chosen, n_listed, n_gathered, n_spread[CLUSTER];
    uint32_t bound; /* bits of 2^32 / e^score of the best draw so far */
    union {
        uint32_t keys[CLUSTER][SPREAD_IDS];
        uint32_t bits[MAX_SEGMENT / 32];
        uint2 best[SPREAD_IDS * CLUSTER / 2];
    } list;
};

/* A thread's view of the row. */
struct sample_row {
    const struct sample_call &call;
    struct sample_block &block;
    uint32_t task;         /* its number */
    float *z;              /* [segment]; -inf behind the last id */
    const float *logits;   /* of the whole row */
    uint32_t rank;         /* of the block in its cluster */
    uint32_t first, n_own; /* ids of the segment */
    uint32_t n_kept;       /* of them below vocab_limit */
    uint32_t n_groups, turn;
};

struct log_sum {
    float most, sum, log; /* M, S, log S */
};

/* ---- joins over the cluster ---------------------------------------------------------------------------------------------- */

/* A value as words, for exchange between lanes and blocks. */
template <class V> struct words_of {
    static const uint32_t n = sizeof(V) / 4;
    static_assert(sizeof(V) % 4 == 0 && n <= JOIN_WORDS, "fits a slot");
    uint32_t words[n];
    __device__ __forceinline__ explicit words_of(const V &value) { memcpy(words, &value, sizeof value); }
    __device__ __forceinline__ explicit words_of(const uint32_t *from)
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            words[i] = from[i];
    }
    __device__ __forceinline__ V value(void) const
    {
        V v;
        memcpy(&v, words, sizeof v);
        return v;
    }
    __device__ __forceinline__ void store(uint32_t *to) const
    {
#pragma unroll
        for (uint32_t i = 0; i < n; i++)
            to[i] = words[i];
    }
};

template <class V> static __device__ __forceinline__ V shuffle_xor(const V &value, uint32_t apart)
{
    words_of<V> w(value);
#pragma unroll
    for (uint32_t i = 0; i < words_of<V>::n; i++)
        w.words[i] = __shfl_xor_sync(~0u, w.words[i], apart);
    return w.value();
}

#if IS_SM_90A
/* Waits for all threads of the cluster. Their writes to the blocks' memory are visible afterwards. */
static __device__ __forceinline__ void cluster_wait(const struct sample_call &)
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* The same memory of another block. */
template <class P> static __device__ __forceinline__ P *of_block(const struct sample_call &, P *place, uint32_t rank)
{
    uint64_t there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((uint64_t)place), "r"(rank));
    return (P *)there;
}
#else
/* All blocks of a cluster run at a time (cooperative launch). The counter may wrap. */
static __device__ __forceinline__ void cluster_wait(const struct sample_call &call)
{
    uint32_t *meetings = call.meetings + blockIdx.x / CLUSTER, now;
    __syncthreads();
    if (!threadIdx.x) {
        __threadfence();
        const uint32_t wanted = atomicAdd(meetings, 1u) / CLUSTER * CLUSTER + CLUSTER;
        do
            asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(now) : "l"(meetings) : "memory");
        while ((int32_t)(now - wanted) < 0);
        __threadfence();
    }
    __syncthreads();
}

template <class P> static __device__ __forceinline__ P *of_block(const struct sample_call &call, P *place, uint32_t rank)
{
    return (P *)((char *)place + ((int64_t)rank - blockIdx.x % CLUSTER) * call.room_bytes);
}
#endif

/* The threads' values joined; the same in all threads. */
template <class V, class J> static __device__ V cluster_join(struct sample_row &r, V value, J join)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (uint32_t apart = 1; apart < 32; apart *= 2)
        value = join(value, shuffle_xor(value, apart));
    if (!lane)
        words_of<V>(value).store(r.block.warps[warp]);
    __syncthreads();
    if (!warp) {
        value = words_of<V>(r.block.warps[lane % WARPS]).value();
        for (uint32_t apart = 1; apart < WARPS; apart *= 2)
            value = join(value, shuffle_xor(value, apart));
        if (lane < CLUSTER)
            words_of<V>(value).store(of_block(r.call, &r.block.joined[r.turn][r.rank][0], lane));
    }
    cluster_wait(r.call);
    value = words_of<V>(r.block.joined[r.turn][0]).value();
#pragma unroll
    for (uint32_t rank = 1; rank < CLUSTER; rank++)
        value = join(value, words_of<V>(r.block.joined[r.turn][rank]).value());
    r.turn ^= 1;
    return value;
}

/* ---- passes over the segment --------------------------------------------------------------------------------------------- */

/* The greatest logit of all ids, and of the ids below vocab_limit (with its lowest id), and whether a logit is not finite. */
struct found {
    float all, most;
    int32_t id;
    uint32_t is_bad;
};

struct join_found {
    __device__ __forceinline__ struct found operator()(const struct found &a, const struct found &b) const
    {
        struct found result = b.most > a.most || (b.most == a.most && b.id < a.id) ? b : a;
        result.all = fmaxf(a.all, b.all);
        result.is_bad = a.is_bad | b.is_bad;
        return result;
    }
};

struct add_values {
    template <class V> __device__ __forceinline__ V operator()(V a, V b) const { return a + b; }
};

/* Takes a group into account. */
static __device__ __forceinline__ void find_in(const struct sample_row &r, uint32_t group, const float4 &v, struct found *found)
{
    float values[4] = {v.x, v.y, v.z, v.w}, most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
    found->is_bad |= !(v.x < INFINITY) | !(v.y < INFINITY) | !(v.z < INFINITY) | !(v.w < INFINITY);
    found->all = fmaxf(found->all, most);
    if (!(most > found->most))
        return;
    for (uint32_t j = 0; j < 4; j++)
        if (values[j] > found->most && 4 * group + j < r.n_kept) {
            found->most = values[j];
            found->id = (int32_t)(r.first + 4 * group + j);
        }
}

static __device__ __forceinline__ float4 load_group(const struct sample_row &r, const float *from, uint32_t group,
                                                   bool is_vector)
{
    if (is_vector && 4 * group + 4 <= r.n_own)
        return __ldg((const float4 *)from + group);
    float v[4];
    for (uint32_t j = 0; j < 4; j++)
        v[j] = 4 * group + j < r.n_own ? from[4 * group + j] : -INFINITY;
    return make_float4(v[0], v[1], v[2], v[3]);
}

static __device__ __forceinline__ float4 divided(float4 v, float by)
{
    return make_float4(v.x / by, v.y / by, v.z / by, v.w / by);
}

#define LOADS 8u /* loads in flight, of 16 bytes */

/* z = the logits, divided unless `by` is 1. */
static __device__ struct found take_logits(const struct sample_row &r, float by)
{
    struct found found = {-INFINITY, -INFINITY, INT32_MAX, 0};
    const float *from = r.logits + r.first;
    bool is_vector = (uintptr_t)from % 16 == 0;
    for (uint32_t group = threadIdx.x; group < r.n_groups; group += LOADS * THREADS) {
        float4 v[LOADS];
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            if (group + i * THREADS < r.n_groups)
                v[i] = load_group(r, from, group + i * THREADS, is_vector);
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            if (group + i * THREADS < r.n_groups) {
                if (by != 1)
                    v[i] = divided(v[i], by);
                ((float4 *)r.z)[group + i * THREADS] = v[i];
                find_in(r, group + i * THREADS, v[i], &found);
            }
    }
    return found;
}

/* z divided in place. */
static __device__ struct found divide_row(const struct sample_row &r, float by)
{
    struct found found = {-INFINITY, -INFINITY, INT32_MAX, 0};
    for (uint32_t group = threadIdx.x; group < r.n_groups; group += THREADS) {
        float4 v = ((float4 *)r.z)[group];
        if (by != 1)
            ((float4 *)r.z)[group] = v = divided(v, by);
        find_in(r, group, v, &found);
    }
    return found;
}

/* The part of a group in a sum of e^(z - most); -inf adds 0. */
static __device__ __forceinline__ float group_sum(const float4 &v, float most)
{
    return (expf(v.x - most) + expf(v.y - most)) + (expf(v.z - most) + expf(v.w - most));
}

static __device__ __forceinline__ struct log_sum make_sum(float most, float sum)
{
    struct log_sum result = {most, sum, sum > 0 ? logf(sum) : 0};
    return result;
}

/* Over the whole row; divides it on the way unless `by` is 1. */
static __device__ struct log_sum sum_row(struct sample_row &r, float most, float by)
{
    float sum = 0;
    for (uint32_t group = threadIdx.x; group < r.n_groups; group += THREADS) {
        float4 v = ((float4 *)r.z)[group];
        sum += most > -INFINITY ? group_sum(v, most) : 0.0f;
        if (by != 1)
            ((float4 *)r.z)[group] = divided(v, by);
    }
    return make_sum(most, cluster_join(r, sum, add_values()));
}

static __device__ __forceinline__ float log_value(const struct log_sum &sum, float z)
{
    return z > -INFINITY ? (z - sum.most) - sum.log : -INFINITY;
}

/* z of any id of the row. */
static __device__ __forceinline__ float peek(const struct sample_row &r, uint32_t id)
{
    return *of_block(r.call, r.z + id % r.call.segment, id / r.call.segment);
}

#endif
