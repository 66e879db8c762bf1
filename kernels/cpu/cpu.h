/* cpu.h: declarations that the files of the CPU backend share. backend_cpu.c owns the context, chooses the instruction set
 * once by cpuid and returns the table. backend_cpu.c, gather.c and memory.c are compiled once, files named *_avx2.c and
 * *_avx512.c for that instruction set, all other files of this folder once for each instruction set. These define ISA as avx2
 * or avx512 and name their symbols with K(name). An operation runs on all threads at once: pool_run calls the operation's
 * function with (job, thread), and the function takes its share of the work. pool_barrier joins the threads between two
 * phases. No result depends on the number of threads. */
#ifndef LLMPY_CPU_H
#define LLMPY_CPU_H

#include "../../csrc/base/pool.h"
#include "../backend.h"

#define CPU_PASTE2(name, isa) name##_##isa
#define CPU_PASTE(name, isa) CPU_PASTE2(name, isa)
#define K(name) CPU_PASTE(name, ISA)

/* Allocates memory for weights (memory.c): zeroed, aligned to 64 bytes. Small matrices share chunks of huge pages; a chunk is
 * freed with its last matrix. Returns NULL if memory is short. */
struct weight_chunk;
struct cpu;
void *cpu_weights_take(struct cpu *cpu, size_t size_bytes, struct weight_chunk **chunk);
void cpu_weights_release(struct cpu *cpu, struct weight_chunk *chunk);

/* The functions of struct backend with these names, in memory.c. */
enum rc cpu_buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err);
void cpu_buffer_destroy(void *ctx, void *buffer, size_t size_bytes);
enum rc cpu_pool_create(void *ctx, uint32_t use, size_t size_bytes, void **buffer, struct err *err);
enum rc cpu_pool_release(void *ctx, uint32_t use, struct err *err);
enum rc cpu_pool_restore(void *ctx, uint32_t use, struct err *err);
enum rc cpu_pool_save(void *ctx, uint32_t use, struct err *err);
void cpu_pool_forget(void *ctx, uint32_t use);
extern const struct moves cpu_moves;

/* The context that backend_cpu.c opens. `scratch` has one block for each thread, `shared` is one block for all threads; both
 * are sized at open. A step allocates nothing else. */
struct cpu {
    struct pool *pool;
    uint32_t n_threads;
    const struct cpu_kernels *kernels;
    void *shared;               size_t shared_bytes;        /* packed activations, states of cut attention tasks, ... */
    char *scratch;              size_t scratch_bytes;       /* n_threads blocks of scratch_bytes */
    size_t cache_bytes;                                     /* second-level cache of a core */
    struct weight_chunk *chunks;
    struct cpu_buffer *buffers;                             /* allocated by pool_create */
    struct move_state moved;                                /* moves run at once, in the caller's thread */
    bool is_hidden[2], is_saved[2];                         /* by enum memory_use: inaccessible; contents kept meanwhile */
    struct backend_options options;
    char description[64];
    uint32_t n_processors;                                  /* that this process may run on */
    struct cpu_ranks *ranks; uint32_t rank;                 /* gather.h; NULL: the context runs a model alone */
};

/* The operations of one instruction set. They take the argument structs of backend.h. */
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
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#include "../entries.def"
};

const struct cpu_kernels *cpu_kernels_avx2(void);
const struct cpu_kernels *cpu_kernels_avx512(void);

/* First of a thread's share of n equal items; the share ends where the next thread's begins. */
static inline uint32_t share_first(uint32_t n, uint32_t thread, uint32_t n_threads)
{
    return (uint32_t)((uint64_t)n * thread / n_threads);
}

#endif
