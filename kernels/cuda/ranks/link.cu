/* link.cu: gathers of ranks in several processes. The ranks of a process store their parts into a buffer of their first rank,
 * which has the whole value's layout and zero bytes elsewhere. NCCL (memory/comm_nccl.cu) adds the buffers of all processes as
 * unsigned integers of 32 bits. At most one rank has other bytes than zero at a place, so no addition carries: the sum has the
 * bytes of all parts, also of -0 and of a NaN, in whatever order NCCL adds. The first rank stores the sum into all ranks'
 * values.
 *
 * The ranks of a process meet twice: when they have stored their parts, and when the whole value is there. Two buffers take
 * turns. The first rank clears the other one before the second meeting, behind which the ranks store to it.
 *
 * Bound by the network: a ring of n processes sends 2 (n - 1) / n of the value from each. */
#include "link.cuh"

#include "../../../csrc/base/clock.h"
#include "../memory/peers.cuh"
#include "gather_push.cuh"

#include <stdio.h>
#include <time.h>

#define MOST_BYTES ((size_t)32 << 20) /* of a buffer; larger values take several turns, equally many in all processes */
#define BUSY_SECONDS 1e-3 /* a wait looks all the time, then it rests between two looks */

struct link {
    struct cuda *first;           /* the process's first rank */
    struct process_group *group;
    double timeout_seconds;
    void *ctx; /* of check */
    enum rc (*check)(void *ctx, struct err *err);
    bool is_aborted;              /* set by any thread */
    char *sums[2];                /* [size_bytes] on the first rank's device */
    size_t size_bytes, used_bytes[2]; /* size_bytes: a multiple of 16. The rest of a buffer is clear */
    uint32_t n_turns[MAX_RANKS];  /* that a rank has enqueued */
    struct err failure;
};

/* ---- waits --------------------------------------------------------------------------------------------------------------- */

/* Keeps the first failure and ends the group: kernels that wait for other processes end then. */
static enum rc fail(struct link *link, const struct err *failure, struct err *err)
{
    if (!link->failure.rc)
        link->failure = *failure;
    nccl_group_end(link->group);
    if (err)
        *err = link->failure;
    return link->failure.rc;
}

/* Whether a wait may go on that ends at a time. */
static enum rc check_wait(const struct link *link, double end, struct err *err)
{
    const int device = link->first->device;
    if (__atomic_load_n(&link->is_aborted, __ATOMIC_ACQUIRE))
        err_set(err, RC_DEVICE, "cuda:%d stopped: the step was aborted", device);
    else if (link->check && link->check(link->ctx, err))
        return err->rc;
    else if (seconds_now() > end)
        err_set(err, RC_DEVICE, "cuda:%d did not get the values of the ranks on other hosts within %g s (step_timeout_s)",
                device, link->timeout_seconds);
    else
        return RC_OK;
    err_name(err, "gather", NULL);
    return RC_DEVICE;
}

static void rest(double begun)
{
    const struct timespec time = {0, 50000};
    if (seconds_now() - begun > BUSY_SECONDS)
        nanosleep(&time, NULL);
}

enum rc cuda_await(struct cuda *cuda, cudaEvent_t event, const char *operation, struct err *err)
{
    struct link *link = cuda->link;
    cudaError_t code = cudaSuccess;
    if (!link)
        code = event ? cudaEventSynchronize(event) : cudaStreamSynchronize(cuda->stream);
    const double begun = seconds_now();
    while (link && (code = event ? cudaEventQuery(event) : cudaStreamQuery(cuda->stream)) == cudaErrorNotReady) {
        struct err failure = {};
        cudaGetLastError(); /* no error */
        if (check_wait(link, begun + link->timeout_seconds, &failure))
            return fail(link, &failure, err);
        rest(begun);
    }
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, operation);
}

/* Waits until NCCL has enqueued its last call. */
static enum rc settle(struct link *link, struct err *err)
{
    struct err failure = {};
    const double end = seconds_now() + link->timeout_seconds;
    bool is_done = false;
    while (!is_done)
        if (nccl_group_settle(link->group, BUSY_SECONDS, &is_done, &failure) ||
            (!is_done && check_wait(link, end, &failure)))
            return fail(link, &failure, err);
    return RC_OK;
}

/* ---- gathers ------------------------------------------------------------------------------------------------------------- */

/* Some rows of a gather. */
static struct gather_args rows_of(const struct gather_args *args, uint32_t first, uint32_t n_rows, size_t item)
{
    struct gather_args some = *args;
    some.n_rows = n_rows;
    some.whole.data = (char *)args->whole.data + (size_t)first * args->whole.stride * item;
    some.a.data = args->a.width ? (char *)args->a.data + (size_t)first * args->a.stride * item : NULL;
    some.b.data = args->b.width ? (char *)args->b.data + (size_t)first * args->b.stride * item : NULL;
    some.token_ids = args->token_ids ? args->token_ids + first : NULL;
    some.routes = args->routes ? args->routes + (size_t)first * args->route_stride : NULL;
    return some;
}

/* Stores a part where it says, and meets the process's ranks. */
template <class T> static enum rc store_and_meet(struct cuda *cuda, const struct own_part &own, struct err *err)
{
    const uint32_t n_blocks = cuda->team->shares_device ? SHARED_BLOCKS : PLAIN_BLOCKS;
    const auto kernel = own.n_parts ? gather_push_parts<T> : gather_push<T>;
    launch(cuda, kernel, n_blocks, MEETING_THREADS, 0, meeting_of(cuda, false), own);
    return launched(err, "gather");
}

/* This rank's part, to the first rank's buffer. */
template <class T> static struct own_part part_to_buffer(const struct gather_args *args, char *sums)
{
    struct own_part own = part_of_args<T>(args);
    const size_t first = args->kind == GATHER_ROWS || args->kind == GATHER_ROUTES ? 0 : args->first;
    own.to[own.n_to++] = (T *)sums + first;
    own.is_by_rows = false;
    own.is_aligned = own.is_aligned && first * sizeof(T) % 16 == 0;
    return own;
}

/* The first rank: the whole value, from its buffer to all ranks, or logits to itself. Other ranks: nothing. */
template <class T> static struct own_part whole_of_buffer(struct cuda *cuda, const struct gather_args *args, const char *sums)
{
    const struct cuda_team *team = cuda->team;
    const uint32_t purpose = is_of_logits(args) ? COMM_LOGITS : COMM_ARENA;
    const size_t offset = (size_t)((char *)args->whole.data - team->memory[purpose][cuda->rank]);
    struct own_part own = {};
    own.n_rows = args->n_rows;
    own.a = sums;
    own.a_stride = own.to_stride = args->whole.stride;
    own.n_columns = cuda->rank ? 0 : args->whole.width;
    own.is_aligned = own.n_columns % 8 == 0 && is_aligned<T>(args->whole.data, own.to_stride);
    for (uint32_t r = 0; r < (cuda->rank ? 0 : is_of_logits(args) ? 1 : team->n_ranks); r++)
        own.to[own.n_to++] = team->memory[purpose][r] + offset;
    return own;
}

/* The first rank: adds the buffers of all processes, and clears the other buffer. */
static enum rc add_buffers(struct cuda *cuda, uint32_t parity, size_t n_bytes, struct err *err)
{
    struct link *link = cuda->link;
    struct err failure = {};
    if (nccl_group_sum(link->group, link->sums[parity], (n_bytes + 3) / 4, cuda->stream, &failure))
        return fail(link, &failure, err);
    enum rc rc = settle(link, err);
    if (rc)
        return rc;
    cudaError_t code = cudaMemsetAsync(link->sums[1 - parity], 0, link->used_bytes[1 - parity], cuda->stream);
    link->used_bytes[parity] = n_bytes + 3;
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "gather");
}

template <class T> static enum rc gather_rows(struct cuda *cuda, const struct gather_args *args, struct err *err)
{
    struct link *link = cuda->team->link;
    const uint32_t parity = link->n_turns[cuda->rank]++ % 2;
    char *sums = link->sums[parity];
    enum rc rc = store_and_meet<T>(cuda, part_to_buffer<T>(args, sums), err);
    if (!rc && !cuda->rank)
        rc = add_buffers(cuda, parity, args->n_rows * args->whole.stride * sizeof(T), err);
    return rc ? rc : store_and_meet<T>(cuda, whole_of_buffer<T>(cuda, args, sums), err);
}

enum rc link_gather(struct cuda *cuda, const struct gather_args *args, struct err *err)
{
    const struct link *link = cuda->team->link;
    const size_t item = is_of_logits(args) || cuda->dtype == DTYPE_F32 ? 4 : 2;
    const size_t row_bytes = args->whole.stride * item;
    const uint32_t most = row_bytes ? (uint32_t)((link->size_bytes - 16) / row_bytes) : 0;
    if (!most)
        return err_set(err, RC_INTERNAL, "gather: a row of %zu bytes does not fit the link's buffer of %zu", row_bytes,
                       link->size_bytes);
    enum rc rc = link_check(link, err);
    for (uint32_t row = 0; row < args->n_rows && !rc; row += most) {
        const struct gather_args some = rows_of(args, row, min(args->n_rows - row, most), item);
        if (is_of_logits(args))
            rc = gather_rows<float>(cuda, &some, err);
        else
            visit_type(cuda->dtype, [&](auto value) { rc = gather_rows<decltype(value)>(cuda, &some, err); });
    }
    return rc;
}

/* ---- the life of a link -------------------------------------------------------------------------------------------------- */

enum rc link_open(struct cuda_team *team, const struct comm_options *options, struct err *err)
{
    char device[32];
    if (!options->nccl) {
        err_set(err, RC_DEVICE, "NCCL: wanted libnccl.so.2 for the ranks of other hosts, have none; install nvidia-nccl-cu13, "
                "or name its folder in LLMPY_LIB_PATH");
        err_name(err, "nccl_open", NULL);
        return RC_DEVICE;
    }
    struct link *link = (struct link *)mem_calloc(1, sizeof *link);
    if (!link)
        return err_set(err, RC_MEMORY, "cuda: no memory for the ranks of other hosts");
    team->link = team->ranks[0]->link = link;
    link->first = team->ranks[0];
    link->timeout_seconds = options->timeout_seconds;
    link->ctx = options->exchange_ctx;
    link->check = options->check;
    snprintf(device, sizeof device, "cuda:%d", link->first->device);
    const struct group_options group = {device, options->nccl, options->group_id, options->process, options->n_processes};
    enum rc rc = nccl_group_open(&group, &link->group, err);
    return rc ? rc : settle(link, err);
}

/* Adds clear buffers of all sizes. With the first sums of a size NCCL connects, allocates and loads kernels, which may wait for
 * the device: no rank may wait in a kernel then. */
static enum rc warm(struct link *link, size_t size_bytes, struct err *err)
{
    struct cuda *first = link->first;
    enum rc rc = RC_OK;
    for (size_t n_words = 1; n_words <= size_bytes / 4 && !rc; n_words *= 4) {
        rc = nccl_group_sum(link->group, link->sums[0], n_words, first->stream, err);
        rc = rc ? rc : settle(link, err);
    }
    return rc ? rc : cuda_await(first, NULL, "share", err);
}

enum rc link_share(struct link *link, size_t size_bytes, struct err *err)
{
    const size_t wanted = (min(size_bytes, MOST_BYTES) + 31) / 16 * 16;
    enum rc rc = RC_OK;
    if (!link || wanted <= link->size_bytes)
        return RC_OK;
    link->size_bytes = 0;
    for (uint32_t i = 0; i < 2 && !rc; i++) {
        cuda_give(link->first, link->sums[i]);
        link->sums[i] = NULL;
        rc = cuda_take(link->first, MEMORY_WORK, wanted, &link->sums[i], err);
        link->used_bytes[i] = 0;
    }
    if (rc)
        return rc;
    device_scope scope(link->first->device);
    cudaError_t code = cudaMemset(link->sums[0], 0, wanted);
    code = code ? code : cudaMemset(link->sums[1], 0, wanted);
    code = code ? code : cudaDeviceSynchronize();
    if (code != cudaSuccess)
        return cuda_fail(err, code, "share");
    link->size_bytes = wanted;
    return warm(link, wanted, err);
}

enum rc link_check(const struct link *link, struct err *err)
{
    if (!link || !link->failure.rc)
        return RC_OK;
    if (err)
        *err = link->failure;
    return link->failure.rc;
}

void link_abort(struct link *link)
{
    if (link)
        __atomic_store_n(&link->is_aborted, true, __ATOMIC_RELEASE);
}

void link_close(struct link *link)
{
    if (!link)
        return;
    link->first->link = NULL;
    nccl_group_close(link->group);
    for (uint32_t i = 0; i < 2; i++)
        cuda_give(link->first, link->sums[i]);
    mem_free(link);
}
