/* opencl.h: what this backend uses of OpenCL 2.0 and later. The declarations are our own and libOpenCL.so.1 is opened at run
 * time, so that the package builds where OpenCL is not installed. */
#ifndef LLMPY_OPENCL_OPENCL_H
#define LLMPY_OPENCL_OPENCL_H

#include <stddef.h>
#include <stdint.h>

typedef void *handle; /* of a platform, a device, a context, a queue, a program or a kernel */

enum {
    CL_DEVICE_NOT_FOUND = -1, CL_PLATFORM_NOT_FOUND_KHR = -1001,
    CL_TRUE = 1, CL_DEVICE_TYPE_ALL = -1, CL_DEVICE_TYPE_CPU = 2,
    CL_DEVICE_TYPE = 0x1000, CL_DEVICE_MAX_WORK_GROUP_SIZE = 0x1004, CL_DEVICE_SINGLE_FP_CONFIG = 0x101B,
    CL_DEVICE_GLOBAL_MEM_SIZE = 0x101F, CL_DEVICE_NAME = 0x102B, CL_DEVICE_SVM_CAPABILITIES = 0x1053,
    CL_DEVICE_SVM_COARSE_GRAIN_BUFFER = 1, CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT = 128,
    CL_PROGRAM_BUILD_LOG = 0x1183, CL_MEM_READ_WRITE = 1, CL_MAP_READ = 1, CL_MAP_WRITE = 2
};

#define OPENCL_FUNCTIONS(F) \
    F(int32_t, clGetPlatformIDs, (uint32_t n, handle *platforms, uint32_t *n_found)) \
    F(int32_t, clGetDeviceIDs, (handle platform, uint64_t type, uint32_t n, handle *devices, uint32_t *n_found)) \
    F(int32_t, clGetDeviceInfo, (handle device, uint32_t name, size_t size, void *value, size_t *size_found)) \
    F(handle, clCreateContext, (const intptr_t *properties, uint32_t n, const handle *devices, \
                                void (*notify)(const char *, const void *, size_t, void *), void *data, int32_t *code)) \
    F(int32_t, clReleaseContext, (handle context)) \
    F(handle, clCreateCommandQueueWithProperties, (handle context, handle device, const uint64_t *properties, int32_t *code)) \
    F(int32_t, clReleaseCommandQueue, (handle queue)) \
    F(handle, clCreateProgramWithSource, (handle context, uint32_t n, const char **texts, const size_t *sizes, int32_t *code)) \
    F(int32_t, clBuildProgram, (handle program, uint32_t n, const handle *devices, const char *options, \
                                void (*notify)(handle, void *), void *data)) \
    F(int32_t, clGetProgramBuildInfo, (handle program, handle device, uint32_t name, size_t size, void *value, \
                                       size_t *size_found)) \
    F(int32_t, clReleaseProgram, (handle program)) \
    F(handle, clCreateKernel, (handle program, const char *name, int32_t *code)) \
    F(int32_t, clReleaseKernel, (handle kernel)) \
    F(int32_t, clSetKernelArg, (handle kernel, uint32_t index, size_t size, const void *value)) \
    F(int32_t, clSetKernelArgSVMPointer, (handle kernel, uint32_t index, const void *value)) \
    F(void *, clSVMAlloc, (handle context, uint64_t flags, size_t size, uint32_t alignment)) \
    F(void, clSVMFree, (handle context, void *memory)) \
    F(int32_t, clEnqueueSVMMemcpy, (handle queue, uint32_t waits, void *to, const void *from, size_t size, uint32_t n_events, \
                                    const handle *events, handle *event)) \
    F(int32_t, clEnqueueSVMMemFill, (handle queue, void *to, const void *pattern, size_t pattern_size, size_t size, \
                                     uint32_t n_events, const handle *events, handle *event)) \
    F(int32_t, clEnqueueSVMMap, (handle queue, uint32_t waits, uint64_t flags, void *memory, size_t size, uint32_t n_events, \
                                 const handle *events, handle *event)) \
    F(int32_t, clEnqueueSVMUnmap, (handle queue, void *memory, uint32_t n_events, const handle *events, handle *event)) \
    F(int32_t, clEnqueueNDRangeKernel, (handle queue, handle kernel, uint32_t n_dims, const size_t *offset, \
                                        const size_t *size, const size_t *group, uint32_t n_events, const handle *events, \
                                        handle *event)) \
    F(int32_t, clFinish, (handle queue))

struct opencl {
#define DECLARE(type, name, parameters) type(*name) parameters;
    OPENCL_FUNCTIONS(DECLARE)
#undef DECLARE
};

#endif
