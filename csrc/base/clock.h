/* clock.h: time that only goes forward, in seconds, and waits that end by it. */
#ifndef LLMPY_CLOCK_H
#define LLMPY_CLOCK_H

#include <pthread.h>
#include <time.h>

static inline double seconds_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* The end of a wait of so many seconds from now, 0 to 1e6, for a condition of cond_init_monotonic. */
static inline struct timespec deadline_after(double seconds)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    seconds = seconds < 0 ? 0 : seconds > 1e6 ? 1e6 : seconds;
    double whole = (double)time.tv_nsec * 1e-9 + seconds;
    time.tv_sec += (time_t)whole;
    time.tv_nsec = (long)((whole - (double)(time_t)whole) * 1e9);
    return time;
}

static inline void cond_init_monotonic(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

#endif
