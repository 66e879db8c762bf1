/* driver.cuh: the driver's functions that the backend calls, found by name once, so that nothing links libcuda. Their codes are
 * the runtime's. device.cu fills the table; memory.cu maps memory through it. */
#ifndef LLMPY_CUDA_DRIVER_CUH
#define LLMPY_CUDA_DRIVER_CUH

#include "common.cuh"

#include <cuda.h>

struct driver {
    decltype(&cuDevicePrimaryCtxRetain) retain;
    decltype(&cuDevicePrimaryCtxRelease) release;
    decltype(&cuDevicePrimaryCtxGetState) get_state;
    decltype(&cuCtxGetCurrent) get_current;
    decltype(&cuCtxPushCurrent) push;
    decltype(&cuCtxPopCurrent) pop;
    decltype(&cuMemGetAllocationGranularity) granularity;
    decltype(&cuMemAddressReserve) reserve;
    decltype(&cuMemAddressFree) unreserve;
    decltype(&cuMemCreate) create;
    decltype(&cuMemRelease) destroy;
    decltype(&cuMemMap) map;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemSetAccess) set_access;
    decltype(&cuMemExportToShareableHandle) export_handle;
    decltype(&cuMemImportFromShareableHandle) import_handle;
    decltype(&cuMemGetAddressRange) address_range;
    decltype(&cuKernelGetLibrary) library_of;
    decltype(&cuLibraryGetKernelCount) count_kernels;
    decltype(&cuLibraryEnumerateKernels) list_kernels;
    decltype(&cuKernelGetFunction) function_of;
    decltype(&cuFuncLoad) load;
    cudaError_t error;
};

/* memory.cu: functions of struct moves. */
enum rc cuda_lend(void *ctx, void *reader, struct err *err);
enum rc cuda_share(void *ctx, const void *pool, int *descriptor, size_t *offset, size_t *size_bytes, struct err *err);
/* Only after a device has been found; error says what the driver lacks. */
const struct driver *driver_get(void);

#endif
