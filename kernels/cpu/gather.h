/* gather.h: contexts that run one model together (struct comm of backend.h). All of them point to one struct cpu_ranks; comm's
 * `open` makes it, `close` frees it. */
#ifndef LLMPY_CPU_GATHER_H
#define LLMPY_CPU_GATHER_H

#include "cpu.h"

extern const struct comm cpu_comm;

/* Ranks that the context meets, itself included; 0: `open` has not connected it. */
uint32_t cpu_n_ranks(const struct cpu *cpu);
/* Stores rows of the rank's arena to the same place of all other ranks' arenas. */
enum rc cpu_mirror(struct cpu *cpu, const struct view *rows, uint32_t n_rows, struct err *err);
/* Stores what the rank's experts have made: parts, or `inner` columns of each part. */
enum rc cpu_mirror_parts(struct cpu *cpu, const struct experts_args *args, uint32_t inner, struct err *err);

#endif
