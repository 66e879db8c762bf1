/* sample.cu: one token for each task from a row of logits, in the order of docs/sampling.md; all in float32, no sort.
 * logits [n_logits_rows][vocab_stride]; the row is read, never written.
 *
 * A block of THREADS does one task over two rows of scratch: z, the logits of step 3, and kept, which is z where an id may be
 * drawn and -inf elsewhere. Sums: thread t adds e^(z - M) of the ids t, t + THREADS, ..., then a fixed tree; so raw and full
 * values have the same bits in every task. Truncation finds exact thresholds: the bits of a logit, made to ascend, are fixed
 * eight at a time by histograms of counts (top_k) or of masses in 2^-40 (top_p); integer sums do not depend on their order.
 * The draw is the greatest (z - M) + noise over what is kept, lowest id on ties, with the keys and counters of kernels/cpu.
 * Alternatives are found one after the other, each the best behind the last. Bound by reading the row: a pass over 152k ids
 * is about 20 us for one block; a draw with top_p makes about 14 passes.
 *
 * The lists of a task travel through pinned memory, as many tasks at a time as fit; the results come back the same way. */
#include "common.cuh"

#include <string.h>

#define THREADS 512u
#define MASS_ONE 0x1p40f

struct sample_place {
    struct sample_task task;        /* its lists are device memory */
    const float *logits;
    float *z, *kept;
    uint32_t vocab_size, limit;
    const int32_t *banned;          /* the engine's */
    uint32_t n_banned;
    struct sample_result *result;
    int32_t *top_ids, *top_ranks;
    float *top_values;
};

struct log_sum {
    float most, sum, log; /* M, S, log S */
};

/* ---- passes over a row -------------------------------------------------------------------------------------------------- */

static __device__ float row_greatest(const float *z, uint32_t n)
{
    float most = -INFINITY;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        most = fmaxf(most, z[i]);
    return block_reduce(most, max_of());
}

static __device__ bool row_is_bad(const float *z, uint32_t n)
{
    int bad = 0;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        bad |= !(z[i] < INFINITY);
    return __syncthreads_or(bad);
}

static __device__ struct log_sum row_sum(const float *z, uint32_t n)
{
    struct log_sum all = {row_greatest(z, n), 0, 0};
    if (!(all.most > -INFINITY))
        return all;
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        sum += expf(z[i] - all.most);
    all.sum = block_reduce(sum, add_of());
    all.log = logf(all.sum);
    return all;
}

static __device__ float log_value(const struct log_sum &sum, float z)
{
    return z > -INFINITY ? (z - sum.most) - sum.log : -INFINITY;
}

struct scored {
    float score;
    int32_t id;
};

struct best_of {
    __device__ struct scored operator()(struct scored a, struct scored b) const
    {
        return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
    }
};

/* ---- steps 2 and 4 ------------------------------------------------------------------------------------------------------ */

/* True if anything was changed. Ids of a list are unique, so threads do not meet. */
static __device__ bool edit_logits(const struct sample_place &p)
{
    const struct sample_task &task = p.task;
    int edited = task.n_seen > 0;
    for (uint32_t i = threadIdx.x; i < task.n_bias; i += THREADS)
        if (task.bias[i].value > -INFINITY) {
            p.z[task.bias[i].id] += task.bias[i].value;
            edited = 1;
        }
    edited = __syncthreads_or(edited);
    for (uint32_t i = threadIdx.x; i < task.n_seen; i += THREADS) {
        struct token_seen seen = task.seen[i];
        float z = p.z[seen.id];
        if (task.repetition_penalty != 1 && (seen.in_prompt || seen.count))
            z = z > 0 ? z / task.repetition_penalty : z * task.repetition_penalty;
        if (seen.count)
            z -= task.frequency_penalty * (float)seen.count + task.presence_penalty;
        p.z[seen.id] = z;
    }
    __syncthreads();
    return edited;
}

static __device__ void remove_list(const struct sample_place &p, const int32_t *ids, uint32_t n)
{
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        if (ids[i] >= 0 && (uint32_t)ids[i] < p.vocab_size)
            p.kept[ids[i]] = -INFINITY;
}

static __device__ void remove_ids(const struct sample_place &p)
{
    const struct sample_task &task = p.task;
    if (task.n_allowed) {
        for (uint32_t i = threadIdx.x; i < p.vocab_size; i += THREADS)
            p.kept[i] = -INFINITY;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < task.n_allowed; i += THREADS)
            if (task.allowed[i] >= 0 && (uint32_t)task.allowed[i] < p.limit)
                p.kept[task.allowed[i]] = p.z[task.allowed[i]];
    } else {
        for (uint32_t i = p.limit + threadIdx.x; i < p.vocab_size; i += THREADS)
            p.kept[i] = -INFINITY;
    }
    __syncthreads();
    remove_list(p, p.banned, p.n_banned);
    remove_list(p, task.banned, task.n_banned);
    for (uint32_t i = threadIdx.x; i < task.n_bias; i += THREADS)
        if (task.bias[i].value == -INFINITY)
            p.kept[task.bias[i].id] = -INFINITY;
    __syncthreads();
}

static __device__ bool is_truncated(const struct sample_place &p)
{
    const struct sample_task &task = p.task;
    return !task.is_greedy && (task.min_p > 0 || (task.top_k && task.top_k < p.vocab_size) || task.top_p < 1);
}

/* Does a score task need steps 4 to 8 at all? */
static __device__ bool wants_kept(const struct sample_place &p)
{
    const struct sample_task &task = p.task;
    int wants = !task.is_score || task.mode == LOGPROB_PROCESSED || task.n_banned || task.n_allowed || is_truncated(p);
    for (uint32_t i = threadIdx.x; i < task.n_bias; i += THREADS)
        wants |= task.bias[i].value == -INFINITY;
    return __syncthreads_or(wants);
}

/* ---- step 6 ------------------------------------------------------------------------------------------------------------- */

/* Bits of a float that ascend with it. */
static __device__ __forceinline__ uint32_t ascending_bits(float z)
{
    uint32_t bits = __float_as_uint(z);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ unsigned long long mass_of(float z, float most, bool is_count)
{
    return is_count ? 1ull : (unsigned long long)(expf(z - most) * MASS_ONE);
}

static __device__ unsigned long long total_mass(const struct sample_place &p, float most)
{
    unsigned long long mass = 0;
    for (uint32_t i = threadIdx.x; i < p.limit; i += THREADS)
        if (p.kept[i] > -INFINITY)
            mass += mass_of(p.kept[i], most, false);
    return block_reduce(mass, add_of());
}

/* The bits of the greatest z such that the kept ids at or above it weigh `need` or more together; those of the least kept one
 * if all weigh less. */
static __device__ uint32_t find_threshold(const struct sample_place &p, float most, unsigned long long need, bool is_count)
{
    __shared__ unsigned long long histogram[256];
    __shared__ uint32_t counts[256], chosen;
    __shared__ unsigned long long still;
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (uint32_t i = threadIdx.x; i < 256; i += THREADS)
            histogram[i] = counts[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < p.limit; i += THREADS) {
            float z = p.kept[i];
            uint32_t bits = ascending_bits(z);
            if (z > -INFINITY && (shift == 24 || bits >> (shift + 8) == prefix)) {
                atomicAdd(&histogram[bits >> shift & 255], mass_of(z, most, is_count));
                atomicAdd(&counts[bits >> shift & 255], 1u);
            }
        }
        __syncthreads();
        if (!threadIdx.x) {
            unsigned long long above = 0;
            for (int b = 255; b >= 0; b--) {
                if (!counts[b])
                    continue;
                chosen = (uint32_t)b; /* the least so far */
                still = need > above ? need - above : 0;
                above += histogram[b];
                if (above >= need)
                    break;
            }
        }
        __syncthreads();
        prefix = prefix << 8 | chosen;
        need = still;
        __syncthreads();
    }
    return prefix;
}

static __device__ void keep_from(const struct sample_place &p, uint32_t threshold)
{
    for (uint32_t i = threadIdx.x; i < p.limit; i += THREADS)
        if (ascending_bits(p.kept[i]) < threshold)
            p.kept[i] = -INFINITY;
    __syncthreads();
}

static __device__ void truncate_tokens(const struct sample_place &p, float most)
{
    const struct sample_task &task = p.task;
    if (task.min_p > 0) {
        for (uint32_t i = threadIdx.x; i < p.limit; i += THREADS)
            if (p.kept[i] > -INFINITY && !(expf(p.kept[i] - most) >= task.min_p))
                p.kept[i] = -INFINITY;
        __syncthreads();
    }
    if (task.top_k && task.top_k < p.vocab_size)
        keep_from(p, find_threshold(p, most, task.top_k, true));
    if (task.top_p < 1) {
        unsigned long long need = (unsigned long long)ceil((double)task.top_p * (double)total_mass(p, most));
        keep_from(p, find_threshold(p, most, need > 1 ? need : 1, false));
    }
}

/* ---- steps 5 and 7 ------------------------------------------------------------------------------------------------------ */

/* Philox4x32-10: key = seed, counter = (id / 4, position, sample index, 0), output id % 4. */
static __device__ uint4 philox(uint64_t seed, uint32_t block, uint32_t position, uint32_t sample_index)
{
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint4 c = make_uint4(block, position, sample_index, 0);
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
        uint32_t high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
        uint32_t high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
        c = make_uint4(high1 ^ c.y ^ key0, low1, high0 ^ c.w ^ key1, low0);
    }
    return c;
}

/* -log(-log1p(-v)), v = (u + 1/2) 2^-32 rounded, at most the number below 1. */
static __device__ float gumbel(uint32_t u)
{
    float v = fminf((float)u * 0x1p-32f + 0x1p-33f, 0x1.fffffep-1f);
    return -logf(-log1pf(-v));
}

static __device__ int32_t draw(const struct sample_place &p, float most)
{
    struct scored best = {-INFINITY, 0x7fffffff};
    for (uint32_t first = 4 * threadIdx.x; first < p.limit; first += 4 * THREADS) {
        uint4 u = philox(p.task.seed, first / 4, p.task.position, p.task.sample_index);
        uint32_t four[4] = {u.x, u.y, u.z, u.w};
        for (uint32_t j = 0; j < 4 && first + j < p.limit; j++) {
            float z = p.kept[first + j];
            struct scored here = {(z - most) + gumbel(four[j]), (int32_t)(first + j)};
            if (z > -INFINITY)
                best = best_of()(best, here);
        }
    }
    return block_reduce(best, best_of()).id;
}

static __device__ int32_t greedy_id(const struct sample_place &p)
{
    struct scored best = {-INFINITY, 0x7fffffff};
    for (uint32_t i = threadIdx.x; i < p.limit; i += THREADS)
        best = best_of()(best, {p.kept[i], (int32_t)i});
    return block_reduce(best, best_of()).id;
}

/* ---- step 8 and the report ---------------------------------------------------------------------------------------------- */

/* Rank of `own` and the alternatives among values[0..n). */
static __device__ void rank_and_list(const struct sample_place &p, const float *values, uint32_t n, float own,
                                     const struct log_sum &sum)
{
    uint32_t larger = 0;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        larger += values[i] > own;
    larger = block_reduce(larger, add_of());
    if (!threadIdx.x)
        p.result->rank = (int32_t)larger + 1;
    struct scored last = {INFINITY, -1};
    int32_t last_rank = 0;
    for (uint32_t k = 0; k < p.task.n_top; k++) {
        struct scored best = {-INFINITY, (int32_t)p.vocab_size};
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
            float z = values[i];
            bool is_behind = z < last.score || (z == last.score && (int32_t)i > last.id);
            if (is_behind && z > -INFINITY)
                best = best_of()(best, {z, (int32_t)i});
        }
        best = block_reduce(best, best_of());
        last_rank = k && best.score == last.score ? last_rank : (int32_t)k + 1;
        last = best;
        if (!threadIdx.x) {
            p.top_ids[k] = best.id;
            p.top_ranks[k] = last_rank;
            p.top_values[k] = log_value(sum, best.score);
        }
    }
}

static __device__ void report(const struct sample_place &p, int32_t id, const struct log_sum &raw, const struct log_sum &full,
                              bool is_all_kept)
{
    struct log_sum kept = is_all_kept ? full : row_sum(p.kept, p.limit);
    float own = is_all_kept ? p.z[id] : (uint32_t)id < p.limit ? p.kept[id] : -INFINITY;
    if (!threadIdx.x) {
        p.result->raw = log_value(raw, p.logits[id]);
        p.result->full = log_value(full, p.z[id]);
        p.result->processed = log_value(kept, own);
        float mass = is_all_kept ? 1.0f : expf(kept.most - full.most) * kept.sum / full.sum;
        p.result->kept_mass = mass < 1 ? mass : 1;
    }
    if (p.task.mode == LOGPROB_RAW)
        rank_and_list(p, p.logits, p.vocab_size, p.logits[id], raw);
    else if (p.task.mode == LOGPROB_FULL)
        rank_and_list(p, p.z, p.vocab_size, p.z[id], full);
    else
        rank_and_list(p, is_all_kept ? p.z : p.kept, is_all_kept ? p.vocab_size : p.limit, own, kept);
}

/* ---- a task ------------------------------------------------------------------------------------------------------------- */

static __device__ void finish(const struct sample_place &p, uint32_t status)
{
    if (!threadIdx.x)
        p.result->status = status;
}

/* Steps 1 to 3; false: a logit is not finite. */
static __device__ bool take_logits(const struct sample_place &p, struct log_sum *raw, struct log_sum *full)
{
    const struct sample_task &task = p.task;
    bool is_scaled = !task.is_greedy && task.temperature != 1;
    if (row_is_bad(p.logits, p.vocab_size))
        return false;
    for (uint32_t i = threadIdx.x; i < p.vocab_size; i += THREADS)
        p.z[i] = p.logits[i];
    __syncthreads();
    if (task.wants_logprobs)
        *raw = row_sum(p.logits, p.vocab_size);
    *full = *raw;
    if (!edit_logits(p) && !is_scaled)
        return true;
    for (uint32_t i = threadIdx.x; is_scaled && i < p.vocab_size; i += THREADS)
        p.z[i] = p.z[i] / task.temperature;
    __syncthreads();
    if (row_is_bad(p.z, p.vocab_size))
        return false;
    if (task.wants_logprobs)
        *full = row_sum(p.z, p.vocab_size);
    return true;
}

/* Steps 4 to 7 of a task that needs them: the id, or -1 when none is allowed. */
static __device__ int32_t choose(const struct sample_place &p)
{
    for (uint32_t i = threadIdx.x; i < p.vocab_size; i += THREADS)
        p.kept[i] = p.z[i];
    __syncthreads();
    remove_ids(p);
    float most = row_greatest(p.kept, p.limit);
    if (!(most > -INFINITY))
        return -1;
    if (is_truncated(p))
        truncate_tokens(p, most);
    return p.task.is_score ? p.task.target : p.task.is_greedy ? greedy_id(p) : draw(p, most);
}

static __global__ void __launch_bounds__(THREADS) run_tasks(const struct sample_place *places)
{
    __shared__ struct sample_place p;
    struct log_sum raw = {0, 0, 0}, full = raw;
    if (!threadIdx.x)
        p = places[blockIdx.x];
    __syncthreads();
    if (!take_logits(p, &raw, &full)) {
        finish(p, SAMPLE_NON_FINITE);
        return;
    }
    bool is_all_kept = !wants_kept(p);
    int32_t id = is_all_kept ? p.task.target : choose(p);
    if (id < 0) {
        finish(p, SAMPLE_NONE_ALLOWED);
        return;
    }
    if (!threadIdx.x)
        p.result->id = id;
    if (p.task.wants_logprobs)
        report(p, id, raw, full, is_all_kept);
}

/* ---- the call ----------------------------------------------------------------------------------------------------------- */

/* One wave: tasks whose lists and results fit the staging memory. The first half of it goes to the device, the second comes
 * back. */
struct wave {
    struct cuda *cuda;
    size_t in_bytes, out_bytes;
};

static size_t padded(size_t size_bytes)
{
    return (size_bytes + 15) & ~(size_t)15;
}

/* Room for n bytes of input; the place on the device of what lies at `host`. NULL when it does not fit. */
static char *take_in(struct wave *wave, size_t size_bytes, char **host)
{
    size_t at = wave->in_bytes;
    if (at + padded(size_bytes) > wave->cuda->staged_bytes)
        return NULL;
    wave->in_bytes += padded(size_bytes);
    *host = wave->cuda->pinned + at;
    return wave->cuda->staged + at;
}

/* The same for results: they lie at `host` once the wave is over. */
static char *take_out(struct wave *wave, size_t size_bytes, size_t *offset)
{
    if (wave->out_bytes + padded(size_bytes) > wave->cuda->staged_bytes)
        return NULL;
    *offset = wave->out_bytes;
    wave->out_bytes += padded(size_bytes);
    return wave->cuda->staged + wave->cuda->staged_bytes + *offset;
}

template <class E> static bool stage_list(struct wave *wave, const E **list, uint32_t n)
{
    char *host, *device = take_in(wave, n * sizeof **list, &host);
    if (!device)
        return false;
    if (n)
        memcpy(host, *list, n * sizeof **list);
    *list = (const E *)device;
    return true;
}

struct task_out {
    size_t result, ids, values, ranks;
};

static bool stage_task(struct wave *wave, const struct sample_args *args, const struct sample_task *task, uint32_t slot,
                       struct sample_place *place, struct task_out *out)
{
    struct cuda *cuda = wave->cuda;
    place->task = *task;
    place->logits = args->logits + (size_t)task->logits_row * args->vocab_stride;
    place->z = cuda->sample_rows + (size_t)2 * slot * cuda->vocab_stride;
    place->kept = place->z + cuda->vocab_stride;
    place->vocab_size = args->vocab_size;
    place->limit = args->vocab_limit < args->vocab_size ? args->vocab_limit : args->vocab_size;
    place->n_banned = args->n_banned;
    struct sample_task *t = &place->task;
    if (!stage_list(wave, &t->bias, t->n_bias) || !stage_list(wave, &t->seen, t->n_seen) ||
        !stage_list(wave, &t->banned, t->n_banned) || !stage_list(wave, &t->allowed, t->n_allowed))
        return false;
    place->result = (struct sample_result *)take_out(wave, sizeof *place->result, &out->result);
    place->top_ids = (int32_t *)take_out(wave, task->n_top * sizeof(int32_t), &out->ids);
    place->top_values = (float *)take_out(wave, task->n_top * sizeof(float), &out->values);
    place->top_ranks = (int32_t *)take_out(wave, task->n_top * sizeof(int32_t), &out->ranks);
    return place->result && place->top_ids && place->top_values && place->top_ranks;
}

static void collect(const struct cuda *cuda, const struct sample_args *args, uint32_t task, const struct task_out *out)
{
    const char *results = cuda->pinned + cuda->staged_bytes;
    uint32_t at = args->tasks[task].top_offset;
    size_t n_bytes = args->tasks[task].n_top * sizeof(int32_t);
    memcpy(&args->results[task], results + out->result, sizeof *args->results);
    if (!n_bytes)
        return;
    memcpy(args->top_ids + at, results + out->ids, n_bytes);
    memcpy(args->top_values + at, results + out->values, n_bytes);
    memcpy(args->top_ranks + at, results + out->ranks, n_bytes);
}

/* Stages tasks from `first` on; returns how many. */
static uint32_t stage_wave(struct wave *wave, const struct sample_args *args, uint32_t first,
                           const struct sample_place **places, struct task_out *outs)
{
    const int32_t *banned = args->banned;
    uint32_t n = args->n_tasks - first, n_staged = 0;
    n = n < wave->cuda->sample_slots ? n : wave->cuda->sample_slots;
    char *host;
    *places = (const struct sample_place *)take_in(wave, n * sizeof(struct sample_place), &host);
    if (!*places || !stage_list(wave, &banned, args->n_banned))
        return 0;
    struct sample_place *list = (struct sample_place *)host;
    while (n_staged < n) {
        struct wave before = *wave;
        list[n_staged].banned = banned;
        if (!stage_task(wave, args, &args->tasks[first + n_staged], n_staged, &list[n_staged], &outs[n_staged])) {
            *wave = before;
            break;
        }
        /* Kept mass 1 and zeros are what a task has that computes no more. */
        struct sample_result *empty = (struct sample_result *)(wave->cuda->pinned + wave->cuda->staged_bytes +
                                                               outs[n_staged].result);
        memset(empty, 0, sizeof *empty);
        empty->kept_mass = 1;
        n_staged++;
    }
    return n_staged;
}

#define MAX_WAVE 128u

static enum rc run_wave(struct wave *wave, const struct sample_place *places, uint32_t n, struct err *err)
{
    struct cuda *cuda = wave->cuda;
    char *out = cuda->staged + cuda->staged_bytes, *host_out = cuda->pinned + cuda->staged_bytes;
    cudaError_t code = cudaMemcpyAsync(cuda->staged, cuda->pinned, wave->in_bytes, cudaMemcpyHostToDevice, cuda->stream);
    if (code == cudaSuccess)
        code = cudaMemcpyAsync(out, host_out, wave->out_bytes, cudaMemcpyHostToDevice, cuda->stream);
    if (code == cudaSuccess) {
        run_tasks<<<n, THREADS, 0, cuda->stream>>>(places);
        code = cudaGetLastError();
    }
    if (code == cudaSuccess)
        code = cudaMemcpyAsync(host_out, out, wave->out_bytes, cudaMemcpyDeviceToHost, cuda->stream);
    if (code == cudaSuccess)
        code = cudaStreamSynchronize(cuda->stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "sample");
}

enum rc cuda_sample(void *ctx, const struct sample_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (args->vocab_size > cuda->options.vocab_size)
        return err_set(err, RC_INTERNAL, "sample: wanted at most the %u ids that the backend was opened for, have %u",
                       cuda->options.vocab_size, args->vocab_size);
    struct task_out outs[MAX_WAVE];
    for (uint32_t first = 0, n; args->vocab_size && first < args->n_tasks; first += n) {
        struct wave wave = {cuda, 0, 0};
        const struct sample_place *places;
        n = stage_wave(&wave, args, first, &places, outs);
        if (!n)
            return err_set(err, RC_INTERNAL, "sample: wanted lists of at most %zu bytes, have more", cuda->staged_bytes);
        enum rc rc = run_wave(&wave, places, n, err);
        if (rc)
            return rc;
        int32_t ids[MAX_WAVE];
        for (uint32_t i = 0; i < n; i++) {
            collect(cuda, args, first + i, &outs[i]);
            ids[i] = args->results[first + i].id;
        }
        int32_t *sampled = cuda->sampled + (args->slot & 1) * cuda->max_tasks + args->first_task + first;
        if (args->first_task + first + n <= cuda->max_tasks) {
            cudaError_t code = cudaMemcpyAsync(sampled, ids, n * sizeof *ids, cudaMemcpyHostToDevice, cuda->stream);
            if (code != cudaSuccess)
                return cuda_fail(err, code, "sample");
        }
    }
    return RC_OK;
}

enum rc cuda_sample_finish(void *ctx, uint32_t slot, struct err *err)
{
    (void)slot;
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaError_t code = cudaStreamSynchronize(cuda->stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "sample");
}
