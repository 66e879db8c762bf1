/* comm.cu: the functions of struct comm that enqueue nothing: connecting ranks, sharing memory, failures. A rank is a context
 * with a stream. Ranks on different devices store into each other's memory over NVLink or PCIe (peer access); ranks on one
 * device, as tests have them, into other buffers of the same device. Shared memory comes from buffer_create, which calls
 * cudaMalloc: peer access covers it. */
#include "../linear/linear.cuh"
#include "gather.cuh"
#include "link.cuh"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define LEAST_SHARED_ROWS 32u /* the sampler takes fewer rows at once: its time is that of one */

static struct cuda_team *teams; /* all open ones */
static pthread_mutex_t teams_lock = PTHREAD_MUTEX_INITIALIZER;

uint32_t cuda_n_ranks(const struct cuda *cuda)
{
    return cuda->team && !cuda->team->link ? cuda->team->n_ranks : 0;
}

/* ---- devices ------------------------------------------------------------------------------------------------------------- */

static enum rc check_kind(const struct cuda *first, const struct cuda *other, struct err *err)
{
    cudaDeviceProp a, b;
    cudaError_t code = cudaGetDeviceProperties(&a, first->device);
    code = code ? code : cudaGetDeviceProperties(&b, other->device);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "ranks");
    if (!strcmp(a.name, b.name) && a.major == b.major && a.minor == b.minor)
        return RC_OK;
    err_set(err, RC_CONFIG,
            "device_ids: wanted devices of one kind, have cuda:%d (%.80s, compute capability %d.%d) and cuda:%d (%.80s, "
            "%d.%d); choose devices of one name", first->device, a.name, a.major, a.minor, other->device, b.name, b.major,
            b.minor);
    err_name(err, "device_ids", NULL);
    return RC_CONFIG;
}

/* Lets kernels on `from` access the memory of `to`. */
static enum rc enable_peer(const struct cuda *from, const struct cuda *to, struct err *err)
{
    device_scope scope(from->device);
    int can_access = 0;
    if (from->device == to->device)
        return RC_OK;
    cudaError_t code = cudaDeviceCanAccessPeer(&can_access, from->device, to->device);
    if (code == cudaSuccess && !can_access)
        return err_set(err, RC_UNSUPPORTED,
                       "device_ids: cuda:%d has no access to the memory of cuda:%d over NVLink or PCIe; choose other devices, "
                       "or lower tensor_parallel_size", from->device, to->device);
    code = code ? code : cudaDeviceEnablePeerAccess(to->device, 0);
    if (code == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        code = cudaSuccess;
    }
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "ranks");
}

static enum rc check_ranks(const struct cuda_team *team, struct err *err)
{
    const struct cuda *first = team->ranks[0];
    enum rc rc = RC_OK;
    for (uint32_t r = 1; r < team->n_ranks && !rc; r++) {
        const struct cuda *other = team->ranks[r];
        if (other->dtype != first->dtype || other->max_tasks != first->max_tasks)
            return err_set(err, RC_INTERNAL, "ranks: wanted contexts with the same options");
        rc = check_kind(first, other, err);
    }
    for (uint32_t r = 0; r < team->n_ranks && !rc; r++)
        for (uint32_t other = 0; other < team->n_ranks && !rc; other++)
            rc = enable_peer(team->ranks[r], team->ranks[other], err);
    return rc;
}

static_assert(MAX_MIRRORS == MAX_RANKS - 1, "a linear stores to all other ranks");

uint32_t cuda_mirrors(const struct cuda *cuda, ptrdiff_t mirrors[MAX_MIRRORS])
{
    const struct cuda_team *team = cuda->team;
    uint32_t n = 0;
    for (uint32_t i = 1; i < team->n_ranks; i++) { /* from this rank on: not all ranks store to the same one at a time */
        const uint32_t r = (cuda->rank + i) % team->n_ranks;
        mirrors[n++] = team->memory[COMM_ARENA][r] - team->memory[COMM_ARENA][cuda->rank];
    }
    return n;
}

/* ---- teams --------------------------------------------------------------------------------------------------------------- */

static bool has_device(const struct cuda_team *team, int device)
{
    for (uint32_t r = 0; r < team->n_ranks; r++)
        if (team->ranks[r]->device == device)
            return true;
    return false;
}

static bool has_company(const struct cuda_team *team)
{
    for (const struct cuda_team *other = teams; other; other = other->next)
        for (uint32_t r = 0; other != team && r < team->n_ranks; r++)
            if (has_device(other, team->ranks[r]->device))
                return true;
    return team->shares_device;
}

/* Tells the kernels of all teams whether they may start their successors before they have met. With other ranks on a device
 * they must not: the successor's blocks, which wait for the meeting, could take the room that another rank's kernel needs to
 * come to it. The caller holds the lock. */
static cudaError_t announce_company(void)
{
    cudaError_t code = cudaSuccess;
    for (struct cuda_team *team = teams; team; team = team->next) {
        const uint32_t is_alone = !has_company(team);
        if (is_alone == team->is_alone)
            continue;
        team->is_alone = is_alone;
        for (uint32_t r = 0; r < team->n_ranks && code == cudaSuccess; r++) {
            device_scope scope(team->ranks[r]->device);
            code = cudaMemcpy(&team->states[r]->is_alone, &is_alone, sizeof is_alone, cudaMemcpyHostToDevice);
        }
    }
    return code;
}

static cudaError_t join_teams(struct cuda_team *team)
{
    pthread_mutex_lock(&teams_lock);
    team->next = teams;
    teams = team;
    cudaError_t code = announce_company();
    pthread_mutex_unlock(&teams_lock);
    return code;
}

static void leave_teams(struct cuda_team *team)
{
    pthread_mutex_lock(&teams_lock);
    struct cuda_team **place = &teams;
    while (*place && *place != team)
        place = &(*place)->next;
    if (*place) {
        *place = team->next;
        announce_company();
    }
    pthread_mutex_unlock(&teams_lock);
}

static void team_close(struct cuda_team *team)
{
    leave_teams(team);
    link_close(team->link); /* ends kernels that wait for other processes */
    for (uint32_t r = 0; r < team->n_ranks; r++) {
        struct cuda *cuda = team->ranks[r];
        device_scope scope(cuda->device);
        cudaStreamSynchronize(cuda->stream);
    }
    for (uint32_t r = 0; r < team->n_ranks; r++) {
        struct cuda *cuda = team->ranks[r];
        cuda->team = NULL;
        cuda_give(cuda, team->states[r]);
        cuda_give(cuda, team->slots[r]);
        cuda_give(cuda, team->failures[r]);
        if (!r)
            cuda_give(cuda, team->aborted);
    }
    mem_free(team);
}

/* ---- struct comm --------------------------------------------------------------------------------------------------------- */

/* All counts and flags are `first`, as if so many meetings had been. */
static enum rc make_state(struct cuda_team *team, uint32_t rank, uint32_t first, struct err *err)
{
    struct cuda *cuda = team->ranks[rank];
    device_scope scope(cuda->device);
    struct rank_state initial = {};
    for (uint32_t block = 0; block < MEETING_BLOCKS; block++) {
        initial.met[block] = first;
        for (uint32_t r = 0; r < MAX_RANKS; r++)
            initial.flags[r][block] = first;
    }
    initial.step = first;
    enum rc rc = cuda_take(cuda, MEMORY_WORK, sizeof initial, &team->states[rank], err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, sizeof *team->slots[rank], &team->slots[rank], err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_PINNED, sizeof *team->failures[rank], &team->failures[rank], err);
    if (rc)
        return rc;
    memset(team->failures[rank], 0, sizeof *team->failures[rank]);
    cudaError_t code = cudaMemcpyAsync(team->states[rank], &initial, sizeof initial, cudaMemcpyHostToDevice, cuda->stream);
    for (uint32_t parity = 0; parity < 2; parity++) /* cleared slots have numbers of the other parity */
        code = code ? code : cudaMemsetAsync(team->slots[rank]->packets[parity], 1 - (int)parity,
                                             sizeof team->slots[rank]->packets[parity], cuda->stream);
    code = code ? code : cudaStreamSynchronize(cuda->stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "ranks");
}

static enum rc make_states(struct cuda_team *team, uint32_t first, struct err *err)
{
    enum rc rc = cuda_take(team->ranks[0], MEMORY_PINNED, sizeof *team->aborted, &team->aborted, err);
    if (!rc)
        *team->aborted = 0;
    for (uint32_t r = 0; r < team->n_ranks && !rc; r++)
        rc = make_state(team, r, first, err);
    if (rc)
        return rc;
    cudaError_t code = join_teams(team);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "ranks");
}

static enum rc comm_open(void *const *ctxs, uint32_t n_ranks, const struct comm_options *options, struct err *err)
{
    if (!(options->timeout_seconds > 0)) {
        err_set(err, RC_CONFIG, "step_timeout_s: wanted more than 0 seconds, have %g", options->timeout_seconds);
        err_name(err, "step_timeout_s", NULL);
        return RC_CONFIG;
    }
    if (!n_ranks || n_ranks > MAX_RANKS) {
        err_set(err, RC_CONFIG, "tensor_parallel_size: wanted at most %u ranks on CUDA devices, have %u", MAX_RANKS, n_ranks);
        err_name(err, "tensor_parallel_size", NULL);
        return RC_CONFIG;
    }
    for (uint32_t r = 0; r < n_ranks; r++)
        if (((const struct cuda *)ctxs[r])->team)
            return err_set(err, RC_INTERNAL, "ranks: context %u is connected to other ranks already", r);
    struct cuda_team *team = (struct cuda_team *)mem_calloc(1, sizeof *team);
    if (!team)
        return err_set(err, RC_MEMORY, "cuda: no memory for %u ranks", n_ranks);
    team->n_ranks = n_ranks;
    team->timeout_seconds = options->timeout_seconds;
    for (uint32_t r = 0; r < n_ranks; r++) {
        team->ranks[r] = (struct cuda *)ctxs[r];
        for (uint32_t other = 0; other < r; other++)
            team->shares_device |= team->ranks[r]->device == team->ranks[other]->device;
    }
    enum rc rc = check_ranks(team, err);
    rc = rc ? rc : make_states(team, options->first_meeting, err);
    rc = rc || !options->exchange ? rc : link_open(team, options, err);
    if (rc) {
        team_close(team);
        return rc;
    }
    for (uint32_t r = 0; r < n_ranks; r++) {
        team->ranks[r]->team = team;
        team->ranks[r]->rank = r;
    }
    return RC_OK;
}

static enum rc comm_share(void *const *ctxs, uint32_t n_ranks, uint32_t purpose, void *const *memory, size_t size_bytes,
                          struct err *err)
{
    struct cuda *first = (struct cuda *)ctxs[0];
    struct cuda_team *team = first->team;
    if (!team || purpose >= COMM_MEMORIES || n_ranks != team->n_ranks)
        return err_set(err, RC_INTERNAL, "share: wanted the contexts of open ranks, and a purpose below %u, have %u",
                       COMM_MEMORIES, purpose);
    for (uint32_t r = 0; r < n_ranks; r++)
        team->memory[purpose][r] = (char *)memory[r];
    team->size_bytes[purpose] = size_bytes;
    return link_share(team->link, size_bytes, err);
}

static enum rc comm_check(void *ctx, struct err *err)
{
    const struct cuda *cuda = (const struct cuda *)ctx;
    const struct cuda_team *team = cuda->team;
    enum rc rc = link_check(team->link, err);
    if (rc)
        return rc;
    const volatile struct rank_failure *failure = team->failures[cuda->rank];
    const uint32_t reason = failure->reason, source = failure->source, gather = failure->gather;
    char meeting[32] = "the start of the step";
    if (reason == WAIT_OK)
        return RC_OK;
    if (gather) /* a gather over a link has several meetings */
        snprintf(meeting, sizeof meeting, "%s %u", team->link ? "meeting" : "gather", gather);
    if (reason == WAIT_LATE && source == cuda->rank)
        err_set(err, RC_DEVICE, "rank %u (cuda:%d) did not get all values of %s within %g s (step_timeout_s)", source,
                cuda->device, meeting, team->timeout_seconds);
    else if (reason == WAIT_LATE)
        err_set(err, RC_DEVICE, "rank %u (cuda:%d) did not reach %s within %g s (step_timeout_s)", source,
                team->ranks[source]->device, meeting, team->timeout_seconds);
    else
        err_set(err, RC_DEVICE, "rank %u (cuda:%d) stopped at %s: the step was aborted", cuda->rank, cuda->device, meeting);
    err_name(err, gather ? "gather" : "meet", NULL);
    return RC_DEVICE;
}

static void comm_abort(void *const *ctxs, uint32_t n_ranks)
{
    const struct cuda_team *team = n_ranks ? ((const struct cuda *)ctxs[0])->team : NULL;
    if (!team)
        return;
    link_abort(team->link);
    __atomic_store_n(team->aborted, 1, __ATOMIC_RELEASE);
}

static void comm_close(void *const *ctxs, uint32_t n_ranks)
{
    struct cuda_team *team = n_ranks ? ((const struct cuda *)ctxs[0])->team : NULL;
    if (team)
        team_close(team);
}

const struct comm cuda_comm = {sizeof(struct comm), comm_open, comm_share, cuda_meet, cuda_gather, comm_check, comm_abort,
                               comm_close, true, MAX_RANKS, LEAST_SHARED_ROWS, cuda_linear_mirrors,
                               cuda_experts_mirror};
