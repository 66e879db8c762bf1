/* Rows of weights on their way to the device: a few threads, each with a stream and two pinned buffers, take chunks in turn;
 * while one buffer is copied to the device, the other is filled. Bound by the link (PCIe 5 x16: 55 GB/s) when the file is in
 * memory; one thread alone moves some 10 GB/s of it. Small tensors go the plain way. What this needs is made at the first large
 * tensor and kept for later ones. */
#include "common.cuh"

#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_LANES 8u
#define CHUNK_BYTES ((size_t)4 << 20)
#define PLAIN_BYTES ((size_t)8 << 20) /* up to here a tensor is not worth the threads */
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

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
    const char *rows;
    size_t row_bytes, file_row_bytes;
    uint32_t n_rows, rows_at_once, next_row; /* next_row and code: shared */
    int code;
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

/* Rows as the device has them: padded with zeros. The file's pages are mapped in one go, not by a fault for each few. */
static void fill_buffer(const struct upload_job *job, uint32_t first, uint32_t n, char *buffer)
{
    const char *rows = job->rows + (size_t)first * job->file_row_bytes;
    size_t n_bytes = (size_t)n * job->file_row_bytes, before = (uintptr_t)rows % (size_t)sysconf(_SC_PAGESIZE);
    madvise((void *)(rows - before), n_bytes + before, MADV_POPULATE_READ);
    if (job->row_bytes == job->file_row_bytes) {
        memcpy(buffer, rows, n_bytes);
        return;
    }
    for (uint32_t r = 0; r < n; r++, buffer += job->row_bytes, rows += job->file_row_bytes) {
        memcpy(buffer, rows, job->file_row_bytes);
        memset(buffer + job->file_row_bytes, 0, job->row_bytes - job->file_row_bytes);
    }
}

static void *work(void *argument)
{
    struct upload_worker *worker = (struct upload_worker *)argument;
    struct upload_job *job = worker->job;
    struct lane *lane = worker->lane;
    device_scope scope(job->cuda->device);
    cudaError_t code = cudaSuccess;
    for (uint32_t turn = 0; code == cudaSuccess; turn++) {
        uint32_t first = __atomic_fetch_add(&job->next_row, job->rows_at_once, __ATOMIC_RELAXED);
        if (first >= job->n_rows)
            break;
        uint32_t n = job->n_rows - first < job->rows_at_once ? job->n_rows - first : job->rows_at_once;
        if (turn >= 2)
            code = cudaEventSynchronize(lane->copied[turn % 2]);
        if (code != cudaSuccess)
            break;
        fill_buffer(job, first, n, lane->pinned[turn % 2]);
        code = cudaMemcpyAsync(job->target + (size_t)first * job->row_bytes, lane->pinned[turn % 2],
                               (size_t)n * job->row_bytes, cudaMemcpyHostToDevice, lane->stream);
        if (code == cudaSuccess)
            code = cudaEventRecord(lane->copied[turn % 2], lane->stream);
    }
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
    return job->code == cudaSuccess ? RC_OK : cuda_fail(err, (cudaError_t)job->code, "matrix_write");
}

enum rc cuda_upload_rows(struct cuda *cuda, char *target, size_t row_bytes, const void *rows, size_t file_row_bytes,
                         uint32_t n_rows, struct err *err)
{
    struct upload_job job = {};
    job.cuda = cuda;
    job.target = target;
    job.rows = (const char *)rows;
    job.row_bytes = row_bytes;
    job.file_row_bytes = file_row_bytes;
    job.n_rows = n_rows;
    job.rows_at_once = (uint32_t)(CHUNK_BYTES / row_bytes);
    bool is_plain = n_rows * file_row_bytes <= PLAIN_BYTES || !job.rows_at_once;
    cudaError_t code = cudaSuccess;
    if (is_plain && row_bytes == file_row_bytes)
        code = cudaMemcpyAsync(target, rows, n_rows * row_bytes, cudaMemcpyHostToDevice, cuda->stream);
    else if (is_plain)
        code = cudaMemcpy2DAsync(target, row_bytes, rows, file_row_bytes, file_row_bytes, n_rows, cudaMemcpyHostToDevice,
                                 cuda->stream);
    if (code == cudaSuccess) /* of the plain copy, or of what made the target zero */
        code = cudaStreamSynchronize(cuda->stream);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "matrix_write");
    return is_plain ? RC_OK : upload_in_lanes(&job, err);
}
