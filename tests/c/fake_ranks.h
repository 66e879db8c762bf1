/* fake_ranks.h: for test_team.c, a backend of ranks that computes a tiny program and fails one call of one rank. Its ranks meet
 * as those of the CPU. */
#ifndef LLMPY_FAKE_RANKS_H
#define LLMPY_FAKE_RANKS_H

#include "check.h"

#include "../../csrc/base/mem.h"
#include "../../csrc/program/backend_library.h"
#include "../../kernels/cpu/backend_cpu.h"
#include "../../kernels/cpu/gather.h"

#include <stdatomic.h>
#include <unistd.h>

#define MAX_RANKS 4u
#define WIDTH 8u
#define VOCAB 16u
#define GIB ((uint64_t)1 << 30)
#define NEVER UINT32_MAX

struct fake {
    struct cpu cpu; /* first: the CPU's comm takes it for the context */
    uint32_t rank, n_calls;
    bool is_hidden[2], is_saved[2], is_lost[2]; /* by enum memory_use; is_lost: restored without saved contents */
    bool has_other_kernels;                     /* what refresh finds */
    uint32_t n_graphs, n_recorded;              /* graphs that exist; that ever did */
};

struct matrix {
    uint32_t n_rows, n_cols;
    float values[];
};

static const char *const DEVICES[MAX_RANKS] = {"fake:0", "fake:1", "fake:2", "fake:3"};

/* What goes wrong: call number `call` of a rank. */
static struct {
    uint32_t rank, call;
    bool is_late;             /* the call does not fail, but ends when another rank has given up */
    atomic_uint n_given_up;   /* ranks whose meeting has failed */
    atomic_bool has_happened;
    char name[32];            /* of the call */
    struct fake *fakes[MAX_RANKS];
} fault;

static void no_fault(void)
{
    fault.rank = NEVER;
    fault.is_late = false;
    fault.name[0] = 0;
    atomic_store(&fault.n_given_up, 0);
    atomic_store(&fault.has_happened, false);
}

static void set_fault(uint32_t rank, uint32_t call)
{
    no_fault();
    fault.rank = rank;
    fault.call = call;
}

static enum rc call(void *ctx, const char *name, struct err *err)
{
    struct fake *fake = ctx;
    if (fake->rank != fault.rank || fake->n_calls++ != fault.call)
        return RC_OK;
    snprintf(fault.name, sizeof fault.name, "%s", name);
    atomic_store(&fault.has_happened, true);
    while (fault.is_late && !atomic_load(&fault.n_given_up))
        usleep(1000);
    if (fault.is_late)
        return RC_OK;
    err_set(err, RC_DEVICE, "%s fails", name);
    err_name(err, name, NULL);
    if (err)
        err->code = 700 + (int64_t)fake->rank;
    return RC_DEVICE;
}

static enum rc fake_add(struct cpu *cpu, const struct add_args *args, struct err *err)
{
    (void)cpu, (void)args;
    return err_set(err, RC_INTERNAL, "the program has no sums");
}

static const struct cpu_kernels KERNELS = {.add = fake_add};

static void close_fake(void *ctx)
{
    struct fake *fake = ctx;
    CHECK(!fake->cpu.ranks);
    fault.fakes[fake->rank] = NULL;
    pool_destroy(fake->cpu.pool);
    mem_free(fake);
}

static enum rc open_fake(const struct backend_options *options, void **ctx, struct err *err)
{
    struct fake *fake = mem_calloc(1, sizeof *fake);
    if (!fake)
        return err_set(err, RC_MEMORY, "fake: out of memory");
    fake->rank = (uint32_t)atoi(options->device + 5);
    fake->cpu = (struct cpu){.n_threads = 1, .kernels = &KERNELS, .options = {.device = DEVICES[fake->rank]}};
    enum rc rc = call(fake, "open", err);
    if (!rc)
        rc = pool_create(1, "fake", &fake->cpu.pool, err);
    if (rc) {
        mem_free(fake);
        return rc;
    }
    *ctx = fault.fakes[fake->rank] = fake;
    return RC_OK;
}

static const char *describe(void *ctx)
{
    return DEVICES[((struct fake *)ctx)->rank];
}

static uint32_t no_fusions(void *ctx)
{
    (void)ctx;
    return 0;
}

static bool supports(void *ctx, uint32_t dtype, uint32_t use)
{
    (void)ctx, (void)use;
    return dtype == DTYPE_F32;
}

static enum rc create_buffer(void *ctx, size_t size_bytes, void **buffer, struct err *err)
{
    enum rc rc = call(ctx, "buffer_create", err);
    if (!rc && !(*buffer = mem_calloc(1, size_bytes)))
        rc = err_set(err, RC_MEMORY, "fake: out of memory");
    return rc;
}

static enum rc create_in_pool(void *ctx, uint32_t use, size_t size_bytes, void **buffer, struct err *err)
{
    (void)use;
    enum rc rc = call(ctx, "pool_create", err);
    return rc ? rc : create_buffer(ctx, size_bytes, buffer, err);
}

static void destroy_buffer(void *ctx, void *buffer, size_t size_bytes)
{
    (void)ctx, (void)size_bytes;
    mem_free(buffer);
}

static enum rc upload(void *ctx, void *target, const void *host, size_t size_bytes, struct err *err)
{
    enum rc rc = call(ctx, "upload", err);
    if (!rc)
        memcpy(target, host, size_bytes);
    return rc;
}

static enum rc download(void *ctx, void *host, const void *source, size_t size_bytes, struct err *err)
{
    return upload(ctx, host, source, size_bytes, err);
}

static enum rc synchronize(void *ctx, struct err *err)
{
    return call(ctx, "synchronize", err);
}

static enum rc create_matrix(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err)
{
    enum rc rc = call(ctx, "matrix_create", err);
    size_t n_values = (size_t)desc->parts[0].n_rows * desc->n_cols;
    if (!rc && !(*matrix = mem_calloc(1, sizeof **matrix + n_values * sizeof(float))))
        rc = err_set(err, RC_MEMORY, "fake: out of memory");
    if (!rc)
        **matrix = (struct matrix){.n_rows = desc->parts[0].n_rows, .n_cols = desc->n_cols};
    return rc;
}

static void destroy_matrix(void *ctx, struct matrix *matrix)
{
    (void)ctx;
    mem_free(matrix);
}

static size_t matrix_bytes(const struct matrix *matrix)
{
    return (size_t)matrix->n_rows * matrix->n_cols * sizeof(float);
}

static uint32_t matrix_arithmetic(const struct matrix *matrix, uint32_t part)
{
    (void)matrix, (void)part;
    return ARITHMETIC_FLOAT;
}

static enum rc write_matrix(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                            const void *rows, struct err *err)
{
    (void)part;
    enum rc rc = call(ctx, "matrix_write", err);
    if (!rc)
        memcpy(matrix->values + (size_t)first_row * matrix->n_cols, rows, (size_t)n_rows * matrix->n_cols * sizeof(float));
    return rc;
}

static size_t kv_layer_bytes(void *ctx, uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens)
{
    (void)ctx, (void)dtype;
    return (size_t)2 * n_kv_heads * head_dim * block_tokens * sizeof(float);
}

static uint32_t activations(void *ctx)
{
    (void)ctx;
    return DTYPE_F32;
}

static enum rc prepare(void *ctx, struct err *err)
{
    return call(ctx, "prepare", err);
}

/* The pool gets half of the total less a GiB for the context: 64 KiB, and more on higher ranks but the last. */
static enum rc tell_memory(void *ctx, struct backend_memory *memory, struct err *err)
{
    uint32_t rank = ((struct fake *)ctx)->rank;
    uint64_t total = 2 * (GIB + (64 << 10) + (rank == 1 ? 0 : (16 << 10) * (rank + 1)));
    *memory = (struct backend_memory){.total_bytes = total, .free_bytes = total};
    return call(ctx, "memory", err);
}

/* tensor_write of rows of a matrix; the tensor is contiguous float32. */
static enum rc write_tensor(void *ctx, const struct tensor_write_args *args, struct err *err)
{
    enum rc rc = call(ctx, "tensor_write", err);
    for (uint32_t row = 0; row < args->from.n_rows && !rc; row++)
        memcpy(args->to.matrix->values + (size_t)(args->to.first_row + row) * args->to.matrix->n_cols,
               (const float *)args->from.data + (int64_t)row * args->from.row_stride, args->from.n_cols * sizeof(float));
    return rc;
}

static enum rc finish_tensors(void *ctx, struct err *err)
{
    return call(ctx, "tensor_finish", err);
}

static enum rc release_pool(void *ctx, uint32_t use, struct err *err)
{
    enum rc rc = call(ctx, "pool_release", err);
    if (!rc)
        ((struct fake *)ctx)->is_hidden[use] = true;
    return rc;
}

static enum rc restore_pool(void *ctx, uint32_t use, struct err *err)
{
    struct fake *fake = ctx;
    enum rc rc = call(ctx, "pool_restore", err);
    if (rc)
        return rc;
    fake->is_lost[use] |= fake->is_hidden[use] && !fake->is_saved[use];
    fake->is_hidden[use] = false;
    return RC_OK;
}

static enum rc save_pool(void *ctx, uint32_t use, struct err *err)
{
    enum rc rc = call(ctx, "pool_save", err);
    if (!rc)
        ((struct fake *)ctx)->is_saved[use] = true;
    return rc;
}

static void forget_pool(void *ctx, uint32_t use)
{
    ((struct fake *)ctx)->is_saved[use] = false;
}

static enum rc graph_begin(void *ctx, struct err *err)
{
    return call(ctx, "graph_begin", err);
}

static enum rc graph_end(void *ctx, void **graph, struct err *err)
{
    enum rc rc = call(ctx, "graph_end", err);
    *graph = rc ? NULL : mem_alloc(1);
    ((struct fake *)ctx)->n_graphs += *graph != NULL;
    ((struct fake *)ctx)->n_recorded += *graph != NULL;
    return rc || *graph ? rc : err_set(err, RC_MEMORY, "fake: out of memory");
}

static enum rc graph_launch(void *ctx, void *graph, struct err *err)
{
    (void)graph;
    return call(ctx, "graph_launch", err);
}

static void graph_destroy(void *ctx, void *graph)
{
    ((struct fake *)ctx)->n_graphs--;
    mem_free(graph);
}

static enum rc refresh(void *ctx, const struct refresh_args *args, struct err *err)
{
    *args->is_stale |= ((struct fake *)ctx)->has_other_kernels;
    return call(ctx, "refresh", err);
}

static enum rc begin(void *ctx, const struct begin_args *args, struct err *err)
{
    uint32_t n = args->n_rows;
    enum rc rc = call(ctx, "begin", err);
    for (uint32_t i = 0; i < n + args->n_pad_rows && !rc; i++) {
        ((int32_t *)(uintptr_t)args->to.token_ids)[i] = i < n ? args->token_ids[i] : 0;
        ((int32_t *)(uintptr_t)args->to.logits_rows)[i] = i < args->n_logits_rows ? args->logits_rows[i] : (int32_t)i;
    }
    return rc;
}

static enum rc embed(void *ctx, const struct embed_args *args, struct err *err)
{
    for (uint32_t row = 0; row < args->n_rows; row++)
        memcpy((float *)args->out.data + (size_t)row * args->out.stride,
               args->matrix->values + (size_t)args->token_ids[row] * WIDTH, WIDTH * sizeof(float));
    return call(ctx, "embed", err);
}

static enum rc linear(void *ctx, const struct linear_args *args, struct err *err)
{
    const struct matrix *matrix = args->matrix;
    for (uint32_t row = 0; row < args->n_rows; row++)
        for (uint32_t i = 0; i < matrix->n_rows; i++) {
            const float *x = (const float *)args->x.data + (size_t)row * args->x.stride, *w = matrix->values + i * WIDTH;
            float sum = 0;
            for (uint32_t c = 0; c < WIDTH; c++)
                sum += x[c] * w[c];
            ((float *)args->y.data)[(size_t)row * args->y.stride + i] = sum;
        }
    return call(ctx, "linear", err);
}

static enum rc select_rows(void *ctx, const struct select_args *args, struct err *err)
{
    for (uint32_t row = 0; row < args->n_selected; row++)
        memcpy((float *)args->out.data + (size_t)row * args->out.stride,
               (const float *)args->x.data + (size_t)args->rows[row] * args->x.stride, WIDTH * sizeof(float));
    return call(ctx, "select", err);
}

static enum rc sample(void *ctx, const struct sample_args *args, struct err *err)
{
    for (uint32_t i = 0; i < args->n_tasks; i++) {
        const float *logits = args->logits + (size_t)args->tasks[i].logits_row * args->vocab_stride;
        struct sample_result best = {.raw = logits[0]};
        for (int32_t id = 1; id < (int32_t)VOCAB; id++)
            if (logits[id] > best.raw)
                best = (struct sample_result){.id = id, .raw = logits[id]};
        args->results[i] = best;
    }
    return call(ctx, "sample", err);
}

#define NOTHING(name) \
    static enum rc no_##name(void *ctx, const struct name##_args *args, struct err *err) \
    { \
        (void)ctx, (void)args; \
        return err_set(err, RC_INTERNAL, "the program has no " #name); \
    }
NOTHING(rope_table) NOTHING(position_scale) NOTHING(scale_logits) NOTHING(spread_logits) NOTHING(route) NOTHING(copy_pages)

static enum rc note_meeting(enum rc rc)
{
    atomic_fetch_add(&fault.n_given_up, rc != RC_OK);
    return rc;
}

static enum rc meet(void *ctx, const struct meet_args *args, struct err *err)
{
    enum rc rc = call(ctx, "meet", err);
    return rc ? rc : note_meeting(cpu_comm.meet(ctx, args, err));
}

static enum rc gather(void *ctx, const struct gather_args *args, struct err *err)
{
    enum rc rc = call(ctx, "gather", err);
    return rc ? rc : note_meeting(cpu_comm.gather(ctx, args, err));
}

static enum rc open_comm(void *const *ctxs, uint32_t n_ranks, const struct comm_options *options, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t rank = 0; rank < n_ranks && !rc; rank++)
        rc = call(ctxs[rank], "connect", err);
    return rc ? rc : cpu_comm.open(ctxs, n_ranks, options, err);
}

static enum rc share(void *const *ctxs, uint32_t n_ranks, uint32_t purpose, void *const *memory, size_t size_bytes,
                     struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t rank = 0; rank < n_ranks && !rc; rank++)
        rc = call(ctxs[rank], "share", err);
    return rc ? rc : cpu_comm.share(ctxs, n_ranks, purpose, memory, size_bytes, err);
}

static enum rc check(void *ctx, struct err *err)
{
    return cpu_comm.check(ctx, err);
}

static void abort_all(void *const *ctxs, uint32_t n_ranks)
{
    cpu_comm.abort(ctxs, n_ranks);
}

static void close_comm(void *const *ctxs, uint32_t n_ranks)
{
    cpu_comm.close(ctxs, n_ranks);
}

static const struct comm COMM = {.size_bytes = sizeof COMM, .open = open_comm, .share = share, .meet = meet, .gather = gather,
                                 .check = check, .abort = abort_all, .close = close_comm, .least_shared_rows = 2};
static const struct device_traits TRAITS = {.size_bytes = sizeof TRAITS, .default_tokens = 8, .default_seqs = 4};
static const struct backend BACKEND = {
    .name = "fake", .traits = &TRAITS, .open = open_fake, .close = close_fake, .describe = describe, .fusions = no_fusions,
    .supports = supports, .buffer_create = create_buffer, .buffer_destroy = destroy_buffer, .upload = upload,
    .download = download, .synchronize = synchronize, .matrix_create = create_matrix, .matrix_destroy = destroy_matrix,
    .matrix_bytes = matrix_bytes, .matrix_arithmetic = matrix_arithmetic, .matrix_write = write_matrix,
    .kv_layer_bytes = kv_layer_bytes, .activations = activations, .prepare = prepare, .pool_create = create_in_pool,
    .pool_release = release_pool, .pool_restore = restore_pool, .pool_save = save_pool, .pool_forget = forget_pool,
    .memory = tell_memory, .graph_begin = graph_begin, .graph_end = graph_end, .graph_launch = graph_launch,
    .graph_destroy = graph_destroy, .begin = begin, .embed = embed, .linear = linear, .select = select_rows,
    .sample = sample, .rope_table = no_rope_table, .position_scale = no_position_scale, .scale_logits = no_scale_logits,
    .spread_logits = no_spread_logits,
    .route = no_route, .copy_pages = no_copy_pages, .tensor_write = write_tensor, .tensor_finish = finish_tensors,
    .comm = &COMM, .refresh = refresh,
};

/* In place of csrc/program/backend_library.c. */
enum rc backend_find(const char *device, const char *library, const struct backend **backend, struct err *err)
{
    (void)device, (void)library, (void)err;
    *backend = &BACKEND;
    return RC_OK;
}

bool backend_has(const struct backend *backend, size_t offset)
{
    void (*entry)(void);
    memcpy(&entry, (const char *)backend + offset, sizeof entry);
    return entry;
}

const struct backend *backend_cpu(void)
{
    return NULL;
}

#endif
