/* link.cu: gathers of ranks in several processes, one rank a process, over NCCL (memory/comm_nccl.cu).
 *
 * Each rank fills a buffer of the whole value's layout: its own part, and zero bytes elsewhere. NCCL adds the buffers of all
 * ranks as unsigned integers of 32 bits. At most one rank has other bytes than zero at a place, so no addition carries: the sum
 * has the bytes of all parts, also of -0 and of a NaN, in whatever order NCCL adds.
 *
 * Bound by the network: a ring of n ranks sends 2 (n - 1) / n of the value from each rank. */
#include "link.cuh"

#include "../../../csrc/base/clock.h"
#include "../memory/peers.cuh"
#include "own_part.cuh"

#include <stdio.h>
#include <time.h>

#define MOST_BYTES ((size_t)32 << 20) /* of the buffer; larger values take several turns */
#define FILL_BLOCKS 256u
#define FILL_THREADS 256u
#define BUSY_SECONDS 1e-3 /* a wait looks all the time, then it rests between two looks */

struct link {
    struct process_group *group;
    double timeout_seconds;
    void *ctx; /* of check */
    enum rc (*check)(void *ctx, struct err *err);
    bool is_aborted;   /* set by any thread */
    char *sums;        /* on the device */
    size_t size_bytes; /* of sums, a multiple of 16 */
    struct err failure;
};

template <class T, bool HAS_PARTS>
static __global__ void __launch_bounds__(FILL_THREADS) gather_fill(const __grid_constant__ own_part own)
{
    wait_for_input();
    if (HAS_PARTS)
        store_parts<T>(own);
    else
        store_own<T>(own);
}

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
static enum rc check_wait(const struct cuda *cuda, double end, struct err *err)
{
    const struct link *link = cuda->link;
    if (__atomic_load_n(&link->is_aborted, __ATOMIC_ACQUIRE))
        err_set(err, RC_DEVICE, "cuda:%d stopped: the step was aborted", cuda->device);
    else if (link->check && link->check(link->ctx, err))
        return err->rc;
    else if (seconds_now() > end)
        err_set(err, RC_DEVICE, "cuda:%d did not get the values of the ranks on other hosts within %g s (step_timeout_s)",
                cuda->device, link->timeout_seconds);
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
        if (check_wait(cuda, begun + link->timeout_seconds, &failure))
            return fail(link, &failure, err);
        rest(begun);
    }
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, operation);
}

/* Waits until NCCL has enqueued its last call. */
static enum rc settle(struct cuda *cuda, struct err *err)
{
    struct link *link = cuda->link;
    struct err failure = {};
    const double end = seconds_now() + link->timeout_seconds;
    bool is_done = false;
    while (!is_done)
        if (nccl_group_settle(link->group, BUSY_SECONDS, &is_done, &failure) ||
            (!is_done && check_wait(cuda, end, &failure)))
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

template <class T> static void fill(struct cuda *cuda, const struct gather_args *args)
{
    struct own_part own = part_of_args<T>(args);
    const size_t first = args->kind == GATHER_ROWS || args->kind == GATHER_ROUTES ? 0 : args->first;
    own.to[own.n_to++] = (T *)cuda->link->sums + first;
    own.is_by_rows = false;
    own.is_aligned = own.is_aligned && first * sizeof(T) % 16 == 0;
    launch(cuda, own.n_parts ? gather_fill<T, true> : gather_fill<T, false>, FILL_BLOCKS, FILL_THREADS, 0, own);
}

template <class T> static enum rc gather_rows(struct cuda *cuda, const struct gather_args *args, struct err *err)
{
    struct link *link = cuda->link;
    const size_t row_bytes = args->whole.stride * sizeof(T), n_bytes = args->n_rows * row_bytes;
    cudaError_t code = cudaMemsetAsync(link->sums, 0, n_bytes + 3, cuda->stream);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "gather");
    fill<T>(cuda, args);
    enum rc rc = launched(err, "gather");
    if (rc)
        return rc;
    struct err failure = {};
    if (nccl_group_sum(link->group, link->sums, (n_bytes + 3) / 4, cuda->stream, &failure))
        return fail(link, &failure, err);
    rc = settle(cuda, err);
    if (rc)
        return rc;
    code = cudaMemcpy2DAsync(args->whole.data, row_bytes, link->sums, row_bytes, args->whole.width * sizeof(T), args->n_rows,
                             cudaMemcpyDeviceToDevice, cuda->stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "gather");
}

enum rc cuda_link_gather(struct cuda *cuda, const struct gather_args *args, struct err *err)
{
    const struct link *link = cuda->link;
    const size_t item = args->kind == GATHER_TO_FIRST || cuda->dtype == DTYPE_F32 ? 4 : 2;
    const size_t row_bytes = args->whole.stride * item;
    const uint32_t most = row_bytes ? (uint32_t)((link->size_bytes - 16) / row_bytes) : 0;
    if (!most)
        return err_set(err, RC_INTERNAL, "gather: a row of %zu bytes does not fit the link's buffer of %zu", row_bytes,
                       link->size_bytes);
    enum rc rc = cuda_link_check(cuda, err);
    for (uint32_t row = 0; row < args->n_rows && !rc; row += most) {
        const struct gather_args some = rows_of(args, row, min(args->n_rows - row, most), item);
        if (args->kind == GATHER_TO_FIRST)
            rc = gather_rows<float>(cuda, &some, err);
        else
            visit_type(cuda->dtype, [&](auto value) { rc = gather_rows<decltype(value)>(cuda, &some, err); });
    }
    return rc || !args->norm ? rc : cuda_rms_norm(cuda, args->norm, err);
}

/* ---- the life of a link -------------------------------------------------------------------------------------------------- */

enum rc cuda_link_open(struct cuda *cuda, const struct comm_options *options, struct err *err)
{
    char device[32];
    struct link *link = (struct link *)mem_calloc(1, sizeof *link);
    if (!link)
        return err_set(err, RC_MEMORY, "cuda: no memory for the ranks of other hosts");
    link->timeout_seconds = options->timeout_seconds;
    link->ctx = options->exchange_ctx;
    link->check = options->check;
    snprintf(device, sizeof device, "cuda:%d", cuda->device);
    const struct group_options group = {device, options->nccl, options->group_id, options->first_rank, options->n_all_ranks};
    cuda->link = link;
    enum rc rc = nccl_group_open(&group, &link->group, err);
    rc = rc ? rc : settle(cuda, err);
    if (rc)
        cuda_link_close(cuda);
    return rc;
}

enum rc cuda_link_share(struct cuda *cuda, size_t size_bytes, struct err *err)
{
    struct link *link = cuda->link;
    const size_t wanted = (min(size_bytes, MOST_BYTES) + 31) / 16 * 16;
    if (wanted <= link->size_bytes)
        return RC_OK;
    cuda_give(cuda, link->sums);
    link->sums = NULL;
    link->size_bytes = 0;
    enum rc rc = cuda_take(cuda, MEMORY_WORK, wanted, &link->sums, err);
    if (!rc)
        link->size_bytes = wanted;
    return rc;
}

enum rc cuda_link_check(const struct cuda *cuda, struct err *err)
{
    const struct err *failure = &cuda->link->failure;
    if (failure->rc && err)
        *err = *failure;
    return failure->rc;
}

void cuda_link_abort(struct cuda *cuda)
{
    __atomic_store_n(&cuda->link->is_aborted, true, __ATOMIC_RELEASE);
}

void cuda_link_close(struct cuda *cuda)
{
    struct link *link = cuda->link;
    cuda->link = NULL;
    nccl_group_close(link->group);
    cuda_give(cuda, link->sums);
    mem_free(link);
}
