/* peaks.c: this machine's ceilings, with which benchmarks/cpu.py compares: DRAM read bandwidth and float32 multiply-add peak of
 * n threads. The benchmark builds it with -O3 -march=native; it is not part of the package. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_THREADS 256
#ifdef __AVX512F__
#define LANES 16
#define CHAINS 24
#else
#define LANES 8
#define CHAINS 12
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef long long words __attribute__((vector_size(64)));

struct work {
    const words *data;
    size_t n;
    long n_rounds;
    volatile float sink;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *read_all(void *argument)
{
    struct work *w = argument;
    words a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 4 <= w->n; i += 4) {
        a ^= w->data[i];
        b ^= w->data[i + 1];
        c ^= w->data[i + 2];
        d ^= w->data[i + 3];
    }
    a ^= b ^ c ^ d;
    w->sink = (float)a[0];
    return NULL;
}

static void *multiply(void *argument)
{
    struct work *w = argument;
    vec sums[CHAINS], x, y;
    for (int i = 0; i < LANES; i++) {
        x[i] = 1.0f + 1e-7f * (float)i;
        y[i] = 1e-9f;
    }
#pragma GCC unroll 24 /* an array indexed by a loop that stays a loop would live in memory */
    for (int i = 0; i < CHAINS; i++)
        sums[i] = y * (float)(i + 1); /* alike, they would be computed once */
    for (long r = 0; r < w->n_rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++)
            sums[i] = sums[i] * x + y;
        __asm__ volatile("" : "+x"(x), "+x"(y));
    }
#pragma GCC unroll 24
    for (int i = 1; i < CHAINS; i++)
        sums[0] += sums[i];
    w->sink = sums[0][0];
    return NULL;
}

static double run(void *(*job)(void *), struct work *works, int n_threads)
{
    pthread_t threads[MAX_THREADS];
    double start = now();
    for (int i = 1; i < n_threads; i++)
        pthread_create(&threads[i], NULL, job, &works[i]);
    job(&works[0]);
    for (int i = 1; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    return now() - start;
}

/* GB/s over a buffer of size_bytes that the caller holds. */
double peak_read(const void *buffer, size_t size_bytes, int n_threads)
{
    struct work works[MAX_THREADS];
    size_t each = size_bytes / sizeof(words) / (size_t)n_threads;
    const words *data = (const words *)(((uintptr_t)buffer + 63) & ~(uintptr_t)63);
    for (int i = 0; i < n_threads; i++)
        works[i] = (struct work){data + each * (size_t)i, each - 1, 0, 0};
    return (double)(each * (size_t)n_threads * sizeof(words)) / run(read_all, works, n_threads) / 1e9;
}

/* GFLOP/s */
double peak_float(long n_rounds, int n_threads)
{
    struct work works[MAX_THREADS];
    for (int i = 0; i < n_threads; i++)
        works[i] = (struct work){NULL, 0, n_rounds, 0};
    return 2.0 * LANES * CHAINS * (double)n_rounds * n_threads / run(multiply, works, n_threads) / 1e9;
}
