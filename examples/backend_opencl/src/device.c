/* device.c: finds OpenCL and its devices, opens one, and copies and launches on it. */
#include "device.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 256u
#define MAX_DEVICES 64u

static const char SOURCE[] =
#include "kernels.inc"
    ;

enum rc check(int32_t code, const char *call, struct err *err)
{
    return code ? host->err_set(err, RC_DEVICE, "opencl: %s failed with code %d", call, (int)code) : RC_OK;
}
#define CHECK(code, call) check(code, call, err)

/* ---- OpenCL and its devices ---------------------------------------------------------------------------------------------- */

/* The library stays open as long as the process. */
static enum rc load(struct opencl *cl, struct err *err)
{
    void *library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return host->err_set(err, RC_DEVICE, "opencl: there is no libOpenCL.so.1 (Debian's package is ocl-icd-libopencl1)");
    static const struct {
        const char *name;
        size_t offset;
    } FUNCTIONS[] = {
#define ROW(type, name, parameters) {#name, offsetof(struct opencl, name)},
        OPENCL_FUNCTIONS(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++) {
        void *function = dlsym(library, FUNCTIONS[i].name);
        if (!function)
            return host->err_set(err, RC_DEVICE, "opencl: libOpenCL.so.1 has no %s; wanted OpenCL 2.0", FUNCTIONS[i].name);
        memcpy((char *)cl + FUNCTIONS[i].offset, &function, sizeof function);
    }
    return RC_OK;
}

/* All devices of all platforms, at most MAX_DEVICES. */
static enum rc list(const struct opencl *cl, handle *devices, uint32_t *n_devices, struct err *err)
{
    handle platforms[16];
    uint32_t n_platforms = 0, n;
    int32_t code = cl->clGetPlatformIDs(16, platforms, &n_platforms);
    *n_devices = 0;
    if (code == CL_PLATFORM_NOT_FOUND_KHR)
        return RC_OK;
    for (uint32_t i = 0; i < n_platforms && i < 16 && !code; i++) {
        code = cl->clGetDeviceIDs(platforms[i], (uint32_t)CL_DEVICE_TYPE_ALL, MAX_DEVICES - *n_devices, devices + *n_devices, &n);
        if (code == CL_DEVICE_NOT_FOUND)
            code = 0;
        else if (!code)
            *n_devices += n < MAX_DEVICES - *n_devices ? n : MAX_DEVICES - *n_devices;
    }
    return CHECK(code, "clGetPlatformIDs or clGetDeviceIDs");
}

static enum rc find(const struct opencl *cl, const char *name, handle *device, struct err *err)
{
    handle devices[MAX_DEVICES];
    uint32_t n, index = 0;
    char end;
    enum rc rc = list(cl, devices, &n, err);
    if (rc)
        return rc;
    if (strcmp(name, "opencl") != 0 && sscanf(name, "opencl:%u%c", &index, &end) != 1)
        return host->err_set(err, RC_DEVICE, "device '%.60s': wanted opencl:N", name);
    if (index >= n)
        return host->err_set(err, RC_DEVICE, "device '%.60s': OpenCL's platforms have %u devices%s", name, n,
                             n ? "" : " (Debian's package pocl-opencl-icd has one that is the processor)");
    *device = devices[index];
    return RC_OK;
}

static uint64_t number(const struct opencl *cl, handle device, uint32_t name)
{
    uint64_t value = 0;
    cl->clGetDeviceInfo(device, name, sizeof value, &value, NULL);
    return value;
}

enum rc device_describe(const char *device, bool wants_free, struct device_info *info, struct err *err)
{
    struct opencl cl;
    handle id = NULL;
    (void)wants_free; /* OpenCL does not tell it */
    memset(info, 0, sizeof *info);
    enum rc rc = load(&cl, err);
    if (!rc)
        rc = find(&cl, device, &id, err);
    if (!rc)
        rc = CHECK(cl.clGetDeviceInfo(id, CL_DEVICE_NAME, sizeof info->name - 1, info->name, NULL), "clGetDeviceInfo");
    if (!rc)
        info->total_bytes = number(&cl, id, CL_DEVICE_GLOBAL_MEM_SIZE);
    return rc;
}

/* ---- opening ------------------------------------------------------------------------------------------------------------- */

static enum rc build(struct device *d, struct err *err)
{
    char options[160], log[401] = "";
    const char *text = SOURCE;
    int32_t code;
    bool is_rounded = number(&d->cl, d->id, CL_DEVICE_SINGLE_FP_CONFIG) & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT;
    snprintf(options, sizeof options, "-cl-std=CL1.2 -DF16=%d -DBF16=%d%s", DTYPE_F16, DTYPE_BF16,
             is_rounded ? " -cl-fp32-correctly-rounded-divide-sqrt" : "");
    d->program = d->cl.clCreateProgramWithSource(d->context, 1, &text, NULL, &code);
    if (code)
        return CHECK(code, "clCreateProgramWithSource");
    code = d->cl.clBuildProgram(d->program, 1, &d->id, options, NULL, NULL);
    if (code) {
        char *whole = calloc(1, 1 << 16);
        if (whole && !d->cl.clGetProgramBuildInfo(d->program, d->id, CL_PROGRAM_BUILD_LOG, (1 << 16) - 1, whole, NULL))
            snprintf(log, sizeof log, "%.400s", whole);
        free(whole);
        return host->err_set(err, RC_DEVICE, "opencl: clBuildProgram failed with code %d: %s", (int)code, log);
    }
    static const char *const NAMES[] = {
#define NAME(name) #name,
        KERNELS(NAME)
#undef NAME
    };
    for (uint32_t i = 0; i < N_KERNELS; i++) {
        d->kernels[i] = d->cl.clCreateKernel(d->program, NAMES[i], &code);
        if (code)
            return host->err_set(err, RC_DEVICE, "opencl: clCreateKernel of %s failed with code %d", NAMES[i], (int)code);
    }
    return RC_OK;
}

static enum rc connect_device(struct device *d, const struct backend_options *options, struct err *err)
{
    int32_t code;
    char name[128] = "";
    enum rc rc = load(&d->cl, err);
    if (!rc)
        rc = find(&d->cl, options->device, &d->id, err);
    if (rc)
        return rc;
    d->cl.clGetDeviceInfo(d->id, CL_DEVICE_NAME, sizeof name - 1, name, NULL);
    snprintf(d->description, sizeof d->description, "opencl %s", name);
    if (!(number(&d->cl, d->id, CL_DEVICE_SVM_CAPABILITIES) & CL_DEVICE_SVM_COARSE_GRAIN_BUFFER))
        return host->err_set(err, RC_UNSUPPORTED, "opencl: %s has no shared virtual memory", name);
    if (number(&d->cl, d->id, CL_DEVICE_MAX_WORK_GROUP_SIZE) < GROUP)
        return host->err_set(err, RC_UNSUPPORTED, "opencl: %s has no groups of %u work items", name, GROUP);
    d->linear_group = number(&d->cl, d->id, CL_DEVICE_TYPE) & CL_DEVICE_TYPE_CPU ? 4 : GROUP;
    d->context = d->cl.clCreateContext(NULL, 1, &d->id, NULL, NULL, &code);
    if (code)
        return CHECK(code, "clCreateContext");
    d->queue = d->cl.clCreateCommandQueueWithProperties(d->context, d->id, NULL, &code);
    if (code)
        return CHECK(code, "clCreateCommandQueueWithProperties");
    rc = build(d, err);
    return rc ? rc : buffer_create(d, ALIGNMENT, &d->nothing, err);
}

void device_close(void *ctx)
{
    struct device *d = ctx;
    if (d->queue)
        d->cl.clFinish(d->queue);
    if (d->nothing)
        d->cl.clSVMFree(d->context, d->nothing);
    for (uint32_t i = 0; i < N_KERNELS; i++)
        if (d->kernels[i])
            d->cl.clReleaseKernel(d->kernels[i]);
    if (d->program)
        d->cl.clReleaseProgram(d->program);
    if (d->queue)
        d->cl.clReleaseCommandQueue(d->queue);
    if (d->context)
        d->cl.clReleaseContext(d->context);
    free(d);
}

enum rc device_open(const struct backend_options *options, void **ctx, struct err *err)
{
    if (options->max_head_dim > MAX_HEAD_DIM)
        return host->err_set(err, RC_UNSUPPORTED, "opencl: wanted heads of at most %u, have %u", MAX_HEAD_DIM,
                             options->max_head_dim);
    struct device *d = calloc(1, sizeof *d);
    if (!d)
        return host->err_set(err, RC_MEMORY, "opencl: no memory for the context");
    enum rc rc = connect_device(d, options, err);
    if (rc)
        device_close(d);
    else
        *ctx = d;
    return rc;
}

/* ---- memory -------------------------------------------------------------------------------------------------------------- */

enum rc buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err)
{
    struct device *d = ctx;
    static const uint32_t ZERO;
    size_t rounded = (size_bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *made = d->cl.clSVMAlloc(d->context, CL_MEM_READ_WRITE, rounded, 0);
    if (!made)
        return host->err_set(err, RC_DEVICE_MEMORY, "opencl: no memory for %zu bytes", size_bytes);
    enum rc rc = CHECK(d->cl.clEnqueueSVMMemFill(d->queue, made, &ZERO, sizeof ZERO, rounded, 0, NULL, NULL),
                       "clEnqueueSVMMemFill");
    if (rc)
        d->cl.clSVMFree(d->context, made);
    else
        *buffer = made;
    return rc;
}

void buffer_destroy(void *ctx, void *buffer, size_t size_bytes)
{
    struct device *d = ctx;
    (void)size_bytes;
    if (!buffer)
        return;
    d->cl.clFinish(d->queue);
    d->cl.clSVMFree(d->context, buffer);
}

enum rc upload(void *ctx, void *target, const void *from, size_t size_bytes, struct err *err)
{
    struct device *d = ctx;
    return CHECK(d->cl.clEnqueueSVMMemcpy(d->queue, CL_TRUE, target, from, size_bytes, 0, NULL, NULL), "clEnqueueSVMMemcpy");
}

enum rc download(void *ctx, void *to, const void *source, size_t size_bytes, struct err *err)
{
    return upload(ctx, to, source, size_bytes, err);
}

enum rc synchronize(void *ctx, struct err *err)
{
    struct device *d = ctx;
    return CHECK(d->cl.clFinish(d->queue), "clFinish");
}

/* ---- launches ------------------------------------------------------------------------------------------------------------ */

enum rc launch(struct device *d, enum kernel kernel, size_t columns, size_t rows, uint32_t group, struct err *err,
               const char *types, ...)
{
    handle k = d->kernels[kernel];
    int32_t code = 0;
    if (!columns || !rows)
        return RC_OK;
    va_list list;
    va_start(list, types);
    for (uint32_t i = 0; types[i] && !code; i++) {
        union {
            const void *p;
            uint32_t u;
            float f;
            uint64_t z;
        } a;
        switch (types[i]) {
        case 'p':
            a.p = va_arg(list, const void *);
            code = d->cl.clSetKernelArgSVMPointer(k, i, a.p ? a.p : d->nothing);
            break;
        case 'u':
            a.u = va_arg(list, uint32_t);
            code = d->cl.clSetKernelArg(k, i, sizeof a.u, &a.u);
            break;
        case 'f':
            a.f = (float)va_arg(list, double);
            code = d->cl.clSetKernelArg(k, i, sizeof a.f, &a.f);
            break;
        default:
            a.z = va_arg(list, size_t);
            code = d->cl.clSetKernelArg(k, i, sizeof a.z, &a.z);
        }
    }
    va_end(list);
    if (code)
        return CHECK(code, "clSetKernelArg");
    size_t sizes[2] = {(columns + group - 1) / group * group, rows}, groups[2] = {group, 1};
    return CHECK(d->cl.clEnqueueNDRangeKernel(d->queue, k, 2, NULL, sizes, groups, 0, NULL, NULL), "clEnqueueNDRangeKernel");
}
