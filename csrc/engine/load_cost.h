/* load_cost.h: which part of a hit is loaded. Blocks that the pool lacks are worth a load only if their copies take less time
 * than the rows that they save, by the measured times of both (tiers.c). What is chosen changes no bit of a result. Driver's
 * thread only; only with a host tier. */
#ifndef LLMPY_LOAD_COST_H
#define LLMPY_LOAD_COST_H

#include "scheduler.h"

/* Shortens a hit of n_hit blocks, whose pages scheduler_find_hit has put into the tables of the slot, to what is worth its
 * loads. Returns the blocks that are left; the tables are theirs. */
uint32_t load_cost_cut(struct scheduler *scheduler, struct sequence *sequence, uint32_t slot, uint32_t n_hit);

#endif
