/* sample_select.cuh: exact thresholds over a row without a sort, and the alternatives. A threshold is fixed digit by digit,
 * from histograms that all blocks of the cluster add up. The digits, in this order:
 *
 *   distance   to the greatest logit in steps of 1/16, which spreads logits over the bins
 *   bits       of the logit, made to ascend, eight at a time
 *   id         where ties must be parted
 *
 * Weights are counts, or masses in 2^-40: integers, whose sums do not depend on their order. Included by sample.cu. */
#ifndef LLMPY_CUDA_SAMPLE_SELECT_CUH
#define LLMPY_CUDA_SAMPLE_SELECT_CUH

#include "sample_row.cuh"

#define MASS_ONE 0x1p40f
#define BINS_A_NAT 16.0f
#define KEY_DIGITS 5u /* the distance and four of the bits */
#define N_DIGITS 8u   /* with three of the id */
#define BEST_IDS 512u /* alternatives found at a time */

/* Bits of a float that ascend with it, the same for both zeros. */
static __device__ __forceinline__ uint32_t ascending_bits(float z)
{
    uint32_t bits = __float_as_uint(z + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float from_ascending(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

/* The ids that are searched: ids of the row below n with -inf < z and cut <= z <= last; of ids equal to `last` only those
 * above last_id. */
struct selection {
    float most;                          /* no z is greater */
    float cut, last;
    int32_t last_id;
    uint32_t n;                          /* of the own segment */
    bool is_mass;                        /* else a count */
    bool is_spread;                      /* every block has all keys with the first digit */
    float share;                         /* is_mass: of the whole mass that is needed */
    uint32_t n_digits, bin, key, ids;    /* chosen so far: the distance, and as many digits of the bits and of the id */
    unsigned long long need, equal;      /* weight still needed from the ids with the chosen digits; their weight */
};

static __device__ __forceinline__ bool is_looked_at(const struct selection &s, float z, uint32_t id)
{
    return z >= s.cut && (z < s.last || (z == s.last && (int32_t)id > s.last_id));
}

static __device__ __forceinline__ uint32_t digit_of(const struct selection &s, uint32_t place, float z, uint32_t id)
{
    if (place == 0)
        return N_BINS - 1 - (uint32_t)fminf((s.most - z) * BINS_A_NAT, (float)(N_BINS - 1));
    if (place < KEY_DIGITS)
        return ascending_bits(z) >> 8 * (KEY_DIGITS - 1 - place) & 255;
    return (0xffffffu - id) >> 8 * (N_DIGITS - 1 - place) & 255;
}

static __device__ __forceinline__ bool has_digits(const struct selection &s, float z, uint32_t id)
{
    if (!s.n_digits)
        return true;
    if (digit_of(s, 0, z, id) != s.bin)
        return false;
    if (s.n_digits <= KEY_DIGITS)
        return s.n_digits == 1 || ascending_bits(z) >> 8 * (KEY_DIGITS - s.n_digits) == s.key;
    return ascending_bits(z) == s.key && (0xffffffu - id) >> 8 * (N_DIGITS - s.n_digits) == s.ids;
}

static __device__ __forceinline__ void take_digit(struct selection *s, uint32_t digit)
{
    if (!s->n_digits) {
        s->bin = digit;
        s->key = s->ids = 0;
    } else if (s->n_digits < KEY_DIGITS) {
        s->key = s->key << 8 | digit;
    } else {
        s->ids = s->ids << 8 | digit;
    }
    s->n_digits++;
}

static __device__ __forceinline__ unsigned long long weight_of(const struct selection &s, float z)
{
    return s.is_mass ? (unsigned long long)(expf(z - s.most) * MASS_ONE) : 1ull;
}

/* Adds to 64 bits in shared memory; two native additions are faster than one of 64 bits. */
static __device__ __forceinline__ void add_weight(unsigned long long *sum, unsigned long long weight)
{
    uint32_t *words = (uint32_t *)sum, low = (uint32_t)weight;
    uint32_t high = (uint32_t)(weight >> 32) + (atomicAdd(&words[0], low) > ~low);
    if (high)
        atomicAdd(&words[1], high);
}

static __device__ __forceinline__ void clear_histogram(unsigned long long *histogram)
{
    for (uint32_t i = threadIdx.x; i < N_BINS; i += THREADS)
        histogram[i] = 0;
    __syncthreads();
}

/* Adds up the weights of each digit in the block's segment. */
static __device__ void fill_histogram(const struct sample_row &r, const struct selection &s, unsigned long long *histogram)
{
    clear_histogram(histogram);
    for (uint32_t group = threadIdx.x; 4 * group < s.n; group += THREADS) {
        float4 v = ((const float4 *)r.z)[group];
        float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t i = 4 * group + j, id = r.first + i;
            if (i < s.n && is_looked_at(s, values[j], id) && has_digits(s, values[j], id))
                add_weight(&histogram[digit_of(s, s.n_digits, values[j], id)], weight_of(s, values[j]));
        }
    }
}

/* Hands the keys of all ids that have the first digit to all blocks. False: they are too many. */
static __device__ bool spread_keys(struct sample_row &r, const struct selection &s)
{
    uint32_t most = 0;
    if (!threadIdx.x)
        r.block.n_listed = 0;
    __syncthreads();
    for (uint32_t group = threadIdx.x; 4 * group < s.n; group += THREADS) {
        float4 v = ((const float4 *)r.z)[group];
        float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t i = 4 * group + j, id = r.first + i;
            if (i >= s.n || !is_looked_at(s, values[j], id) || digit_of(s, 0, values[j], id) != s.bin)
                continue;
            uint32_t at = atomicAdd(&r.block.n_listed, 1u);
            if (at < SPREAD_IDS)
                for (uint32_t rank = 0; rank < CLUSTER; rank++)
                    *of_block(r.call, &r.block.list.keys[r.rank][at], rank) = ascending_bits(values[j]);
        }
    }
    __syncthreads();
    if (threadIdx.x < CLUSTER)
        *of_block(r.call, &r.block.n_spread[r.rank], threadIdx.x) = r.block.n_listed;
    cluster_wait(r.call);
    for (uint32_t rank = 0; rank < CLUSTER; rank++)
        most = max(most, r.block.n_spread[rank]);
    return most <= SPREAD_IDS;
}

/* The same for the next digit of the keys that were handed out: every block has the whole sums. */
static __device__ void fill_from_keys(const struct sample_row &r, const struct selection &s, unsigned long long *histogram)
{
    clear_histogram(histogram);
    for (uint32_t i = threadIdx.x; i < CLUSTER * SPREAD_IDS; i += THREADS) {
        uint32_t rank = i / SPREAD_IDS, at = i % SPREAD_IDS;
        if (at >= r.block.n_spread[rank])
            continue;
        uint32_t key = r.block.list.keys[rank][at];
        if (s.n_digits == 1 || key >> 8 * (KEY_DIGITS - s.n_digits) == s.key)
            add_weight(&histogram[key >> 8 * (KEY_DIGITS - 1 - s.n_digits) & 255], weight_of(s, from_ascending(key)));
    }
    __syncthreads();
}

/* Finds the greatest digit at or above which the weights reach the needed weight. False if all weights together are less, or
 * zero. n_blocks: the cluster's, or 1 if the block's histogram holds everything. */
static __device__ bool choose_digit(struct sample_row &r, struct selection *s, const unsigned long long *histogram,
                                    uint32_t n_blocks)
{
    static_assert(N_BINS == THREADS, "a bin a thread");
    uint32_t bin = N_BINS - 1 - threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned long long own = 0, sum, total = 0, before = 0, parts[CLUSTER];
    if (n_blocks == 1) {
        own = histogram[bin];
    } else {
#pragma unroll
        for (uint32_t rank = 0; rank < CLUSTER; rank++)
            parts[rank] = *of_block(r.call, &histogram[bin], rank);
#pragma unroll
        for (uint32_t rank = 0; rank < CLUSTER; rank++)
            own += parts[rank];
    }
    sum = own;
    for (uint32_t apart = 1; apart < 32; apart *= 2) {
        unsigned long long lower = __shfl_up_sync(~0u, sum, apart);
        sum += lane >= apart ? lower : 0;
    }
    if (lane == 31)
        r.block.above[warp] = sum;
    __syncthreads();
    for (uint32_t w = 0; w < WARPS; w++) {
        before += w < warp ? r.block.above[w] : 0;
        total += r.block.above[w];
    }
    sum += before;
    if (!s->n_digits && s->is_mass) {
        unsigned long long part = (unsigned long long)ceil((double)s->share * (double)total);
        s->need = part > 1 ? part : 1;
    }
    if (sum >= s->need && sum - own < s->need) {
        r.block.chosen = bin;
        r.block.need = s->need - (sum - own);
        r.block.equal = own;
    }
    __syncthreads();
    if (total < s->need)
        return false;
    take_digit(s, r.block.chosen);
    s->need = r.block.need;
    s->equal = r.block.equal;
    return true;
}

/* Fixes n_digits digits. False: all that is looked through weighs less than needed. */
static __device__ bool select_digits(struct sample_row &r, struct selection *s, uint32_t n_digits)
{
    while (s->n_digits < n_digits) {
        unsigned long long *histogram = r.block.histograms[r.turn];
        if (s->n_digits && s->n_digits < KEY_DIGITS && s->is_spread) {
            fill_from_keys(r, *s, histogram);
            choose_digit(r, s, histogram, 1);
            continue;
        }
        r.turn ^= 1;
        fill_histogram(r, *s, histogram);
        cluster_wait(r.call);
        if (!choose_digit(r, s, histogram, CLUSTER))
            return false;
        if (s->n_digits == 1)
            s->is_spread = spread_keys(r, *s);
    }
    return true;
}

/* The least float whose e^(z - most) reaches min_p. */
static __device__ float min_p_cut(float most, float min_p)
{
    uint32_t low = ascending_bits(-FLT_MAX), high = ascending_bits(most); /* high reaches it: min_p <= 1 */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (expf(from_ascending(middle) - most) >= min_p)
            high = middle;
        else
            low = middle + 1;
    }
    return from_ascending(high);
}

/* Step 6: the least logit that is kept. */
static __device__ float truncate_row(struct sample_row &r, float most)
{
    const struct staged_task &task = r.block.task;
    struct selection s = {};
    s.most = s.last = most;
    s.last_id = -1;
    s.n = r.n_kept;
    s.cut = task.min_p > 0 ? min_p_cut(most, task.min_p) : -FLT_MAX;
    if (task.top_k && task.top_k < r.call.vocab_size) {
        s.need = task.top_k;
        if (select_digits(r, &s, KEY_DIGITS))
            s.cut = from_ascending(s.key);
    }
    if (task.top_p < 1) {
        s.n_digits = 0;
        s.is_mass = true;
        s.share = task.top_p;
        if (select_digits(r, &s, KEY_DIGITS))
            s.cut = from_ascending(s.key);
    }
    return s.cut;
}

/* ---- alternatives -------------------------------------------------------------------------------------------------------- */

struct ranked {
    float value;
    int32_t id, rank;
    uint32_t n;
};

/* Writes the best of the ids that s searches, at most BEST_IDS, to the list of the first block. Returns their number. */
static __device__ uint32_t gather_best(struct sample_row &r, struct selection *s, uint32_t n_wanted)
{
    uint32_t key = 0, lowest = 0xffffffu, n = 0; /* ids of the least key up to `lowest` */
    s->n_digits = 0;
    s->need = n_wanted;
    if (select_digits(r, s, KEY_DIGITS)) {
        key = s->key;
        if (s->need < s->equal && select_digits(r, s, N_DIGITS))
            lowest = 0xffffffu - s->ids;
    }
    if (!threadIdx.x)
        r.block.n_gathered = 0;
    cluster_wait(r.call);
    uint32_t *count = of_block(r.call, &r.block.n_gathered, 0);
    uint2 *best = of_block(r.call, r.block.list.best, 0);
    for (uint32_t i = threadIdx.x; i < s->n; i += THREADS) {
        float z = r.z[i];
        uint32_t own = ascending_bits(z), id = r.first + i;
        if (is_looked_at(*s, z, id) && (own > key || (own == key && id <= lowest)))
            best[atomicAdd(count, 1u)] = make_uint2(__float_as_uint(z), id);
    }
    cluster_wait(r.call);
    n = *count;
    return n;
}

/* The first block brings n entries of its list into order, from place `done` on, behind `last`; the last of them. */
static __device__ struct ranked write_best(const struct sample_row &r, const struct log_sum &sum, uint32_t n, uint32_t done,
                                           const struct ranked &last)
{
    struct ranked own = {0, 0, 0, 0};
    if (threadIdx.x >= n)
        return own;
    uint2 entry = r.block.list.best[threadIdx.x];
    float value = __uint_as_float(entry.x);
    uint32_t larger = 0, better = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint2 other = r.block.list.best[i];
        float z = __uint_as_float(other.x);
        larger += z > value;
        better += z > value || (z == value && other.y < entry.y);
    }
    own.value = value;
    own.id = (int32_t)entry.y;
    own.rank = done && value == last.value ? last.rank : (int32_t)(done + larger) + 1;
    own.n = better + 1 == n; /* this one is the last */
    uint32_t at = r.block.task.top_at + done + better;
    r.call.top_ids[at] = own.id;
    r.call.top_ranks[at] = own.rank;
    r.call.top_values[at] = log_value(sum, value);
    return own;
}

struct join_last {
    __device__ __forceinline__ struct ranked operator()(const struct ranked &a, const struct ranked &b) const
    {
        return b.n ? b : a;
    }
};

/* The n_top best among the first n ids of each segment. */
static __device__ void list_best(struct sample_row &r, const struct log_sum &sum, uint32_t n)
{
    uint32_t n_top = r.block.task.n_top, done = 0;
    struct ranked last = {sum.most, -1, 0, 0};
    struct selection s = {};
    s.cut = -FLT_MAX;
    s.n = n;
    while (done < n_top) {
        uint32_t n_wanted = n_top - done < BEST_IDS ? n_top - done : BEST_IDS;
        s.most = s.last = last.value;
        s.last_id = last.id;
        uint32_t n_found = gather_best(r, &s, n_wanted);
        struct ranked own = {0, 0, 0, 0};
        if (!r.rank)
            own = write_best(r, sum, n_found, done, last);
        last = cluster_join(r, own, join_last());
        done += n_found;
        if (n_found < n_wanted)
            break;
    }
    for (uint32_t k = done + threadIdx.x; !r.rank && k < n_top; k += THREADS) {
        r.call.top_ids[r.block.task.top_at + k] = (int32_t)r.call.vocab_size;
        r.call.top_ranks[r.block.task.top_at + k] = (int32_t)done + 1;
        r.call.top_values[r.block.task.top_at + k] = -INFINITY;
    }
}

#endif
