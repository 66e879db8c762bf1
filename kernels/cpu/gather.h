/* gather.h: contexts that run one model together (struct comm of backend.h). All of them point to one struct cpu_ranks; comm's
 * `open` makes it, `close` frees it. */
#ifndef LLMPY_CPU_GATHER_H
#define LLMPY_CPU_GATHER_H

#include "cpu.h"

extern const struct comm cpu_comm;

/* Ranks that the context meets, itself included; 0: `open` has not connected it. */
uint32_t cpu_n_ranks(const struct cpu *cpu);

#endif
