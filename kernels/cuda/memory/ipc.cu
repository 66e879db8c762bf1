/* Memory of other processes. A handle of cudaIpcGetMemHandle stands for the whole allocation that contains a tensor; a
 * descriptor of cuMemExportToShareableHandle is mapped. Nothing is copied here: the importer reads the memory in place, at the
 * device's bandwidth, and closes it before the exporter frees it. */
#include "peers.cuh"

#include <string.h>

/* ---- contexts ------------------------------------------------------------------------------------------------------------ */

enum rc primary::take(const char *name, struct err *err)
{
    context = NULL;
    enum rc rc = cuda_find_device(name, &device, err);
    if (rc)
        return rc;
    const struct driver *driver = driver_get();
    cudaError_t code = driver->error;
    if (code == cudaSuccess)
        code = (cudaError_t)driver->retain(&context, device);
    if (code == cudaSuccess)
        return RC_OK;
    context = NULL;
    return cuda_fail(err, code, "open");
}

void primary::drop()
{
    if (context)
        driver_get()->release(device);
    context = NULL;
}

primary_scope::primary_scope(const struct primary &primary)
{
    CUcontext now = NULL;
    is_pushed = driver_get()->get_current(&now) == CUDA_SUCCESS && now != primary.context &&
                driver_get()->push(primary.context) == CUDA_SUCCESS;
}

primary_scope::~primary_scope()
{
    CUcontext popped;
    if (is_pushed)
        driver_get()->pop(&popped);
}

/* ---- import -------------------------------------------------------------------------------------------------------------- */

struct imported {
    struct primary primary;
    void *opened;        /* by an IPC handle */
    CUdeviceptr mapped;  /* by a descriptor */
    size_t mapped_bytes;
    bool is_mapped;
};

static enum rc refuse(struct err *err, cudaError_t code, const char *why)
{
    cudaGetLastError();
    err_set(err, RC_DEVICE, "IPC handle: %s (%s)", why, cudaGetErrorName(code));
    err_name(err, "ipc_open", NULL);
    if (err)
        err->code = code;
    return RC_DEVICE;
}

static enum rc open_handle(struct imported *imported, const struct import_args *args, struct err *err)
{
    cudaIpcMemHandle_t handle;
    static_assert(sizeof handle == 64, "a handle is 64 bytes");
    memcpy(&handle, args->handle, sizeof handle);
    cudaError_t code = cudaIpcOpenMemHandle(&imported->opened, handle, cudaIpcMemLazyEnablePeerAccess);
    if (code == cudaErrorDeviceUninitialized || code == cudaErrorIncompatibleDriverContext)
        return refuse(err, code, "wanted one of another process, have one of this process; pass the tensor itself");
    if (code == cudaErrorPeerAccessUnsupported || code == cudaErrorMapBufferObjectFailed)
        return refuse(err, code, "wanted memory of the engine's device, have that of one which it cannot reach; send it from "
                                 "the engine's device");
    if (code == cudaErrorMemoryAllocation)
        return refuse(err, code, "wanted room to map the memory, have none; lower gpu_memory_utilization");
    if (code != cudaSuccess)
        return refuse(err, code, "wanted memory that its process still holds, have a handle that has expired; keep the tensor "
                                 "until the update is over");
    cudaPointerAttributes attributes;
    code = cudaPointerGetAttributes(&attributes, imported->opened);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "ipc_open");
    if (attributes.device == imported->primary.device)
        return RC_OK;
    err_set(err, RC_DEVICE, "IPC handle: wanted memory of cuda:%d, have that of cuda:%d; send it from the engine's device",
            imported->primary.device, attributes.device);
    err_name(err, "ipc_open", NULL);
    return RC_DEVICE;
}

static enum rc check_size(const struct imported *imported, const struct import_args *args, struct err *err)
{
    CUdeviceptr base = 0;
    size_t size_bytes = 0;
    CUresult code = driver_get()->address_range(&base, &size_bytes, (CUdeviceptr)imported->opened);
    if (code != CUDA_SUCCESS)
        return cuda_fail(err, (cudaError_t)code, "ipc_open");
    size_t have = size_bytes - ((CUdeviceptr)imported->opened - base);
    if (have >= args->size_bytes)
        return RC_OK;
    err_set(err, RC_DEVICE, "IPC handle: wanted %zu bytes behind it, have %zu; nbytes counts from the start of the allocation",
            args->size_bytes, have);
    err_name(err, "ipc_open", NULL);
    return RC_DEVICE;
}

static enum rc map_descriptor(struct imported *imported, const struct import_args *args, struct err *err)
{
    const struct driver *driver = driver_get();
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = imported->primary.device;
    CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle allocation;
    CUresult code = driver->import_handle(&allocation, (void *)(uintptr_t)args->descriptor,
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (code != CUDA_SUCCESS)
        return refuse(err, (cudaError_t)code, "wanted the descriptor of a device allocation, have another; for host memory "
                                              "device_uuid is \"\"");
    size_t step = 0;
    code = driver->granularity(&step, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (code == CUDA_SUCCESS) {
        imported->mapped_bytes = (args->size_bytes + step - 1) / step * step;
        code = driver->reserve(&imported->mapped, imported->mapped_bytes, 0, 0, 0);
    }
    if (code == CUDA_SUCCESS) {
        code = driver->map(imported->mapped, imported->mapped_bytes, 0, allocation, 0);
        imported->is_mapped = code == CUDA_SUCCESS;
    }
    if (code == CUDA_SUCCESS)
        code = driver->set_access(imported->mapped, imported->mapped_bytes, &access, 1);
    driver->destroy(allocation); /* the mapping keeps it */
    if (code == CUDA_SUCCESS)
        return RC_OK;
    return refuse(err, (cudaError_t)code, "wanted an allocation of nbytes on the engine's device");
}

static enum rc wait_for_event(const uint8_t *bytes, struct err *err)
{
    cudaIpcEventHandle_t handle;
    cudaEvent_t event = NULL;
    static_assert(sizeof handle == 64, "a handle is 64 bytes");
    memcpy(&handle, bytes, sizeof handle);
    cudaError_t code = cudaIpcOpenEventHandle(&event, handle);
    if (code != cudaSuccess)
        return refuse(err, code, "wanted the event that its process recorded, have a handle that has expired");
    code = cudaEventSynchronize(event);
    cudaEventDestroy(event);
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "ipc_open");
}

static void release_memory(struct imported *imported)
{
    if (!imported)
        return;
    if (imported->primary.context) {
        const struct driver *driver = driver_get();
        primary_scope scope(imported->primary);
        if (imported->opened)
            cudaIpcCloseMemHandle(imported->opened);
        if (imported->is_mapped)
            driver->unmap(imported->mapped, imported->mapped_bytes);
        if (imported->mapped)
            driver->unreserve(imported->mapped, imported->mapped_bytes);
    }
    imported->primary.drop();
    mem_free(imported);
}

static enum rc import_memory(const struct import_args *args, struct imported **result, void **memory, struct err *err)
{
    struct imported *imported = (struct imported *)mem_calloc(1, sizeof *imported);
    if (!imported)
        return err_set(err, RC_MEMORY, "ipc_open: out of memory");
    enum rc rc = imported->primary.take(args->device, err);
    if (!rc) {
        primary_scope scope(imported->primary);
        rc = args->handle ? open_handle(imported, args, err) : map_descriptor(imported, args, err);
        if (!rc && args->handle)
            rc = check_size(imported, args, err);
        if (!rc && args->event)
            rc = wait_for_event(args->event, err);
    }
    if (rc) {
        release_memory(imported);
        cudaGetLastError(); /* reported already; clears it for the next launch */
        return rc;
    }
    *result = imported;
    *memory = args->handle ? imported->opened : (void *)imported->mapped;
    return RC_OK;
}

/* ---- export -------------------------------------------------------------------------------------------------------------- */

static enum rc export_memory(const char *device, const void *memory, uint8_t *handle, size_t *offset, size_t *size_bytes,
                             struct err *err)
{
    struct primary primary = {};
    enum rc rc = primary.take(device, err);
    if (rc)
        return rc;
    {
        primary_scope scope(primary);
        CUdeviceptr base = 0;
        cudaIpcMemHandle_t made;
        cudaError_t code = (cudaError_t)driver_get()->address_range(&base, size_bytes, (CUdeviceptr)memory);
        if (code == cudaSuccess)
            code = cudaIpcGetMemHandle(&made, (void *)base);
        if (code == cudaErrorInvalidValue || code == cudaErrorNotSupported)
            rc = refuse(err, code, "wanted memory of cudaMalloc, have that of a pool or an expandable segment; set "
                                   "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False");
        else if (code != cudaSuccess)
            rc = cuda_fail(err, code, "ipc_export");
        if (!rc) {
            memcpy(handle, &made, sizeof made);
            *offset = (CUdeviceptr)memory - base;
        }
    }
    primary.drop();
    if (rc)
        cudaGetLastError();
    return rc;
}

const struct peers cuda_peers = {
    import_memory,     release_memory,   export_memory,        nccl_group_id,   nccl_group_open, nccl_group_settle,
    nccl_group_buffer, nccl_group_greet, nccl_group_broadcast, nccl_group_wait, nccl_group_copy, nccl_group_close,
};
