/* spin.h: what a thread does while it spins: let the core's other thread run, and look at a clock that costs nothing. */
#ifndef LLMPY_SPIN_H
#define LLMPY_SPIN_H

#include <stdint.h>

#ifdef __aarch64__

static inline void spin_pause(void)
{
    __asm__ volatile("yield");
}

/* Half nanoseconds, as the ticks of x86 about are. */
static inline uint64_t spin_clock(void)
{
    uint64_t ticks, a_second;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    __asm__ volatile("mrs %0, cntfrq_el0" : "=r"(a_second));
    return ticks * (2000000000u / a_second);
}

#else

#include <immintrin.h>

static inline void spin_pause(void)
{
    _mm_pause();
}

static inline uint64_t spin_clock(void)
{
    return __builtin_ia32_rdtsc();
}

#endif

#endif
