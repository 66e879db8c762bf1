/* pool.h: persistent threads that run one job together. An idle thread first spins, then sleeps on a futex. Thread 0 is the
 * caller. The CPU backend's kernels run on a pool, and so do the ranks of a team (csrc/program/team.c). */
#ifndef LLMPY_POOL_H
#define LLMPY_POOL_H

#include "status.h"

#include <stdbool.h>

struct pool;
/* name: of the threads, at most 15 characters. */
enum rc pool_create(uint32_t n_threads, const char *name, struct pool **pool, struct err *err);
void pool_destroy(struct pool *pool); /* NULL is allowed */
uint32_t pool_threads(const struct pool *pool);
/* Runs job(args, thread) on every thread; returns when all have ended. One job at a time. */
void pool_run(struct pool *pool, void (*job)(void *args, uint32_t thread), void *args);
void pool_barrier(struct pool *pool); /* called by every thread of a running job */
/* Threads for a job: all, or only the caller if waking the other threads would cost more than the work. */
static inline uint32_t pool_threads_for(const struct pool *pool, bool is_worth_it)
{
    return is_worth_it ? pool_threads(pool) : 1;
}
/* n_threads: the result of pool_threads_for. */
static inline void pool_run_on(struct pool *pool, uint32_t n_threads, void (*job)(void *args, uint32_t thread), void *args)
{
    if (n_threads == 1)
        job(args, 0);
    else
        pool_run(pool, job, args);
}

#endif
