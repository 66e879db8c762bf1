/* Devices: the driver's functions, the primary context of each device, and the backend's kernels. All kernels are loaded when
 * a device is first opened: the driver would load each at its first launch, in the middle of a step, into memory of the
 * device. Where the driver has to translate PTX, which it does once and then keeps, several threads load files. */
#include "driver.cuh"

#include <pthread.h>

#define MAX_DEVICES 64
#define MAX_ANCHORS 64
#define MAX_LOADERS 16

template <class F> static void find(struct driver *driver, const char *name, F *function)
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSuccess;
    cudaError_t code = cudaGetDriverEntryPointByVersion(name, &found, 13000, cudaEnableDefault, &status);
    if (code == cudaSuccess && status != cudaDriverEntryPointSuccess)
        code = cudaErrorSymbolNotFound;
    if (code != cudaSuccess)
        driver->error = code;
    *function = (F)found;
}

static struct driver find_driver(void)
{
    struct driver d = {};
    find(&d, "cuDevicePrimaryCtxRetain", &d.retain);
    find(&d, "cuDevicePrimaryCtxRelease", &d.release);
    find(&d, "cuDevicePrimaryCtxGetState", &d.get_state);
    find(&d, "cuCtxGetCurrent", &d.get_current);
    find(&d, "cuCtxPushCurrent", &d.push);
    find(&d, "cuCtxPopCurrent", &d.pop);
    find(&d, "cuMemGetAllocationGranularity", &d.granularity);
    find(&d, "cuMemAddressReserve", &d.reserve);
    find(&d, "cuMemAddressFree", &d.unreserve);
    find(&d, "cuMemCreate", &d.create);
    find(&d, "cuMemRelease", &d.destroy);
    find(&d, "cuMemMap", &d.map);
    find(&d, "cuMemUnmap", &d.unmap);
    find(&d, "cuMemSetAccess", &d.set_access);
    find(&d, "cuMemExportToShareableHandle", &d.export_handle);
    find(&d, "cuMemImportFromShareableHandle", &d.import_handle);
    find(&d, "cuMemGetAddressRange", &d.address_range);
    find(&d, "cuKernelGetLibrary", &d.library_of);
    find(&d, "cuLibraryGetKernelCount", &d.count_kernels);
    find(&d, "cuLibraryEnumerateKernels", &d.list_kernels);
    find(&d, "cuKernelGetFunction", &d.function_of);
    find(&d, "cuFuncLoad", &d.load);
    return d;
}

const struct driver *driver_get(void)
{
    static const struct driver driver = find_driver();
    return &driver;
}

/* ---- contexts ------------------------------------------------------------------------------------------------------------ */

static CUcontext contexts[MAX_DEVICES]; /* primary ones, kept for the life of the process once an engine has used them */
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;

/* One kernel of every file of the backend (common.cuh). */
static const void *anchors[MAX_ANCHORS];
static uint32_t n_anchors;

module_anchor::module_anchor(const void *kernel)
{
    if (n_anchors < MAX_ANCHORS)
        anchors[n_anchors++] = kernel;
}

/* Loads all kernels of the file that an anchor stands for. */
static cudaError_t load_kernels(const void *anchor)
{
    const struct driver *driver = driver_get();
    cudaKernel_t kernel;
    CUlibrary library;
    CUfunction function;
    unsigned int n = 0;
    cudaError_t code = cudaGetKernel(&kernel, anchor);
    if (code == cudaSuccess)
        code = (cudaError_t)driver->library_of(&library, (CUkernel)kernel);
    if (code == cudaSuccess)
        code = (cudaError_t)driver->count_kernels(&n, library);
    CUkernel *kernels = (CUkernel *)mem_calloc(n + 1, sizeof *kernels);
    if (!kernels)
        return cudaErrorMemoryAllocation;
    if (code == cudaSuccess)
        code = (cudaError_t)driver->list_kernels(kernels, n, library);
    for (unsigned int i = 0; i < n && code == cudaSuccess; i++) {
        code = (cudaError_t)driver->function_of(&function, kernels[i]);
        if (code == cudaSuccess)
            code = (cudaError_t)driver->load(function);
    }
    mem_free(kernels);
    return code;
}

/* The image that the driver has loaded: machine code of sm_90a, or what it made of the PTX for compute_80. */
static cudaError_t find_image(int device, bool *is_portable)
{
    cudaFuncAttributes attributes;
    device_scope scope(device);
    cudaError_t code = cudaFuncGetAttributes(&attributes, anchors[0]);
    *is_portable = code == cudaSuccess && attributes.ptxVersion != 90;
    return code;
}

/* The files of all anchors, as threads take them. */
struct loading {
    int device;
    uint32_t next;
    cudaError_t code; /* the first failure */
};

static void *load_files(void *shared)
{
    struct loading *all = (struct loading *)shared;
    device_scope scope(all->device);
    cudaError_t code = cudaSuccess;
    for (uint32_t i; code == cudaSuccess && (i = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < n_anchors;)
        code = load_kernels(anchors[i]);
    cudaError_t none = cudaSuccess;
    if (code != cudaSuccess)
        __atomic_compare_exchange_n(&all->code, &none, code, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return NULL;
}

static cudaError_t load_all(int device)
{
    struct loading all = {device, 0, cudaSuccess};
    pthread_t threads[MAX_LOADERS];
    uint32_t n_threads = 0;
    bool is_portable;
    cudaError_t code = find_image(device, &is_portable);
    if (code != cudaSuccess)
        return code;
    while (is_portable && n_threads + 1 < MAX_LOADERS && !pthread_create(&threads[n_threads], NULL, load_files, &all))
        n_threads++;
    load_files(&all);
    for (uint32_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    return all.code;
}

static cudaError_t make_context(int device)
{
    const struct driver *driver = driver_get();
    cudaError_t code = (cudaError_t)driver->retain(&contexts[device], device);
    if (code == cudaSuccess)
        code = load_all(device);
    if (code != cudaSuccess && contexts[device]) {
        driver->release(device);
        contexts[device] = NULL;
    }
    return code;
}

enum rc cuda_context_open(int device, bool *is_portable, struct err *err)
{
    cudaError_t code = device < MAX_DEVICES ? driver_get()->error : cudaErrorInvalidDevice;
    pthread_mutex_lock(&contexts_lock);
    if (code == cudaSuccess && !contexts[device])
        code = make_context(device);
    if (code == cudaSuccess)
        code = find_image(device, is_portable);
    pthread_mutex_unlock(&contexts_lock);
    if (code != cudaErrorMemoryAllocation)
        return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "open");
    return err_set(err, RC_DEVICE_MEMORY,
                   "CUDA: no memory for a context on cuda:%d, other processes use it; choose another device", device);
}

/* A context is pushed, not set: cudaSetDevice would make one on the device that the caller gets back. */
device_scope::device_scope(int device)
{
    CUcontext now = NULL;
    is_pushed = driver_get()->get_current(&now) == CUDA_SUCCESS && now != contexts[device] &&
                driver_get()->push(contexts[device]) == CUDA_SUCCESS;
}

device_scope::~device_scope()
{
    CUcontext popped;
    if (is_pushed)
        driver_get()->pop(&popped);
}

enum rc cuda_free_memory(int device, uint64_t *free_bytes, struct err *err)
{
    const struct driver *driver = driver_get();
    CUcontext context, popped;
    size_t n_free = 0, n_total = 0;
    if (driver->error != cudaSuccess)
        return cuda_fail(err, driver->error, "open");
    cudaError_t code = (cudaError_t)driver->retain(&context, device); /* the one there is, or one for this question alone */
    if (code != cudaSuccess)
        return cuda_fail(err, code, "open");
    code = (cudaError_t)driver->push(context);
    if (code == cudaSuccess) {
        code = cudaMemGetInfo(&n_free, &n_total);
        driver->pop(&popped);
    }
    driver->release(device);
    *free_bytes = n_free;
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, "open");
}
