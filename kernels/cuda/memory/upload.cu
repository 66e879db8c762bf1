/* Copies rows of weights to the device: a few threads, each with a stream and two pinned buffers, take chunks in turn; while
 * one buffer is copied to the device, the other is filled, from memory or by a read of the file. Bound by the link (PCIe 5
 * x16: 55 GB/s) when the file is in memory; one thread alone moves some 10 GB/s of it. Small tensors are copied plainly.
 * Chunks of computed rows are small, because one thread computes 0.005 (Q4_K) to 0.5 GB/s of them. Threads and buffers are
 * made for the first large tensor and kept for later ones. */
#include "../core/fp8_rows.cuh"

#include <pthread.h>
#include <sched.h>
#include <string.h>

#define MAX_LANES 8u
#define CHUNK_BYTES ((size_t)4 << 20)
#define PLAIN_BYTES ((size_t)8 << 20) /* up to here a tensor is not worth the threads */
#define COMPUTED_BYTES ((size_t)64 << 10) /* of computed rows at once; those of FP8 take a thread 0.5 ms */

struct lane {
    cudaStream_t stream;
    cudaEvent_t copied[2];
    char *pinned[2];
};
struct upload_lanes {
    uint32_t n;
    struct lane lanes[MAX_LANES];
};

struct upload_job {
    struct cuda *cuda;
    char *target;
    const char *rows;                        /* NULL: they come from `source` */
    const struct row_source *source;
    uint32_t source_row;                     /* the first of them */
    size_t row_bytes, file_row_bytes;
    uint32_t fp8_cols;                       /* of rows that are split; 0: rows are padded with zeros */
    uint32_t n_rows, rows_at_once, next_row; /* next_row and what follows: shared */
    int code;
    int has_failed;                          /* a read has; the thread that sets it fills err and rc */
    struct err *err;
    enum rc rc;
};
struct upload_worker {
    struct upload_job *job;
    struct lane *lane;
    pthread_t thread;
};

static uint32_t lanes_wanted(void)
{
    cpu_set_t allowed;
    uint32_t n = sched_getaffinity(0, sizeof allowed, &allowed) ? 1 : (uint32_t)CPU_COUNT(&allowed) / 2;
    return n < 1 ? 1 : n < MAX_LANES ? n : MAX_LANES;
}

void cuda_uploads_close(struct cuda *cuda)
{
    struct upload_lanes *all = cuda->uploads;
    for (uint32_t i = 0; all && i < all->n; i++)
        for (int b = 0; b < 2; b++) {
            if (all->lanes[i].copied[b])
                cudaEventDestroy(all->lanes[i].copied[b]);
            if (b && all->lanes[i].stream)
                cudaStreamDestroy(all->lanes[i].stream);
        }
    mem_free(all);
    cuda->uploads = NULL;
}

static enum rc open_lanes(struct cuda *cuda, struct err *err)
{
    struct upload_lanes *all = (struct upload_lanes *)mem_calloc(1, sizeof *all);
    if (!all)
        return err_set(err, RC_MEMORY, "cuda: out of memory");
    cuda->uploads = all;
    enum rc rc = RC_OK;
    for (uint32_t wanted = lanes_wanted(); all->n < wanted && !rc;) {
        struct lane *lane = &all->lanes[all->n++];
        cudaError_t code = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
        for (int b = 0; b < 2 && !rc; b++) {
            if (code == cudaSuccess)
                code = cudaEventCreateWithFlags(&lane->copied[b], cudaEventDisableTiming | cudaEventBlockingSync);
            rc = code == cudaSuccess ? cuda_take(cuda, MEMORY_PINNED, CHUNK_BYTES, &lane->pinned[b], err)
                                     : cuda_fail(err, code, "matrix_write");
        }
    }
    if (rc)
        cuda_uploads_close(cuda);
    return rc;
}

/* Rows as the file has them, from memory or read in place. False once a read has failed. */
static bool fetch_rows(struct upload_job *job, uint32_t first, uint32_t n, char *to)
{
    struct err err;
    if (job->rows) {
        memcpy(to, job->rows + (size_t)first * job->file_row_bytes, n * job->file_row_bytes);
        return true;
    }
    enum rc rc = job->source->read(job->source->ctx, job->source_row + first, n, to, &err);
    if (rc && !__atomic_exchange_n(&job->has_failed, 1, __ATOMIC_ACQ_REL)) {
        job->rc = rc;
        if (job->err)
            *job->err = err;
    }
    return !rc;
}

/* Rows as the device has them. They are fetched to the buffer's end and moved forward one by one. row: room for one of FP8,
 * which is split even where it takes as many bytes as in the file: 32 scales fill the 128 bytes before the numbers. */
static bool fill_buffer(struct upload_job *job, uint32_t first, uint32_t n, char *buffer, char *row)
{
    size_t padding = job->row_bytes - job->file_row_bytes;
    char *rows = buffer + n * padding;
    if (__atomic_load_n(&job->has_failed, __ATOMIC_RELAXED) || !fetch_rows(job, first, n, rows))
        return false;
    for (uint32_t r = 0; (padding || job->fp8_cols) && r < n; r++, buffer += job->row_bytes, rows += job->file_row_bytes) {
        if (job->fp8_cols) {
            memcpy(row, rows, job->file_row_bytes);
            fp8_split(buffer, row, job->fp8_cols);
            continue;
        }
        memmove(buffer, rows, job->file_row_bytes);
        memset(buffer + job->file_row_bytes, 0, padding);
    }
    return true;
}

static void *work(void *argument)
{
    struct upload_worker *worker = (struct upload_worker *)argument;
    struct upload_job *job = worker->job;
    struct lane *lane = worker->lane;
    device_scope scope(job->cuda->device);
    char *row = job->fp8_cols ? (char *)mem_alloc(job->file_row_bytes) : NULL;
    cudaError_t code = job->fp8_cols && !row ? cudaErrorMemoryAllocation : cudaSuccess;
    for (uint32_t turn = 0; code == cudaSuccess; turn++) {
        uint32_t first = __atomic_fetch_add(&job->next_row, job->rows_at_once, __ATOMIC_RELAXED);
        if (first >= job->n_rows)
            break;
        uint32_t n = job->n_rows - first < job->rows_at_once ? job->n_rows - first : job->rows_at_once;
        if (turn >= 2)
            code = cudaEventSynchronize(lane->copied[turn % 2]);
        if (code != cudaSuccess)
            break;
        if (!fill_buffer(job, first, n, lane->pinned[turn % 2], row))
            break;
        code = cudaMemcpyAsync(job->target + (size_t)first * job->row_bytes, lane->pinned[turn % 2],
                               (size_t)n * job->row_bytes, cudaMemcpyHostToDevice, lane->stream);
        if (code == cudaSuccess)
            code = cudaEventRecord(lane->copied[turn % 2], lane->stream);
    }
    mem_free(row);
    cudaError_t last = cudaStreamSynchronize(lane->stream);
    if (code != cudaSuccess || last != cudaSuccess)
        __atomic_store_n(&job->code, code != cudaSuccess ? code : last, __ATOMIC_RELAXED);
    return NULL;
}

static enum rc upload_in_lanes(struct upload_job *job, struct err *err)
{
    enum rc rc = job->cuda->uploads ? RC_OK : open_lanes(job->cuda, err);
    if (rc)
        return rc;
    struct upload_worker workers[MAX_LANES];
    uint32_t n_started = 0;
    for (uint32_t i = 1; i < job->cuda->uploads->n; i++) {
        struct upload_worker *worker = &workers[n_started + 1];
        worker->job = job;
        worker->lane = &job->cuda->uploads->lanes[i];
        n_started += pthread_create(&worker->thread, NULL, work, worker) == 0; /* fewer threads do as well */
    }
    workers[0].job = job;
    workers[0].lane = &job->cuda->uploads->lanes[0];
    work(&workers[0]);
    for (uint32_t i = 1; i <= n_started; i++)
        pthread_join(workers[i].thread, NULL);
    if (job->code != cudaSuccess)
        return cuda_fail(err, (cudaError_t)job->code, "matrix_write");
    return job->rc;
}

static bool is_plain(size_t row_bytes, size_t file_row_bytes, uint32_t n_rows, bool is_computed)
{
    return n_rows * file_row_bytes <= (is_computed ? COMPUTED_BYTES : PLAIN_BYTES) || row_bytes > CHUNK_BYTES;
}

static struct upload_job job_of(struct cuda *cuda, char *target, size_t row_bytes, size_t file_row_bytes, uint32_t n_rows,
                                uint32_t fp8_cols, struct err *err)
{
    struct upload_job job = {};
    job.cuda = cuda;
    job.target = target;
    job.row_bytes = row_bytes;
    job.file_row_bytes = file_row_bytes;
    job.fp8_cols = fp8_cols;
    job.n_rows = n_rows;
    job.rows_at_once = (uint32_t)(CHUNK_BYTES / row_bytes);
    job.err = err;
    return job;
}

/* Few rows of FP8, without threads: they are split in memory of the host. */
static enum rc upload_split(struct cuda *cuda, char *target, size_t row_bytes, const char *rows, size_t file_row_bytes,
                            uint32_t n_rows, uint32_t fp8_cols, struct err *err)
{
    char *split = (char *)mem_alloc(n_rows * row_bytes);
    if (!split)
        return err_set(err, RC_MEMORY, "matrix_write: no memory for %zu bytes", n_rows * row_bytes);
    for (uint32_t r = 0; r < n_rows; r++)
        fp8_split(split + r * row_bytes, rows + r * file_row_bytes, fp8_cols);
    enum rc rc = cuda_upload_rows(cuda, target, row_bytes, split, row_bytes, n_rows, err);
    mem_free(split);
    return rc;
}

enum rc cuda_upload_rows(struct cuda *cuda, char *target, size_t row_bytes, const void *rows, size_t file_row_bytes,
                         uint32_t n_rows, struct err *err, uint32_t fp8_cols)
{
    struct upload_job job = job_of(cuda, target, row_bytes, file_row_bytes, n_rows, fp8_cols, err);
    bool plain = is_plain(row_bytes, file_row_bytes, n_rows, false);
    cudaError_t code = cudaSuccess;
    job.rows = (const char *)rows;
    if (plain && fp8_cols)
        return upload_split(cuda, target, row_bytes, job.rows, file_row_bytes, n_rows, fp8_cols, err);
    if (plain && row_bytes == file_row_bytes)
        code = cudaMemcpyAsync(target, rows, n_rows * row_bytes, cudaMemcpyHostToDevice, cuda->stream);
    else if (plain)
        code = cudaMemcpy2DAsync(target, row_bytes, rows, file_row_bytes, file_row_bytes, n_rows, cudaMemcpyHostToDevice,
                                 cuda->stream);
    if (code == cudaSuccess) /* of the plain copy, or of the work that zeroed the target */
        code = cudaStreamSynchronize(cuda->stream);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "matrix_write");
    return plain ? RC_OK : upload_in_lanes(&job, err);
}

enum rc cuda_upload_source(struct cuda *cuda, char *target, size_t row_bytes, const struct row_source *source,
                           uint32_t source_row, size_t file_row_bytes, uint32_t n_rows, struct err *err, uint32_t fp8_cols)
{
    if (!is_plain(row_bytes, file_row_bytes, n_rows, source->is_computed)) {
        struct upload_job job = job_of(cuda, target, row_bytes, file_row_bytes, n_rows, fp8_cols, err);
        cudaError_t code = cudaStreamSynchronize(cuda->stream); /* of the work that zeroed the target */
        job.source = source;
        job.source_row = source_row;
        if (source->is_computed)
            job.rows_at_once = row_bytes < COMPUTED_BYTES ? (uint32_t)(COMPUTED_BYTES / row_bytes) : 1;
        return code == cudaSuccess ? upload_in_lanes(&job, err) : cuda_fail(err, code, "matrix_load");
    }
    char *rows = (char *)mem_alloc(n_rows * file_row_bytes);
    if (!rows)
        return err_set(err, RC_MEMORY, "matrix_load: no memory for %zu bytes", n_rows * file_row_bytes);
    enum rc rc = source->read(source->ctx, source_row, n_rows, rows, err);
    rc = rc ? rc : cuda_upload_rows(cuda, target, row_bytes, rows, file_row_bytes, n_rows, err, fp8_cols);
    mem_free(rows);
    return rc;
}

/* ---- beside the operations ----------------------------------------------------------------------------------------------- */

struct beside {
    cudaStream_t stream;
    cudaEvent_t ready, copied[2]; /* ready: all operations enqueued before the call */
    char *pinned[2];
};

enum rc cuda_beside_open(struct cuda *cuda, struct err *err)
{
    struct beside *beside = cuda->beside = (struct beside *)mem_calloc(1, sizeof *beside);
    if (!beside)
        return err_set(err, RC_MEMORY, "cuda: out of memory");
    cudaError_t code = cudaStreamCreateWithFlags(&beside->stream, cudaStreamNonBlocking);
    for (cudaEvent_t *event : {&beside->ready, &beside->copied[0], &beside->copied[1]})
        code = code ? code : cudaEventCreateWithFlags(event, cudaEventDisableTiming | cudaEventBlockingSync);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "open");
    enum rc rc = cuda_take(cuda, MEMORY_PINNED, CHUNK_BYTES, &beside->pinned[0], err);
    return rc ? rc : cuda_take(cuda, MEMORY_PINNED, CHUNK_BYTES, &beside->pinned[1], err);
}

void cuda_beside_close(struct cuda *cuda)
{
    struct beside *beside = cuda->beside;
    if (!beside)
        return;
    for (cudaEvent_t event : {beside->ready, beside->copied[0], beside->copied[1]})
        if (event)
            cudaEventDestroy(event);
    if (beside->stream)
        cudaStreamDestroy(beside->stream);
    mem_free(beside);
    cuda->beside = NULL;
}

static bool is_on_device(const void *memory)
{
    cudaPointerAttributes found;
    return cudaPointerGetAttributes(&found, memory) == cudaSuccess && found.type == cudaMemoryTypeDevice;
}

static cudaError_t copy_in_turns(const struct beside *beside, const struct upload_beside_args *args)
{
    cudaError_t code = cudaSuccess;
    for (size_t first = 0, turn = 0; first < args->size_bytes && code == cudaSuccess; first += CHUNK_BYTES, turn++) {
        const size_t n = args->size_bytes - first < CHUNK_BYTES ? args->size_bytes - first : CHUNK_BYTES;
        char *pinned = beside->pinned[turn % 2];
        if (turn >= 2)
            code = cudaEventSynchronize(beside->copied[turn % 2]);
        memcpy(pinned, (const char *)args->host + first, n);
        if (code == cudaSuccess)
            code = cudaMemcpyAsync((char *)args->target + first, pinned, n, cudaMemcpyHostToDevice, beside->stream);
        if (code == cudaSuccess)
            code = cudaEventRecord(beside->copied[turn % 2], beside->stream);
    }
    return code;
}

enum rc cuda_upload_beside(void *ctx, const struct upload_beside_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    struct beside *beside = cuda->beside;
    device_scope scope(cuda->device);
    if (!beside)
        return err_set(err, RC_INTERNAL, "upload_beside: wanted max_loras above 0, have 0");
    cudaError_t code = cudaEventRecord(beside->ready, cuda->stream);
    code = code ? code : cudaStreamWaitEvent(beside->stream, beside->ready, 0);
    if (code == cudaSuccess && is_on_device(args->host))
        code = cudaMemcpyAsync(args->target, args->host, args->size_bytes, cudaMemcpyDeviceToDevice, beside->stream);
    else if (code == cudaSuccess)
        code = copy_in_turns(beside, args);
    const cudaError_t last = cudaStreamSynchronize(beside->stream);
    code = code ? code : last;
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "upload_beside");
}
