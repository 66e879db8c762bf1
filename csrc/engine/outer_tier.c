#define _GNU_SOURCE
#include "outer_tier.h"

#include "../base/mem.h"
#include "block_manager.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#define N_LOADS 1024u
#define N_SAVES 64u
#define LOOK_SECONDS 1.0 /* the connector looks at most this often */

enum job_kind { JOB_BLOCK, JOB_LOOK, JOB_CLEAR };

struct job {
    enum job_kind kind;
    struct outer_block block;
    void **parts;                  /* [most parts] */
    uint32_t entry;
    bool is_good;
};

/* Jobs of one thread: a ring. Numbers count from 1 on. */
struct lane {
    struct outer_tier *owner;
    struct job *jobs;              /* [n] */
    void **parts;                  /* [n][most parts] */
    uint32_t n;
    uint64_t ordered, ended, taken; /* numbers of the last jobs; ordered and taken are the driver's */
    double begun;                  /* time at which the running job began; 0: none runs */
    double seconds;                /* of calls that moved a block */
    uint64_t n_moved;              /* blocks */
    uint64_t n_bytes;
    pthread_t thread;
    bool has_thread, is_closing;
    pthread_cond_t wake;
};

enum { LOAD, SAVE, N_LANES };

struct outer_tier {
    struct connector connector;
    struct host_tier *tier;
    char *slots;
    size_t slot_bytes;
    uint32_t bundle_pages, most_parts;
    struct lane lanes[N_LANES];
    pthread_mutex_t lock;          /* guards the lanes; never held while the connector is called */
    pthread_cond_t ended;          /* a load has ended */
    uint64_t n_missed;
    double looked;
    uint64_t clear;                /* number of the last job that clears the connector */
    bool is_off, is_late;
};

static double seconds_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* ---- the threads ---- */

static void job_run(struct outer_tier *outer, struct job *job, bool is_save)
{
    const struct connector *connector = &outer->connector;
    if (job->kind == JOB_LOOK)
        connector->look(connector->ctx);
    else if (job->kind == JOB_CLEAR)
        connector->clear(connector->ctx);
    else
        job->is_good = (is_save ? connector->save : connector->load)(connector->ctx, &job->block);
}

static void *lane_run(void *ctx)
{
    struct lane *lane = ctx;
    struct outer_tier *outer = lane->owner;
    pthread_mutex_lock(&outer->lock);
    for (;;) {
        while (!lane->is_closing && lane->ended == lane->ordered)
            pthread_cond_wait(&lane->wake, &outer->lock);
        if (lane->is_closing)
            break;
        struct job *job = &lane->jobs[(lane->ended + 1) % lane->n];
        double begun = lane->begun = seconds_now();
        pthread_mutex_unlock(&outer->lock);
        job_run(outer, job, lane == &outer->lanes[SAVE]);
        pthread_mutex_lock(&outer->lock);
        if (job->kind == JOB_BLOCK && job->is_good) {
            lane->seconds += seconds_now() - begun;
            lane->n_moved++;
            lane->n_bytes += job->block.n_parts * outer->slot_bytes;
        }
        lane->begun = 0;
        lane->ended++;
        pthread_cond_broadcast(&outer->ended);
    }
    pthread_mutex_unlock(&outer->lock);
    return NULL;
}

/* ---- life ---- */

static enum rc lane_start(struct outer_tier *outer, uint32_t which, uint32_t n_jobs, struct err *err)
{
    struct lane *lane = &outer->lanes[which];
    sigset_t all, old;
    lane->owner = outer;
    lane->n = n_jobs;
    lane->jobs = mem_calloc(n_jobs, sizeof *lane->jobs);
    lane->parts = mem_calloc((size_t)n_jobs * outer->most_parts, sizeof *lane->parts);
    if (!lane->jobs || !lane->parts)
        return err_set(err, RC_MEMORY, "outer tier: out of memory for %u jobs", n_jobs);
    for (uint32_t i = 0; i < n_jobs; i++)
        lane->jobs[i].parts = lane->parts + (size_t)i * outer->most_parts;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the program */
    lane->has_thread = !pthread_create(&lane->thread, NULL, lane_run, lane);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!lane->has_thread)
        return err_set(err, RC_MEMORY, "outer tier: no more threads");
    pthread_setname_np(lane->thread, which == LOAD ? "llmpy-load" : "llmpy-save");
    return RC_OK;
}

enum rc outer_tier_create(const struct connector *connector, struct host_tier *tier, void *slots, size_t slot_bytes,
                          uint32_t bundle_pages, struct outer_tier **result, struct err *err)
{
    struct outer_tier *outer = mem_calloc(1, sizeof *outer);
    if (!outer) {
        connector->close(connector->ctx);
        return err_set(err, RC_MEMORY, "outer tier: out of memory");
    }
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&outer->ended, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&outer->lock, NULL);
    outer->connector = *connector;
    outer->tier = tier;
    outer->slots = slots;
    outer->slot_bytes = slot_bytes;
    outer->bundle_pages = bundle_pages;
    outer->most_parts = bundle_pages > 1 ? bundle_pages : 1;
    for (uint32_t i = 0; i < N_LANES; i++)
        pthread_cond_init(&outer->lanes[i].wake, NULL);
    enum rc rc = lane_start(outer, LOAD, N_LOADS, err);
    if (!rc)
        rc = lane_start(outer, SAVE, N_SAVES, err);
    if (rc) {
        outer_tier_destroy(outer);
        return rc;
    }
    *result = outer;
    return RC_OK;
}

void outer_tier_destroy(struct outer_tier *outer)
{
    if (!outer)
        return;
    pthread_mutex_lock(&outer->lock);
    for (uint32_t i = 0; i < N_LANES; i++) {
        outer->lanes[i].is_closing = true;
        pthread_cond_signal(&outer->lanes[i].wake);
    }
    pthread_mutex_unlock(&outer->lock);
    for (uint32_t i = 0; i < N_LANES; i++) {
        if (outer->lanes[i].has_thread)
            pthread_join(outer->lanes[i].thread, NULL);
        pthread_cond_destroy(&outer->lanes[i].wake);
        mem_free(outer->lanes[i].jobs);
        mem_free(outer->lanes[i].parts);
    }
    outer->connector.close(outer->connector.ctx);
    pthread_mutex_destroy(&outer->lock);
    pthread_cond_destroy(&outer->ended);
    mem_free(outer);
}

/* ---- jobs ---- */

static bool lane_is_full(const struct lane *lane)
{
    return lane->ordered - lane->taken == lane->n;
}

/* Orders a job with the slots of an entry, if it has one. The lane must not be full. Returns the job's number. */
static uint64_t order(struct outer_tier *outer, uint32_t which, enum job_kind kind, uint32_t entry)
{
    struct lane *lane = &outer->lanes[which];
    struct job *job = &lane->jobs[(lane->ordered + 1) % lane->n];
    job->kind = kind;
    job->entry = entry;
    job->is_good = false;
    job->block = (struct outer_block){.parts = job->parts};
    if (entry)
        job->block.key = *host_tier_key(outer->tier, entry, &job->block.group);
    for (uint32_t at = entry; at; at = host_tier_next(outer->tier, at))
        job->parts[job->block.n_parts++] = outer->slots + (size_t)(at - 1) * outer->slot_bytes;
    pthread_mutex_lock(&outer->lock);
    lane->ordered++;
    pthread_cond_signal(&lane->wake);
    pthread_mutex_unlock(&outer->lock);
    return lane->ordered;
}

static void job_take(struct outer_tier *outer, uint32_t which, const struct job *job)
{
    if (job->kind != JOB_BLOCK)
        return;
    outer->n_missed += which == LOAD && !job->is_good;
    if (which == SAVE)
        host_tier_end_save(outer->tier, job->entry);
    else
        host_tier_end_fill(outer->tier, job->entry, job->is_good);
}

/* Takes up the jobs that have ended. */
static void take_ended(struct outer_tier *outer)
{
    double now = seconds_now();
    bool is_late = false;
    for (uint32_t which = 0; which < N_LANES; which++) {
        struct lane *lane = &outer->lanes[which];
        pthread_mutex_lock(&outer->lock);
        uint64_t ended = lane->ended;
        is_late |= lane->begun > 0 && now - lane->begun > OUTER_DEADLINE_S;
        pthread_mutex_unlock(&outer->lock);
        for (; lane->taken < ended; lane->taken++)
            job_take(outer, which, &lane->jobs[(lane->taken + 1) % lane->n]);
    }
    outer->is_late = is_late;
}

static void order_saves(struct outer_tier *outer, bool all)
{
    while (!outer->is_off && !lane_is_full(&outer->lanes[SAVE])) {
        uint32_t group, entry = host_tier_begin_save(outer->tier, all);
        if (!entry)
            return;
        const struct hash *key = host_tier_key(outer->tier, entry, &group);
        if (outer_tier_has(outer, key, group))
            host_tier_end_save(outer->tier, entry);
        else
            order(outer, SAVE, JOB_BLOCK, entry);
    }
}

void outer_tier_poll(struct outer_tier *outer)
{
    take_ended(outer);
    order_saves(outer, false);
}

/* Waits until the lane has ended a job behind those that were taken, at most as long. */
static void lane_wait(struct outer_tier *outer, const struct lane *lane, double seconds)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t ns = (uint64_t)until.tv_nsec + (uint64_t)(seconds * 1e9);
    until.tv_sec += (time_t)(ns / 1000000000u);
    until.tv_nsec = (long)(ns % 1000000000u);
    pthread_mutex_lock(&outer->lock);
    while (lane->ended == lane->taken && lane->ended < lane->ordered &&
           pthread_cond_timedwait(&outer->ended, &outer->lock, &until) != ETIMEDOUT)
        continue;
    pthread_mutex_unlock(&outer->lock);
}

void outer_tier_wait(struct outer_tier *outer, double seconds)
{
    lane_wait(outer, &outer->lanes[LOAD], seconds);
}

void outer_tier_turn_off(struct outer_tier *outer)
{
    outer->is_off = true;
}

bool outer_tier_has(struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    bool is_asked = !outer->is_off && !outer->is_late && outer->lanes[SAVE].taken >= outer->clear;
    return is_asked && outer->connector.has(outer->connector.ctx, key, group);
}

uint64_t outer_tier_load(struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    struct lane *lane = &outer->lanes[LOAD];
    uint64_t coming = host_tier_coming(outer->tier, key, group);
    if (coming || lane_is_full(lane))
        return coming;
    uint32_t n = group == BUNDLE_GROUP ? outer->bundle_pages : 1;
    uint32_t entry = host_tier_begin_fill(outer->tier, key, group, n, lane->ordered + 1);
    return entry ? order(outer, LOAD, JOB_BLOCK, entry) : 0;
}

bool outer_tier_is_loading(const struct outer_tier *outer, uint64_t number)
{
    return number > outer->lanes[LOAD].taken && !outer->is_late;
}

void outer_tier_look(struct outer_tier *outer)
{
    double now = seconds_now();
    if (outer->is_off || now - outer->looked < LOOK_SECONDS || lane_is_full(&outer->lanes[LOAD]))
        return;
    outer->looked = now;
    order(outer, LOAD, JOB_LOOK, 0);
}

void outer_tier_clear(struct outer_tier *outer)
{
    while (lane_is_full(&outer->lanes[SAVE])) {
        lane_wait(outer, &outer->lanes[SAVE], OUTER_DEADLINE_S);
        take_ended(outer);
    }
    outer->clear = order(outer, SAVE, JOB_CLEAR, 0);
}

void outer_tier_save_all(struct outer_tier *outer)
{
    struct lane *lane = &outer->lanes[SAVE];
    for (order_saves(outer, true); lane->taken < lane->ordered && !outer->is_late; order_saves(outer, true)) {
        lane_wait(outer, lane, OUTER_DEADLINE_S);
        take_ended(outer);
    }
}

bool outer_tier_is_lasting(const struct outer_tier *outer)
{
    return outer->connector.is_lasting && !outer->is_off && !outer->is_late;
}

void outer_tier_stats(struct outer_tier *outer, struct outer_stats *stats)
{
    const struct lane *load = &outer->lanes[LOAD], *save = &outer->lanes[SAVE];
    *stats = (struct outer_stats){.n_missed = outer->n_missed, .is_late = outer->is_late};
    outer->connector.stats(outer->connector.ctx, &stats->connector);
    pthread_mutex_lock(&outer->lock);
    stats->n_loaded = load->n_moved;
    stats->n_saved = save->n_moved;
    stats->loaded_bytes = load->n_bytes;
    stats->saved_bytes = save->n_bytes;
    stats->load_s = load->seconds;
    stats->save_s = save->seconds;
    pthread_mutex_unlock(&outer->lock);
    stats->n_loading = (uint32_t)(load->ordered - load->taken);
    stats->n_saving = (uint32_t)(save->ordered - save->taken);
}
