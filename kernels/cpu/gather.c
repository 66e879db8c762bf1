/* Meetings of ranks: n contexts of one process, each run by a thread. A gather stores this rank's values into the memory of the
 * other ranks and then waits at a barrier, so a value is complete on every rank that has passed the barrier. A value is copied,
 * never computed again, so all bits are kept. Bound by bytes: each rank writes its columns n_ranks - 1 times. If there are
 * other processes, the last rank that comes to the barrier exchanges the values of all ranks here for those of the others. */
#define _GNU_SOURCE
#include "gather.h"
#include "../../csrc/base/clock.h"
#include "../../csrc/base/mem.h"
#include "../../csrc/base/spin.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Time stamp ticks (2 to 5 us) that a rank spins before it sleeps. If ranks outnumber processors it sleeps at once: the rank
 * that it waits for may need its processor. */
#define SPIN_TICKS 10000
#define ALONE_VALUES 16384u       /* up to this size waking the other threads costs more than the copy */
#define ABORTED 1u                /* bit of `phase` */
#define NEXT_PHASE 2u             /* step of `phase` */
#define MAX_TIMEOUT 1e9           /* seconds */
#define START UINT32_MAX          /* name of a meeting: the start of the step; other numbers are gathers */

enum reason { REASON_NONE, REASON_IN_WORK, REASON_SET };

struct rank {
    struct cpu *cpu;
    uint32_t n_gathers;           /* of this step */
    uint32_t n_meetings;
    char *memory[COMM_MEMORIES];  /* set by `share` */
    const struct gather_args *args; /* of the gather at hand; NULL at the start of a step. Read by the last rank that arrives */
    struct err failure;           /* of the first wait that failed */
    /* Read by other ranks. It has a separate cache line, because one thread writes it. */
    _Alignas(64) atomic_uint n_arrivals;
};

struct cpu_ranks {
    uint32_t n_ranks;             /* of this process */
    struct comm_options options;  /* exchange: NULL, or the way to the other processes */
    char *own, *others;           /* [block_bytes] blocks of an exchange; NULL without one */
    size_t block_bytes;
    double timeout_seconds;
    unsigned long long spin_ticks;
    size_t size_bytes[COMM_MEMORIES]; /* of each rank's memory */
    char reason[512];             /* why the ranks cannot meet any more; may be read once has_reason is REASON_SET */
    atomic_uint has_reason;       /* enum reason */
    _Alignas(64) atomic_uint phase; /* NEXT_PHASE for each meeting that all ranks have reached, and ABORTED */
    _Alignas(64) atomic_uint n_arrived; /* at the meeting of this phase */
    _Alignas(64) atomic_uint n_asleep;
    struct rank ranks[];
};

uint32_t cpu_n_ranks(const struct cpu *cpu)
{
    return cpu->ranks ? cpu->ranks->n_ranks : 0;
}

/* ---- the barrier -------------------------------------------------------------------------------------------------------- */

/* Sleeps until the word differs from `seen`, or for the given time at most; may wake up early. */
static void sleep_on(atomic_uint *word, unsigned seen, double seconds)
{
    struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, &time, NULL, 0);
}

static void wake_sleepers(struct cpu_ranks *all)
{
    if (atomic_load(&all->n_asleep))
        syscall(SYS_futex, &all->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Ends all waits. The reason of the first call is kept; "": the caller of comm_abort has it. */
static void end_meetings(struct cpu_ranks *all, const char *reason)
{
    unsigned none = REASON_NONE;
    if (atomic_compare_exchange_strong(&all->has_reason, &none, REASON_IN_WORK)) {
        snprintf(all->reason, sizeof all->reason, "%s", reason);
        atomic_store(&all->has_reason, REASON_SET);
    }
    atomic_fetch_or(&all->phase, ABORTED);
    wake_sleepers(all);
}

/* The first rank that has not come to a rank's current meeting; n_ranks if all have. */
static uint32_t first_missing(struct cpu_ranks *all, const struct rank *rank)
{
    uint32_t other = 0;
    while (other < all->n_ranks && atomic_load(&all->ranks[other].n_arrivals) == rank->n_meetings)
        other++;
    return other;
}

/* Returns true when the phase is no longer `seen`, false after the timeout. */
static bool wait_change(struct cpu_ranks *all, unsigned seen)
{
    uint64_t start = spin_clock();
    do {
        if (atomic_load_explicit(&all->phase, memory_order_acquire) != seen)
            return true;
        spin_pause();
    } while (spin_clock() - start < all->spin_ticks);
    double end = seconds_now() + all->timeout_seconds, left = all->timeout_seconds;
    atomic_fetch_add(&all->n_asleep, 1);
    while (atomic_load(&all->phase) == seen && left > 0) {
        sleep_on(&all->phase, seen, left);
        left = end - seconds_now();
    }
    atomic_fetch_sub(&all->n_asleep, 1);
    return atomic_load(&all->phase) != seen;
}

struct name {
    char text[32];
};

static struct name name_of(uint32_t gather)
{
    struct name name;
    if (gather == START)
        snprintf(name.text, sizeof name.text, "the start of the step");
    else
        snprintf(name.text, sizeof name.text, "gather %u", gather);
    return name;
}

static enum rc fail(struct rank *rank, const char *text, uint32_t gather, struct err *err)
{
    struct err failure;
    err_set(&failure, RC_DEVICE, "%s", text);
    err_name(&failure, gather == START ? "meet" : "gather", NULL);
    if (!rank->failure.rc)
        rank->failure = failure;
    if (err)
        *err = failure;
    return RC_DEVICE;
}

/* Fails a meeting that was aborted, with the reason if there is one. */
static enum rc fail_aborted(struct cpu_ranks *all, struct rank *rank, uint32_t gather, struct err *err)
{
    char text[sizeof all->reason];
    if (atomic_load(&all->has_reason) == REASON_SET && *all->reason)
        return fail(rank, all->reason, gather, err);
    snprintf(text, sizeof text, "rank %u (%s) stopped at %s: the step was aborted",
             all->options.first_rank + (uint32_t)(rank - all->ranks), rank->cpu->options.device, name_of(gather).text);
    return fail(rank, text, gather, err);
}

/* Fails a meeting to which another rank did not come. */
static enum rc fail_missing(struct cpu_ranks *all, struct rank *rank, uint32_t missing, uint32_t gather, struct err *err)
{
    char text[sizeof all->reason];
    snprintf(text, sizeof text, "rank %u (%s) did not reach %s within %g s (step_timeout_s)",
             all->options.first_rank + missing, all->ranks[missing].cpu->options.device, name_of(gather).text,
             all->timeout_seconds);
    end_meetings(all, text);
    return fail(rank, text, gather, err);
}

static enum rc exchange(struct cpu_ranks *all, uint32_t gather, struct err *err);

/* The last rank that arrives brings the values of other processes, and then lets all ranks go. */
static enum rc release(struct cpu_ranks *all, struct rank *rank, uint32_t gather, struct err *err)
{
    struct err failure;
    bool has_values = gather != START && all->options.exchange && rank->args->n_rows;
    if (has_values && exchange(all, gather, &failure)) {
        end_meetings(all, failure.message);
        return fail(rank, failure.message, gather, err);
    }
    atomic_store(&all->n_arrived, 0);
    atomic_fetch_add(&all->phase, NEXT_PHASE);
    wake_sleepers(all);
    return RC_OK;
}

/* Stores before the call on any rank happen before the return on every rank. args: NULL at the start of a step. */
static enum rc arrive(struct cpu_ranks *all, struct rank *rank, const struct gather_args *args, uint32_t gather,
                      struct err *err)
{
    unsigned seen = atomic_load_explicit(&all->phase, memory_order_acquire);
    if (seen & ABORTED)
        return fail_aborted(all, rank, gather, err);
    rank->n_meetings++;
    rank->args = args;
    atomic_store(&rank->n_arrivals, rank->n_meetings);
    if (atomic_fetch_add(&all->n_arrived, 1) == all->n_ranks - 1) {
        enum rc rc = release(all, rank, gather, err);
        if (rc)
            return rc;
    }
    while (!wait_change(all, seen)) {
        uint32_t missing = first_missing(all, rank);
        if (missing < all->n_ranks)
            return fail_missing(all, rank, missing, gather, err);
    }
    if (atomic_load_explicit(&all->phase, memory_order_acquire) & ABORTED)
        return fail_aborted(all, rank, gather, err);
    return RC_OK;
}

/* ---- stores to other ranks ---------------------------------------------------------------------------------------------- */

struct store_job {
    const struct gather_args *args;
    const struct rank *ranks;
    uint32_t rank, n_ranks; /* this rank; the first n_ranks get the values, or the row's owner of them does */
    uint32_t purpose;       /* of the memory that has whole */
    size_t offset;          /* of whole in it */
    uint32_t n_parts;       /* of a row */
    uint32_t n_threads;
    struct view source;     /* whole, or a: then whole gets it, too */
    bool is_from_a;
};

/* Whether this rank stores a part, and its columns. */
static bool own_part(const struct gather_args *args, uint32_t row, uint32_t part, uint32_t *first, uint32_t *n_columns)
{
    int32_t id;
    *first = args->first;
    *n_columns = args->n_columns;
    switch (args->kind) {
    case GATHER_ROWS:
        *first = 0;
        *n_columns = args->whole.width;
        id = args->token_ids[row];
        break;
    case GATHER_ROUTES:
        *n_columns = args->whole.width / args->n_chosen;
        *first = part * *n_columns;
        id = args->routes[(size_t)row * args->route_stride + part].expert;
        break;
    default:
        *first += args->n_chosen ? part * (args->whole.width / args->n_chosen) : 0;
        return true;
    }
    return id >= args->first_id && id < args->end_id;
}

static void store_parts(void *job_args, uint32_t thread)
{
    const struct store_job *job = job_args;
    const struct gather_args *args = job->args;
    uint32_t n = args->n_rows * job->n_parts, end = share_first(n, thread + 1, job->n_threads), first, n_columns;
    for (uint32_t i = share_first(n, thread, job->n_threads); i < end; i++) {
        uint32_t row = i / job->n_parts;
        if (!own_part(args, row, i % job->n_parts, &first, &n_columns))
            continue;
        const float *source = (const float *)job->source.data + (size_t)row * job->source.stride +
                              (job->is_from_a ? 0 : first);
        size_t place = job->offset + ((size_t)row * args->whole.stride + first) * sizeof(float);
        uint32_t owner = (uint32_t)(((row + 1ull) * job->n_ranks - 1) / args->n_rows);
        bool has_owner = args->kind == GATHER_TO_OWNERS;
        for (uint32_t rank = has_owner ? owner : 0; rank < (has_owner ? owner + 1 : job->n_ranks); rank++)
            if (rank != job->rank || job->is_from_a)
                memcpy(job->ranks[rank].memory[job->purpose] + place, source, n_columns * sizeof(float));
    }
}

/* Whether the view is one of columns of whole, so that its values are there already. */
static bool is_in_whole(const struct view *view, const struct gather_args *args)
{
    return view->data == (float *)args->whole.data + args->first && (args->n_rows == 1 || view->stride == args->whole.stride);
}

static bool is_of_logits(const struct gather_args *args)
{
    return args->kind == GATHER_TO_FIRST || args->kind == GATHER_TO_OWNERS;
}

static uint32_t purpose_of(const struct gather_args *args)
{
    return is_of_logits(args) ? COMM_LOGITS : COMM_ARENA;
}

static enum rc store(struct cpu *cpu, const struct gather_args *args, struct err *err)
{
    const struct cpu_ranks *all = cpu->ranks;
    struct store_job job = {.args = args, .ranks = all->ranks, .rank = cpu->rank, .purpose = purpose_of(args),
                            .n_ranks = args->kind == GATHER_TO_FIRST ? 1 : all->n_ranks, .source = args->whole,
                            .n_parts = args->n_chosen ? args->n_chosen : 1};
    job.offset = (size_t)((char *)args->whole.data - all->ranks[cpu->rank].memory[job.purpose]);
    if (args->b.width) {
        struct view sum = {(float *)args->whole.data + args->first, args->n_columns, args->whole.stride};
        struct add_args add = {args->n_rows, args->a, args->b, sum};
        enum rc rc = cpu->kernels->add(cpu, &add, err);
        if (rc)
            return rc;
    } else if (args->a.width && !is_in_whole(&args->a, args)) {
        job.source = args->a;
        job.is_from_a = true;
    }
    job.n_threads = pool_threads_for(cpu->pool, (uint64_t)args->n_rows * args->whole.width > ALONE_VALUES);
    pool_run_on(cpu->pool, job.n_threads, store_parts, &job);
    return RC_OK;
}

enum rc cpu_mirror(struct cpu *cpu, const struct view *rows, uint32_t n_rows, struct err *err)
{
    const struct gather_args args = {.kind = GATHER_COLUMNS, .n_rows = n_rows, .whole = *rows, .n_columns = rows->width};
    return store(cpu, &args, err);
}

enum rc cpu_mirror_parts(struct cpu *cpu, const struct experts_args *args, uint32_t inner, struct err *err)
{
    const struct gather_args parts = {
        .kind = args->half == EXPERTS_UP ? GATHER_COLUMNS : GATHER_ROUTES, .n_rows = args->n_rows, .whole = args->y,
        .first = args->first_column, .n_columns = inner, .n_chosen = args->n_chosen, .routes = args->routes,
        .route_stride = args->route_stride, .first_id = (int32_t)args->first, .end_id = (int32_t)(args->first + args->n_local),
    };
    return store(cpu, &parts, err);
}

/* From two rows on, so that tests have both ways. */
static bool mirrors(void *ctx, const struct linear_args *args)
{
    return ((const struct cpu *)ctx)->ranks && args->n_rows > 1;
}

static bool mirrors_parts(void *ctx, const struct experts_args *args)
{
    return ((const struct cpu *)ctx)->ranks && args->n_rows > 1;
}

static enum rc check_place(const struct cpu *cpu, const struct gather_args *args, struct err *err)
{
    uint32_t purpose = purpose_of(args);
    uintptr_t base = (uintptr_t)cpu->ranks->ranks[cpu->rank].memory[purpose], data = (uintptr_t)args->whole.data;
    uint64_t n_values = (uint64_t)(args->n_rows - 1) * args->whole.stride + args->whole.width;
    uint64_t size = cpu->ranks->size_bytes[purpose], offset = data - base;
    if (!base || data < base || offset > size || n_values > (size - offset) / sizeof(float))
        return err_set(err, RC_INTERNAL, "gather: %u rows of %u columns do not lie in the rank's shared %s of %llu bytes",
                       args->n_rows, args->whole.width, purpose == COMM_LOGITS ? "logits" : "arena", (unsigned long long)size);
    return RC_OK;
}

static enum rc check_args(const struct cpu *cpu, const struct gather_args *args, struct err *err)
{
    bool is_columns = args->kind == GATHER_COLUMNS || is_of_logits(args);
    uint32_t a = args->a.width, b = args->b.width, part_width = args->whole.width / (args->n_chosen ? args->n_chosen : 1);
    if (args->kind > GATHER_TO_OWNERS || (args->kind == GATHER_TO_OWNERS && cpu->ranks->options.exchange))
        return err_set(err, RC_INTERNAL, "gather: there is no kind %u", args->kind);
    if (is_columns && (uint64_t)args->first + args->n_columns > part_width)
        return err_set(err, RC_INTERNAL, "gather: columns %u to %llu do not lie in %u columns", args->first,
                       (unsigned long long)args->first + args->n_columns, part_width);
    if (a | b && (args->n_chosen || args->kind != GATHER_COLUMNS || a != args->n_columns || (b && b != a)))
        return err_set(err, RC_INTERNAL, "gather: terms of %u and %u columns do not fit %u columns of kind %u", a, b,
                       args->n_columns, args->kind);
    if (args->kind == GATHER_ROWS && !args->token_ids)
        return err_set(err, RC_INTERNAL, "gather: rows have no token ids");
    if (args->kind == GATHER_ROUTES && (!args->routes || !args->n_chosen || args->whole.width % args->n_chosen))
        return err_set(err, RC_INTERNAL, "gather: %u columns are not %u equal parts with routes", args->whole.width,
                       args->n_chosen);
    return check_place(cpu, args, err);
}

/* ---- values of other processes ------------------------------------------------------------------------------------------ */

/* A block has what a process gives to a gather: this header, and for each of its ranks a struct part_header and its values, in
 * the order of rows and parts. */
struct block_header {
    uint32_t gather, kind, n_rows, width, n_parts, n_ranks;
};

struct part_header {
    uint32_t first, n_columns;    /* as in struct gather_args */
    int32_t first_id, end_id;
};

struct cursor {
    char *at, *end;
};

static uint32_t n_parts_of(const struct gather_args *args)
{
    return args->n_chosen ? args->n_chosen : 1;
}

/* Copies what a rank gives: from whole into the block, or, if is_taken, from the block into the wholes of n_ranks ranks. False:
 * the block ends before. */
static bool copy_parts(const struct cpu_ranks *all, const struct gather_args *args, struct cursor *block, bool is_taken,
                       uint32_t n_ranks, size_t offset)
{
    uint32_t purpose = purpose_of(args), n_parts = n_parts_of(args), first, n_columns;
    for (uint32_t row = 0; row < args->n_rows; row++)
        for (uint32_t part = 0; part < n_parts; part++) {
            if (!own_part(args, row, part, &first, &n_columns))
                continue;
            size_t place = offset + ((size_t)row * args->whole.stride + first) * sizeof(float);
            size_t size = n_columns * sizeof(float);
            if (size > (size_t)(block->end - block->at))
                return false;
            if (!is_taken)
                memcpy(block->at, all->ranks[0].memory[purpose] + place, size);
            for (uint32_t rank = 0; is_taken && rank < n_ranks; rank++)
                memcpy(all->ranks[rank].memory[purpose] + place, block->at, size);
            block->at += size;
        }
    return true;
}

static bool write_block(const struct cpu_ranks *all, const struct block_header *header, size_t offset, size_t *n_bytes)
{
    struct cursor block = {all->own, all->own + all->block_bytes};
    memcpy(block.at, header, sizeof *header);
    block.at += sizeof *header;
    for (uint32_t rank = 0; rank < all->n_ranks; rank++) {
        const struct gather_args *args = all->ranks[rank].args;
        const struct part_header part = {args->first, args->n_columns, args->first_id, args->end_id};
        if (sizeof part > (size_t)(block.end - block.at))
            return false;
        memcpy(block.at, &part, sizeof part);
        block.at += sizeof part;
        if (!copy_parts(all, args, &block, false, 0, offset))
            return false;
    }
    *n_bytes = (size_t)(block.at - all->own);
    return true;
}

/* Stores the values of one rank of another process. False: they do not fit the gather. */
static bool read_rank(const struct cpu_ranks *all, struct cursor *block, size_t offset)
{
    struct gather_args args = *all->ranks[0].args;
    struct part_header part;
    if (sizeof part > (size_t)(block->end - block->at))
        return false;
    memcpy(&part, block->at, sizeof part);
    block->at += sizeof part;
    if (args.kind != GATHER_ROWS && args.kind != GATHER_ROUTES &&
        (uint64_t)part.first + part.n_columns > args.whole.width / n_parts_of(&args))
        return false;
    args.first = part.first;
    args.n_columns = part.n_columns;
    args.first_id = part.first_id;
    args.end_id = part.end_id;
    return copy_parts(all, &args, block, true, args.kind == GATHER_TO_FIRST ? 1 : all->n_ranks, offset);
}

/* Returns the number of ranks whose values have come; 0: a block is of another gather or is damaged. */
static uint32_t read_blocks(const struct cpu_ranks *all, const struct block_header *wanted, size_t offset, size_t n_bytes)
{
    struct cursor block = {all->others, all->others + n_bytes};
    uint32_t n_ranks = 0;
    while (block.at < block.end) {
        struct block_header header;
        if (sizeof header > (size_t)(block.end - block.at))
            return 0;
        memcpy(&header, block.at, sizeof header);
        block.at += sizeof header;
        uint32_t n = header.n_ranks;
        header.n_ranks = wanted->n_ranks;
        if (memcmp(&header, wanted, sizeof header) || n > all->options.n_all_ranks)
            return 0;
        for (uint32_t i = 0; i < n; i++)
            if (!read_rank(all, &block, offset))
                return 0;
        n_ranks += n;
    }
    return n_ranks;
}

static enum rc exchange(struct cpu_ranks *all, uint32_t gather, struct err *err)
{
    const struct gather_args *args = all->ranks[0].args;
    const struct comm_options *o = &all->options;
    const struct block_header header = {gather, args->kind, args->n_rows, args->whole.width, n_parts_of(args), all->n_ranks};
    size_t offset = (size_t)((char *)args->whole.data - all->ranks[0].memory[purpose_of(args)]), own_bytes, n_bytes;
    bool is_to_first = args->kind == GATHER_TO_FIRST;
    if (!all->own || !write_block(all, &header, offset, &own_bytes))
        return err_set(err, RC_INTERNAL, "gather %u: %u rows of %u columns do not fit a block of %zu bytes", gather,
                       args->n_rows, args->whole.width, all->block_bytes);
    enum rc rc = o->exchange(o->exchange_ctx, all->own, own_bytes, is_to_first, all->others, all->block_bytes, &n_bytes, err);
    uint32_t n_wanted = is_to_first && o->first_rank ? 0 : o->n_all_ranks - all->n_ranks,
             n_come = rc ? 0 : read_blocks(all, &header, offset, n_bytes);
    return rc || n_come == n_wanted ? rc : err_set(err, RC_DEVICE, "gather %u: wanted the values of %u ranks of other "
                                                   "processes, have %u that fit", gather, n_wanted, n_come);
}

/* Makes room for the blocks of gathers in memory of this size. */
static enum rc make_blocks(struct cpu_ranks *all, size_t size_bytes, struct err *err)
{
    size_t wanted = size_bytes + all->options.n_all_ranks * (sizeof(struct block_header) + sizeof(struct part_header));
    if (!all->options.exchange || wanted <= all->block_bytes)
        return RC_OK;
    mem_free(all->own);
    mem_free(all->others);
    all->own = mem_alloc(wanted);
    all->others = mem_alloc(wanted);
    all->block_bytes = wanted;
    return all->own && all->others ? RC_OK : err_set(err, RC_MEMORY, "cpu: no memory for blocks of %zu bytes", wanted);
}

/* ---- struct comm -------------------------------------------------------------------------------------------------------- */

static enum rc comm_meet(void *ctx, const struct meet_args *args, struct err *err)
{
    struct cpu *cpu = ctx;
    (void)args; /* `sample` has written its results, so there are no ids below 0 */
    if (!cpu->ranks)
        return err_set(err, RC_INTERNAL, "meet: the context is not connected to other ranks");
    struct rank *rank = &cpu->ranks->ranks[cpu->rank];
    rank->n_gathers = 0;
    return arrive(cpu->ranks, rank, NULL, START, err);
}

static enum rc comm_gather(void *ctx, const struct gather_args *args, struct err *err)
{
    struct cpu *cpu = ctx;
    enum rc rc = RC_OK;
    if (!cpu->ranks)
        return err_set(err, RC_INTERNAL, "gather: the context is not connected to other ranks");
    struct rank *rank = &cpu->ranks->ranks[cpu->rank];
    uint32_t number = ++rank->n_gathers;
    if (atomic_load_explicit(&cpu->ranks->phase, memory_order_acquire) & ABORTED)
        return fail_aborted(cpu->ranks, rank, number, err);
    if (args->n_rows && !args->is_stored) {
        rc = check_args(cpu, args, err);
        rc = rc ? rc : store(cpu, args, err);
    }
    rc = rc ? rc : arrive(cpu->ranks, rank, args, number, err);
    return rc || !args->norm ? rc : cpu->kernels->rms_norm(cpu, args->norm, err);
}

static enum rc comm_check(void *ctx, struct err *err)
{
    struct cpu *cpu = ctx;
    const struct rank *rank = cpu->ranks ? &cpu->ranks->ranks[cpu->rank] : NULL;
    if (!rank || !rank->failure.rc)
        return RC_OK;
    if (err)
        *err = rank->failure;
    return rank->failure.rc;
}

static void comm_abort(void *const *ctxs, uint32_t n_ranks)
{
    struct cpu *cpu = n_ranks ? ctxs[0] : NULL;
    if (cpu && cpu->ranks)
        end_meetings(cpu->ranks, "");
}

static void comm_close(void *const *ctxs, uint32_t n_ranks)
{
    for (uint32_t i = 0; i < n_ranks; i++) {
        struct cpu *cpu = ctxs[i];
        if (i == 0 && cpu->ranks) {
            mem_free(cpu->ranks->own);
            mem_free(cpu->ranks->others);
            mem_free(cpu->ranks);
        }
        cpu->ranks = NULL;
    }
}

/* Spinning helps only while every thread of every rank has a processor. */
static unsigned long long spin_ticks(void *const *ctxs, uint32_t n_ranks)
{
    const struct cpu *first = ctxs[0];
    uint32_t n_threads = 0;
    for (uint32_t i = 0; i < n_ranks; i++)
        n_threads += ((const struct cpu *)ctxs[i])->n_threads;
    return n_threads <= first->n_processors ? SPIN_TICKS : 0;
}

static enum rc comm_open(void *const *ctxs, uint32_t n_ranks, const struct comm_options *options, struct err *err)
{
    if (!(options->timeout_seconds > 0)) {
        err_set(err, RC_CONFIG, "step_timeout_s: wanted more than 0 seconds, have %g", options->timeout_seconds);
        err_name(err, "step_timeout_s", NULL);
        return RC_CONFIG;
    }
    for (uint32_t i = 0; i < n_ranks; i++)
        if (((const struct cpu *)ctxs[i])->ranks)
            return err_set(err, RC_INTERNAL, "cpu: context %u is connected to other ranks already", i);
    struct cpu_ranks *all = mem_calloc(1, sizeof *all + n_ranks * sizeof all->ranks[0]);
    if (!all)
        return err_set(err, RC_MEMORY, "cpu: no memory for %u ranks", n_ranks);
    all->n_ranks = n_ranks;
    all->options = *options;
    all->timeout_seconds = options->timeout_seconds < MAX_TIMEOUT ? options->timeout_seconds : MAX_TIMEOUT;
    all->spin_ticks = spin_ticks(ctxs, n_ranks);
    atomic_store(&all->phase, options->first_meeting * NEXT_PHASE);
    for (uint32_t i = 0; i < n_ranks; i++) {
        struct cpu *cpu = ctxs[i];
        all->ranks[i].cpu = cpu;
        all->ranks[i].n_meetings = options->first_meeting;
        atomic_store(&all->ranks[i].n_arrivals, options->first_meeting);
        cpu->ranks = all;
        cpu->rank = i;
    }
    return RC_OK;
}

static enum rc comm_share(void *const *ctxs, uint32_t n_ranks, uint32_t purpose, void *const *memory, size_t size_bytes,
                          struct err *err)
{
    struct cpu_ranks *all = n_ranks ? ((const struct cpu *)ctxs[0])->ranks : NULL;
    if (!all || all->n_ranks != n_ranks || purpose >= COMM_MEMORIES)
        return err_set(err, RC_INTERNAL, "cpu: memory %u of %u contexts cannot be shared: %u contexts are connected", purpose,
                       n_ranks, all ? all->n_ranks : 0);
    for (uint32_t i = 0; i < n_ranks; i++)
        all->ranks[i].memory[purpose] = memory[i];
    all->size_bytes[purpose] = size_bytes;
    return make_blocks(all, size_bytes, err);
}

const struct comm cpu_comm = {
    .size_bytes = sizeof cpu_comm,
    .most_of_several = UINT32_MAX,
    .least_shared_rows = 2, /* few, so that tests share rows */
    .mirrors = mirrors,
    .mirrors_parts = mirrors_parts,
    .open = comm_open,
    .share = comm_share,
    .meet = comm_meet,
    .gather = comm_gather,
    .check = comm_check,
    .abort = comm_abort,
    .close = comm_close,
};
