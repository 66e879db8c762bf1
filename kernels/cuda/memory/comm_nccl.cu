/* Groups of processes over NCCL, which is opened for the first group. Communicators do not block: each call is polled until it
 * is done or the caller's time is over, and the loss of a peer ends in ncclCommAbort instead of a hang. Each group has its own
 * stream. Bound by the link: NVLink 4, 450 GB/s each way on an H200. */
#include "peers.cuh"

#include "../../../csrc/base/clock.h"
#include "dyn_nccl.h"

#include <dlfcn.h>
#include <string.h>
#include <time.h>

struct group_slot {
    void *memory;
    size_t size_bytes;
    cudaEvent_t done;
    bool is_unrecorded; /* its call is not enqueued yet */
};
struct process_group {
    struct primary primary;
    struct nccl_functions call;
    void *comm;
    cudaStream_t stream;
    struct group_slot slots[GROUP_SLOTS];
};

/* ---- the library --------------------------------------------------------------------------------------------------------- */

static enum rc refuse(struct err *err, const char *path, const char *wanted)
{
    err_set(err, RC_DEVICE, "NCCL: wanted %s, have '%.300s'; install nvidia-nccl-cu13, or name its folder in LLMPY_LIB_PATH",
            wanted, path);
    err_name(err, "nccl_open", NULL);
    return RC_DEVICE;
}

/* The library stays open. */
static enum rc find_functions(const char *path, struct nccl_functions *functions, struct err *err)
{
    const size_t n = sizeof NCCL_NAMES / sizeof *NCCL_NAMES;
    static_assert(sizeof *functions == n * sizeof(void *), "a name for every function");
    void *found[n];
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return refuse(err, path, "libnccl.so.2");
    bool has_all = true;
    for (size_t i = 0; i < n; i++)
        has_all &= (found[i] = dlsym(library, NCCL_NAMES[i])) != NULL;
    memcpy(functions, found, sizeof *functions);
    int version = 0;
    if (!has_all || functions->version(&version) || version < NCCL_OLDEST)
        return refuse(err, path, "version 2.14 or newer");
    return RC_OK;
}

enum rc nccl_group_id(const char *nccl, uint8_t *id, struct err *err)
{
    struct nccl_functions call;
    struct nccl_id made;
    static_assert(sizeof made == GROUP_ID_BYTES, "an id is as long as backend.h says");
    enum rc rc = find_functions(nccl, &call, err);
    if (rc)
        return rc;
    int result = call.unique_id(&made);
    if (result) {
        err_set(err, RC_DEVICE, "NCCL id: %.200s", call.error_text(result));
        err_name(err, "nccl_id", NULL);
        return RC_DEVICE;
    }
    memcpy(id, made.bytes, sizeof made.bytes);
    return RC_OK;
}

/* ---- ends ---------------------------------------------------------------------------------------------------------------- */

/* Ends the running calls in this process. The other processes notice it themselves. */
static void end_comm(struct process_group *group)
{
    if (group->comm)
        group->call.abort_all(group->comm);
    group->comm = NULL;
}

static enum rc fail(struct process_group *group, int result, const char *operation, struct err *err)
{
    const char *more = group->comm ? group->call.last_error(group->comm) : NULL;
    err_set(err, RC_DEVICE, "NCCL %s: %.120s%s%.200s", operation, group->call.error_text(result), more && *more ? ": " : "",
            more ? more : "");
    err_name(err, operation, NULL);
    if (err)
        err->code = result;
    end_comm(group);
    return RC_DEVICE;
}

static enum rc fail_cuda(struct process_group *group, cudaError_t code, const char *operation, struct err *err)
{
    end_comm(group);
    cudaGetLastError(); /* reported already; clears it for the next launch */
    return cuda_fail(err, code, operation);
}

static enum rc check_alive(const struct process_group *group, const char *operation, struct err *err)
{
    if (group->comm)
        return RC_OK;
    err_set(err, RC_DEVICE, "NCCL %s: the group has ended; make another with init_weight_group()", operation);
    err_name(err, operation, NULL);
    return RC_DEVICE;
}

void nccl_group_end(struct process_group *group)
{
    primary_scope scope(group->primary);
    end_comm(group);
}

enum rc nccl_group_sum(struct process_group *group, void *words, size_t n, cudaStream_t stream, struct err *err)
{
    enum rc rc = check_alive(group, "gather", err);
    if (rc)
        return rc;
    const int result = group->call.all_reduce(words, words, n, NCCL_UINT32, NCCL_SUM, group->comm, stream);
    return result == NCCL_OK || result == NCCL_IN_PROGRESS ? RC_OK : fail(group, result, "gather", err);
}

void nccl_group_close(struct process_group *group)
{
    if (!group)
        return;
    if (group->primary.context) {
        primary_scope scope(group->primary);
        end_comm(group);
        if (group->stream)
            cudaStreamSynchronize(group->stream);
        for (struct group_slot &slot : group->slots) {
            if (slot.done)
                cudaEventDestroy(slot.done);
            cudaFree(slot.memory);
        }
        if (group->stream)
            cudaStreamDestroy(group->stream);
    }
    group->primary.drop();
    mem_free(group);
}

/* ---- the life of a group ------------------------------------------------------------------------------------------------- */

static enum rc start(struct process_group *group, const struct group_options *options, struct err *err)
{
    cudaError_t code = cudaStreamCreateWithFlags(&group->stream, cudaStreamNonBlocking);
    for (struct group_slot &slot : group->slots)
        if (code == cudaSuccess)
            code = cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "group_open");
    struct nccl_config config = {sizeof config, NCCL_MAGIC, NCCL_OLDEST, 0, NCCL_UNDEFINED};
    struct nccl_id id;
    memcpy(id.bytes, options->id, sizeof id.bytes);
    int result = group->call.init(&group->comm, (int)options->n_ranks, id, (int)options->rank, &config);
    return result == NCCL_OK || result == NCCL_IN_PROGRESS ? RC_OK : fail(group, result, "group_open", err);
}

enum rc nccl_group_open(const struct group_options *options, struct process_group **result, struct err *err)
{
    struct process_group *group = (struct process_group *)mem_calloc(1, sizeof *group);
    if (!group)
        return err_set(err, RC_MEMORY, "group_open: out of memory");
    enum rc rc = find_functions(options->nccl, &group->call, err);
    if (!rc)
        rc = group->primary.take(options->device, err);
    if (!rc) {
        primary_scope scope(group->primary);
        rc = start(group, options, err);
    }
    if (rc)
        nccl_group_close(group);
    else
        *result = group;
    return rc;
}

/* Short against a broadcast of milliseconds, and long enough to leave the processor to other threads. */
static void rest(void)
{
    const struct timespec time = {0, 20000};
    nanosleep(&time, NULL);
}

enum rc nccl_group_settle(struct process_group *group, double seconds, bool *is_done, struct err *err)
{
    enum rc rc = check_alive(group, "group_settle", err);
    if (rc)
        return rc;
    primary_scope scope(group->primary);
    double end = seconds_now() + seconds;
    int state = NCCL_IN_PROGRESS;
    *is_done = false;
    for (;;) {
        int result = group->call.async_error(group->comm, &state);
        if (result || (state != NCCL_OK && state != NCCL_IN_PROGRESS))
            return fail(group, result ? result : state, "group_settle", err);
        if (state == NCCL_OK)
            break;
        if (seconds_now() >= end)
            return RC_OK;
        rest();
    }
    for (struct group_slot &slot : group->slots) {
        if (!slot.is_unrecorded)
            continue;
        cudaError_t code = cudaEventRecord(slot.done, group->stream);
        if (code != cudaSuccess)
            return fail_cuda(group, code, "group_settle", err);
        slot.is_unrecorded = false;
    }
    *is_done = true;
    return RC_OK;
}

enum rc nccl_group_buffer(struct process_group *group, uint32_t slot, size_t size_bytes, void **memory, struct err *err)
{
    primary_scope scope(group->primary);
    struct group_slot *s = &group->slots[slot];
    if (s->size_bytes < size_bytes) {
        cudaFree(s->memory); /* broadcasts into it have ended */
        s->memory = NULL;
        s->size_bytes = 0;
        cudaError_t code = cudaMalloc(&s->memory, size_bytes);
        if (code == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            size_t n_free = 0, n_total = 0;
            cudaMemGetInfo(&n_free, &n_total);
            err_set(err, RC_DEVICE_MEMORY,
                    "CUDA: wanted %zu bytes for a buffer of a weight group, %zu of %zu are free; lower buffer_bytes, or free "
                    "the KV pool during the update: sleep(tags=[\"kv_cache\"])",
                    size_bytes, n_free, n_total);
            if (err) {
                err->code = (int64_t)size_bytes;
                err->free_bytes = (int64_t)n_free;
            }
            return RC_DEVICE_MEMORY;
        }
        if (code != cudaSuccess)
            return cuda_fail(err, code, "group_buffer");
        s->size_bytes = size_bytes;
    }
    *memory = s->memory;
    return RC_OK;
}

/* Checks the result of a call. group_settle records its event once the call is enqueued. */
static enum rc called(struct process_group *group, uint32_t slot, int result, const char *operation, struct err *err)
{
    if (result != NCCL_OK && result != NCCL_IN_PROGRESS)
        return fail(group, result, operation, err);
    group->slots[slot].is_unrecorded = true;
    return RC_OK;
}

enum rc nccl_group_greet(struct process_group *group, struct err *err)
{
    void *one = NULL;
    enum rc rc = check_alive(group, "group_greet", err);
    if (!rc)
        rc = nccl_group_buffer(group, 0, sizeof(float), &one, err);
    if (rc)
        return rc;
    primary_scope scope(group->primary);
    cudaError_t code = cudaMemsetAsync(one, 0, sizeof(float), group->stream);
    if (code != cudaSuccess)
        return fail_cuda(group, code, "group_greet", err);
    return called(group, 0, group->call.all_reduce(one, one, 1, NCCL_FLOAT32, NCCL_SUM, group->comm, group->stream),
                  "group_greet", err);
}

enum rc nccl_group_broadcast(struct process_group *group, uint32_t slot, void *memory, size_t size_bytes, struct err *err)
{
    enum rc rc = check_alive(group, "group_broadcast", err);
    if (rc)
        return rc;
    primary_scope scope(group->primary);
    return called(group, slot, group->call.broadcast(memory, memory, size_bytes, NCCL_UINT8, 0, group->comm, group->stream),
                  "group_broadcast", err);
}

enum rc nccl_group_wait(struct process_group *group, uint32_t slot, double seconds, bool *is_done, struct err *err)
{
    enum rc rc = check_alive(group, "group_wait", err);
    if (rc)
        return rc;
    primary_scope scope(group->primary);
    double end = seconds_now() + seconds;
    cudaError_t code;
    while ((code = cudaEventQuery(group->slots[slot].done)) == cudaErrorNotReady) {
        if (seconds_now() >= end)
            break;
        rest();
    }
    if (code == cudaErrorNotReady)
        cudaGetLastError(); /* no error */
    int state = NCCL_OK, result = group->call.async_error(group->comm, &state);
    if (result || state != NCCL_OK)
        return fail(group, result ? result : state, "group_wait", err);
    if (code != cudaSuccess && code != cudaErrorNotReady)
        return fail_cuda(group, code, "group_wait", err);
    *is_done = code == cudaSuccess;
    return RC_OK;
}

enum rc nccl_group_copy(struct process_group *group, uint32_t slot, const void *memory, size_t size_bytes, void **copy,
                        struct err *err)
{
    enum rc rc = nccl_group_buffer(group, slot, size_bytes, copy, err);
    if (rc)
        return rc;
    primary_scope scope(group->primary);
    cudaError_t code = cudaMemcpyAsync(*copy, memory, size_bytes, cudaMemcpyDeviceToDevice, cudaStreamPerThread);
    if (code == cudaSuccess)
        code = cudaStreamSynchronize(cudaStreamPerThread);
    return code == cudaSuccess ? RC_OK : fail_cuda(group, code, "group_copy", err);
}
