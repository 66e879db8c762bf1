#include "pooling.h"

#include <math.h>

#define READ_VALUES 16384u /* values that a mean reads at once, unless one row has more */

void pooling_plan(struct request *r)
{
    uint32_t n = r->spec.prompt.n, kind = r->spec.pooling;
    if (!kind)
        return;
    r->first_pooled = kind == POOLING_LAST ? n - 1 : 0;
    r->n_to_pool = kind == POOLING_MEAN || kind == POOLING_ALL ? n : 1;
    r->n_states = kind == POOLING_ALL ? n : 1;
    if (kind == POOLING_MEAN) {
        uint32_t most = READ_VALUES / r->context->config->runner.states_width;
        r->n_read = most < 1 ? 1 : most < n ? most : n;
    }
}

bool pooling_wants(const struct sequence *q, uint32_t position)
{
    const struct request *r = q->request;
    return position >= r->first_pooled + r->n_pooled && position < r->first_pooled + r->n_to_pool;
}

static bool are_finite(const float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            return false;
    return true;
}

enum rc pooling_take(struct sequence *q, const struct batch *batch, uint32_t first, uint32_t n, bool *is_finite,
                     struct err *err)
{
    struct request *r = q->request;
    const struct runner *runner = &r->context->config->runner;
    size_t width = runner->states_width;
    bool is_mean = r->spec.pooling == POOLING_MEAN;
    for (uint32_t end = r->n_pooled + n; r->n_pooled < end;) {
        uint32_t left = end - r->n_pooled, n_now = is_mean && r->n_read < left ? r->n_read : left;
        float *row = is_mean ? r->states : r->states + r->n_pooled * width;
        enum rc rc = runner->read_states(runner->ctx, batch, first, n_now, row, err);
        if (rc)
            return rc;
        first += n_now;
        for (uint32_t i = 0; i < n_now; i++, row += width, r->n_pooled++) {
            if (!(*is_finite = are_finite(row, width)))
                return RC_OK;
            for (size_t c = 0; is_mean && c < width; c++)
                r->sums[c] += (double)row[c];
        }
    }
    for (size_t c = 0; is_mean && r->n_pooled == r->n_to_pool && c < width; c++)
        r->states[c] = (float)(r->sums[c] / r->n_to_pool);
    return RC_OK;
}
