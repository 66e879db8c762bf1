#define _GNU_SOURCE
#include "outer_tier.h"

#include "../base/clock.h"
#include "../base/mem.h"
#include "../step/kv_layout.h"
#include "block_manager.h"
#include "key_table.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#define N_LOADS 1024u
#define N_SAVES 64u
#define MAX_GROUPS (BATCH_MAX_GROUPS + 1u) /* those of the layout, and BUNDLE_GROUP */
#define N_QUESTIONS 16u
#define MOST_ASKED 4096u /* keys of a question */
#define N_KNOWN 65536u   /* blocks remembered that the connector said it has */

enum job_kind { JOB_BLOCK, JOB_ASK, JOB_CLEAR };

/* What a connector that is not quick is asked. */
struct question {
    struct hash keys[MOST_ASKED];
    bool found[MAX_GROUPS * MOST_ASKED];
    uint32_t n;
    bool is_taken;
};

struct job {
    enum job_kind kind;
    struct outer_block block;
    void **parts;                  /* [most parts] */
    uint32_t entry;
    struct question *question;
    bool is_good, is_done;
};

struct worker {
    struct lane *lane;
    pthread_t thread;
    char *bounce;                  /* [most parts][slot_bytes] a connector whose calls may hang gets this instead of slots */
    void **bounce_parts;           /* [most parts] */
    double begun;                  /* time at which the running job began; 0: none runs */
    bool has_thread, has_ended;
    bool is_copying;               /* between the bounce and slots */
};

/* Jobs of some threads: a ring. Numbers count from 1 on. A job has ended once all jobs before it have. */
struct lane {
    struct outer_tier *owner;
    struct job *jobs;              /* [n] */
    void **parts;                  /* [n][most parts] */
    uint32_t n;
    uint64_t ordered, started, ended, taken; /* numbers of the last jobs; ordered and taken are the driver's */
    uint64_t barrier;              /* number of a job that runs alone; no later one starts before it has ended */
    double seconds;                /* of calls that moved a block, by the number of threads */
    uint64_t n_moved;              /* blocks */
    uint64_t n_bytes;
    struct worker workers[CONNECTOR_MOST_THREADS];
    bool is_closing;
    pthread_cond_t wake;
};

enum { LOAD, SAVE, N_LANES };

struct outer_tier {
    struct connector connector;
    struct host_tier *tier;
    char *slots;
    size_t slot_bytes;
    uint32_t bundle_pages, most_parts, n_workers; /* of a lane */
    struct lane lanes[N_LANES];
    pthread_mutex_t lock;          /* guards the lanes; never held while the connector is called */
    pthread_cond_t ended;          /* a job or a thread has ended */
    bool is_abandoned;             /* the driver is gone; the last thread frees everything */
    uint32_t groups[MAX_GROUPS], n_groups;
    struct question *questions;    /* [N_QUESTIONS]; NULL for a quick connector */
    struct key_table known;        /* [N_KNOWN] blocks that it has, and two lists: free items, and the oldest first */
    struct question *asked;        /* the last one */
    uint64_t n_missed;
    uint64_t clear;                /* number of the last job that clears the connector */
    bool is_off, is_late, has_weights;
    struct hash weights;           /* if has_weights: what keys outside follow from */
};

/* ---- the threads ---- */

/* Copies between slots and bounce; false if the slots are no longer the engine's. */
static bool bounce(struct outer_tier *outer, struct worker *worker, const struct outer_block *block, bool is_save)
{
    pthread_mutex_lock(&outer->lock);
    worker->is_copying = !outer->is_abandoned;
    pthread_mutex_unlock(&outer->lock);
    for (uint32_t i = 0; worker->is_copying && i < block->n_parts; i++)
        memcpy(is_save ? worker->bounce_parts[i] : block->parts[i], is_save ? block->parts[i] : worker->bounce_parts[i],
               outer->slot_bytes);
    pthread_mutex_lock(&outer->lock);
    bool has_copied = worker->is_copying;
    worker->is_copying = false;
    pthread_cond_broadcast(&outer->ended);
    pthread_mutex_unlock(&outer->lock);
    return has_copied;
}

/* Loads or saves a block by way of the bounce. */
static bool block_run(struct outer_tier *outer, struct worker *worker, const struct outer_block *block, bool is_save)
{
    const struct connector *connector = &outer->connector;
    struct outer_block own = *block;
    own.parts = worker->bounce_parts;
    if (is_save)
        return bounce(outer, worker, block, true) && connector->save(connector->ctx, &own);
    return connector->load(connector->ctx, &own) && bounce(outer, worker, block, false);
}

static void job_run(struct outer_tier *outer, struct worker *worker, struct job *job)
{
    const struct connector *connector = &outer->connector;
    struct question *question = job->question;
    bool is_save = worker->lane == &outer->lanes[SAVE];
    if (job->kind == JOB_CLEAR)
        connector->clear(connector->ctx);
    else if (job->kind == JOB_ASK)
        job->is_good = connector->match(connector->ctx, question->keys, question->n, outer->groups, outer->n_groups,
                                        question->found);
    else if (worker->bounce)
        job->is_good = block_run(outer, worker, &job->block, is_save);
    else
        job->is_good = (is_save ? connector->save : connector->load)(connector->ctx, &job->block);
}

static void outer_free(struct outer_tier *outer)
{
    for (uint32_t i = 0; i < N_LANES; i++) {
        pthread_cond_destroy(&outer->lanes[i].wake);
        mem_free(outer->lanes[i].jobs);
        mem_free(outer->lanes[i].parts);
        for (uint32_t w = 0; w < outer->n_workers; w++) {
            mem_free(outer->lanes[i].workers[w].bounce);
            mem_free(outer->lanes[i].workers[w].bounce_parts);
        }
    }
    outer->connector.close(outer->connector.ctx);
    key_table_destroy(&outer->known);
    mem_free(outer->questions);
    pthread_mutex_destroy(&outer->lock);
    pthread_cond_destroy(&outer->ended);
    mem_free(outer);
}

/* True if no thread is left that may use the memory; with is_copying: that copies between its bounce and slots. */
static bool have_ended(const struct outer_tier *outer, bool is_copying)
{
    bool have = true;
    for (uint32_t i = 0; i < N_LANES; i++)
        for (uint32_t w = 0; w < outer->n_workers; w++) {
            const struct worker *worker = &outer->lanes[i].workers[w];
            have &= is_copying ? !worker->is_copying : !worker->has_thread || worker->has_ended;
        }
    return have;
}

/* True if the next job may start: one that clears the connector comes behind all jobs before it, and before all others. */
static bool may_start(const struct lane *lane)
{
    if (lane->started == lane->ordered || lane->ended < lane->barrier)
        return false;
    return lane->jobs[(lane->started + 1) % lane->n].kind != JOB_CLEAR || lane->ended == lane->started;
}

/* Takes up that a job is done; the lock is held. */
static void job_end(struct lane *lane, struct job *job, double seconds)
{
    if (job->kind == JOB_BLOCK && job->is_good) {
        lane->seconds += seconds / lane->owner->n_workers;
        lane->n_moved++;
        lane->n_bytes += job->block.n_parts * lane->owner->slot_bytes;
    }
    job->is_done = true;
    for (; lane->ended < lane->started && lane->jobs[(lane->ended + 1) % lane->n].is_done; lane->ended++)
        lane->jobs[(lane->ended + 1) % lane->n].is_done = false;
    pthread_cond_broadcast(&lane->wake);
    pthread_cond_broadcast(&lane->owner->ended);
}

static void *worker_run(void *ctx)
{
    struct worker *worker = ctx;
    struct lane *lane = worker->lane;
    struct outer_tier *outer = lane->owner;
    pthread_mutex_lock(&outer->lock);
    for (;;) {
        while (!lane->is_closing && !may_start(lane))
            pthread_cond_wait(&lane->wake, &outer->lock);
        if (lane->is_closing)
            break;
        struct job *job = &lane->jobs[++lane->started % lane->n];
        lane->barrier = job->kind == JOB_CLEAR ? lane->started : lane->barrier;
        double begun = worker->begun = seconds_now();
        pthread_mutex_unlock(&outer->lock);
        job_run(outer, worker, job);
        pthread_mutex_lock(&outer->lock);
        worker->begun = 0;
        job_end(lane, job, seconds_now() - begun);
    }
    worker->has_ended = true;
    pthread_cond_broadcast(&outer->ended);
    bool is_last = outer->is_abandoned && have_ended(outer, false);
    pthread_mutex_unlock(&outer->lock);
    if (is_last)
        outer_free(outer);
    return NULL;
}

/* ---- life ---- */

static enum rc worker_start(struct outer_tier *outer, uint32_t which, struct worker *worker, struct err *err)
{
    sigset_t all, old;
    worker->lane = &outer->lanes[which];
    if (outer->questions && !outer->connector.ends_itself) {
        worker->bounce = mem_alloc(outer->most_parts * outer->slot_bytes);
        worker->bounce_parts = mem_calloc(outer->most_parts, sizeof *worker->bounce_parts);
        if (!worker->bounce || !worker->bounce_parts)
            return err_set(err, RC_MEMORY, "outer tier: out of memory for %u pages", outer->most_parts);
        for (uint32_t i = 0; i < outer->most_parts; i++)
            worker->bounce_parts[i] = worker->bounce + i * outer->slot_bytes;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the program */
    worker->has_thread = !pthread_create(&worker->thread, NULL, worker_run, worker);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!worker->has_thread)
        return err_set(err, RC_MEMORY, "outer tier: no more threads");
    pthread_setname_np(worker->thread, which == LOAD ? "llmpy-load" : "llmpy-save");
    return RC_OK;
}

static enum rc lane_start(struct outer_tier *outer, uint32_t which, uint32_t n_jobs, struct err *err)
{
    struct lane *lane = &outer->lanes[which];
    enum rc rc = RC_OK;
    lane->owner = outer;
    lane->n = n_jobs;
    lane->jobs = mem_calloc(n_jobs, sizeof *lane->jobs);
    lane->parts = mem_calloc((size_t)n_jobs * outer->most_parts, sizeof *lane->parts);
    if (!lane->jobs || !lane->parts)
        return err_set(err, RC_MEMORY, "outer tier: out of memory for %u jobs", n_jobs);
    for (uint32_t i = 0; i < n_jobs; i++)
        lane->jobs[i].parts = lane->parts + (size_t)i * outer->most_parts;
    for (uint32_t w = 0; !rc && w < outer->n_workers; w++)
        rc = worker_start(outer, which, &lane->workers[w], err);
    return rc;
}

/* What a connector that is not quick needs. */
static enum rc questions_create(struct outer_tier *outer, struct err *err)
{
    outer->questions = mem_calloc(N_QUESTIONS, sizeof *outer->questions);
    if (!outer->questions || key_table_create(&outer->known, N_KNOWN + 1, 2, err))
        return err_set(err, RC_MEMORY, "outer tier: out of memory for questions");
    for (uint32_t item = 1; item <= N_KNOWN; item++)
        list_push(&outer->known, N_KNOWN + 1, item);
    return RC_OK;
}

enum rc outer_tier_create(const struct connector *connector, struct host_tier *tier, void *slots, size_t slot_bytes,
                          uint32_t bundle_pages, uint32_t n_groups, struct outer_tier **result, struct err *err)
{
    struct outer_tier *outer = mem_calloc(1, sizeof *outer);
    if (!outer) {
        connector->close(connector->ctx);
        return err_set(err, RC_MEMORY, "outer tier: out of memory");
    }
    cond_init_monotonic(&outer->ended);
    pthread_mutex_init(&outer->lock, NULL);
    outer->connector = *connector;
    outer->tier = tier;
    outer->slots = slots;
    outer->slot_bytes = slot_bytes;
    outer->bundle_pages = bundle_pages;
    outer->most_parts = bundle_pages > 1 ? bundle_pages : 1;
    outer->n_workers = connector->n_threads ? connector->n_threads : 1;
    for (uint32_t i = 0; i < N_LANES; i++)
        pthread_cond_init(&outer->lanes[i].wake, NULL);
    for (uint32_t group = 0; group < n_groups; group++)
        outer->groups[outer->n_groups++] = group;
    if (bundle_pages)
        outer->groups[outer->n_groups++] = BUNDLE_GROUP;
    enum rc rc = connector->has ? RC_OK : questions_create(outer, err);
    if (!rc)
        rc = lane_start(outer, LOAD, N_LOADS, err);
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
        pthread_cond_broadcast(&outer->lanes[i].wake);
    }
    bool may_leave = outer->questions && !outer->connector.ends_itself;
    const struct timespec until = deadline_after(outer->connector.deadline_s);
    int code = 0;
    while (!have_ended(outer, false) && (code != ETIMEDOUT || !have_ended(outer, true)))
        code = may_leave && code != ETIMEDOUT ? pthread_cond_timedwait(&outer->ended, &outer->lock, &until)
                                              : pthread_cond_wait(&outer->ended, &outer->lock);
    bool is_last = have_ended(outer, false);
    outer->is_abandoned = true;
    for (uint32_t i = 0; i < N_LANES; i++)
        for (uint32_t w = 0; w < outer->n_workers; w++)
            if (outer->lanes[i].workers[w].has_thread)
                pthread_detach(outer->lanes[i].workers[w].thread);
    pthread_mutex_unlock(&outer->lock);
    if (is_last)
        outer_free(outer);
}

/* ---- jobs ---- */

/* The key of a block for the connector. In the engine a key says nothing of the weights. */
static struct hash key_outside(const struct outer_tier *outer, const struct hash *key)
{
    return outer->has_weights ? hash_bytes(&outer->weights, key, sizeof *key) : *key;
}

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
    job->question = outer->asked;
    job->block = (struct outer_block){.parts = job->parts};
    if (entry)
        job->block.key = key_outside(outer, host_tier_key(outer->tier, entry, &job->block.group));
    for (uint32_t at = entry; at; at = host_tier_next(outer->tier, at))
        job->parts[job->block.n_parts++] = outer->slots + (size_t)(at - 1) * outer->slot_bytes;
    pthread_mutex_lock(&outer->lock);
    lane->ordered++;
    pthread_cond_broadcast(&lane->wake);
    pthread_mutex_unlock(&outer->lock);
    return lane->ordered;
}

/* ---- questions ---- */

static uint32_t known_find(const struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    return key_table_match(&outer->known, *key_table_bucket(&outer->known, key, group), key, group);
}

static void known_drop(struct outer_tier *outer, uint32_t item)
{
    key_table_drop(&outer->known, item);
    list_remove(&outer->known, item);
    list_push(&outer->known, N_KNOWN + 1, item);
}

static void known_forget(struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    uint32_t item = known_find(outer, key, group);
    if (item)
        known_drop(outer, item);
}

static void known_add(struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    const struct keyed *items = outer->known.items;
    if (known_find(outer, key, group))
        return;
    if (list_is_empty(&outer->known, N_KNOWN + 1))
        known_drop(outer, items[N_KNOWN + 2].next);
    uint32_t item = items[N_KNOWN + 1].next;
    list_remove(&outer->known, item);
    list_push(&outer->known, N_KNOWN + 2, item);
    key_table_add(&outer->known, item, key, group);
}

static void answer_take(struct outer_tier *outer, const struct job *job)
{
    struct question *question = job->question;
    for (uint32_t g = 0; job->is_good && g < outer->n_groups; g++)
        for (uint32_t i = 0; i < question->n; i++)
            if (question->found[g * question->n + i])
                known_add(outer, &question->keys[i], outer->groups[g]);
            else
                known_forget(outer, &question->keys[i], outer->groups[g]);
    question->is_taken = false;
}

bool outer_tier_must_ask(const struct outer_tier *outer)
{
    return outer->questions && !outer->is_off && !outer->is_late;
}

uint64_t outer_tier_ask(struct outer_tier *outer, const struct hash *(*key_at)(void *ctx, uint32_t i), void *ctx, uint32_t n)
{
    struct question *question = outer->questions;
    while (question < outer->questions + N_QUESTIONS && question->is_taken)
        question++;
    if (question == outer->questions + N_QUESTIONS || lane_is_full(&outer->lanes[LOAD]) || !n)
        return 0;
    question->n = n < MOST_ASKED ? n : MOST_ASKED;
    question->is_taken = true;
    memset(question->found, 0, (size_t)question->n * outer->n_groups);
    for (uint32_t i = 0; i < question->n; i++)
        question->keys[i] = key_outside(outer, key_at(ctx, i));
    outer->asked = question;
    return order(outer, LOAD, JOB_ASK, 0);
}

/* ---- what has ended ---- */

static void job_take(struct outer_tier *outer, uint32_t which, const struct job *job)
{
    if (job->kind == JOB_ASK)
        answer_take(outer, job);
    if (job->kind != JOB_BLOCK)
        return;
    outer->n_missed += which == LOAD && !job->is_good;
    if (outer->questions && which == LOAD && !job->is_good)
        known_forget(outer, &job->block.key, job->block.group);
    if (outer->questions && which == SAVE && job->is_good)
        known_add(outer, &job->block.key, job->block.group);
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
        for (uint32_t w = 0; w < outer->n_workers; w++)
            is_late |= lane->workers[w].begun > 0 && now - lane->workers[w].begun > outer->connector.deadline_s;
        pthread_mutex_unlock(&outer->lock);
        for (; lane->taken < ended; lane->taken++)
            job_take(outer, which, &lane->jobs[(lane->taken + 1) % lane->n]);
    }
    outer->is_late = is_late;
}

/* Orders the removal of all blocks that is due, if there is room for the job. */
static void order_clear(struct outer_tier *outer)
{
    if (outer->clear == UINT64_MAX && !lane_is_full(&outer->lanes[SAVE]))
        outer->clear = order(outer, SAVE, JOB_CLEAR, 0);
}

static void order_saves(struct outer_tier *outer, bool all)
{
    while (!outer->is_off && outer->clear != UINT64_MAX && !lane_is_full(&outer->lanes[SAVE])) {
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
    order_clear(outer);
    order_saves(outer, false);
}

/* Waits until the lane has ended a job behind those that were taken, or as long. */
static void lane_wait(struct outer_tier *outer, const struct lane *lane, double seconds)
{
    const struct timespec until = deadline_after(seconds);
    pthread_mutex_lock(&outer->lock);
    while (lane->ended == lane->taken &&
           pthread_cond_timedwait(&outer->ended, &outer->lock, &until) != ETIMEDOUT)
        continue;
    pthread_mutex_unlock(&outer->lock);
}

void outer_tier_wait(struct outer_tier *outer, double seconds)
{
    lane_wait(outer, &outer->lanes[LOAD], seconds);
}

void outer_tier_renew(struct outer_tier *outer, const struct hash *weights)
{
    outer->is_off = !weights;
    outer->has_weights = weights != NULL;
    outer->weights = weights ? *weights : (struct hash){0};
}

bool outer_tier_has(struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    bool is_asked = !outer->is_off && !outer->is_late && outer->lanes[SAVE].taken >= outer->clear;
    if (!is_asked)
        return false;
    struct hash outside = key_outside(outer, key);
    if (outer->questions)
        return known_find(outer, &outside, group) != 0;
    return outer->connector.has(outer->connector.ctx, &outside, group);
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

void outer_tier_clear(struct outer_tier *outer)
{
    outer->clear = UINT64_MAX;
    order_clear(outer);
}

/* Waits for a save, and takes up what has ended. False: there is none, or the connector is late. */
static bool await_save(struct outer_tier *outer)
{
    struct lane *lane = &outer->lanes[SAVE];
    if (lane->taken == lane->ordered || outer->is_late)
        return false;
    lane_wait(outer, lane, outer->connector.deadline_s);
    take_ended(outer);
    return true;
}

void outer_tier_save_all(struct outer_tier *outer)
{
    do
        order_saves(outer, true);
    while (await_save(outer));
}

void outer_tier_settle(struct outer_tier *outer)
{
    while (await_save(outer))
        continue;
}

void outer_tier_save(struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    uint32_t entry = host_tier_find(outer->tier, key, group);
    if (!entry || outer->is_off || outer->clear == UINT64_MAX || outer_tier_has(outer, key, group))
        return;
    if (lane_is_full(&outer->lanes[SAVE]))
        outer_tier_settle(outer);
    if (!lane_is_full(&outer->lanes[SAVE]) && host_tier_begin_save_of(outer->tier, entry))
        order(outer, SAVE, JOB_BLOCK, entry);
}

bool outer_tier_save_soon(struct outer_tier *outer, const struct hash *key, uint32_t group)
{
    uint32_t entry = host_tier_find(outer->tier, key, group);
    if (!entry || outer->is_off || outer->clear == UINT64_MAX || outer_tier_has(outer, key, group))
        return true;
    if (lane_is_full(&outer->lanes[SAVE]) || !host_tier_is_copied(outer->tier, entry))
        return false;
    if (host_tier_begin_save_of(outer->tier, entry)) /* else it is being saved */
        order(outer, SAVE, JOB_BLOCK, entry);
    return true;
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
