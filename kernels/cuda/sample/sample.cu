/* sample.cu: one token for each task from a row of logits, in the order of docs/use/sampling.md; all in float32, no sort.
 * logits [n_logits_rows][vocab_stride]; the row is read, never written.
 *
 * A cluster of 8 blocks does one task: each reads its eighth of the row into shared memory once, and every pass runs from
 * there (sample_row.cuh; devices without clusters use global memory). Sums: thread t of a block adds e^(z - M) of its ids in
 * ascending order, four at a time, then one fixed tree; so raw and full values have the same bits in every task. Truncation
 * finds exact thresholds (sample_select.cuh). The draw is the greatest (z - M) + noise over the kept ids, the lowest id on
 * ties, with the keys and counters of kernels/cpu. Noise is computed only for ids that could win. Bound by reading the rows,
 * 31 us for 256 rows of 128256 ids at 4.3 TB/s, and by 35 operations an id for a draw with logprobs, 40 us; one row by the
 * latency of its few passes, about 6 us.
 *
 * sample_greedy.cuh has a separate kernel for calls that want the greatest logit of every task and nothing else.
 *
 * A call only enqueues: the kernel reads its tasks from pinned memory, ahead of its wait, and writes results there. Lists go
 * to the device in one copy. Each of the two slots has its own memory and an event that is recorded when its results are
 * written. */
#include "../core/launch.cuh"
#include "../ranks/link.cuh"
#include "sample_greedy.cuh"
#include "sample_select.cuh"

#include <string.h>

/* ---- steps 2 and 4 ------------------------------------------------------------------------------------------------------- */

struct task_arrays {
    const struct token_bias *bias;
    const struct token_seen *seen;
    const int32_t *banned, *allowed;
    const uint32_t *mask;
};

static __device__ __forceinline__ struct task_arrays arrays_of(const struct sample_row &r)
{
    const struct task_lists &lists = r.block.lists;
    struct task_arrays a;
    a.bias = (const struct token_bias *)(r.call.lists + lists.first);
    a.seen = (const struct token_seen *)(a.bias + lists.n_bias);
    a.banned = (const int32_t *)(a.seen + lists.n_seen);
    a.allowed = a.banned + lists.n_banned;
    a.mask = (const uint32_t *)(a.allowed + lists.n_allowed);
    return a;
}

/* Step 2. Ids of a list are unique, so threads do not meet. */
static __device__ void edit_logits(const struct sample_row &r)
{
    const struct task_lists &lists = r.block.lists;
    struct task_arrays a = arrays_of(r);
    for (uint32_t i = threadIdx.x; i < lists.n_bias; i += THREADS) {
        uint32_t at = (uint32_t)a.bias[i].id - r.first;
        if (at < r.n_own && a.bias[i].value > -INFINITY)
            r.z[at] += a.bias[i].value;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < lists.n_seen; i += THREADS) {
        struct token_seen seen = a.seen[i];
        uint32_t at = (uint32_t)seen.id - r.first;
        if (at >= r.n_own)
            continue;
        float z = r.z[at];
        if (lists.repetition_penalty != 1 && (seen.in_prompt || seen.count))
            z = z > 0 ? z / lists.repetition_penalty : z * lists.repetition_penalty;
        if (seen.count)
            z -= lists.frequency_penalty * (float)seen.count + lists.presence_penalty;
        r.z[at] = z;
    }
    __syncthreads();
}

static __device__ void remove_list(const struct sample_row &r, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        if ((uint32_t)ids[i] - r.first < r.n_own)
            r.z[(uint32_t)ids[i] - r.first] = -INFINITY;
}

/* Step 4, but for the ids from vocab_limit on. */
static __device__ void remove_ids(const struct sample_row &r)
{
    const struct task_lists &lists = r.block.lists;
    struct task_arrays a = arrays_of(r);
    if (lists.n_allowed) {
        for (uint32_t i = threadIdx.x; i < (r.n_own + 31) / 32; i += THREADS)
            r.block.list.bits[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < lists.n_allowed; i += THREADS) {
            uint32_t at = (uint32_t)a.allowed[i] - r.first;
            if (at < r.n_own)
                atomicOr(&r.block.list.bits[at / 32], 1u << at % 32);
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < r.n_own; i += THREADS)
            if (!(r.block.list.bits[i / 32] >> i % 32 & 1))
                r.z[i] = -INFINITY;
        __syncthreads();
    }
    if (r.block.task.flags & TASK_MASKED) {
        for (uint32_t i = threadIdx.x; i < r.n_own; i += THREADS)
            if (!(a.mask[(r.first + i) / 32] >> (r.first + i) % 32 & 1))
                r.z[i] = -INFINITY;
        __syncthreads();
    }
    remove_list(r, (const int32_t *)r.call.lists, r.call.n_banned);
    remove_list(r, a.banned, lists.n_banned);
    for (uint32_t i = threadIdx.x; i < lists.n_bias; i += THREADS)
        if ((uint32_t)a.bias[i].id - r.first < r.n_own && a.bias[i].value == -INFINITY)
            r.z[(uint32_t)a.bias[i].id - r.first] = -INFINITY;
    __syncthreads();
}

/* ---- steps 5 and 7 ------------------------------------------------------------------------------------------------------- */

/* Philox4x32-10: key = seed, counter = (id / 4, position, sample index, 0), output id % 4. */
static __device__ __forceinline__ uint4 philox(uint64_t seed, uint32_t block, uint32_t position, uint32_t sample_index)
{
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint4 c = make_uint4(block, position, sample_index, 0);
#pragma unroll
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c.x, product1 = (uint64_t)0xCD9E8D57u * c.z;
        c = make_uint4((uint32_t)(product1 >> 32) ^ c.y ^ key0, (uint32_t)product1, (uint32_t)(product0 >> 32) ^ c.w ^ key1,
                       (uint32_t)product0);
    }
    return c;
}

/* v = (u + 1/2) 2^-32 rounded, at most the number below 1; the noise is -log(-log1p(-v)). */
static __device__ __forceinline__ float uniform_of(uint32_t u)
{
    return fminf((float)u * 0x1p-32f + 0x1p-33f, 0x1.fffffep-1f);
}

/* The noise is -2.8115 or more, and M is the logit of an id that is kept: nothing below e^-2.8125 can win. */
#define FIRST_BOUND (0x1p32f / 0.06f)

struct drawn {
    float full, kept; /* sums of e^(z - M) */
    float score;
    int32_t id;
};

struct join_drawn {
    __device__ __forceinline__ struct drawn operator()(const struct drawn &a, const struct drawn &b) const
    {
        struct drawn result = b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
        result.full = a.full + b.full;
        result.kept = a.kept + b.kept;
        return result;
    }
};

struct draw_plan {
    float full_most, most, cut;
    bool sums_full, sums_kept, draws;
};

/* Noise of a group whose e^(z - most) are e. -log1p(-v) >= v, so an id with e < v e^best cannot win; the bound is on the
 * random number itself and leaves room for rounding. */
static __device__ __forceinline__ void draw_group(const struct sample_row &r, uint32_t group, const float (&z)[4],
                                                  const float (&e)[4], float most, struct drawn *best)
{
    const struct staged_task &task = r.block.task;
    float bound = __uint_as_float(*(volatile uint32_t *)&r.block.bound);
    if (fmaxf(fmaxf(e[0], e[1]), fmaxf(e[2], e[3])) * bound < 0.5f)
        return;
    uint4 u = philox(task.seed, (r.first + 4 * group) / 4, task.position, task.sample_index);
    uint32_t four[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
        if (four[j] > __float2uint_rz(e[j] * bound + 1.0f) || e[j] == 0)
            continue;
        float score = (z[j] - most) - logf(-log1pf(-uniform_of(four[j])));
        if (score > best->score) {
            best->score = score;
            best->id = (int32_t)(r.first + 4 * group + j);
            atomicMin(&r.block.bound, __float_as_uint(0x1.004p32f * __expf(-score)));
        }
    }
}

/* One pass: the sum over the row, the sum over the kept ids, and the draw from them. */
static __device__ struct drawn draw_row(const struct sample_row &r, const struct draw_plan &plan)
{
    struct drawn d = {0, 0, -INFINITY, INT32_MAX};
    bool is_shared = plan.sums_full && plan.full_most == plan.most;
    for (uint32_t group = threadIdx.x; group < r.n_groups; group += THREADS) {
        float4 v = ((const float4 *)r.z)[group];
        float z[4] = {v.x, v.y, v.z, v.w}, all[4], e[4];
        if (plan.sums_full) {
#pragma unroll
            for (uint32_t j = 0; j < 4; j++)
                all[j] = expf(z[j] - plan.full_most);
            d.full += (all[0] + all[1]) + (all[2] + all[3]);
        }
        if (!plan.sums_kept && !plan.draws)
            continue;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            bool is_kept = 4 * group + j < r.n_kept && z[j] >= plan.cut;
            e[j] = !is_kept ? 0.0f : is_shared ? all[j] : plan.sums_kept ? expf(z[j] - plan.most) : __expf(z[j] - plan.most);
        }
        if (plan.sums_kept)
            d.kept += (e[0] + e[1]) + (e[2] + e[3]);
        if (plan.draws)
            draw_group(r, group, z, e, plan.most, &d);
    }
    return d;
}

/* ---- step 8 and the report ----------------------------------------------------------------------------------------------- */

struct outcome {
    int32_t id;
    float own, kept_own;      /* its logit of step 3, and -inf if it is removed */
    float cut;
    struct log_sum raw, full, kept;
    bool is_all_kept;
};

static __device__ __forceinline__ bool is_changed(const struct staged_task &task)
{
    return task.flags & TASK_EDITED || (!(task.flags & TASK_GREEDY) && task.temperature != 1);
}

/* Replaces z by the values that the logprobs' mode shows. Returns the number of ids of the segment that count. */
static __device__ uint32_t show_mode(struct sample_row &r, const struct outcome &o, uint32_t mode)
{
    const struct staged_task &task = r.block.task;
    bool was_removed = task.flags & TASK_KEPT && task.flags & TASK_REMOVES;
    if (mode == LOGPROB_PROCESSED) {
        if (o.is_all_kept)
            return r.n_own;
        cluster_wait(r.call); /* other blocks may still read z */
        for (uint32_t i = threadIdx.x; i < r.n_kept; i += THREADS)
            if (!(r.z[i] >= o.cut))
                r.z[i] = -INFINITY;
        __syncthreads();
        return r.n_kept;
    }
    if (was_removed || (mode == LOGPROB_RAW && is_changed(task))) {
        cluster_wait(r.call);
        take_logits(r, 1);
        __syncthreads();
        if (mode == LOGPROB_FULL) {
            if (task.flags & TASK_EDITED)
                edit_logits(r);
            divide_row(r, task.flags & TASK_GREEDY ? 1 : task.temperature);
            __syncthreads();
        }
    }
    return r.n_own;
}

static __device__ void report(struct sample_row &r, const struct outcome &o)
{
    uint32_t mode = r.block.task.flags >> TASK_MODE_SHIFT, larger = 0;
    const struct log_sum &sum = mode == LOGPROB_RAW ? o.raw : mode == LOGPROB_FULL ? o.full : o.kept;
    float raw_own = r.logits[o.id];
    float own = mode == LOGPROB_RAW ? raw_own : mode == LOGPROB_FULL ? o.own : o.kept_own;
    uint32_t n = show_mode(r, o, mode);
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        larger += r.z[i] > own;
    larger = cluster_join(r, larger, add_values());
    if (!r.rank && !threadIdx.x) {
        struct sample_result result = {};
        float mass = o.is_all_kept ? 1.0f : expf(o.kept.most - o.full.most) * o.kept.sum / o.full.sum;
        result.id = o.id;
        result.raw = log_value(o.raw, raw_own);
        result.full = log_value(o.full, o.own);
        result.processed = log_value(o.kept, o.kept_own);
        result.kept_mass = mass < 1 ? mass : 1;
        result.rank = (int32_t)larger + 1;
        store_result(&r.call.results[r.task], result);
    }
    if (r.block.task.n_top)
        list_best(r, sum, n);
}

/* ---- a task -------------------------------------------------------------------------------------------------------------- */

/* Writes the result of a task that computes nothing more. */
static __device__ void finish(const struct sample_row &r, int32_t id, uint32_t status)
{
    if (r.rank || threadIdx.x)
        return;
    struct sample_result result = {};
    result.id = id;
    result.status = status;
    result.kept_mass = 1;
    store_result(&r.call.results[r.task], result);
}

/* Steps 1 to 3: z, its greatest value and, if logprobs are wanted and z is not the logits, the logits' sum. */
static __device__ struct found scale_logits(struct sample_row &r, struct log_sum *raw)
{
    const struct staged_task &task = r.block.task;
    bool is_edited = task.flags & TASK_EDITED, wants = task.flags & TASK_LOGPROBS;
    float by = task.flags & TASK_GREEDY ? 1.0f : task.temperature;
    struct found found = cluster_join(r, take_logits(r, is_edited || wants ? 1.0f : by), join_found());
    if (found.is_bad || !is_changed(task))
        return found;
    if (is_edited) {
        if (wants)
            *raw = sum_row(r, found.all, 1);
        edit_logits(r);
        return cluster_join(r, divide_row(r, by), join_found());
    }
    if (wants) {
        *raw = sum_row(r, found.all, by);
        found.all = found.all / by;
        found.most = found.most / by;
        found.is_bad = !(found.all < INFINITY);
    }
    return found;
}

/* Steps 4 to 8 of a task that needs them; false: no id is allowed. */
static __device__ bool choose_token(struct sample_row &r, struct found found, struct outcome *o)
{
    const struct staged_task &task = r.block.task;
    bool wants = task.flags & TASK_LOGPROBS, removes = task.flags & TASK_REMOVES, is_score = task.flags & TASK_SCORE;
    bool truncates = task.flags & TASK_TRUNCATED;
    float all = found.all;
    if (removes) {
        if (wants)
            o->full = sum_row(r, all, 1);
        remove_ids(r);
        found = cluster_join(r, divide_row(r, 1), join_found());
    }
    if (!(found.most > -INFINITY))
        return false;
    o->cut = truncates ? truncate_row(r, found.most) : -FLT_MAX;
    o->is_all_kept = !removes && !truncates && r.call.limit == r.call.vocab_size;
    struct draw_plan plan = {all, found.most, o->cut, wants && !removes, wants && !o->is_all_kept,
                             !is_score && !(task.flags & TASK_GREEDY)};
    struct drawn drawn = {};
    if (plan.sums_full || plan.sums_kept || plan.draws)
        drawn = cluster_join(r, draw_row(r, plan), join_drawn());
    if (plan.sums_full)
        o->full = make_sum(all, drawn.full);
    o->kept = o->is_all_kept ? o->full : make_sum(found.most, drawn.kept);
    o->id = is_score ? task.target : plan.draws ? drawn.id : found.id;
    if (wants) {
        float z = (uint32_t)o->id < r.call.limit ? peek(r, (uint32_t)o->id) : -INFINITY;
        o->own = is_score ? o->own : z;
        o->kept_own = z >= o->cut ? z : -INFINITY;
    }
    return true;
}

static __device__ void run_task(struct sample_row &r)
{
    const struct staged_task &task = r.block.task;
    struct outcome o = {};
    struct found found = scale_logits(r, &o.raw);
    if (found.is_bad) {
        finish(r, 0, SAMPLE_NON_FINITE);
        return;
    }
    if (task.flags & TASK_SCORE)
        o.own = o.kept_own = peek(r, (uint32_t)task.target);
    if (task.flags & TASK_KEPT) {
        if (!choose_token(r, found, &o)) {
            cluster_wait(r.call); /* other blocks may still read z */
            finish(r, 0, SAMPLE_NONE_ALLOWED);
            return;
        }
    } else {
        o.id = task.target;
        o.full = o.kept = sum_row(r, found.all, 1);
        o.is_all_kept = true;
    }
    if (!r.rank && !threadIdx.x && r.call.sampled)
        r.call.sampled[r.task] = o.id;
    if (!is_changed(task))
        o.raw = o.full;
    if (task.flags & TASK_LOGPROBS)
        report(r, o);
    else
        finish(r, o.id, SAMPLE_OK);
}

/* Coalesced and uncached: other reads of host memory cost 0.17 us each, one after the other. */
static __device__ __forceinline__ uint4 load_once(const uint4 *from)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

/* memory: of the block. is_first: of the launch. */
static __device__ void do_task(const struct sample_call &call, char *memory, uint32_t number, bool is_first)
{
    static_assert(sizeof(struct sample_block) % 16 == 0, "the segment behind it is read by fours");
    struct sample_block &block = *(struct sample_block *)memory;
    uint32_t lane = threadIdx.x % 32;
    cluster_wait(call); /* wait until all blocks of the cluster have started, or have ended the task before */
    if (!threadIdx.x)
        block.bound = __float_as_uint(FIRST_BOUND);
    if (blockIdx.x % CLUSTER == 0 && threadIdx.x < 32) { /* one read from host memory for all blocks */
        uint4 part = load_once((const uint4 *)&call.tasks[number] + lane % 4);
        of_block(call, (uint4 *)&block.task, lane / 4)[lane % 4] = part;
    }
    if (is_first)
        wait_for_input();
    cluster_wait(call);
    if (threadIdx.x < sizeof block.lists / 4)
        ((uint32_t *)&block.lists)[threadIdx.x] =
            block.task.flags & TASK_LISTS ? ((const uint32_t *)(call.lists + block.task.lists))[threadIdx.x] : 0;
    __syncthreads();
    uint32_t rank = blockIdx.x % CLUSTER, first = rank * call.segment;
    uint32_t n_own = first < call.vocab_size ? min(call.segment, call.vocab_size - first) : 0;
    uint32_t n_kept = first < call.limit ? min(n_own, call.limit - first) : 0;
    struct sample_row row = {call, block, number, (float *)(memory + sizeof block), call.logits, rank, first, n_own, n_kept,
                             (n_own + 3) / 4, 0};
    row.logits += (size_t)block.task.logits_row * call.vocab_stride;
    run_task(row);
}

/* A cluster does one task; without sm_90a, where a launch has as many clusters as run at a time, it may do several. */
static __global__ void __launch_bounds__(THREADS, 2) sample_tasks(const __grid_constant__ struct sample_call call)
{
    start_next();
#if IS_SM_90A
    extern __shared__ __align__(64) char shared[];
    do_task(call, shared, blockIdx.x / CLUSTER, true);
#else
    for (uint32_t number = blockIdx.x / CLUSTER; number < call.n_tasks; number += gridDim.x / CLUSTER)
        do_task(call, call.rooms + (size_t)blockIdx.x * call.room_bytes, number, number == blockIdx.x / CLUSTER);
#endif
}

/* ---- the call ------------------------------------------------------------------------------------------------------------ */

#define MIN_LISTS (8u << 20) /* bytes a slot */

static size_t round_up(size_t n, size_t step)
{
    return (n + step - 1) / step * step;
}

/* A slot's pinned memory: lists, tasks, results, top ids, values and ranks. */
struct slot_memory {
    char *lists, *device_lists;
    struct staged_task *tasks;
    struct staged_result *results;
    int32_t *top_ids, *top_ranks;
    float *top_values;
};

void cuda_sample_size(struct cuda *cuda)
{
    const struct backend_options *options = &cuda->options;
    /* The longest lists that one task can have, every id in each of them, and alternatives of one that wants all, fit. */
    size_t lists = round_up((size_t)32 * options->vocab_size + 4096, 256);
    cuda->lists_bytes = lists > MIN_LISTS ? lists : MIN_LISTS;
    cuda->max_wave = options->max_rows + options->max_logits_rows;
    size_t many = (size_t)32 * options->max_logits_rows;
    cuda->max_tops = (uint32_t)(many > options->vocab_size ? many : options->vocab_size);
    size_t task_bytes = sizeof(struct staged_task) + sizeof(struct staged_result);
    cuda->staged_bytes = round_up(cuda->lists_bytes + cuda->max_wave * task_bytes + cuda->max_tops * 12ul, 256);
}

static struct slot_memory memory_of(const struct cuda *cuda, uint32_t slot)
{
    struct slot_memory m;
    m.lists = cuda->pinned + slot * cuda->staged_bytes;
    m.device_lists = cuda->staged + slot * cuda->lists_bytes;
    m.tasks = (struct staged_task *)(m.lists + cuda->lists_bytes);
    m.results = (struct staged_result *)(m.tasks + cuda->max_wave);
    m.top_ids = (int32_t *)(m.results + cuda->max_wave);
    m.top_ranks = m.top_ids + cuda->max_tops;
    m.top_values = (float *)(m.top_ranks + cuda->max_tops);
    return m;
}

static uint32_t segment_of(uint32_t vocab_size)
{
    return (uint32_t)round_up(ceil_div(vocab_size, CLUSTER), 4);
}

static uint32_t room_bytes(uint32_t segment)
{
    return (uint32_t)(sizeof(struct sample_block) + segment * sizeof(float));
}

/* Of a device without clusters: as many as it runs at a time, a block a processor. */
static uint32_t most_clusters(const struct cuda *cuda)
{
    return cuda->n_processors < CLUSTER ? 1 : cuda->n_processors / CLUSTER;
}

static enum rc open_rooms(struct cuda *cuda, struct err *err)
{
    const uint32_t n = most_clusters(cuda);
    const size_t all_bytes = (size_t)n * CLUSTER * round_up(room_bytes(segment_of(cuda->options.vocab_size)), 64);
    enum rc rc = cuda_take(cuda, MEMORY_WORK, all_bytes, &cuda->sample_rooms, err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, n * sizeof *cuda->sample_meetings, &cuda->sample_meetings, err);
    if (rc)
        return rc;
    const cudaError_t code = cudaMemsetAsync(cuda->sample_meetings, 0, n * sizeof *cuda->sample_meetings, cuda->stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "open");
}

enum rc cuda_sample_open(struct cuda *cuda, struct err *err)
{
    size_t greedy_bytes = cuda->max_wave * sizeof(struct greedy_row);
    enum rc rc = cuda_take(cuda, MEMORY_WORK, greedy_bytes, &cuda->greedy, err);
    if (!rc && cuda->is_portable)
        rc = open_rooms(cuda, err);
    if (rc)
        return rc;
    cudaError_t code = cuda->is_portable ? cudaSuccess : allow_shared(sample_tasks);
    if (code == cudaSuccess)
        code = cudaMemsetAsync(cuda->greedy, 0, greedy_bytes, cuda->stream);
    for (uint32_t slot = 0; slot < 2 && code == cudaSuccess; slot++)
        code = cudaEventCreateWithFlags(&cuda->samples[slot].done, cudaEventDisableTiming);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "open");
}

void cuda_sample_close(struct cuda *cuda)
{
    for (uint32_t slot = 0; slot < 2; slot++)
        if (cuda->samples[slot].done)
            cudaEventDestroy(cuda->samples[slot].done);
}

static size_t put_list(char *at, size_t used, const void *list, size_t size_bytes)
{
    if (size_bytes)
        memcpy(at + used, list, size_bytes);
    return used + size_bytes;
}

static bool has_removing_bias(const struct sample_task *task)
{
    for (uint32_t i = 0; i < task->n_bias; i++)
        if (task->bias[i].value == -INFINITY)
            return true;
    return false;
}

static bool has_adding_bias(const struct sample_task *task)
{
    for (uint32_t i = 0; i < task->n_bias; i++)
        if (task->bias[i].value > -INFINITY)
            return true;
    return false;
}

static uint32_t flags_of(const struct sample_args *args, const struct sample_task *task)
{
    bool truncates = !task->is_greedy &&
                     (task->min_p > 0 || (task->top_k && task->top_k < args->vocab_size) || task->top_p < 1);
    bool removes = task->n_banned || task->n_allowed || task->mask || has_removing_bias(task);
    bool keeps = !task->is_score || task->mode == LOGPROB_PROCESSED || removes || truncates;
    uint32_t flags = task->mode << TASK_MODE_SHIFT;
    flags |= task->is_score ? TASK_SCORE : 0;
    flags |= task->is_greedy ? TASK_GREEDY : 0;
    flags |= task->wants_logprobs || task->is_score ? TASK_LOGPROBS : 0;
    flags |= task->n_bias + task->n_seen + task->n_banned + task->n_allowed || task->mask ? TASK_LISTS : 0;
    flags |= task->mask ? TASK_MASKED : 0;
    flags |= task->n_seen || has_adding_bias(task) ? TASK_EDITED : 0;
    flags |= removes || args->n_banned ? TASK_REMOVES : 0;
    flags |= keeps ? TASK_KEPT : 0;
    return flags | (truncates ? TASK_TRUNCATED : 0);
}

/* The staged part of a call. */
struct wave {
    uint32_t n_tasks, n_tops;
    size_t lists_bytes;
};

/* False: the slot's memory is full. */
static bool stage_task(const struct cuda *cuda, const struct slot_memory *memory, const struct sample_args *args,
                       const struct sample_task *task, struct wave *wave)
{
    struct staged_task *staged = &memory->tasks[wave->n_tasks];
    size_t list_bytes = task->n_bias * sizeof *task->bias + task->n_seen * sizeof *task->seen +
                        (task->n_banned + task->n_allowed) * sizeof *task->banned;
    size_t mask_bytes = task->mask ? ceil_div(args->vocab_size, 32) * sizeof *task->mask : 0;
    list_bytes += mask_bytes;
    if (wave->n_tasks == cuda->max_wave || wave->n_tops + task->n_top > cuda->max_tops ||
        wave->lists_bytes + sizeof(struct task_lists) + list_bytes > cuda->lists_bytes)
        return false;
    *staged = {task->seed, task->temperature, task->top_p, task->min_p, task->top_k, task->logits_row, task->position,
               task->sample_index, task->target, flags_of(args, task), task->n_top, wave->n_tops, (uint32_t)wave->lists_bytes};
    wave->n_tasks++;
    wave->n_tops += task->n_top;
    if (!list_bytes)
        return true;
    size_t used = wave->lists_bytes + sizeof(struct task_lists);
    struct task_lists lists = {(uint32_t)used, task->n_bias, task->n_seen, task->n_banned, task->n_allowed,
                               task->repetition_penalty, task->presence_penalty, task->frequency_penalty};
    put_list(memory->lists, wave->lists_bytes, &lists, sizeof lists);
    used = put_list(memory->lists, used, task->bias, task->n_bias * sizeof *task->bias);
    used = put_list(memory->lists, used, task->seen, task->n_seen * sizeof *task->seen);
    used = put_list(memory->lists, used, task->banned, task->n_banned * sizeof *task->banned);
    used = put_list(memory->lists, used, task->allowed, task->n_allowed * sizeof *task->allowed);
    wave->lists_bytes = put_list(memory->lists, used, task->mask, mask_bytes);
    return true;
}

/* Stages tasks from `first` on, as many as fit. */
static struct wave stage_wave(const struct cuda *cuda, const struct slot_memory *memory, const struct sample_args *args,
                              uint32_t first)
{
    struct wave wave = {0, 0, args->n_banned * sizeof *args->banned};
    if (wave.lists_bytes > cuda->lists_bytes)
        return wave;
    put_list(memory->lists, 0, args->banned, wave.lists_bytes);
    while (first + wave.n_tasks < args->n_tasks && stage_task(cuda, memory, args, &args->tasks[first + wave.n_tasks], &wave))
        continue;
    return wave;
}

static enum rc run_wave(struct cuda *cuda, const struct slot_memory *memory, const struct sample_args *args, uint32_t first,
                        const struct wave *wave, struct err *err)
{
    struct sample_call call = {};
    uint32_t first_id = args->first_task + first;
    call.logits = args->logits;
    call.vocab_size = args->vocab_size;
    call.vocab_stride = args->vocab_stride;
    call.limit = args->vocab_limit < args->vocab_size ? args->vocab_limit : args->vocab_size;
    call.segment = segment_of(args->vocab_size);
    call.tasks = memory->tasks;
    call.lists = memory->device_lists;
    call.n_banned = args->n_banned;
    call.results = memory->results;
    call.top_ids = memory->top_ids;
    call.top_ranks = memory->top_ranks;
    call.top_values = memory->top_values;
    call.sampled = first_id + wave->n_tasks <= cuda->max_tasks
                       ? cuda->sampled + (args->slot & 1) * cuda->max_tasks + first_id : NULL;
    call.n_tasks = wave->n_tasks;
    call.rooms = cuda->sample_rooms;
    call.room_bytes = (uint32_t)round_up(room_bytes(call.segment), 64);
    call.meetings = cuda->sample_meetings;
    cudaError_t code = cudaSuccess;
    if (wave->lists_bytes)
        code = cudaMemcpyAsync(memory->device_lists, memory->lists, wave->lists_bytes, cudaMemcpyHostToDevice, cuda->stream);
    if (is_all_greedy(memory->tasks, wave->n_tasks))
        launch_greedy(cuda, call, memory->tasks[0].logits_row, wave->n_tasks);
    else if (cuda->is_portable)
        launch_together(cuda, sample_tasks, min(wave->n_tasks, most_clusters(cuda)) * CLUSTER, THREADS, call);
    else
        launch_clusters(cuda, sample_tasks, wave->n_tasks * CLUSTER, CLUSTER, THREADS, room_bytes(call.segment), call);
    return code == cudaSuccess ? launched(err, "sample") : cuda_fail(err, code, "sample");
}

static void collect(const struct slot_memory *memory, const struct running_sample *running)
{
    const struct sample_args *args = &running->args;
    uint32_t top = 0;
    for (uint32_t i = 0; i < running->n_tasks; i++)
        args->results[running->first + i] = memory->results[i].result;
    for (uint32_t i = 0; running->n_tops && i < running->n_tasks; i++) {
        const struct sample_task *task = &args->tasks[running->first + i];
        if (!task->n_top)
            continue;
        memcpy(args->top_ids + task->top_offset, memory->top_ids + top, task->n_top * sizeof *args->top_ids);
        memcpy(args->top_ranks + task->top_offset, memory->top_ranks + top, task->n_top * sizeof *args->top_ranks);
        memcpy(args->top_values + task->top_offset, memory->top_values + top, task->n_top * sizeof *args->top_values);
        top += task->n_top;
    }
}

enum rc cuda_sample_finish(void *ctx, uint32_t slot, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    struct running_sample *running = &cuda->samples[slot & 1];
    if (!running->is_running)
        return RC_OK;
    running->is_running = false;
    enum rc rc = cuda_await(cuda, running->done, "sample", err);
    if (rc)
        return rc;
    struct slot_memory memory = memory_of(cuda, slot & 1);
    collect(&memory, running);
    return RC_OK;
}

enum rc cuda_sample(void *ctx, const struct sample_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    struct running_sample *running = &cuda->samples[args->slot & 1];
    struct slot_memory memory = memory_of(cuda, args->slot & 1);
    if (args->vocab_size > CLUSTER * MAX_SEGMENT)
        return err_set(err, RC_UNSUPPORTED, "sample: wanted a vocabulary of at most %u ids on CUDA, have %u",
                       CLUSTER * MAX_SEGMENT, args->vocab_size);
    if (args->vocab_size > cuda->options.vocab_size)
        return err_set(err, RC_INTERNAL, "sample: wanted at most the %u ids that the backend was opened for, have %u",
                       cuda->options.vocab_size, args->vocab_size);
    uint32_t first = 0;
    do {
        enum rc rc = cuda_sample_finish(ctx, args->slot, err);
        struct wave wave = {};
        if (!rc && args->vocab_size && args->n_tasks) {
            wave = stage_wave(cuda, &memory, args, first);
            rc = wave.n_tasks ? run_wave(cuda, &memory, args, first, &wave, err)
                              : err_set(err, RC_INTERNAL, "sample: wanted lists of at most %zu bytes", cuda->lists_bytes);
        }
        if (rc)
            return rc;
        cudaError_t code = cudaEventRecord(running->done, cuda->stream);
        if (code != cudaSuccess)
            return cuda_fail(err, code, "sample");
        running->args = *args;
        running->first = first;
        running->n_tasks = wave.n_tasks;
        running->n_tops = wave.n_tops;
        running->is_running = true;
        first += wave.n_tasks;
    } while (args->vocab_size && first < args->n_tasks);
    return RC_OK;
}
