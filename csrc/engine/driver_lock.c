/* driver_lock.c: what driver.c and subscription.c do with the driver's lock: wake its thread, count references, read states. */
#define _GNU_SOURCE
#include "driver_state.h"

#include "../base/clock.h"
#include "../base/mem.h"

#include <errno.h>
#include <time.h>

void driver_kick(struct driver *d)
{
    d->is_kicked = true;
    d->is_quiet = false;
    pthread_cond_signal(&d->wake);
}

void driver_hold(struct driver *d)
{
    d->n_holders++;
}

void driver_unlock_release(struct driver *d)
{
    bool is_last = --d->n_holders == 0;
    driver_unlock(d);
    if (!is_last)
        return;
    pthread_cond_destroy(&d->changed);
    pthread_cond_destroy(&d->wake);
    pthread_mutex_destroy(&d->lock);
    mem_free(d);
}

uint64_t driver_n_queued(struct driver *d)
{
    struct engine_stats stats;
    engine_stats(d->engine, &stats);
    return stats.num_waiting;
}

uint32_t driver_state_now(struct driver *d)
{
    uint32_t states = d->is_held ? DRIVER_PAUSED : 0;
    if (d->is_dead)
        states |= DRIVER_DEAD;
    if (d->is_closed)
        return states | DRIVER_CLOSED | DRIVER_IDLE;
    if (d->was_idle && !engine_has_unfinished(d->engine))
        states |= DRIVER_IDLE;
    if (!d->max_queued || driver_n_queued(d) < d->max_queued)
        states |= DRIVER_HAS_ROOM;
    return states;
}

bool driver_wait(struct driver *driver, uint32_t states, uint64_t boundary, double seconds)
{
    struct timespec deadline = deadline_after(seconds);
    bool is_late = false;
    driver_lock(driver);
    driver->n_waiting++;
    bool holds;
    while (!(holds = (driver_state_now(driver) & states) || (boundary && driver->n_done >= boundary)) && !is_late)
        is_late = pthread_cond_timedwait(&driver->changed, &driver->lock, &deadline) == ETIMEDOUT;
    driver->n_waiting--;
    driver_unlock(driver);
    return holds;
}
