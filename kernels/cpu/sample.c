/* sample.c: one token for each task from a row of logits, in the steps of docs/use/sampling.md; all in float32. logits is
 * [n_logits_rows][vocab_stride]. A row is read, never written, because several tasks may use it.
 *
 * Sums: log_softmax over chunks of SAMPLE_CHUNK ids, each with a separate greatest m_c and s_c = sum of e^(z - m_c) by lane,
 * then v_hsum; M = max m_c, S = s_c e^(m_c - M) added for c = 0, 1, ...; a value is (z - M) - log S. So raw and full values
 * have the same bits in every task, for any number of threads. Truncation finds one threshold on z: candidates are the ids
 * within CUT_NATS of the greatest (all ids if these are not enough), min_p is a comparison, top_k and top_p are exact
 * selections over counts and over masses in 2^-40. The draw is the greatest (z - M) + noise over the kept ids, lowest id on
 * ties.
 *
 * A team of threads does one task. With many tasks a team is one thread; otherwise all threads share the chunks of one task.
 * Every thread of a team runs the same code; the leader's parts stand in `if (is_leader(t))`, between calls of team_sync.
 * Bound by reading the row: 152k ids are 0.6 MB, 10 us from the second-level cache; the draw costs about 4 cycles an id. */
#include "sample.h"
#include "ops.h"
#include "sample_allowed.h"
#include "sample_noise.h"

#include <stdatomic.h>
#include <string.h>

#define CUT_NATS 12.0f

struct sample_job {
    struct cpu *cpu;
    const struct sample_args *args;
    bool is_shared;                /* one team of all threads */
    atomic_uint next;
};

struct team {
    struct sample_job *job;
    struct sample_work *work;
    uint32_t rank, size;
};

static bool is_leader(const struct team *t)
{
    return t->rank == 0;
}

static void team_sync(const struct team *t)
{
    if (t->size > 1)
        pool_barrier(t->job->cpu->pool);
}

static uint32_t chunk_ids(uint32_t chunk, uint32_t n)
{
    uint32_t first = chunk * SAMPLE_CHUNK;
    return first >= n ? 0 : n - first < SAMPLE_CHUNK ? n - first : SAMPLE_CHUNK;
}

/* Loads up to LANES values; the other lanes are -inf. */
V_INLINE vf load_part(const float *p, uint32_t n)
{
    return n >= LANES ? v_load(p) : v_select(v_first(n), v_load_n(p, n), v_set1(-INFINITY));
}

static float exp_one(float x)
{
    return v_first_lane(v_exp(v_set1(x)));
}

/* ---- passes over one chunk ---------------------------------------------------------------------------------------------- */

/* Greatest of z[0..n). *is_bad: a value is NaN or +inf. */
static float chunk_greatest(const float *z, uint32_t n, bool *is_bad)
{
    vf most = v_set1(-INFINITY);
    uint32_t bad = 0;
    for (uint32_t i = 0; i < n; i += LANES) {
        vf x = load_part(z + i, n - i);
        bad |= ~v_mask(v_lt(x, v_set1(INFINITY)));
        most = v_max(x, most);
    }
    *is_bad = bad & v_mask(v_first(LANES));
    return v_hmax(most);
}

/* Sum of e^(z - most) over the z >= from; *tail = the sum over the other z. */
static float chunk_sum(const float *z, uint32_t n, float most, float from, float *tail)
{
    vf sum = v_zero(), low = v_zero();
    for (uint32_t i = 0; i < n; i += LANES) {
        vf x = load_part(z + i, n - i), w = v_exp(v_sub(x, v_set1(most)));
        vm is_in = v_le(v_set1(from), x);
        sum = v_add(sum, v_select(is_in, w, v_zero()));
        low = v_add(low, v_select(is_in, v_zero(), w));
    }
    *tail = v_hsum(low);
    return v_hsum(sum);
}

static void chunk_stats(struct sample_work *w, const float *z, uint32_t n, uint32_t chunk, bool wants_sum)
{
    struct chunk_stat *stat = &w->stats[chunk];
    const float *first = z + (size_t)chunk * SAMPLE_CHUNK;
    uint32_t n_ids = chunk_ids(chunk, n);
    stat->most = chunk_greatest(first, n_ids, &stat->is_bad);
    stat->sum = 0;
    if (wants_sum && stat->most > -INFINITY)
        stat->sum = chunk_sum(first, n_ids, stat->most, -INFINITY, &stat->tail);
}

/* z /= temperature */
static void chunk_scale(struct sample_work *w, uint32_t chunk)
{
    float *z = w->z + (size_t)chunk * SAMPLE_CHUNK;
    uint32_t n = chunk_ids(chunk, w->n);
    vf temperature = v_set1(w->task->temperature);
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t part = n - i < LANES ? n - i : LANES;
        v_store_n(z + i, v_div(v_load_n(z + i, part), temperature), part);
    }
}

/* Writes the ids whose z is at or above the cut into the chunk's part of ids, and sums the weight of the other ids. */
static void chunk_gather(struct sample_work *w, uint32_t chunk)
{
    struct chunk_stat *stat = &w->stats[chunk];
    uint32_t first = chunk * SAMPLE_CHUNK, n = chunk_ids(chunk, w->limit), n_found = 0;
    const float *z = w->z + first;
    for (uint32_t i = 0; i < n; i += LANES) {
        vf x = load_part(z + i, n - i);
        uint32_t found = v_mask(v_le(v_set1(w->cut), x)) & v_mask(v_lt(v_set1(-INFINITY), x));
        for (; found; found &= found - 1)
            w->ids[first + n_found++] = (int32_t)(first + i + (uint32_t)__builtin_ctz(found));
    }
    stat->n_found = n_found;
    stat->tail = 0;
    if (w->task->top_p < 1)
        chunk_sum(z, n, w->kept.most, w->cut, &stat->tail);
}

static struct noise task_noise(const struct sample_task *task)
{
    return (struct noise){.seed = task->seed, .position = task->position, .sample_index = task->sample_index};
}

/* Updates each lane's best of the draw. Ids of a lane ascend, so the lowest id stays on ties. */
V_INLINE void draw_step(vf score, vi id, vf *best, vi *best_id)
{
    vm is_better = v_lt(*best, score);
    *best = v_select(is_better, score, *best);
    *best_id = v_bits(v_select(is_better, v_from_bits(id), v_from_bits(*best_id)));
}

/* The best lane, lowest id on ties. */
static int32_t draw_reduce(vf best, vi best_id, float *score)
{
    float scores[LANES];
    int32_t ids[LANES];
    v_store(scores, best);
    memcpy(ids, &best_id, sizeof ids);
    uint32_t top = 0;
    for (uint32_t i = 1; i < LANES; i++)
        if (scores[i] > scores[top] || (scores[i] == scores[top] && ids[i] < ids[top]))
            top = i;
    *score = scores[top];
    return ids[top];
}

static void chunk_draw(struct sample_work *w, uint32_t chunk)
{
    uint32_t first = chunk * SAMPLE_CHUNK, n = chunk_ids(chunk, w->limit);
    struct noise noise = task_noise(w->task);
    vf best = v_set1(-INFINITY), most = v_set1(w->kept.most);
    vi best_id = vi_set1(0x7fffffff);
    for (uint32_t i = 0; i < n; i += 4 * LANES) {
        vf gumbel[4];
        noise_run(&noise, first + i, gumbel);
        for (uint32_t j = 0; j < 4 && i + j * LANES < n; j++) {
            uint32_t at = i + j * LANES;
            vf z = load_part(w->z + first + at, n - at);
            draw_step(v_add(v_sub(z, most), gumbel[j]), vi_add(vi_set1(first + at), vi_lane()), &best, &best_id);
        }
    }
    w->stats[chunk].best_id = draw_reduce(best, best_id, &w->stats[chunk].best);
}

enum pass { PASS_TAKE, PASS_SCALE, PASS_STATS, PASS_GATHER, PASS_DRAW };

static void team_pass(const struct team *t, enum pass pass, bool wants_sum)
{
    struct sample_work *w = t->work;
    team_sync(t);
    for (uint32_t chunk = t->rank; chunk < w->n_chunks; chunk += t->size) {
        size_t first = (size_t)chunk * SAMPLE_CHUNK;
        switch (pass) {
        case PASS_TAKE:
            memcpy(w->z + first, w->logits + first, chunk_ids(chunk, w->n) * sizeof *w->z);
            chunk_stats(w, w->z, w->n, chunk, wants_sum);
            break;
        case PASS_SCALE:
            chunk_scale(w, chunk);
            chunk_stats(w, w->z, w->n, chunk, wants_sum);
            break;
        case PASS_STATS:
            chunk_stats(w, w->z, w->limit, chunk, wants_sum);
            break;
        case PASS_GATHER:
            chunk_gather(w, chunk);
            break;
        case PASS_DRAW:
            chunk_draw(w, chunk);
        }
    }
    team_sync(t);
}

/* ---- the leader's parts ------------------------------------------------------------------------------------------------- */

static struct log_sum join_stats(const struct sample_work *w)
{
    struct log_sum all = {.most = -INFINITY};
    for (uint32_t c = 0; c < w->n_chunks; c++)
        all.most = w->stats[c].most > all.most ? w->stats[c].most : all.most;
    for (uint32_t c = 0; c < w->n_chunks && all.most > -INFINITY; c++)
        if (w->stats[c].most > -INFINITY)
            all.sum += w->stats[c].sum * exp_one(w->stats[c].most - all.most);
    all.log = all.sum > 0 ? v_first_lane(v_log(v_set1(all.sum))) : 0;
    return all;
}

static float log_value(const struct log_sum *sum, float z)
{
    return z > -INFINITY ? (z - sum->most) - sum->log : -INFINITY;
}

static void finish(struct sample_work *w, enum sample_status status)
{
    w->result->status = status;
    w->is_done = true;
}

static bool any_bad(const struct sample_work *w)
{
    for (uint32_t c = 0; c < w->n_chunks; c++)
        if (w->stats[c].is_bad)
            return true;
    return false;
}

/* Step 2. */
static void edit_logits(struct sample_work *w)
{
    const struct sample_task *task = w->task;
    for (uint32_t i = 0; i < task->n_bias; i++)
        if (task->bias[i].value > -INFINITY) {
            w->z[task->bias[i].id] += task->bias[i].value;
            w->is_edited = true;
        }
    for (uint32_t i = 0; i < task->n_seen; i++) {
        const struct token_seen *seen = &task->seen[i];
        float *z = &w->z[seen->id];
        if (task->repetition_penalty != 1 && (seen->in_prompt || seen->count))
            *z = *z > 0 ? *z / task->repetition_penalty : *z * task->repetition_penalty;
        if (seen->count)
            *z -= task->frequency_penalty * (float)seen->count + task->presence_penalty;
        w->is_edited = true;
    }
}

static bool is_truncated(const struct sample_work *w)
{
    const struct sample_task *task = w->task;
    return !task->is_greedy && (task->min_p > 0 || (task->top_k && task->top_k < w->n) || task->top_p < 1);
}

/* True if a score task needs steps 4 to 8. */
static bool wants_kept(const struct sample_work *w)
{
    const struct sample_task *task = w->task;
    if (!task->is_score || task->mode == LOGPROB_PROCESSED || task->n_banned || task->n_allowed || task->mask ||
        is_truncated(w))
        return true;
    for (uint32_t i = 0; i < task->n_bias; i++)
        if (task->bias[i].value == -INFINITY)
            return true;
    return false;
}

/* Joins the chunks' candidates. Returns the weight of all other ids, in 2^-40. */
static int64_t join_candidates(struct sample_work *w)
{
    double tail = 0;
    w->n_ids = 0;
    for (uint32_t c = 0; c < w->n_chunks; c++) {
        memmove(w->ids + w->n_ids, w->ids + (size_t)c * SAMPLE_CHUNK, w->stats[c].n_found * sizeof *w->ids);
        w->n_ids += w->stats[c].n_found;
        tail += (double)w->stats[c].tail;
    }
    return (int64_t)(tail * 0x1p40);
}

/* Keeps the listed ids with z >= from. */
static void keep_from(struct sample_work *w, float from)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_ids; i++)
        if (w->z[w->ids[i]] >= from)
            w->ids[n++] = w->ids[i];
    w->n_ids = n;
}

/* Fills candidates with z and e^(z - M) of the listed ids. Returns their mass. */
static int64_t weigh_candidates(struct sample_work *w)
{
    int64_t mass = 0;
    for (uint32_t i = 0; i < w->n_ids; i += LANES) {
        uint32_t n = w->n_ids - i < LANES ? w->n_ids - i : LANES;
        float z[LANES], weight[LANES];
        for (uint32_t j = 0; j < LANES; j++)
            z[j] = j < n ? w->z[w->ids[i + j]] : -INFINITY;
        v_store(weight, v_exp(v_sub(v_load(z), v_set1(w->kept.most))));
        for (uint32_t j = 0; j < n; j++) {
            w->candidates[i + j] = (struct candidate){z[j], weight[j]};
            mass += candidate_mass(&w->candidates[i + j], false);
        }
    }
    return mass;
}

/* Step 6 on the listed ids. tail: the weight of the unlisted ids. Returns false if the list is too short to decide. */
static bool truncate_list(struct sample_work *w, int64_t tail)
{
    const struct sample_task *task = w->task;
    bool is_whole = w->is_listed || w->cut == -INFINITY;
    int64_t mass = weigh_candidates(w);
    if (task->min_p > 0) {
        float least = INFINITY;
        for (uint32_t i = 0; i < w->n_ids; i++)
            if (w->candidates[i].w >= task->min_p && w->candidates[i].z < least)
                least = w->candidates[i].z;
        if (!is_whole && exp_one(w->cut - w->kept.most) >= task->min_p)
            return false;
        keep_from(w, least);
        mass = weigh_candidates(w);
        is_whole = true;
    }
    if (task->top_k && task->top_k < w->n) {
        if (!is_whole && w->n_ids < task->top_k)
            return false;
        if (w->n_ids > task->top_k) {
            keep_from(w, candidates_threshold(w->candidates, w->n_ids, task->top_k, true));
            mass = weigh_candidates(w);
        }
        is_whole = true;
    }
    if (task->top_p < 1) {
        int64_t need = (int64_t)ceil((double)task->top_p * (double)(is_whole ? mass : mass + tail));
        if (!is_whole && mass < need)
            return false;
        keep_from(w, candidates_threshold(w->candidates, w->n_ids, need > 1 ? need : 1, false));
    }
    w->is_listed = true;
    return true;
}

/* S over the listed ids: LANES ids at a time, then the sum of the lanes. */
static void sum_list(struct sample_work *w)
{
    vf sum = v_zero();
    for (uint32_t i = 0; i < w->n_ids; i += LANES) {
        float z[LANES];
        for (uint32_t j = 0; j < LANES; j++)
            z[j] = i + j < w->n_ids ? w->z[w->ids[i + j]] : -INFINITY;
        sum = v_add(sum, v_exp(v_sub(v_load(z), v_set1(w->kept.most))));
    }
    w->kept.sum = v_hsum(sum);
    w->kept.log = v_first_lane(v_log(v_set1(w->kept.sum)));
}

static int32_t draw_list(const struct sample_work *w)
{
    struct noise noise = task_noise(w->task);
    vf best = v_set1(-INFINITY);
    vi best_id = vi_set1(0x7fffffff);
    float score;
    for (uint32_t i = 0; i < w->n_ids; i += LANES) {
        float z[LANES];
        int32_t ids[LANES];
        vi id;
        for (uint32_t j = 0; j < LANES; j++) {
            ids[j] = i + j < w->n_ids ? w->ids[i + j] : 0x7fffffff;
            z[j] = i + j < w->n_ids ? w->z[ids[j]] : -INFINITY;
        }
        memcpy(&id, ids, sizeof id);
        draw_step(v_add(v_sub(v_load(z), v_set1(w->kept.most)), noise_ids(&noise, id)), id, &best, &best_id);
    }
    return draw_reduce(best, best_id, &score);
}

static int32_t join_draw(const struct sample_work *w)
{
    const struct chunk_stat *best = &w->stats[0];
    for (uint32_t c = 1; c < w->n_chunks; c++)
        if (w->stats[c].best > best->best)
            best = &w->stats[c];
    return best->best_id;
}

static int32_t greedy_id(const struct sample_work *w)
{
    if (!w->is_listed)
        return (int32_t)find_equal(w->z, w->limit, w->kept.most);
    for (uint32_t i = 0; i < w->n_ids; i++)
        if (w->z[w->ids[i]] == w->kept.most)
            return w->ids[i];
    return 0;
}

/* Rank of the result's id, and the alternatives, by z: over all logits, over all of step 3, or over the kept ids. */
static void rank_and_list(struct sample_work *w, const float *z, uint32_t n, const struct log_sum *sum)
{
    const struct sample_task *task = w->task;
    bool is_list = task->mode == LOGPROB_PROCESSED && w->is_listed;
    int32_t *ranks = w->args->top_ranks + task->top_offset;
    struct best_list best = {w->args->top_ids + task->top_offset, w->args->top_values + task->top_offset, task->n_top};
    float own = z[w->result->id];
    if (task->mode == LOGPROB_PROCESSED && w->result->processed == -INFINITY)
        own = -INFINITY;
    if (task->n_top)
        best_clear(&best, (int32_t)w->n);
    uint32_t larger = 0;
    for (uint32_t i = 0; is_list && i < w->n_ids; i++) {
        larger += z[w->ids[i]] > own;
        best_offer(&best, w->ids[i], z[w->ids[i]]);
    }
    if (!is_list) {
        larger = count_larger(z, n, own);
        best_scan(&best, z, n);
    }
    w->result->rank = (int32_t)larger + 1;
    for (uint32_t i = 0; i < task->n_top; i++) {
        bool is_tie = i && best.values[i] == best.values[i - 1];
        ranks[i] = is_tie ? ranks[i - 1] : (int32_t)i + 1;
    }
    for (uint32_t i = 0; i < task->n_top; i++)
        best.values[i] = log_value(sum, best.values[i]);
}

static bool is_kept(const struct sample_work *w, int32_t id)
{
    if (!w->is_listed)
        return (uint32_t)id < w->limit && w->z[id] > -INFINITY;
    uint32_t low = 0, high = w->n_ids;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (w->ids[middle] < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low < w->n_ids && w->ids[low] == id;
}

/* Fills in the result except its id, after steps 4 to 8. z still lacks the removed ids. */
static void report(struct sample_work *w, bool is_all_kept)
{
    const struct sample_task *task = w->task;
    struct sample_result *result = w->result;
    int32_t id = result->id;
    if (is_all_kept)
        w->kept = w->full;
    result->raw = log_value(&w->raw, w->logits[id]);
    result->processed = is_all_kept || is_kept(w, id) ? log_value(&w->kept, w->z[id]) : -INFINITY;
    if (task->mode == LOGPROB_PROCESSED)
        rank_and_list(w, w->z, w->limit, &w->kept);
    restore_ids(w);
    result->full = log_value(&w->full, w->z[id]);
    float mass = is_all_kept ? 1.0f : exp_one(w->kept.most - w->full.most) * w->kept.sum / w->full.sum;
    result->kept_mass = mass < 1 ? mass : 1;
    if (task->mode == LOGPROB_RAW)
        rank_and_list(w, w->logits, w->n, &w->raw);
    else if (task->mode == LOGPROB_FULL)
        rank_and_list(w, w->z, w->n, &w->full);
}

/* ---- a task ------------------------------------------------------------------------------------------------------------- */

/* Steps 1 to 3. */
static void take_logits(const struct team *t)
{
    struct sample_work *w = t->work;
    const struct sample_task *task = w->task;
    bool is_scaled = !task->is_greedy && task->temperature != 1, wants_sum = task->wants_logprobs;
    team_pass(t, PASS_TAKE, wants_sum);
    if (is_leader(t)) {
        if (any_bad(w))
            finish(w, SAMPLE_NON_FINITE);
        w->raw = w->full = join_stats(w);
        if (!w->is_done)
            edit_logits(w);
    }
    team_sync(t);
    if (w->is_done || !(is_scaled || w->is_edited))
        return;
    team_pass(t, is_scaled ? PASS_SCALE : PASS_STATS, wants_sum);
    if (is_leader(t)) {
        w->full = join_stats(w);
        if (any_bad(w))
            finish(w, SAMPLE_NON_FINITE);
    }
    team_sync(t);
}

/* Step 4. kept becomes the greatest of the remaining ids and, if nothing is truncated, their sum. */
static void remove_tokens(const struct team *t, bool *is_all_kept)
{
    struct sample_work *w = t->work;
    if (is_leader(t)) {
        w->limit = w->args->vocab_limit < w->n ? w->args->vocab_limit : w->n;
        remove_ids(w);
        if (w->task->n_allowed)
            list_allowed(w);
        else if (w->task->mask)
            apply_mask(w);
        w->kept = w->is_listed ? w->kept : w->full;
    }
    team_sync(t);
    *is_all_kept = !w->n_removed && w->limit == w->n && !w->is_listed;
    if (!w->is_listed && !*is_all_kept) {
        team_pass(t, PASS_STATS, w->task->wants_logprobs && !is_truncated(w));
        if (is_leader(t))
            w->kept = join_stats(w);
    }
    if (is_leader(t) && !(w->kept.most > -INFINITY))
        finish(w, SAMPLE_NONE_ALLOWED);
    team_sync(t);
}

/* Step 6. */
static void truncate_tokens(const struct team *t)
{
    struct sample_work *w = t->work;
    if (is_leader(t)) {
        w->cut = w->kept.most - CUT_NATS;
        w->needs_gather = !w->is_listed;
        if (w->is_listed)
            truncate_list(w, 0);
    }
    team_sync(t);
    while (w->needs_gather) {
        team_pass(t, PASS_GATHER, false);
        if (is_leader(t)) {
            w->needs_gather = !truncate_list(w, join_candidates(w));
            w->cut = -INFINITY;
        }
        team_sync(t);
    }
}

static void choose_token(const struct team *t)
{
    struct sample_work *w = t->work;
    const struct sample_task *task = w->task;
    bool draws = !task->is_score && !task->is_greedy;
    if (draws && !w->is_listed)
        team_pass(t, PASS_DRAW, false);
    if (!is_leader(t))
        return;
    if (task->is_score)
        w->result->id = task->target;
    else if (task->is_greedy)
        w->result->id = greedy_id(w);
    else
        w->result->id = w->is_listed ? draw_list(w) : join_draw(w);
}

static void run_task(const struct team *t)
{
    struct sample_work *w = t->work;
    bool is_all_kept = true;
    take_logits(t);
    if (w->is_done)
        return;
    if (wants_kept(w)) {
        remove_tokens(t, &is_all_kept);
        if (w->is_done)
            return;
        if (is_truncated(w)) {
            truncate_tokens(t);
            is_all_kept = false;
        }
    }
    choose_token(t);
    if (is_leader(t) && w->task->wants_logprobs) {
        if (w->is_listed)
            sum_list(w);
        report(w, is_all_kept);
    }
}

/* ---- greedy without logprobs: one pass over the row -------------------------------------------------------------------- */

static bool is_in(const int32_t *ids, uint32_t n, uint32_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if ((uint32_t)ids[i] == id)
            return true;
    return false;
}

/* Takes the greatest logit if no setting of the task can change the result. Returns false if run_task must decide. */
static bool run_greedy(const struct team *t)
{
    struct sample_work *w = t->work;
    const struct sample_task *task = w->task;
    if (!task->is_greedy || task->is_score || task->wants_logprobs || task->n_bias || task->n_seen || task->n_allowed)
        return false;
    team_sync(t);
    for (uint32_t chunk = t->rank; chunk < w->n_chunks; chunk += t->size)
        chunk_stats(w, w->logits, w->n, chunk, false);
    team_sync(t);
    if (is_leader(t)) {
        float most = join_stats(w).most;
        uint32_t id = 0;
        if (any_bad(w))
            finish(w, SAMPLE_NON_FINITE);
        else if (most > -INFINITY)
            for (uint32_t c = 0; c < w->n_chunks; c++)
                if (w->stats[c].most == most) {
                    uint32_t first = c * SAMPLE_CHUNK;
                    id = first + find_equal(w->logits + first, chunk_ids(c, w->n), most);
                    break;
                }
        if (!w->is_done && most > -INFINITY && id < w->args->vocab_limit && is_unmasked(task, id) &&
            !is_in(task->banned, task->n_banned, id) &&
            !is_in(w->args->banned, w->args->n_banned, id)) {
            w->result->id = (int32_t)id;
            w->is_done = true;
        }
    }
    team_sync(t);
    return w->is_done;
}

/* ---- the call ----------------------------------------------------------------------------------------------------------- */

static void work_open(const struct sample_job *job, uint32_t thread, uint32_t task)
{
    char *at = job->cpu->scratch + thread * job->cpu->scratch_bytes;
    struct sample_work *w = (struct sample_work *)at;
    const struct sample_args *args = job->args;
    memset(w, 0, sizeof *w);
    w->args = args;
    w->task = &args->tasks[task];
    w->result = &args->results[task];
    memset(w->result, 0, sizeof *w->result);
    w->result->kept_mass = 1;
    w->logits = args->logits + (size_t)w->task->logits_row * args->vocab_stride;
    w->n = w->limit = args->vocab_size;
    w->n_chunks = (w->n + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK;
    size_t n_ids = (size_t)w->n_chunks * SAMPLE_CHUNK;
    w->z = (float *)(at + 1024);
    w->ids = (int32_t *)(w->z + n_ids);
    w->candidates = (struct candidate *)(w->ids + n_ids);
    w->removed = (struct removed *)(w->candidates + n_ids);
    w->stats = (struct chunk_stat *)(w->removed + n_ids);
}

static void run_team(struct sample_job *job, uint32_t task, uint32_t leader, uint32_t rank, uint32_t size)
{
    struct team team = {.job = job, .rank = rank, .size = size};
    team.work = (struct sample_work *)(job->cpu->scratch + leader * job->cpu->scratch_bytes);
    if (rank == 0)
        work_open(job, leader, task);
    team_sync(&team);
    if (!run_greedy(&team))
        run_task(&team);
    team_sync(&team);
}

static void run_tasks(void *job_args, uint32_t thread)
{
    struct sample_job *job = job_args;
    if (job->is_shared) {
        for (uint32_t task = 0; task < job->args->n_tasks; task++)
            run_team(job, task, 0, thread, job->cpu->n_threads);
        return;
    }
    for (uint32_t task; (task = atomic_fetch_add(&job->next, 1)) < job->args->n_tasks;)
        run_team(job, task, thread, 0, 1);
}

enum rc K(sample)(struct cpu *cpu, const struct sample_args *args, struct err *err)
{
    _Static_assert(sizeof(struct sample_work) <= 1024 && sizeof(struct chunk_stat) <= 32, "sample.h sizes the scratch");
    if (args->vocab_size > cpu->options.vocab_size)
        return err_set(err, RC_INTERNAL, "sample: wanted at most the %u ids that the backend was opened for, have %u",
                       cpu->options.vocab_size, args->vocab_size);
    struct sample_job job = {.cpu = cpu, .args = args, .is_shared = args->n_tasks < cpu->n_threads};
    if (args->n_tasks && args->vocab_size)
        pool_run(cpu->pool, run_tasks, &job);
    return RC_OK;
}
