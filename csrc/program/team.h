/* team.h: the ranks of one model as one runner. A rank is a model that has its own context, weights, arena and pool, and
 * computes its own columns. The caller's thread runs rank 0; a team of several ranks has one more thread for each other rank.
 * All ranks run the same batch and meet where a value is wanted whole (struct comm in backend.h). A team of one rank has no
 * threads and calls its model directly. The ranks may be those of several processes (hosts.h): the team then has the ranks of
 * this process, and the first process sends each step to the others. One thread at a time. */
#ifndef LLMPY_TEAM_H
#define LLMPY_TEAM_H

#include "hosts.h"
#include "model.h"

#define TEAM_MAX_RANKS RUNNER_MOST_RANKS

struct team;

struct team_options {
    uint32_t n_ranks;
    double timeout_seconds;        /* a rank that waits longer for another rank in a step fails */
    const struct hosts_options *hosts; /* NULL: all ranks are in this process */
    uint32_t first_rank, n_all_ranks;  /* with hosts: of the first rank here; of all processes */
    struct program **others;       /* with hosts: [n_all_ranks] programs of ranks on other hosts; the team takes ownership */
    const char *nccl;              /* with hosts: path of the library, or NULL; devices that need it refuse NULL */
};

/* Takes ownership of the programs [n_ranks], also when it fails. ranks [n_ranks]: the options of each rank; team_create sets
 * their rank and n_ranks. The checkpoint may be closed afterwards. */
enum rc team_create(struct program **programs, const struct checkpoint *checkpoint, struct model_options *ranks,
                    const struct team_options *options, struct team **team, struct err *err);
void team_destroy(struct team *team);
uint32_t team_n_ranks(const struct team *team); /* in this process */
struct hosts *team_hosts(const struct team *team); /* NULL: there are no other processes */
uint32_t team_n_all_ranks(const struct team *team); /* of all processes */
const struct program *team_program(const struct team *team, uint32_t rank); /* of any rank of all processes */
struct model *team_model(const struct team *team, uint32_t rank);
struct model *const *team_models(const struct team *team); /* [n_ranks] */
/* Runs a function for every rank, each in the rank's thread, and waits for all. The ranks meet in it. The error is that of the
 * rank at fault; after it no rank can meet again, so the engine has to end. */
enum rc team_meet(struct team *team, enum rc (*run)(struct model *model, void *arg, struct err *err), void *arg,
                  struct err *err);
/* Tells the ranks where the arenas [n_ranks] of size_bytes each lie; NULL: those of the models. */
enum rc team_share_arenas(struct team *team, void *const *arenas, size_t size_bytes, struct err *err);
/* The functions of struct runner; ctx is the team. */
enum rc team_start(void *ctx, struct batch *batch, struct err *err);
enum rc team_finish(void *ctx, struct batch *batch, struct err *err);
enum rc team_read_states(void *ctx, const struct batch *batch, uint32_t first, uint32_t n, float *rows, struct err *err);
enum rc team_check(void *ctx, struct err *err); /* a team of several hosts alone */
uint64_t team_allocations(void *ctx);
void team_add_tower(const struct team *team, struct runner *runner); /* what the model's tower takes, if it has one */
enum rc team_move(void *ctx, struct move_args *args, struct err *err); /* moves.c */
enum rc team_poll_moves(void *ctx, struct move_state *state, struct err *err);
void team_add_lending(const struct team *team, struct runner *runner); /* what lends and borrows pools */
enum rc team_release(void *ctx, uint32_t parts, bool keeps, struct err *err);
enum rc team_restore(void *ctx, uint32_t parts, struct err *err);
/* A follower: carries out an order of host 0. number: its result. A failure of its own leaves everything as it was. */
enum rc team_obey(struct team *team, const void *bytes, size_t n_bytes, uint64_t *number, struct err *err);
size_t team_most_order_bytes(void);

#endif
