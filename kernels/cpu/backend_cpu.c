#define _GNU_SOURCE
#include "backend_cpu.h"
#include "attention.h"
#include "gather.h"
#include "row_attention.h"
#include "kv.h"
#include "linear_type.h"
#include "matrix.h"
#include "sample.h"
#include "../../csrc/base/mem.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAX_THREADS 512u

#ifdef __aarch64__

bool cpu_has_isa(const char *isa)
{
    return strcmp(isa, "neon") == 0;
}

#else

bool cpu_has_isa(const char *isa)
{
    bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    if (strcmp(isa, "avx2") == 0)
        return has_v3;
    if (strcmp(isa, "avx512") == 0)
        return has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    return false;
}

#endif

/* Adds the option's name to the error that was just set. */
static enum rc option_error(struct err *err, const char *option)
{
    err_name(err, option, NULL);
    return RC_CONFIG;
}

#ifdef __aarch64__

static enum rc choose_kernels(const char *isa, const struct cpu_kernels **kernels, struct err *err)
{
    if (isa && *isa && strcmp(isa, "auto") != 0 && !cpu_has_isa(isa)) {
        err_set(err, RC_CONFIG, "isa: wanted \"auto\" or \"neon\", have \"%.32s\"", isa);
        return option_error(err, "isa");
    }
    *kernels = cpu_kernels_avx2();
    return RC_OK;
}

#else

static enum rc choose_kernels(const char *isa, const struct cpu_kernels **kernels, struct err *err)
{
    bool is_auto = !isa || !*isa || strcmp(isa, "auto") == 0;
    if (is_auto && !cpu_has_isa("avx2")) {
        err_set(err, RC_CONFIG, "isa: wanted a processor with AVX2 and FMA (x86-64-v3), have none; llmpy's kernels need it");
        return option_error(err, "isa");
    }
    if (!is_auto && strcmp(isa, "avx2") != 0 && strcmp(isa, "avx512") != 0) {
        err_set(err, RC_CONFIG, "isa: wanted \"auto\", \"avx2\" or \"avx512\", have \"%.32s\"", isa);
        return option_error(err, "isa");
    }
    if (!is_auto && !cpu_has_isa(isa)) {
        err_set(err, RC_CONFIG, "isa: this processor does not have all of %s; use isa=\"auto\"", isa);
        return option_error(err, "isa");
    }
    bool wants_avx512 = is_auto ? cpu_has_isa("avx512") : strcmp(isa, "avx512") == 0;
    *kernels = wants_avx512 ? cpu_kernels_avx512() : cpu_kernels_avx2();
    return RC_OK;
}

#endif

/* True if no allowed processor with a lower number shares this one's core. */
static bool is_first_of_core(int processor, const cpu_set_t *allowed)
{
    char path[96], list[256];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", processor);
    FILE *file = fopen(path, "re");
    if (!file)
        return true;
    bool is_first = true;
    if (fgets(list, sizeof list, file))
        for (char *at = list; *at && *at != '\n';) {
            int first, last, used;
            if (sscanf(at, "%d%n", &first, &used) != 1)
                break;
            at += used;
            last = first;
            if (*at == '-' && sscanf(at + 1, "%d%n", &last, &used) == 1)
                at += 1 + used;
            for (int sibling = first; sibling <= last && sibling < processor; sibling++)
                is_first = is_first && !(sibling < CPU_SETSIZE && CPU_ISSET(sibling, allowed));
            at += *at == ',';
        }
    fclose(file);
    return is_first;
}

/* The container's CPU quota in processors, rounded up. With more threads than that, threads would wait for each other. */
static uint32_t quota_cores(void)
{
    unsigned long quota, period;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!file)
        return MAX_THREADS;
    bool is_limited = fscanf(file, "%lu %lu", &quota, &period) == 2 && period; /* "max 100000": no limit */
    fclose(file);
    unsigned long n = is_limited ? (quota + period - 1) / period : MAX_THREADS;
    return n < 1 ? 1 : n < MAX_THREADS ? (uint32_t)n : MAX_THREADS;
}

/* Counts the processors, or the physical cores, that this process may run on; at most the container's quota. */
static void count_processors(uint32_t *n_processors, uint32_t *n_cores)
{
    cpu_set_t allowed;
    uint32_t n = 0, quota = quota_cores();
    *n_processors = *n_cores = 1;
    if (sched_getaffinity(0, sizeof allowed, &allowed))
        return;
    for (int processor = 0; processor < CPU_SETSIZE; processor++)
        n += CPU_ISSET(processor, &allowed) && is_first_of_core(processor, &allowed);
    *n_cores = n < 1 ? 1 : n < quota ? n : quota;
    n = (uint32_t)CPU_COUNT(&allowed);
    *n_processors = n < quota ? n : quota;
}

uint32_t backend_cpu_threads(void)
{
    uint32_t n_processors, n_cores;
    count_processors(&n_processors, &n_cores);
    return n_cores;
}

static size_t round_up(size_t n, size_t step)
{
    return (n + step - 1) / step * step;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Sizes the scratch for the widest call that the options allow. Threads share one block (linear.c's packed rows, attention.c's
 * tasks and states); every thread has a private block for everything else. */
static void size_scratch(struct cpu *cpu)
{
    size_t cols = round_up(cpu->options.max_cols, MAX_BLOCK_VALUES);
    cpu->shared_bytes = round_up((size_t)cpu->options.max_rows * cols * STRIP_VALUE_BYTES + 4096, 4096);
    cpu->scratch_bytes = round_up(linear_scratch_bytes(cpu->options.max_rows, cols), 4096);
    cpu->shared_bytes = larger(cpu->shared_bytes, round_up(attention_shared_bytes(&cpu->options), 4096));
    cpu->scratch_bytes = larger(cpu->scratch_bytes, round_up(attention_scratch_bytes(), 4096));
    cpu->scratch_bytes = larger(cpu->scratch_bytes, round_up(LATENT_SCRATCH_BYTES, 4096));
    cpu->scratch_bytes = larger(cpu->scratch_bytes, round_up(row_attention_scratch_bytes(&cpu->options), 4096));
    cpu->scratch_bytes = larger(cpu->scratch_bytes, round_up(sample_scratch_bytes(cpu->options.vocab_size), 4096));
    long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    cpu->cache_bytes = cache < (256 << 10) ? 512 << 10 : (size_t)cache;
}

static void cpu_close(void *ctx)
{
    struct cpu *cpu = ctx;
    if (!cpu)
        return;
    pool_destroy(cpu->pool);
    mem_unmap(cpu->shared, cpu->shared_bytes);
    mem_unmap(cpu->scratch, cpu->scratch_bytes * cpu->n_threads);
    mem_free(cpu);
}

static enum rc cpu_open(const struct backend_options *options, void **ctx, struct err *err)
{
    const struct cpu_kernels *kernels;
    enum rc rc = choose_kernels(options->isa, &kernels, err);
    if (rc)
        return rc;
    if (options->n_threads > MAX_THREADS) {
        err_set(err, RC_CONFIG, "num_threads: wanted at most %u, have %u", MAX_THREADS, options->n_threads);
        return option_error(err, "num_threads");
    }
    if (!options->max_rows || !options->max_cols)
        return err_set(err, RC_INTERNAL, "cpu: wanted at least one row and one column, have %u and %u", options->max_rows,
                       options->max_cols);
    struct cpu *cpu = mem_calloc(1, sizeof *cpu);
    if (!cpu)
        return err_set(err, RC_MEMORY, "cpu: no memory for the context");
    cpu->kernels = kernels;
    cpu->options = *options;
    cpu->options.device = "cpu"; /* the caller may free its strings after the call */
    cpu->options.isa = kernels->isa;
    count_processors(&cpu->n_processors, &cpu->n_threads);
    cpu->n_threads = options->n_threads ? options->n_threads : cpu->n_threads;
    if (options->n_ranks > 1)
        cpu->n_threads = cpu->n_threads > options->n_ranks ? cpu->n_threads / options->n_ranks : 1;
    size_scratch(cpu);
    rc = pool_create(cpu->n_threads, "llmpy-cpu", &cpu->pool, err);
    if (rc)
        goto fail;
    cpu->shared = mem_map(cpu->shared_bytes);
    cpu->scratch = mem_map(cpu->scratch_bytes * cpu->n_threads);
    if (!cpu->shared || !cpu->scratch) {
        rc = err_set(err, RC_MEMORY, "cpu: no memory for %zu bytes of scratch; lower max_num_batched_tokens",
                     cpu->shared_bytes + cpu->scratch_bytes * cpu->n_threads);
        goto fail;
    }
    snprintf(cpu->description, sizeof cpu->description, "cpu %s %u thread%s", kernels->isa, cpu->n_threads,
             cpu->n_threads == 1 ? "" : "s");
    *ctx = cpu;
    return RC_OK;
fail:
    cpu_close(cpu);
    return rc;
}

static const char *cpu_describe(void *ctx)
{
    return ((struct cpu *)ctx)->description;
}

static uint32_t cpu_activations(void *ctx)
{
    (void)ctx;
    return DTYPE_F32;
}

static uint32_t cpu_fusions(void *ctx)
{
    uint32_t of_ranks = cpu_n_ranks(ctx) > 1 ? FUSION_GATHER_NORM | FUSION_LINEAR_ADD_GATHER : 0;
    return FUSION_NORM_LINEAR | FUSION_GATED_LINEAR | FUSION_LINEAR_ADD | FUSION_VISIBLE_END | FUSION_EXPERTS_LORA |
           FUSION_LORA_WHOLE | FUSION_LORA_BIASES | FUSION_EXPERTS_LORA_RANKS | of_ranks;
}

static bool cpu_supports(void *ctx, uint32_t dtype, uint32_t use)
{
    (void)ctx;
    (void)use;
    return linear_type_avx2(dtype, ARITHMETIC_FLOAT) != NULL;
}

static enum rc copy_bytes(void *ctx, void *target, const void *source, size_t size_bytes, struct err *err)
{
    (void)ctx;
    (void)err;
    memcpy(target, source, size_bytes);
    return RC_OK;
}

static enum rc cpu_upload_beside(void *ctx, const struct upload_beside_args *args, struct err *err)
{
    return copy_bytes(ctx, args->target, args->host, args->size_bytes, err);
}

static enum rc cpu_synchronize(void *ctx, struct err *err)
{
    (void)ctx;
    (void)err;
    return RC_OK;
}

static void cpu_matrix_destroy(void *ctx, struct matrix *matrix)
{
    if (!matrix)
        return;
    cpu_weights_release(ctx, matrix->chunk);
    mem_free(matrix);
}

static size_t cpu_matrix_bytes(const struct matrix *matrix)
{
    size_t bytes = matrix->bytes;
    for (const struct cpu_part *part = matrix->parts; part < matrix->parts + matrix->n_parts; part++)
        bytes -= part->rows ? part->n_panels * part->panel_bytes : 0;
    return bytes;
}

static enum rc cpu_matrix_borrow(void *ctx, const struct matrix_borrow_args *args, struct err *err)
{
    struct cpu_part *part = &args->matrix->parts[args->part];
    (void)ctx;
    if (part->type->expand)
        return err_set(err, RC_UNSUPPORTED, "matrix_borrow: wanted a weight of floats, have %s", part->type->name);
    part->rows = args->rows;
    part->row_bytes = args->row_bytes;
    mem_drop(part->panels, part->n_panels * part->panel_bytes);
    return RC_OK;
}

static uint32_t cpu_matrix_arithmetic(const struct matrix *matrix, uint32_t part)
{
    return matrix->parts[part].type->arithmetic;
}

static size_t cpu_kv_layer_bytes(void *ctx, uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens)
{
    (void)ctx;
    return kv_page_layer_bytes(n_kv_heads, head_dim, dtype, block_tokens);
}

static enum rc cpu_copy_pages(void *ctx, const struct copy_pages_args *args, struct err *err)
{
    (void)ctx;
    (void)err;
    char *pool = args->pool;
    for (uint32_t i = 0; i < args->n_copies; i++)
        memcpy(pool + (size_t)args->copies[i].target * args->page_bytes,
               pool + (size_t)args->copies[i].source * args->page_bytes, args->page_bytes);
    return RC_OK;
}

static enum rc cpu_matrix_create(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err)
{
    struct cpu *cpu = ctx;
    return cpu->kernels->matrix_create(cpu, desc, matrix, err);
}

static enum rc cpu_matrix_write(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                                const void *rows, struct err *err)
{
    struct cpu *cpu = ctx;
    return cpu->kernels->matrix_write(cpu, matrix, part, first_row, n_rows, rows, err);
}

static enum rc cpu_matrix_load(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                               const struct row_source *source, struct err *err)
{
    struct cpu *cpu = ctx;
    return cpu->kernels->matrix_load(cpu, matrix, part, first_row, n_rows, source, err);
}

static enum rc cpu_matrix_read(void *ctx, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows,
                               struct err *err)
{
    struct cpu *cpu = ctx;
    return cpu->kernels->matrix_read(cpu, matrix, first_row, n_rows, rows, err);
}

#define ENTRY(name)                                                                                                            \
    static enum rc cpu_##name(void *ctx, const struct name##_args *args, struct err *err)                                      \
    {                                                                                                                          \
        struct cpu *cpu = ctx;                                                                                                 \
        return cpu->kernels->name(cpu, args, err);                                                                             \
    }
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#include "../entries.def"

static const struct device_traits TRAITS = {.size_bytes = sizeof TRAITS, .has_host_memory = true, .default_tokens = 512,
                                            .default_seqs = 64, .quantised_dtype = DTYPE_F32};

static const struct backend BACKEND = {
    .abi = BACKEND_ABI,
    .size_bytes = sizeof(struct backend),
    .name = "cpu",
    .traits = &TRAITS,
    .open = cpu_open,
    .close = cpu_close,
    .describe = cpu_describe,
    .fusions = cpu_fusions,
    .supports = cpu_supports,
    .buffer_create = cpu_buffer_create,
    .buffer_destroy = cpu_buffer_destroy,
    .upload = copy_bytes,
    .download = copy_bytes,
    .synchronize = cpu_synchronize,
    .matrix_create = cpu_matrix_create,
    .matrix_destroy = cpu_matrix_destroy,
    .matrix_bytes = cpu_matrix_bytes,
    .matrix_arithmetic = cpu_matrix_arithmetic,
    .matrix_write = cpu_matrix_write,
    .matrix_load = cpu_matrix_load,
    .matrix_read = cpu_matrix_read,
    .kv_layer_bytes = cpu_kv_layer_bytes,
#define ENTRY(name) .name = cpu_##name,
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#include "../entries.def"
    .copy_pages = cpu_copy_pages,
    .matrix_borrow = cpu_matrix_borrow,
    .upload_beside = cpu_upload_beside,
    .comm = &cpu_comm,
    .moves = &cpu_moves,
    .activations = cpu_activations,
    .tensor_finish = cpu_synchronize,
    .pool_create = cpu_pool_create,
    .pool_release = cpu_pool_release,
    .pool_restore = cpu_pool_restore,
    .pool_save = cpu_pool_save,
    .pool_forget = cpu_pool_forget,
};

const struct backend *backend_cpu(void)
{
    return &BACKEND;
}
