/* Chooses the experts of each row and their weights: scores of n_experts logits (softmax over all, or sigmoid of each), the
 * best n_chosen by score + selection_bias among the best groups, their weights divided by their sum if is_normalised is set.
 * All in float32, each row separately. n_experts (or n_chosen) alone decides the order of a sum. A tie goes to the lower
 * number. A NaN is chosen last, so that a row always has n_chosen different experts. Costs few instructions a logit, little
 * compared with the router's linear. */
#include "ops.h"
#include "simd.h"

#define MAX_EXPERTS 4096u

struct route_job {
    struct cpu *cpu;
    const struct route_args *args;
};

/* out = e^(x - shift), and the sum: one chain for each lane, then v_hsum's tree. */
static float exponentials(const float *x, float shift, uint32_t n, float *out)
{
    vf sum = v_zero();
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        v_store_n(out + i, v_exp(v_sub(v_load_n(x + i, lanes), v_set1(shift))), lanes);
        sum = v_add(sum, v_load_n(out + i, lanes));
    }
    return v_hsum(sum);
}

static void softmax(const float *x, uint32_t n, float *out)
{
    float high = x[0];
    for (uint32_t i = 1; i < n; i++)
        high = x[i] > high ? x[i] : high;
    float sum = exponentials(x, high, n, out);
    for (uint32_t i = 0; i < n; i++)
        out[i] /= sum;
}

static void sigmoid(const float *x, uint32_t n, float *out)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t lanes = n - i < LANES ? n - i : LANES;
        vf one = v_set1(1.0f), e = v_exp(v_neg(v_load_n(x + i, lanes)));
        v_store_n(out + i, v_div(one, v_add(one, e)), lanes);
    }
}

/* Inserts a candidate into the list of the best, after all entries that are not below it. The candidate's number is above all
 * numbers in the list. Returns the new length. */
static uint32_t insert(struct route *best, uint32_t n, uint32_t max, int32_t number, float value)
{
    if (n == max && !(value > best[n - 1].weight))
        return n;
    uint32_t at = n < max ? n++ : n - 1;
    for (; at > 0 && value > best[at - 1].weight; at--)
        best[at] = best[at - 1];
    best[at] = (struct route){number, value};
    return n;
}

/* A group's value: the best value of its experts, or the sum of the two best. */
static float group_value(const float *values, uint32_t n, bool sums_two)
{
    struct route best[2];
    uint32_t n_best = 0;
    for (uint32_t i = 0; i < n; i++)
        n_best = insert(best, n_best, sums_two ? 2 : 1, (int32_t)i, values[i]);
    return n_best == 2 ? best[0].weight + best[1].weight : best[0].weight;
}

/* Chooses the best n_chosen of the values; routes[j].weight is the value. groups: room for chosen_groups entries. */
static void choose(const struct route_args *args, const float *values, struct route *groups, struct route *routes)
{
    uint32_t n = 0, size = args->n_experts / args->n_groups, n_groups = 0;
    for (uint32_t g = 0; g < args->n_groups && args->n_groups > args->chosen_groups; g++)
        n_groups = insert(groups, n_groups, args->chosen_groups, (int32_t)g,
                          group_value(values + g * size, size, args->sums_two));
    for (uint32_t g = 0; g < args->n_groups; g++) {
        bool is_chosen = n_groups == 0;
        for (uint32_t i = 0; i < n_groups; i++)
            is_chosen |= groups[i].expert == (int32_t)g;
        for (uint32_t e = g * size; is_chosen && e < (g + 1) * size; e++)
            n = insert(routes, n, args->n_chosen, (int32_t)e, values[e]);
    }
}

/* Computes the weights of the chosen experts from the scores of all. weights: [n_chosen] */
static void weigh(const struct route_args *args, const float *scores, float *weights, struct route *routes)
{
    uint32_t n = args->n_chosen;
    for (uint32_t j = 0; j < n; j++)
        weights[j] = scores[routes[j].expert];
    if (args->score == ROUTE_CHOSEN_SOFTMAX)
        softmax(weights, n, weights);
    if (args->score == ROUTE_CHOSEN_SIGMOID)
        sigmoid(weights, n, weights);
    float sum = 0;
    for (uint32_t j = 0; j < n; j++)
        sum += weights[j];
    for (uint32_t j = 0; j < n; j++)
        routes[j].weight = (args->is_normalised ? weights[j] / (sum + args->sum_eps) : weights[j]) * args->scale;
}

static void route_row(const struct route_args *args, const float *logits, float *scratch, struct route *routes)
{
    uint32_t n = args->n_experts;
    float *scores = scratch, *values = scores + n, *weights = values + n;
    struct route *groups = (struct route *)(weights + n);
    if (args->score == ROUTE_SOFTMAX)
        softmax(logits, n, scores);
    else if (args->score == ROUTE_SIGMOID)
        sigmoid(logits, n, scores);
    else
        scores = (float *)(uintptr_t)logits;
    for (uint32_t e = 0; e < n; e++)
        values[e] = args->selection_bias ? scores[e] + args->selection_bias[e] : scores[e];
    choose(args, values, groups, routes);
    weigh(args, scores, weights, routes);
}

static void route_run(void *job_args, uint32_t thread)
{
    const struct route_job *job = job_args;
    const struct route_args *args = job->args;
    float *scratch = (float *)(job->cpu->scratch + thread * job->cpu->scratch_bytes);
    uint32_t end = share_first(args->n_rows, thread + 1, job->cpu->n_threads);
    for (uint32_t r = share_first(args->n_rows, thread, job->cpu->n_threads); r < end; r++)
        route_row(args, args->logits + (size_t)r * args->logits_stride, scratch, args->routes + (size_t)r * args->route_stride);
}

enum rc K(route)(struct cpu *cpu, const struct route_args *args, struct err *err)
{
    uint32_t n = args->n_experts;
    bool has_groups = args->n_groups && n % args->n_groups == 0 && args->chosen_groups && args->chosen_groups <= args->n_groups;
    if (!n || n > MAX_EXPERTS || !has_groups || !args->n_chosen || args->n_chosen > n / args->n_groups * args->chosen_groups)
        return err_set(err, RC_UNSUPPORTED,
                       "route: wanted 1 to %u experts in equal groups, and chosen groups that contain the chosen experts, have "
                       "%u of %u experts, %u of %u groups",
                       MAX_EXPERTS, args->n_chosen, n, args->chosen_groups, args->n_groups);
    struct route_job job = {cpu, args};
    pool_run(cpu->pool, route_run, &job);
    return RC_OK;
}
