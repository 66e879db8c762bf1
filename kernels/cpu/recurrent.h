/* recurrent.h: functions that conv.c, ssm.c, selective_scan.c and delta.c share: the place of a sequence's state, and the
 * division of the work. The work is cut into independent blocks of channels or heads. A block takes the rows of one sequence
 * after the other. Blocks are assigned to threads by their number of rows, so that a prompt among decoding rows counts with
 * its real cost; no result depends on the assignment. Lanes are channels. Sums over the state run one by one in each lane, so
 * both instruction sets give the same bits. */
#ifndef LLMPY_RECURRENT_H
#define LLMPY_RECURRENT_H

#include "ops.h"
#include "rows.h"

/* The rows of one sequence, and the entries of its state in the page table. */
struct span {
    uint32_t first_row, n_rows;
    bool is_new; /* starts from zeros */
    const int32_t *pages;
};

struct recurrent_job {
    uint32_t n_threads, n_blocks;
    const struct batch_view *batch;
    const struct state_view *state;
    const void *args;
    void (*run)(const void *args, struct span span, uint32_t block);
};

static inline struct span span_of(const struct recurrent_job *job, uint32_t seq)
{
    const struct batch_view *batch = job->batch;
    uint32_t first = (uint32_t)batch->seq_first_row[seq];
    const struct state_view *state = job->state;
    return (struct span){first, (uint32_t)batch->seq_first_row[seq + 1] - first, batch->positions[first] == 0,
                         state->table + (size_t)batch->row_seq[first] * state->table_stride + state->first_entry};
}

static void share_blocks(void *job_args, uint32_t thread)
{
    const struct recurrent_job *job = job_args;
    uint32_t n_rows = job->batch->n_rows, n = job->n_blocks * n_rows;
    uint32_t begin = share_first(n, thread, job->n_threads), end = share_first(n, thread + 1, job->n_threads);
    for (uint32_t block = begin / n_rows; block * n_rows < end; block++)
        for (uint32_t s = 0; s < job->batch->n_seqs; s++) {
            uint32_t at = block * n_rows + (uint32_t)job->batch->seq_first_row[s];
            if (at >= begin && at < end)
                job->run(job->args, span_of(job, s), block);
        }
}

/* row_values: approximate cost of a row in multiplications. The calling thread does small jobs alone. */
static inline enum rc run_blocks(struct cpu *cpu, struct recurrent_job job, uint32_t row_values)
{
    bool is_small = (uint64_t)job.batch->n_rows * row_values <= 4096;
    job.n_threads = is_small ? 1 : cpu->n_threads;
    if (is_small)
        share_blocks(&job, 0);
    else
        pool_run(cpu->pool, share_blocks, &job);
    return RC_OK;
}

static inline float *state_unit(const struct state_view *state, const int32_t *pages, uint32_t unit)
{
    return (float *)((char *)state->pool + (size_t)pages[unit / state->units_per_page] * state->page_bytes +
                     (size_t)(unit % state->units_per_page) * state->unit_bytes);
}

/* Loads units unit .. unit + n - 1, n <= LANES, of n_floats each as tile[float][unit]; the other lanes keep their contents. */
static inline void state_load(const struct state_view *state, const struct span *span, uint32_t unit, uint32_t n,
                              uint32_t n_floats, float (*tile)[LANES])
{
    for (uint32_t i = 0; i < n;) {
        const float *from = state_unit(state, span->pages, unit + i);
        uint32_t left = state->units_per_page - (unit + i) % state->units_per_page;
        for (uint32_t end = left < n - i ? i + left : n; i < end; i++, from += n_floats)
            for (uint32_t f = 0; f < n_floats; f++)
                tile[f][i] = span->is_new ? 0 : from[f];
    }
}

static inline void state_store(const struct state_view *state, const struct span *span, uint32_t unit, uint32_t n,
                               uint32_t n_floats, float (*tile)[LANES])
{
    for (uint32_t i = 0; i < n;) {
        float *to = state_unit(state, span->pages, unit + i);
        uint32_t left = state->units_per_page - (unit + i) % state->units_per_page;
        for (uint32_t end = left < n - i ? i + left : n; i < end; i++, to += n_floats)
            for (uint32_t f = 0; f < n_floats; f++)
                to[f] = tile[f][i];
    }
}

#define WIDE 4u /* vectors of channels that are processed together with a head's state */

/* Processes the rows of a span for channels from `first` on of one head: n_vectors whole vectors, or one of n channels. */
typedef void (*channels_run)(const void *args, const struct span *span, uint32_t head, uint32_t first, uint32_t n_vectors,
                             uint32_t n, float *state);

/* Processes all channels of one head, with `run` inlined for each width. */
V_INLINE void run_channels(channels_run run, const void *args, const struct state_view *view, const struct span *span,
                           uint32_t head, uint32_t size)
{
    float *state = state_unit(view, span->pages, head);
    uint32_t first = 0;
    if (span->is_new)
        memset(state, 0, view->unit_bytes);
    for (; first + WIDE * LANES <= size; first += WIDE * LANES)
        run(args, span, head, first, WIDE, LANES, state);
    for (; first + LANES <= size; first += LANES)
        run(args, span, head, first, 1, LANES, state);
    if (first < size)
        run(args, span, head, first, 1, size - first, state);
}

static inline float *row_at(const struct view *view, uint32_t row, uint32_t column)
{
    return (float *)view->data + (size_t)row * view->stride + column;
}

/* A head's value in all lanes. */
V_INLINE vf head_value(const struct view *view, uint32_t row, uint32_t head)
{
    return v_set1(*row_at(view, row, head));
}

#endif
