/* sample.h: sizes of the memory that sample.c needs; backend_cpu.c allocates it at open. */
#ifndef LLMPY_CPU_SAMPLE_H
#define LLMPY_CPU_SAMPLE_H

#include "cpu.h"

#define SAMPLE_CHUNK 4096u /* ids that are summed as one chunk, for any number of threads */

/* Scratch of one thread: for each id its logit, its place among the candidates, {logit, weight} and {id, removed logit}. */
static inline size_t sample_scratch_bytes(uint32_t vocab_size)
{
    size_t n_chunks = vocab_size / SAMPLE_CHUNK + 1;
    return n_chunks * SAMPLE_CHUNK * 24 + n_chunks * 32 + 4096;
}

#endif
