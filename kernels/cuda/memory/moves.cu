/* Copies between the pool and pinned host memory, or from another pool, by the copy engines, beside the kernels. Each way has a
 * stream of its own, of the lowest priority. A call enqueues one copy for each run of neighbouring pages and slots; a page of
 * 2 MB takes 40 us at the 50 GB/s of a PCIe 5 link. A ring of events says which calls have ended; streams wait for events, the
 * host never does, unless a ring is full. */
#include "../core/driver.cuh"

#define CALLS_KEPT 256u

struct move_lane {
    cudaStream_t stream;
    cudaEvent_t begun[CALLS_KEPT], ended[CALLS_KEPT]; /* of call i % CALLS_KEPT */
    uint64_t number[CALLS_KEPT], bytes[CALLS_KEPT];
    bool is_lent[CALLS_KEPT];                         /* from another pool */
    uint64_t n_enqueued, n_ended;                     /* calls with moves; only grow */
    uint64_t last_number;
};

struct move_lanes {
    struct move_lane lanes[2]; /* by way */
    cudaEvent_t ready;         /* all operations enqueued before a call */
    struct move_state state;
};

/* Takes note of the oldest call's end. */
static cudaError_t end_call(struct move_lanes *moves, uint32_t way)
{
    struct move_lane *lane = &moves->lanes[way];
    const uint32_t at = lane->n_ended % CALLS_KEPT;
    float ms = 0;
    cudaError_t code = cudaEventElapsedTime(&ms, lane->begun[at], lane->ended[at]);
    *(lane->is_lent[at] ? &moves->state.source_bytes : &moves->state.bytes[way]) += lane->bytes[at];
    *(lane->is_lent[at] ? &moves->state.source_seconds : &moves->state.seconds[way]) += ms * 1e-3;
    lane->n_ended++;
    return code;
}

/* Takes note of all calls that have ended. */
static cudaError_t look(struct move_lanes *moves, uint32_t way)
{
    struct move_lane *lane = &moves->lanes[way];
    cudaError_t code = cudaSuccess;
    while (lane->n_ended < lane->n_enqueued && code == cudaSuccess) {
        code = cudaEventQuery(lane->ended[lane->n_ended % CALLS_KEPT]);
        if (code == cudaSuccess)
            code = end_call(moves, way);
    }
    if (code == cudaErrorNotReady) {
        cudaGetLastError();
        code = cudaSuccess;
    }
    const bool is_idle = lane->n_ended == lane->n_enqueued;
    moves->state.ended[way] = is_idle ? lane->last_number : lane->number[lane->n_ended % CALLS_KEPT] - 1;
    return code;
}

/* The stream waits for the moves of a way up to a number. Later ones of the same stream would do, too. */
static cudaError_t wait_for_moves(cudaStream_t stream, const struct move_lane *lane, uint64_t number)
{
    uint64_t call = lane->n_ended;
    if (!number || call == lane->n_enqueued)
        return cudaSuccess;
    while (call + 1 < lane->n_enqueued && lane->number[call % CALLS_KEPT] < number)
        call++;
    return cudaStreamWaitEvent(stream, lane->ended[call % CALLS_KEPT], 0);
}

/* Copies [n] neighbouring pages, whose places on the other side are slot_bytes apart. */
static cudaError_t copy_run(cudaStream_t stream, uint32_t way, char *pages, char *slots, uint32_t n, size_t page_bytes,
                            size_t slot_bytes)
{
    char *to = way == MOVE_OUT ? slots : pages, *from = way == MOVE_OUT ? pages : slots;
    if (slot_bytes == page_bytes)
        return cudaMemcpyAsync(to, from, n * page_bytes, cudaMemcpyDefault, stream);
    return cudaMemcpy2DAsync(to, way == MOVE_OUT ? slot_bytes : page_bytes, from, way == MOVE_OUT ? page_bytes : slot_bytes,
                             page_bytes, n, cudaMemcpyDefault, stream);
}

static cudaError_t copy_runs(const struct move_lane *lane, uint32_t way, const struct move_args *args)
{
    const struct move_list *list = &args->lists[way];
    const bool is_lent = way == MOVE_IN && args->source;
    char *base = is_lent ? (char *)args->source : (char *)args->host;
    const size_t slot_bytes = is_lent ? args->page_bytes : args->slot_bytes;
    cudaError_t code = cudaSuccess;
    for (uint32_t first = 0, end; first < list->n_moves && code == cudaSuccess; first = end) {
        const struct page_move *move = &list->moves[first];
        for (end = first + 1; end < list->n_moves && list->moves[end].page == move->page + (int32_t)(end - first) &&
                              list->moves[end].slot == move->slot + (end - first);)
            end++;
        code = copy_run(lane->stream, way, (char *)args->pool + (size_t)move->page * args->page_bytes,
                        base + (size_t)move->slot * slot_bytes, end - first, args->page_bytes, slot_bytes);
    }
    return code;
}

static cudaError_t enqueue(struct move_lanes *moves, uint32_t way, const struct move_args *args)
{
    struct move_lane *lane = &moves->lanes[way];
    const struct move_list *list = &args->lists[way];
    cudaError_t code = cudaSuccess;
    lane->last_number = list->number;
    if (!list->n_moves)
        return code;
    if (lane->n_enqueued - lane->n_ended == CALLS_KEPT) {
        code = cudaEventSynchronize(lane->ended[lane->n_ended % CALLS_KEPT]);
        if (code == cudaSuccess)
            code = end_call(moves, way);
    }
    const uint32_t at = lane->n_enqueued % CALLS_KEPT;
    if (code == cudaSuccess)
        code = cudaStreamWaitEvent(lane->stream, moves->ready, 0);
    if (code == cudaSuccess)
        code = wait_for_moves(lane->stream, &moves->lanes[!way], list->after);
    if (code == cudaSuccess)
        code = cudaEventRecord(lane->begun[at], lane->stream);
    if (code == cudaSuccess)
        code = copy_runs(lane, way, args);
    if (code == cudaSuccess)
        code = cudaEventRecord(lane->ended[at], lane->stream);
    lane->number[at] = list->number;
    lane->bytes[at] = list->n_moves * args->page_bytes;
    lane->is_lent[at] = way == MOVE_IN && args->source;
    lane->n_enqueued += code == cudaSuccess;
    return code;
}

static enum rc move_pages(void *ctx, const struct move_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    struct move_lanes *moves = cuda->moves;
    device_scope scope(cuda->device);
    cudaError_t code = cudaEventRecord(moves->ready, cuda->stream);
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN && code == cudaSuccess; way++)
        code = enqueue(moves, way, args);
    for (uint32_t way = MOVE_OUT; way <= MOVE_IN && code == cudaSuccess; way++)
        code = wait_for_moves(cuda->stream, &moves->lanes[way], args->awaited[way]);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "move");
}

static enum rc poll_moves(void *ctx, struct move_state *state, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaError_t code = look(cuda->moves, MOVE_OUT);
    if (code == cudaSuccess)
        code = look(cuda->moves, MOVE_IN);
    *state = cuda->moves->state;
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "move");
}

static void lane_close(struct move_lane *lane)
{
    if (lane->stream) {
        cudaStreamSynchronize(lane->stream);
        cudaStreamDestroy(lane->stream);
    }
    for (uint32_t i = 0; i < CALLS_KEPT; i++) {
        if (lane->begun[i])
            cudaEventDestroy(lane->begun[i]);
        if (lane->ended[i])
            cudaEventDestroy(lane->ended[i]);
    }
}

static cudaError_t lane_open(struct move_lane *lane)
{
    int lowest = 0, highest = 0;
    cudaError_t code = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    if (code == cudaSuccess)
        code = cudaStreamCreateWithPriority(&lane->stream, cudaStreamNonBlocking, lowest);
    for (uint32_t i = 0; i < CALLS_KEPT && code == cudaSuccess; i++) {
        code = cudaEventCreate(&lane->begun[i]);
        if (code == cudaSuccess)
            code = cudaEventCreate(&lane->ended[i]);
    }
    return code;
}

static void destroy(void *ctx, void *host, size_t size_bytes)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    (void)size_bytes;
    if (!cuda->moves)
        return;
    lane_close(&cuda->moves->lanes[MOVE_OUT]);
    lane_close(&cuda->moves->lanes[MOVE_IN]);
    if (cuda->moves->ready)
        cudaEventDestroy(cuda->moves->ready);
    mem_free(cuda->moves);
    cuda->moves = NULL;
    cuda_give(cuda, host);
}

static enum rc create(void *ctx, size_t size_bytes, void **host, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    *host = NULL;
    cuda->moves = (struct move_lanes *)mem_calloc(1, sizeof *cuda->moves);
    if (!cuda->moves)
        return err_set(err, RC_MEMORY, "cuda: no memory for the streams of the host cache");
    cudaError_t code = cudaEventCreateWithFlags(&cuda->moves->ready, cudaEventDisableTiming);
    if (code == cudaSuccess)
        code = lane_open(&cuda->moves->lanes[MOVE_OUT]);
    if (code == cudaSuccess)
        code = lane_open(&cuda->moves->lanes[MOVE_IN]);
    enum rc rc = code == cudaSuccess ? RC_OK : cuda_fail(err, code, "host cache");
    if (!rc && size_bytes)
        rc = cuda_take(cuda, MEMORY_PINNED, size_bytes, host, err);
    if (rc)
        destroy(cuda, NULL, 0);
    return rc;
}

const struct moves cuda_moves = {sizeof(struct moves), create, destroy, move_pages, poll_moves, cuda_lend, cuda_share};
