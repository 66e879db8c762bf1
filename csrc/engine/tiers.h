/* tiers.h: the engine's part of the host tier: hands the moves that scheduling a step has led to over to the runner, right
 * before the step starts. Driver's thread only; only for engines with a host tier. */
#ifndef LLMPY_TIERS_H
#define LLMPY_TIERS_H

#include "engine_state.h"

/* Learns which moves have ended; call it before a step is scheduled. */
enum rc tiers_poll(struct engine *engine, struct err *err);
/* Takes up the time of a computed step: how long a row takes of which a preemption by recomputation would have many. */
void tiers_observe(struct engine *engine, const struct step_record *record);
/* Enqueues the moves since the last call, and what the step waits for. */
enum rc tiers_flush(struct engine *engine, struct err *err);
/* The same where all moves in are of host_tier_receive, from pools of another engine. */
enum rc tiers_receive(struct engine *engine, const struct lent_pools *pools, struct err *err);
/* Enqueues the moves since the last call, and waits until all moves have ended. */
enum rc tiers_await(struct engine *engine, struct err *err);
/* Before the engine goes: saves what pool and host tier have to an outer tier that outlives the engine. */
void tiers_close(struct engine *engine);
/* Before the pool sleeps: waits for all moves. With `stores` it first preempts all running sequences, by a swap or not,
 * and copies every findable page to the tier. */
enum rc tiers_settle(struct engine *engine, bool stores, struct err *err);

#endif
