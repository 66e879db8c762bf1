/* Copies a batch to the device, and captures a step's launches in graphs.
 * begin: the host's arrays follow each other in pinned memory, and one kernel reads them in place. Thread i reads element i of
 * every array, so all reads are in flight at once, while the step before ends. Tables persist on the device; only changed
 * entries are copied, as pairs (entry, page). Bound by the latency of one read over PCIe, 1 to 2 us, and of one more kernel.
 * That kernel lets no later kernel begin before its end: a step's kernels may read the batch before their wait. */
#include "../core/launch.cuh"

#include <string.h>

#define THREADS 256u
#define MAX_PAIRS 32768u /* table entries that one kernel brings; more take more kernels */

/* The arrays in pinned memory, in this order: token ids, positions, row_seq, logits_rows, seq_first_row, pairs. The slots of
 * adapters follow at 5 * max_rows + 1 + 2 * MAX_PAIRS. */
struct staged_batch {
    const int32_t *from;
    const int32_t *sampled; /* of the step before */
    uint32_t n_rows, n_all, n_pad, n_seqs, n_logits_rows, n_pairs, pad_row_seq;
    struct batch_arrays to;
};

size_t cuda_begun_values(const struct backend_options *options)
{
    return (size_t)6 * options->max_rows + 1 + 2 * MAX_PAIRS;
}

static __global__ void __launch_bounds__(THREADS) begin_scatter(const struct staged_batch b)
{
    uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    const int32_t *positions = b.from + b.n_rows, *row_seq = positions + b.n_rows, *logits_rows = row_seq + b.n_rows,
                  *seq_first_row = logits_rows + b.n_logits_rows, *pairs = seq_first_row + b.n_seqs + 1;
    int32_t id = 0, position = 0, seq = (int32_t)b.pad_row_seq, wanted = (int32_t)i, first_row = (int32_t)i;
    int32_t entry = 0, page = 0;
    if (i < b.n_rows) {
        id = b.from[i];
        position = positions[i];
        seq = row_seq[i];
    }
    if (i < b.n_logits_rows)
        wanted = logits_rows[i];
    if (b.n_rows && i <= b.n_seqs)
        first_row = seq_first_row[i];
    if (i < b.n_pairs) {
        entry = pairs[2 * i];
        page = pairs[2 * i + 1];
    }
    wait_for_input();
    if (i < b.n_all) {
        b.to.token_ids[i] = id < 0 ? b.sampled[-1 - id] : id;
        b.to.positions[i] = position;
        b.to.row_seq[i] = seq;
    }
    if (i < b.n_logits_rows + b.n_pad)
        b.to.logits_rows[i] = wanted;
    if (b.n_all && i <= b.n_seqs + b.n_pad)
        b.to.seq_first_row[i] = first_row;
    if (i < b.n_pairs)
        b.to.tables[entry] = page;
    __threadfence(); /* before the blocks of the next kernel begin, which do so when these have ended */
}

static int32_t *put(int32_t *at, const int32_t *values, uint32_t n)
{
    if (n)
        memcpy(at, values, n * sizeof *at);
    return at + n;
}

static enum rc scatter(struct cuda *cuda, const struct staged_batch *b, struct err *err)
{
    uint32_t n = b->n_all > b->n_pairs ? b->n_all : b->n_pairs;
    launch(cuda, begin_scatter, ceil_div(n + 1, THREADS), THREADS, 0, *b);
    return launched(err, "begin");
}

/* Brings the pairs gathered so far and makes room for more. */
static enum rc flush_pairs(struct cuda *cuda, const int32_t *pairs, uint32_t n, int32_t *tables, struct err *err)
{
    struct staged_batch b = {};
    b.from = pairs - 1; /* no rows, and one value of seq_first_row before the pairs */
    b.n_pairs = n;
    b.to.tables = tables;
    enum rc rc = scatter(cuda, &b, err);
    cudaError_t code = rc ? cudaSuccess : cudaStreamSynchronize(cuda->stream);
    return code == cudaSuccess ? rc : cuda_fail(err, code, "begin");
}

/* from: the slot's pinned memory, which has the wanted rows already. */
static enum rc begin_adapters(struct cuda *cuda, const struct begin_args *args, int32_t *from, struct err *err)
{
    int32_t *slots = from + (size_t)5 * cuda->options.max_rows + 1 + 2 * MAX_PAIRS;
    if (args->row_adapters)
        put(slots, args->row_adapters, args->n_rows);
    return cuda_lora_begin(cuda, args->row_adapters ? slots : NULL, from + (size_t)3 * args->n_rows, args->n_rows,
                           args->n_logits_rows, args->n_pad_rows, err);
}

enum rc cuda_begin(void *ctx, const struct begin_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    uint32_t n_all = args->n_rows + args->n_pad_rows;
    if (n_all > cuda->options.max_rows || args->n_seqs > args->n_rows || args->n_logits_rows > args->n_rows)
        return err_set(err, RC_INTERNAL, "begin: wanted at most %u rows, have %u with %u sequences", cuda->options.max_rows,
                       n_all, args->n_seqs);
    int32_t *from = cuda->begun + (args->slot & 1) * cuda->begun_values, *at = from;
    at = put(at, args->token_ids, args->n_rows);
    at = put(at, args->positions, args->n_rows);
    at = put(at, args->row_seq, args->n_rows);
    at = put(at, args->logits_rows, args->n_logits_rows);
    at = put(at, args->seq_first_row, args->n_seqs + 1);
    uint32_t n_pairs = 0;
    for (uint32_t r = 0; r < args->n_runs; r++)
        for (uint32_t entry = args->runs[r].first, end = entry + args->runs[r].count; entry < end; entry++) {
            if (n_pairs == MAX_PAIRS) {
                enum rc rc = flush_pairs(cuda, at, n_pairs, args->to.tables, err);
                if (rc)
                    return rc;
                n_pairs = 0;
            }
            at[2 * n_pairs] = (int32_t)entry;
            at[2 * n_pairs++ + 1] = args->tables[entry];
        }
    struct staged_batch b = {};
    b.from = from;
    b.sampled = cuda->sampled + ((args->slot & 1) ^ 1) * cuda->max_tasks;
    b.n_rows = args->n_rows;
    b.n_all = n_all;
    b.n_pad = args->n_pad_rows;
    b.n_seqs = args->n_seqs;
    b.n_logits_rows = args->n_logits_rows;
    b.n_pairs = n_pairs;
    b.pad_row_seq = args->pad_row_seq;
    b.to = args->to;
    enum rc rc = scatter(cuda, &b, err);
    return rc || !args->has_adapters ? rc : begin_adapters(cuda, args, from, err);
}

/* ---- graphs -------------------------------------------------------------------------------------------------------------- */

enum rc cuda_graph_begin(void *ctx, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaError_t code = cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "graph_begin");
}

enum rc cuda_graph_end(void *ctx, void **graph, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaGraph_t recorded = NULL;
    cudaGraphExec_t ready = NULL;
    *graph = NULL;
    cudaError_t code = cudaStreamEndCapture(cuda->stream, &recorded);
    if (code == cudaSuccess)
        code = cudaGraphInstantiate(&ready, recorded, 0);
    if (code == cudaSuccess)
        code = cudaGraphUpload(ready, cuda->stream);
    if (recorded)
        cudaGraphDestroy(recorded);
    if (code != cudaSuccess) {
        cudaGetLastError();
        if (ready)
            cudaGraphExecDestroy(ready);
        return cuda_fail(err, code, "graph_end");
    }
    *graph = ready;
    return RC_OK;
}

enum rc cuda_graph_launch(void *ctx, void *graph, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaError_t code = cudaGraphLaunch((cudaGraphExec_t)graph, cuda->stream);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "graph_launch");
}

void cuda_graph_destroy(void *ctx, void *graph)
{
    device_scope scope(((struct cuda *)ctx)->device);
    if (graph)
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
}
