/* outer_tier.h: the tier behind the host tier: a connector, and the threads that call it. One or more load into slots of the
 * host tier, as many save from them; they know no pages and no keys but those of their jobs. A slot with a job is pinned. Loads
 * have numbers and end in their order, so whoever waits needs the last number alone. A load that fails, or that takes longer
 * than its deadline, costs a computation. All functions are for the driver's thread; none allocates after outer_tier_create. */
#ifndef LLMPY_OUTER_TIER_H
#define LLMPY_OUTER_TIER_H

#include "connector.h"
#include "host_tier.h"

struct outer_tier;

struct outer_stats {
    struct connector_stats connector;
    uint64_t n_loaded, n_saved;          /* blocks */
    uint64_t n_missed;                   /* loads that brought nothing */
    uint64_t loaded_bytes, saved_bytes;
    double load_s, save_s;               /* the threads' time for them */
    uint32_t n_loading, n_saving;        /* jobs that have not ended */
    bool is_late;                        /* a job runs beyond its deadline */
};

/* Takes the connector over, also if it fails. groups: the groups under which the engine has blocks. slots:
 * [n_slots][slot_bytes] the host tier's memory. bundle_pages: as there. */
enum rc outer_tier_create(const struct connector *connector, struct host_tier *tier, void *slots, size_t slot_bytes,
                          uint32_t bundle_pages, uint32_t n_groups, struct outer_tier **outer, struct err *err);
/* Waits for the jobs that run, drops those that wait, and closes the connector. A connector that is not quick and does not come
 * back by its deadline is left to its thread, which closes it once it does; the slots are not touched any more. */
void outer_tier_destroy(struct outer_tier *outer);

/* Takes up the jobs that have ended, and orders saves of entries that will leave the host tier. Call it before each step. */
void outer_tier_poll(struct outer_tier *outer);
/* Waits until a load ends, or as long. Call outer_tier_poll next. */
void outer_tier_wait(struct outer_tier *outer, double seconds);
/* The engine has other weights now: from here on blocks have other keys outside, which follow from weights; those of earlier
 * weights are found no longer, and make room as they get old. NULL: nobody knows which weights, so no block is saved or found
 * until the next call. */
void outer_tier_renew(struct outer_tier *outer, const struct hash *weights);
/* True if the connector must be asked before outer_tier_has knows anything. outer_tier_ask asks for all groups of n keys, and
 * gives a number as outer_tier_load does; what was found is remembered for a while. */
bool outer_tier_must_ask(const struct outer_tier *outer);
uint64_t outer_tier_ask(struct outer_tier *outer, const struct hash *(*key_at)(void *ctx, uint32_t i), void *ctx, uint32_t n);
bool outer_tier_has(struct outer_tier *outer, const struct hash *key, uint32_t group);
/* Orders a load into the host tier, unless one is on its way: its number. 0: there is no slot, or too much waits. */
uint64_t outer_tier_load(struct outer_tier *outer, const struct hash *key, uint32_t group);
/* True until the load with the number has ended, or is late. */
bool outer_tier_is_loading(const struct outer_tier *outer, uint64_t number);
/* Removes every block. */
void outer_tier_clear(struct outer_tier *outer);
/* Orders the save of a block of the host tier, unless the connector is known to have it; waits if too many saves wait.
 * outer_tier_settle waits until all saves have ended. */
void outer_tier_save(struct outer_tier *outer, const struct hash *key, uint32_t group);
void outer_tier_settle(struct outer_tier *outer);
/* The same without waiting; false if it is to be tried again later. */
bool outer_tier_save_soon(struct outer_tier *outer, const struct hash *key, uint32_t group);
/* Saves every entry of the host tier whose copy has ended; waits for that. */
void outer_tier_save_all(struct outer_tier *outer);
bool outer_tier_is_lasting(const struct outer_tier *outer); /* and not turned off */
void outer_tier_stats(struct outer_tier *outer, struct outer_stats *stats);

#endif
