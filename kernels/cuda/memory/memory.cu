/* All memory of a context, by use. Work memory (activations, staging, workspaces) is a cudaMalloc each, made at open and at
 * load. Weights and pages lie in chunks: a range of addresses, reserved for the context's life, with physical memory mapped
 * into it that can be given back to the device and taken again at the same addresses. A chunk is filled from its end, so that
 * reading past the first matrix of one faults. Whatever is not given back before is freed when the context closes. */
#include "../core/driver.cuh"

#include <string.h>

#define CHUNK_BYTES ((size_t)32 << 20) /* of small weights; a larger weight gets its own chunk */

/* ---- chunks -------------------------------------------------------------------------------------------------------------- */

struct memory_chunk {
    struct memory_chunk *next;
    uint32_t use, n_blocks;
    uint64_t readers;              /* bit i: device i reads it, too (cuda_lend) */
    CUdeviceptr base;
    size_t size_bytes, left_bytes; /* free bytes are below used ones */
    CUmemGenericAllocationHandle handle;
    bool is_mapped, is_shareable;
    bool is_new;                   /* mapped by the call in progress */
    char *host;                    /* pinned, for the used bytes; kept from one sleep to the next */
    size_t host_bytes;
    bool is_saved;                 /* the host has it, or will when the stream is done */
};
struct memory_block {
    struct memory_block *next;
    struct memory_chunk *chunk; /* NULL: it has its own allocation */
    char *memory;
    size_t size_bytes;
    uint32_t use;
};

static CUmemAllocationProp properties_of(const struct cuda *cuda)
{
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = cuda->device;
    return properties;
}

/* Physical memory; that of pages can be shared with other processes, where the driver knows how. */
static CUresult memory_create(const struct cuda *cuda, struct memory_chunk *chunk)
{
    CUmemAllocationProp properties = properties_of(cuda);
    CUresult code = CUDA_ERROR_NOT_SUPPORTED;
    if (chunk->use == MEMORY_KV) {
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        code = driver_get()->create(&chunk->handle, chunk->size_bytes, &properties, 0);
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    }
    chunk->is_shareable = code == CUDA_SUCCESS;
    if (code != CUDA_ERROR_NOT_SUPPORTED && code != CUDA_ERROR_INVALID_VALUE && code != CUDA_ERROR_NOT_PERMITTED)
        return code;
    return driver_get()->create(&chunk->handle, chunk->size_bytes, &properties, 0);
}

/* Lets the device, and those that read it, too, use a mapped chunk. */
static CUresult set_access(const struct cuda *cuda, const struct memory_chunk *chunk)
{
    CUmemAccessDesc access = {properties_of(cuda).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult code = driver_get()->set_access(chunk->base, chunk->size_bytes, &access, 1);
    for (access.location.id = 0; access.location.id < 64 && code == CUDA_SUCCESS; access.location.id++)
        if (chunk->readers >> access.location.id & 1)
            code = driver_get()->set_access(chunk->base, chunk->size_bytes, &access, 1);
    return code;
}

static cudaError_t chunk_map(struct cuda *cuda, struct memory_chunk *chunk)
{
    const struct driver *driver = driver_get();
    CUresult code = memory_create(cuda, chunk);
    if (code != CUDA_SUCCESS)
        return (cudaError_t)code;
    code = driver->map(chunk->base, chunk->size_bytes, 0, chunk->handle, 0);
    if (code == CUDA_SUCCESS) {
        code = set_access(cuda, chunk);
        if (code != CUDA_SUCCESS)
            driver->unmap(chunk->base, chunk->size_bytes);
    }
    if (code != CUDA_SUCCESS)
        driver->destroy(chunk->handle);
    chunk->is_mapped = code == CUDA_SUCCESS;
    cuda->held_bytes[chunk->use] += chunk->is_mapped ? chunk->size_bytes : 0;
    return (cudaError_t)code;
}

static void chunk_unmap(struct cuda *cuda, struct memory_chunk *chunk)
{
    const struct driver *driver = driver_get();
    if (!chunk->is_mapped)
        return;
    driver->unmap(chunk->base, chunk->size_bytes);
    driver->destroy(chunk->handle);
    chunk->is_mapped = false;
    cuda->held_bytes[chunk->use] -= chunk->size_bytes;
}

static void host_free(struct cuda *cuda, struct memory_chunk *chunk)
{
    if (chunk->host)
        cudaFreeHost(chunk->host);
    cuda->held_bytes[MEMORY_PINNED] -= chunk->host_bytes;
    chunk->host = NULL;
    chunk->host_bytes = 0;
    chunk->is_saved = false;
}

/* Pinned memory for the used bytes of the chunk. */
static cudaError_t host_take(struct cuda *cuda, struct memory_chunk *chunk)
{
    size_t size_bytes = chunk->size_bytes - chunk->left_bytes;
    if (chunk->host_bytes == size_bytes)
        return cudaSuccess;
    host_free(cuda, chunk);
    cudaError_t code = cudaMallocHost((void **)&chunk->host, size_bytes);
    if (code != cudaSuccess)
        return code;
    cuda->n_allocations++;
    chunk->host_bytes = size_bytes;
    cuda->held_bytes[MEMORY_PINNED] += size_bytes;
    return cudaSuccess;
}

static cudaError_t chunk_create(struct cuda *cuda, uint32_t use, size_t size_bytes, struct memory_chunk **result)
{
    size_t step = 0;
    CUmemAllocationProp properties = properties_of(cuda);
    cudaError_t code =
        (cudaError_t)driver_get()->granularity(&step, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (code != cudaSuccess)
        return code;
    struct memory_chunk *chunk = (struct memory_chunk *)mem_calloc(1, sizeof *chunk);
    if (!chunk)
        return cudaErrorMemoryAllocation;
    chunk->use = use;
    chunk->size_bytes = chunk->left_bytes = (size_bytes + step - 1) / step * step;
    code = (cudaError_t)driver_get()->reserve(&chunk->base, chunk->size_bytes, 0, 0, 0);
    if (code == cudaSuccess) {
        code = chunk_map(cuda, chunk);
        if (code != cudaSuccess)
            driver_get()->unreserve(chunk->base, chunk->size_bytes);
    }
    if (code != cudaSuccess) {
        mem_free(chunk);
        return code;
    }
    *result = chunk;
    return cudaSuccess;
}

static void chunk_release(struct cuda *cuda, struct memory_chunk *chunk)
{
    if (--chunk->n_blocks)
        return;
    struct memory_chunk **place = &cuda->chunks;
    while (*place != chunk)
        place = &(*place)->next;
    *place = chunk->next;
    if (chunk->use == MEMORY_WEIGHTS)
        cudaDeviceSynchronize(); /* a trainer that shares them may have used them on its own streams */
    else
        cudaStreamSynchronize(cuda->stream); /* as cudaFree does: enqueued work may still use the memory */
    chunk_unmap(cuda, chunk);
    host_free(cuda, chunk);
    driver_get()->unreserve(chunk->base, chunk->size_bytes);
    mem_free(chunk);
}

static cudaError_t chunk_take(struct cuda *cuda, struct memory_block *block)
{
    size_t size_bytes = (block->size_bytes + 255) & ~(size_t)255;
    struct memory_chunk *chunk = cuda->chunks;
    while (chunk && (chunk->use != block->use || !chunk->is_mapped || chunk->left_bytes < size_bytes))
        chunk = chunk->next;
    if (!chunk) {
        bool is_own = size_bytes > CHUNK_BYTES / 2 || block->use == MEMORY_KV;
        cudaError_t code = chunk_create(cuda, block->use, is_own ? size_bytes : CHUNK_BYTES, &chunk);
        if (code != cudaSuccess)
            return code;
        chunk->next = cuda->chunks;
        cuda->chunks = chunk;
    }
    chunk->left_bytes -= size_bytes;
    chunk->n_blocks++;
    block->chunk = chunk;
    block->memory = (char *)chunk->base + chunk->left_bytes;
    return cudaSuccess;
}

/* ---- blocks -------------------------------------------------------------------------------------------------------------- */

static enum rc refuse(uint32_t use, size_t size_bytes, cudaError_t code, struct err *err)
{
    static const char *const names[] = {"weights", "the KV cache", "activations and workspaces"};
    static const char *const knobs[] = {
        "choose a smaller or quantised checkpoint",
        "lower kv_cache_memory_bytes or gpu_memory_utilization",
        "lower max_num_batched_tokens or max_num_seqs",
    };
    cudaGetLastError();
    if (code != cudaErrorMemoryAllocation)
        return cuda_fail(err, code, "memory");
    if (use == MEMORY_PINNED)
        return err_set(err, RC_MEMORY, "CUDA: no memory for %zu bytes of pinned host memory", size_bytes);
    size_t n_free = 0, n_total = 0;
    cudaMemGetInfo(&n_free, &n_total);
    err_set(err, RC_DEVICE_MEMORY, "CUDA: wanted %zu bytes for %s, %zu of %zu are free; %s, or close() another engine",
            size_bytes, names[use], n_free, n_total, knobs[use]);
    if (err) {
        err->code = (int64_t)size_bytes;
        err->free_bytes = (int64_t)n_free;
    }
    return RC_DEVICE_MEMORY;
}

enum rc cuda_take(struct cuda *cuda, uint32_t use, size_t size_bytes, void *pointer, struct err *err)
{
    device_scope scope(cuda->device);
    struct memory_block *block = (struct memory_block *)mem_calloc(1, sizeof *block);
    if (!block)
        return err_set(err, RC_MEMORY, "cuda: out of memory");
    block->use = use;
    block->size_bytes = size_bytes ? size_bytes : 1;
    cudaError_t code;
    if (use == MEMORY_PINNED)
        code = cudaMallocHost((void **)&block->memory, block->size_bytes);
    else if (use == MEMORY_WORK)
        code = cudaMalloc((void **)&block->memory, block->size_bytes);
    else
        code = chunk_take(cuda, block);
    if (code != cudaSuccess) {
        mem_free(block);
        return refuse(use, size_bytes, code, err);
    }
    cuda->n_allocations++;
    cuda->held_bytes[use] += block->chunk ? 0 : block->size_bytes;
    block->next = cuda->blocks;
    cuda->blocks = block;
    *(void **)pointer = block->memory;
    return RC_OK;
}

static void block_free(struct cuda *cuda, struct memory_block *block)
{
    if (block->chunk)
        chunk_release(cuda, block->chunk);
    else if (block->use == MEMORY_PINNED)
        cudaFreeHost(block->memory);
    else
        cudaFree(block->memory);
    cuda->held_bytes[block->use] -= block->chunk ? 0 : block->size_bytes;
    mem_free(block);
}

void cuda_give(struct cuda *cuda, void *memory)
{
    device_scope scope(cuda->device);
    struct memory_block **place = &cuda->blocks;
    while (*place && (*place)->memory != memory)
        place = &(*place)->next;
    struct memory_block *block = *place;
    if (!block || !memory)
        return;
    *place = block->next;
    block_free(cuda, block);
}

void cuda_give_all(struct cuda *cuda)
{
    for (struct memory_block *block = cuda->blocks, *next; block; block = next) {
        next = block->next;
        block_free(cuda, block);
    }
    cuda->blocks = NULL;
}

/* ---- operations ---------------------------------------------------------------------------------------------------------- */

enum rc cuda_pool_create(void *ctx, uint32_t use, size_t size_bytes, void **buffer, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    enum rc rc = cuda_take(cuda, use, size_bytes, buffer, err);
    if (rc)
        return rc;
    cudaError_t code = cudaMemsetAsync(*buffer, 0, size_bytes, cuda->stream);
    if (code == cudaSuccess)
        return RC_OK;
    cuda_give(cuda, *buffer);
    *buffer = NULL;
    return cuda_fail(err, code, "buffer_create");
}

enum rc cuda_buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err)
{
    return cuda_pool_create(ctx, MEMORY_WORK, size_bytes, buffer, err);
}

void cuda_buffer_destroy(void *ctx, void *buffer, size_t size_bytes)
{
    (void)size_bytes;
    cuda_give((struct cuda *)ctx, buffer);
}

enum rc cuda_pool_release(void *ctx, uint32_t use, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaError_t code = cudaDeviceSynchronize(); /* copies to the host, and a trainer's work with weights that it shares */
    if (code != cudaSuccess)
        return cuda_fail(err, code, "pool_release");
    for (struct memory_chunk *chunk = cuda->chunks; chunk; chunk = chunk->next)
        if (chunk->use == use)
            chunk_unmap(cuda, chunk);
    return RC_OK;
}

/* Maps a chunk and enqueues its content. Pages need none: no kernel reads a key before it is written. */
static cudaError_t chunk_restore(struct cuda *cuda, struct memory_chunk *chunk)
{
    cudaError_t code = chunk_map(cuda, chunk);
    if (code != cudaSuccess)
        return code;
    chunk->is_new = true;
    cuda->n_allocations++;
    if (chunk->is_saved)
        return cudaMemcpyAsync((char *)chunk->base + chunk->left_bytes, chunk->host, chunk->host_bytes, cudaMemcpyHostToDevice,
                               cuda->stream);
    if (chunk->use == MEMORY_WEIGHTS)
        return cudaMemsetAsync((void *)chunk->base, 0, chunk->size_bytes, cuda->stream);
    return cudaSuccess;
}

enum rc cuda_pool_restore(void *ctx, uint32_t use, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaError_t code = cudaSuccess;
    size_t wanted_bytes = 0;
    for (struct memory_chunk *chunk = cuda->chunks; chunk; chunk = chunk->next) {
        chunk->is_new = false;
        if (chunk->use != use || chunk->is_mapped)
            continue;
        wanted_bytes += chunk->size_bytes;
        code = code == cudaSuccess ? chunk_restore(cuda, chunk) : code; /* chunks before it are copied at the same time */
    }
    if (code == cudaSuccess)
        return RC_OK;
    cudaStreamSynchronize(cuda->stream);
    for (struct memory_chunk *chunk = cuda->chunks; chunk; chunk = chunk->next)
        if (chunk->is_new)
            chunk_unmap(cuda, chunk);
    return refuse(use, wanted_bytes, code, err);
}

enum rc cuda_pool_save(void *ctx, uint32_t use, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    cudaError_t code = cudaSuccess;
    uint64_t wanted_bytes = 0;
    for (struct memory_chunk *chunk = cuda->chunks; chunk; chunk = chunk->next)
        if (chunk->use == use && chunk->is_mapped && code == cudaSuccess) {
            wanted_bytes += chunk->size_bytes - chunk->left_bytes;
            code = host_take(cuda, chunk);
        }
    if (code == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        cuda_pool_forget(cuda, use);
        err_set(err, RC_DEVICE_MEMORY, "sleep: wanted %llu bytes and more of pinned host memory for the weights, have less; "
                "use level 2", (unsigned long long)wanted_bytes);
        if (err)
            err->code = (int64_t)wanted_bytes;
        return RC_DEVICE_MEMORY;
    }
    for (struct memory_chunk *chunk = cuda->chunks; chunk && code == cudaSuccess; chunk = chunk->next)
        if (chunk->use == use && chunk->is_mapped)
            code = cudaMemcpyAsync(chunk->host, (char *)chunk->base + chunk->left_bytes, chunk->host_bytes,
                                   cudaMemcpyDeviceToHost, cuda->stream);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "pool_save");
    for (struct memory_chunk *chunk = cuda->chunks; chunk; chunk = chunk->next)
        chunk->is_saved |= chunk->use == use && chunk->is_mapped;
    return RC_OK;
}

void cuda_pool_forget(void *ctx, uint32_t use)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    for (struct memory_chunk *chunk = cuda->chunks; chunk; chunk = chunk->next)
        if (chunk->use == use)
            host_free(cuda, chunk);
}

/* ---- pages that others read ---------------------------------------------------------------------------------------------- */

enum rc cuda_lend(void *ctx, void *reader, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    const int device = ((struct cuda *)reader)->device;
    int can_access = 0;
    if (device == cuda->device)
        return RC_OK;
    device_scope scope(cuda->device);
    cudaError_t code = cudaDeviceCanAccessPeer(&can_access, device, cuda->device);
    if (code == cudaSuccess && (!can_access || device >= 64))
        return err_set(err, RC_UNSUPPORTED, "lend: cuda:%d cannot reach the memory of cuda:%d", device, cuda->device);
    for (struct memory_chunk *chunk = cuda->chunks; chunk && code == cudaSuccess; chunk = chunk->next) {
        if (chunk->use != MEMORY_KV || chunk->readers >> device & 1)
            continue;
        chunk->readers |= 1ull << device;
        code = chunk->is_mapped ? (cudaError_t)set_access(cuda, chunk) : cudaSuccess;
        if (code != cudaSuccess)
            chunk->readers &= ~(1ull << device);
    }
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "lend");
}

enum rc cuda_share(void *ctx, const void *pool, int *descriptor, size_t *offset, size_t *size_bytes, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    struct memory_chunk *chunk = cuda->chunks;
    while (chunk && (char *)chunk->base + chunk->left_bytes != (const char *)pool)
        chunk = chunk->next;
    if (!chunk || !chunk->is_mapped || !chunk->is_shareable)
        return err_set(err, RC_UNSUPPORTED, "share: cuda:%d has no descriptor of its pages", cuda->device);
    CUresult code = driver_get()->export_handle(descriptor, chunk->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    *offset = chunk->left_bytes;
    *size_bytes = chunk->size_bytes;
    return code == CUDA_SUCCESS ? RC_OK : cuda_fail(err, (cudaError_t)code, "share");
}

enum rc cuda_memory(void *ctx, struct backend_memory *memory, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    size_t n_free = 0, n_total = 0;
    cudaError_t code = cudaMemGetInfo(&n_free, &n_total);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "memory");
    memcpy(memory->held_bytes, cuda->held_bytes, sizeof memory->held_bytes);
    memory->free_bytes = n_free;
    memory->total_bytes = n_total;
    return RC_OK;
}

uint64_t cuda_allocations(void *ctx)
{
    return ((struct cuda *)ctx)->n_allocations + mem_count_own();
}
