#define _GNU_SOURCE
#include "pool.h"

#include "mem.h"
#include "spin.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Time stamp ticks (50 to 100 us) that a waiting thread spins before it sleeps: longer than the gap between two operations of
 * a step, shorter than a scheduler's time slice. */
#define SPIN_TICKS 200000

struct pool {
    uint32_t n_threads, n_started;
    const char *name;
    pthread_t *workers; /* [n_threads - 1] */
    void (*job)(void *args, uint32_t thread);
    void *args;
    /* Each counter has a separate cache line, because one thread writes it while other threads poll it. */
    _Alignas(64) atomic_uint n_jobs;   /* jobs started; a worker runs the next job when it changes */
    _Alignas(64) atomic_uint n_phases; /* barriers passed */
    _Alignas(64) atomic_uint n_arrived;
    _Alignas(64) atomic_uint n_asleep;
    bool is_closing;
};

struct worker {
    struct pool *pool;
    uint32_t thread;
};

static long futex(atomic_uint *word, int operation, unsigned value)
{
    return syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

static void wait_change(struct pool *pool, atomic_uint *word, unsigned seen)
{
    uint64_t start = spin_clock();
    do {
        for (int i = 0; i < 16; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != seen)
                return;
            spin_pause();
        }
    } while (spin_clock() - start < SPIN_TICKS);
    atomic_fetch_add(&pool->n_asleep, 1);
    while (atomic_load(word) == seen)
        futex(word, FUTEX_WAIT_PRIVATE, seen);
    atomic_fetch_sub(&pool->n_asleep, 1);
}

static void change(struct pool *pool, atomic_uint *word)
{
    atomic_fetch_add(word, 1);
    if (atomic_load(&pool->n_asleep))
        futex(word, FUTEX_WAKE_PRIVATE, pool->n_threads);
}

void pool_barrier(struct pool *pool)
{
    if (pool->n_threads == 1)
        return;
    unsigned phase = atomic_load(&pool->n_phases);
    if (atomic_fetch_add(&pool->n_arrived, 1) == pool->n_threads - 1) {
        atomic_store(&pool->n_arrived, 0);
        change(pool, &pool->n_phases);
    } else {
        wait_change(pool, &pool->n_phases, phase);
    }
}

static void *worker_run(void *argument)
{
    struct worker worker = *(struct worker *)argument;
    struct pool *pool = worker.pool;
    mem_free(argument);
    pthread_setname_np(pthread_self(), pool->name);
    for (unsigned n_done = 0;; n_done++) {
        wait_change(pool, &pool->n_jobs, n_done);
        if (pool->is_closing)
            return NULL;
        pool->job(pool->args, worker.thread);
        pool_barrier(pool);
    }
}

void pool_run(struct pool *pool, void (*job)(void *args, uint32_t thread), void *args)
{
    if (pool->n_threads > 1) {
        pool->job = job;
        pool->args = args;
        change(pool, &pool->n_jobs);
    }
    job(args, 0);
    pool_barrier(pool);
}

static enum rc start_worker(struct pool *pool, uint32_t thread, struct err *err)
{
    struct worker *worker = mem_alloc(sizeof *worker);
    if (!worker)
        return err_set(err, RC_MEMORY, "threads: no memory for thread %u", thread);
    *worker = (struct worker){pool, thread};
    sigset_t all, before; /* only the application's threads handle signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&pool->workers[thread - 1], NULL, worker_run, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code) {
        mem_free(worker);
        err_set(err, RC_IO, "threads: the system refuses thread %u of %u; lower num_threads", thread, pool->n_threads);
        if (err)
            err->code = code;
        return RC_IO;
    }
    pool->n_started++;
    return RC_OK;
}

enum rc pool_create(uint32_t n_threads, const char *name, struct pool **out, struct err *err)
{
    struct pool *pool = mem_calloc(1, sizeof *pool);
    pthread_t *workers = mem_calloc(n_threads, sizeof *workers);
    if (!pool || !workers) {
        mem_free(pool);
        mem_free(workers);
        return err_set(err, RC_MEMORY, "threads: no memory for a pool of %u", n_threads);
    }
    pool->n_threads = n_threads;
    pool->workers = workers;
    pool->name = name;
    for (uint32_t thread = 1; thread < n_threads; thread++) {
        enum rc rc = start_worker(pool, thread, err);
        if (rc) {
            pool_destroy(pool);
            return rc;
        }
    }
    *out = pool;
    return RC_OK;
}

void pool_destroy(struct pool *pool)
{
    if (!pool)
        return;
    pool->is_closing = true;
    change(pool, &pool->n_jobs);
    for (uint32_t i = 0; i < pool->n_started; i++)
        pthread_join(pool->workers[i], NULL);
    mem_free(pool->workers);
    mem_free(pool);
}

uint32_t pool_threads(const struct pool *pool)
{
    return pool->n_threads;
}
