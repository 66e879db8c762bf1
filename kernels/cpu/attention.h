/* attention.h: sizes of the memory that attention.c and latent_attention.c need; backend_cpu.c allocates it at open. */
#ifndef LLMPY_CPU_ATTENTION_H
#define LLMPY_CPU_ATTENTION_H

#include "cpu.h"

#define ATTENTION_TILE_ROWS 96u           /* most rows of a task */
#define ATTENTION_MAX_GROUP 192u          /* most query heads of a kv head */
#define ATTENTION_SLOT_BYTES (4u << 20)   /* states of cut tasks */
#define ATTENTION_TASK_BYTES 24u

/* Room for two tasks a row (a group of up to 192 heads in tasks of at least 96 rows) and one more task a sequence. */
static inline size_t attention_task_bytes(const struct backend_options *options)
{
    return ((size_t)options->max_rows * 3 * ATTENTION_TASK_BYTES + 63) / 64 * 64;
}

static inline size_t attention_shared_bytes(const struct backend_options *options)
{
    return attention_task_bytes(options) + ATTENTION_SLOT_BYTES;
}

/* Scratch of one thread in attention.c: for each row of a task a query, 64 scores, two states and a factor. */
static inline size_t attention_scratch_bytes(void)
{
    return ATTENTION_TILE_ROWS * (272 + 64 + 2 * (256 + 16 + 1) + 1) * sizeof(float) + 1024;
}

/* Scratch of one thread in latent_attention.c: queries, scores and two states of LATENT_ROWS rows, and a tile's keys and
 * values. */
#define LATENT_ROWS 48u
#define LATENT_QUERY_STRIDE 656u
#define LATENT_SCRATCH_BYTES \
    ((LATENT_ROWS * (LATENT_QUERY_STRIDE + 64 + 2 * (640 + 16 + 1) + 1) + 2 * 64 * 640) * sizeof(float) + 1024)

#endif
