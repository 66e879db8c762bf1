/* cpu.h: what the files of the CPU backend share. backend_cpu.c owns the context, picks the instruction set once by cpuid and
 * hands out the table; every other file of this folder is compiled once per instruction set, with ISA defined as avx2 or
 * avx512, and names its symbols with K(name). An operation runs on all threads at once: pool_run calls it with (job, thread),
 * and it divides its own work; pool_barrier joins the threads in between. No result depends on the number of threads. */
#ifndef LLMPY_CPU_H
#define LLMPY_CPU_H

#include "../backend.h"

#define CPU_PASTE2(name, isa) name##_##isa
#define CPU_PASTE(name, isa) CPU_PASTE2(name, isa)
#define K(name) CPU_PASTE(name, ISA)

/* pool.c: persistent threads, spin first and sleep on a futex after a while; thread 0 is the caller. */
struct pool;
enum rc pool_create(uint32_t n_threads, struct pool **pool, struct err *err);
void pool_destroy(struct pool *pool);
uint32_t pool_threads(const struct pool *pool);
void pool_run(struct pool *pool, void (*job)(void *args, uint32_t thread), void *args);
/* Threads for a job: all, or the caller alone where waking the others would cost more than the work. */
static inline uint32_t pool_threads_for(const struct pool *pool, bool is_worth_it)
{
    return is_worth_it ? pool_threads(pool) : 1;
}
/* n_threads: as pool_threads_for gave it. */
static inline void pool_run_on(struct pool *pool, uint32_t n_threads, void (*job)(void *args, uint32_t thread), void *args)
{
    if (n_threads == 1)
        job(args, 0);
    else
        pool_run(pool, job, args);
}
void pool_barrier(struct pool *pool); /* called by every thread of a running job */

/* Memory of weights, memory.c: small matrices share chunks of huge pages. It is zeroed, on 64 bytes, and is given back
 * chunk by chunk when no matrix lives in it any more. Returns NULL when memory is out. */
struct weight_chunk;
struct cpu;
void *cpu_weights_take(struct cpu *cpu, size_t size_bytes, struct weight_chunk **chunk);
void cpu_weights_release(struct cpu *cpu, struct weight_chunk *chunk);

/* The backend's operations of these names, memory.c. */
enum rc cpu_buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err);
void cpu_buffer_destroy(void *ctx, void *buffer, size_t size_bytes);
enum rc cpu_pool_create(void *ctx, uint32_t use, size_t size_bytes, void **buffer, struct err *err);
enum rc cpu_pool_release(void *ctx, uint32_t use, struct err *err);
enum rc cpu_pool_restore(void *ctx, uint32_t use, struct err *err);
enum rc cpu_pool_save(void *ctx, uint32_t use, struct err *err);
void cpu_pool_forget(void *ctx, uint32_t use);

/* The context that backend_cpu.c opens. scratch is one block per thread plus one shared, sized at open; nothing else is
 * allocated in a step. */
struct cpu {
    struct pool *pool;
    uint32_t n_threads;
    const struct cpu_kernels *kernels;
    void *shared;               size_t shared_bytes;        /* activations prepared for a linear, split partials, ... */
    char *scratch;              size_t scratch_bytes;       /* n_threads blocks of scratch_bytes */
    size_t cache_bytes;                                     /* second-level cache of a core */
    struct weight_chunk *chunks;
    struct cpu_buffer *buffers;                             /* of pool_create */
    bool is_hidden[2], is_saved[2];                         /* by enum memory_use: asleep; with what it held */
    struct backend_options options;
    char description[64];
};

/* One instruction set's operations; the same argument structs as the backend's. */
struct cpu_kernels {
    const char *isa;
    enum rc (*matrix_create)(struct cpu *cpu, const struct matrix_desc *desc, struct matrix **matrix, struct err *err);
    enum rc (*matrix_write)(struct cpu *cpu, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                            const void *rows, struct err *err);
    enum rc (*matrix_load)(struct cpu *cpu, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                           const struct row_source *source, struct err *err);
    enum rc (*matrix_read)(struct cpu *cpu, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows,
                           struct err *err);
#define ENTRY(name) enum rc (*name)(struct cpu *cpu, const struct name##_args *args, struct err *err);
#include "../entries.def"
};

const struct cpu_kernels *cpu_kernels_avx2(void);
const struct cpu_kernels *cpu_kernels_avx512(void);

/* Which names an instruction set of this processor that we have kernels for: "avx2", "avx512". */
bool cpu_has_isa(const char *isa);

/* A thread's part [first, end) of n equal things. */
static inline uint32_t share_first(uint32_t n, uint32_t thread, uint32_t n_threads)
{
    return (uint32_t)((uint64_t)n * thread / n_threads);
}

#endif
