/* bench_step.c: what a step costs the host, scheduling to enqueue and results included, with a runner that does nothing. Prints
 * for each number of sequences the minimum and the median of the microseconds. tests/engine/test_host_cost.py builds it with the
 * release's flags and guards the numbers. */
#define _GNU_SOURCE
#include "../../csrc/engine/engine.h"
#include "../../csrc/step/kv_layout.h"

#include <stdio.h>
#include <stdlib.h>

#define N_STEPS 400u
#define PROMPT 2000u

static enum rc start_nothing(void *ctx, struct batch *batch, struct err *err)
{
    (void)ctx;
    (void)err;
    for (uint32_t t = 0; t < batch->n_tasks; t++)
        batch->results[t] = (struct sample_result){.id = (int32_t)(batch->tasks[t].position % 1000), .raw = -1};
    return RC_OK;
}

static enum rc finish_nothing(void *ctx, struct batch *batch, struct err *err)
{
    (void)ctx;
    (void)batch;
    (void)err;
    return RC_OK;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int measure(uint32_t n_seqs, bool is_rich)
{
    static double microseconds[N_STEPS];
    static int32_t prompt[PROMPT];
    struct err err;
    struct engine *engine;
    struct kv_place place;
    struct kv_need need = {0};
    struct engine_config config = {.n_pages = 60000, .max_num_seqs = 256, .max_num_batched_tokens = 8192, .max_model_len = 4096,
                                   .max_logprobs = 5, .vocab_size = 1000, .vocab_limit = 1000, .prefix_caching = true,
                                   .runner = {NULL, start_nothing, finish_nothing, true}};
    if (kv_layout_make(&need, 1, 16, 1, &config.layout, &place, &err) || engine_create(&config, &engine, &err))
        return 1;
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint64_t number;
        prompt[0] = (int32_t)i;
        struct request_spec spec = {.prompt = {prompt, PROMPT}, .n = 1, .temperature = 1, .top_p = 1, .max_tokens = 2000,
                                    .repetition_penalty = is_rich ? 1.1f : 1, .wants_logprobs = is_rich, .n_logprobs = is_rich ? 5 : 0};
        if (engine_submit(engine, &spec, &number, &err))
            return 1;
    }
    struct engine_stats stats = {0};
    bool progressed;
    while (stats.generation_tokens < 2 * n_seqs) {
        if (engine_step(engine, &progressed, &err))
            return 1;
        engine_stats(engine, &stats);
    }
    for (uint32_t i = 0; i < N_STEPS; i++) {
        if (engine_step(engine, &progressed, &err))
            return 1;
        engine_stats(engine, &stats);
        microseconds[i] = stats.last_host_us;
    }
    qsort(microseconds, N_STEPS, sizeof *microseconds, compare);
    printf("%u %s %.2f %.2f\n", n_seqs, is_rich ? "logprobs+penalties" : "plain", microseconds[0], microseconds[N_STEPS / 2]);
    engine_destroy(engine);
    return 0;
}

int main(void)
{
    return measure(1, false) || measure(256, false) || measure(1, true) || measure(256, true);
}
