/* backend_cuda.cu: the CUDA backend's context, memory and matrices, and the table that llmpy_backend returns. A context has one
 * device and one stream. It uses the device's primary context, as other libraries of the process do. cuda_open allocates what
 * operations need besides their arguments (pinned memory, the sampler's rows); afterwards only buffer_create, pool_create and
 * matrix_create allocate. Errors of the driver become RC_DEVICE with the driver's name and code of the error. */
#include "../attention/kv.cuh"
#include "../experts/router.cuh"
#include "../ranks/link.cuh"
#include "fp8_rows.cuh"
#include "units.cuh"
#include "launch.cuh"
#include "packed.cuh"
#include "types.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SAMPLE_SLOTS 128u
#define LEAST_SHARED_BYTES 101376u /* that a block can have on all devices of compute capability 8.0 and later */
#define MIN_PARTIALS_BYTES ((size_t)64 << 20)
#define LOAD_BYTES ((size_t)16 << 20) /* matrix_load reads so many bytes of packed rows at once */

/* Is it a fault after which the driver fails every later call of the process on this device? */
static bool is_sticky(cudaError_t code)
{
    static const cudaError_t codes[] = {
        cudaErrorIllegalAddress,    cudaErrorLaunchFailure,   cudaErrorLaunchTimeout, cudaErrorAssert,
        cudaErrorHardwareStackError, cudaErrorIllegalInstruction, cudaErrorMisalignedAddress, cudaErrorInvalidAddressSpace,
        cudaErrorInvalidPc,         cudaErrorECCUncorrectable,
    };
    for (cudaError_t sticky : codes)
        if (code == sticky)
            return true;
    return false;
}

enum rc cuda_fail(struct err *err, cudaError_t code, const char *operation)
{
    err_set(err, RC_DEVICE, "CUDA %s: %s (%s)%s", operation, cudaGetErrorString(code), cudaGetErrorName(code),
            is_sticky(code) ? "; this process cannot use the device any more, start a new one" : "");
    err_name(err, operation, NULL);
    if (err)
        err->code = code;
    return RC_DEVICE;
}

static enum rc checked(struct err *err, cudaError_t code, const char *operation)
{
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, operation);
}

/* ---- the device ---------------------------------------------------------------------------------------------------------- */

enum rc cuda_find_device(const char *name, int *device, struct err *err)
{
    int count = 0;
    *device = strncmp(name, "cuda:", 5) == 0 ? atoi(name + 5) : 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess) {
        cudaGetLastError();
        int version = 0;
        if (code != cudaErrorInsufficientDriver || cudaDriverGetVersion(&version) != cudaSuccess)
            return cuda_fail(err, code, "open");
        err_set(err, RC_DEVICE, "device '%.60s': wanted an NVIDIA driver for CUDA 13 (580 or newer), have %s%.0d%s%.0d", name,
                version ? "one for CUDA " : "none", version / 1000, version ? "." : "", version % 1000 / 10);
        err_name(err, "open", NULL);
        if (err)
            err->code = code;
        return RC_DEVICE;
    }
    if (*device >= 0 && *device < count)
        return RC_OK;
    err_set(err, RC_DEVICE, "device '%.60s': this machine has %d CUDA devices", name, count);
    err_name(err, "open", NULL);
    if (err)
        err->code = cudaErrorInvalidDevice;
    return RC_DEVICE;
}

/* Was this file compiled for sm_90a, too? */
static bool has_sm_90a(void)
{
    const uint32_t compiled[] = {__CUDA_ARCH_LIST__};
    for (uint32_t arch : compiled)
        if (arch == 900)
            return true;
    return false;
}

static enum rc device_describe(const char *name, bool wants_free, struct device_info *info, struct err *err)
{
    int device;
    cudaDeviceProp properties;
    enum rc rc = cuda_find_device(name, &device, err);
    if (!rc)
        rc = checked(err, cudaGetDeviceProperties(&properties, device), "open");
    if (rc)
        return rc;
    if (properties.major < 8) {
        err_set(err, RC_DEVICE, "device '%.60s': wanted compute capability 8.0 or later, have %d.%d", name, properties.major,
                properties.minor);
        err_name(err, "open", NULL);
        if (err)
            err->code = cudaErrorNoKernelImageForDevice;
        return RC_DEVICE;
    }
    memset(info, 0, sizeof *info);
    snprintf(info->name, sizeof info->name, "%.127s", properties.name);
    info->total_bytes = properties.totalGlobalMem;
    const char *from = "portable; from PTX for compute capability 8.0";
    const bool is_seen = properties.major == 9 && properties.minor == 0;
    if (is_seen)
        snprintf(info->kernels, sizeof info->kernels, "%s", has_sm_90a() ? "sm_90a" : from);
    else
        snprintf(info->kernels, sizeof info->kernels, "%s, never run on a device of %d.%d", from, properties.major,
                 properties.minor);
    char *at = info->uuid + snprintf(info->uuid, sizeof info->uuid, "GPU");
    for (int i = 0; i < 16; i++)
        at += snprintf(at, 4, "%s%02x", i == 0 || (i >= 4 && i <= 10 && i % 2 == 0) ? "-" : "",
                       (unsigned char)properties.uuid.bytes[i]);
    return wants_free ? cuda_free_memory(device, &info->free_bytes, err) : RC_OK;
}

/* ---- copies -------------------------------------------------------------------------------------------------------------- */

static enum rc wait(struct cuda *cuda, struct err *err, const char *operation)
{
    return cuda_await(cuda, NULL, operation, err);
}

static enum rc upload(void *ctx, void *target, const void *host, size_t size_bytes, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    /* From pageable memory the call returns once the bytes have left it. Adapters may lie in memory of the device. */
    return checked(err, cudaMemcpyAsync(target, host, size_bytes, cudaMemcpyDefault, cuda->stream), "upload");
}

static enum rc download(void *ctx, void *host, const void *source, size_t size_bytes, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    enum rc rc =
        checked(err, cudaMemcpyAsync(host, source, size_bytes, cudaMemcpyDeviceToHost, cuda->stream), "download");
    return rc ? rc : wait(cuda, err, "download");
}

static enum rc synchronize(void *ctx, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    return wait(cuda, err, "synchronize");
}

/* ---- open and close ------------------------------------------------------------------------------------------------------ */

static void cuda_close(void *ctx)
{
    struct cuda *cuda = (struct cuda *)ctx;
    if (!cuda)
        return;
    {
        device_scope scope(cuda->device);
        if (cuda->stream)
            cudaStreamSynchronize(cuda->stream);
        linear_close(cuda);
        cuda_lora_close(cuda);
        cuda_experts_close(cuda);
        cuda_sample_close(cuda);
        cuda_uploads_close(cuda);
        cuda_beside_close(cuda);
        cuda_tensors_close(cuda);
        cuda_give_all(cuda);
        if (cuda->stream)
            cudaStreamDestroy(cuda->stream);
    }
    mem_free(cuda);
}

/* Allocates `partials`: for each block of attention the float32 sums of a sequence's splits, of 256 keys and at most 16 heads
 * each. */
static enum rc open_partials(struct cuda *cuda, struct err *err)
{
    const struct backend_options *options = &cuda->options;
    uint32_t heads = options->max_group < 16 ? options->max_group : 16;
    size_t slot_bytes = (heads * (options->max_head_dim + 2) + 4) * sizeof(float);
    cuda->partials_bytes = slot_bytes * cuda->n_processors * (options->max_model_len / 256 + 3);
    if (cuda->partials_bytes < MIN_PARTIALS_BYTES)
        cuda->partials_bytes = MIN_PARTIALS_BYTES;
    enum rc rc = cuda_take(cuda, MEMORY_WORK, cuda->partials_bytes, &cuda->partials, err);
    size_t arrivals_bytes = 2 * cuda->n_processors * sizeof *cuda->arrivals;
    if (!rc)
        rc = cuda_take(cuda, MEMORY_WORK, arrivals_bytes, &cuda->arrivals, err);
    return rc ? rc : checked(err, cudaMemsetAsync(cuda->arrivals, 0, arrivals_bytes, cuda->stream), "open");
}

static enum rc read_limits(struct cuda *cuda, struct err *err)
{
    int n_processors = 0, shared_bytes = 0, processor_bytes = 0;
    cudaError_t code = cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, cuda->device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda->device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&processor_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, cuda->device);
    cuda->n_processors = (uint32_t)n_processors;
    cuda->shared_bytes = (uint32_t)shared_bytes;
    cuda->processor_bytes = (uint32_t)processor_bytes;
    if (cuda->is_portable && cuda->shared_bytes >= SHARED_BYTES) /* a device of sm_90 stands in for all others */
        cuda->shared_bytes = LEAST_SHARED_BYTES;
    return checked(err, code, "open");
}

static enum rc open_memory(struct cuda *cuda, struct err *err)
{
    const struct backend_options *options = &cuda->options;
    cuda_sample_size(cuda);
    enum rc rc = checked(err, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), "open");
    if (!rc)
        rc = cuda_take(cuda, MEMORY_PINNED, 2 * cuda->staged_bytes, &cuda->pinned, err);
    if (!rc)
        rc = cuda_take(cuda, MEMORY_WORK, 2 * cuda->lists_bytes, &cuda->staged, err);
    if (!rc)
        rc = cuda_sample_open(cuda, err);
    cuda->max_tasks = options->max_rows + options->max_logits_rows;
    cuda->begun_values = cuda_begun_values(options);
    if (!rc)
        rc = cuda_take(cuda, MEMORY_WORK, (size_t)2 * cuda->max_tasks * sizeof(int32_t), &cuda->sampled, err);
    if (!rc)
        rc = cuda_take(cuda, MEMORY_PINNED, 2 * cuda->begun_values * sizeof(int32_t), &cuda->begun, err);
    if (!rc)
        rc = open_partials(cuda, err);
    if (!rc)
        rc = linear_open(cuda, err);
    if (!rc)
        rc = cuda_lora_open(cuda, err);
    if (!rc && cuda->lora_rows)
        rc = cuda_beside_open(cuda, err);
    if (!rc)
        rc = cuda_router_open(cuda, err);
    return rc ? rc : cuda_experts_open(cuda, err);
}

static enum rc cuda_open(const struct backend_options *options, void **ctx, struct err *err)
{
    struct device_info info = {};
    enum rc rc = device_describe(options->device, false, &info, err);
    if (rc)
        return rc;
    if (!is_float_type(options->dtype))
        return err_set(err, RC_CONFIG, "dtype: wanted float32, float16 or bfloat16 activations, have type %u", options->dtype);
    struct cuda *cuda = (struct cuda *)mem_calloc(1, sizeof *cuda);
    if (!cuda)
        return err_set(err, RC_MEMORY, "cuda: no memory for the context");
    cuda->options = *options;
    cuda->options.device = cuda->options.isa = "cuda"; /* the caller's strings need not outlive the call */
    cuda->dtype = options->dtype;
    rc = cuda_find_device(options->device, &cuda->device, err);
    if (!rc)
        rc = cuda_context_open(cuda->device, &cuda->is_portable, err);
    if (!rc)
        rc = read_limits(cuda, err);
    if (!rc) {
        device_scope scope(cuda->device);
        rc = open_memory(cuda, err);
    }
    cuda->options.cublaslt = NULL; /* the caller's string, too */
    if (rc) {
        cuda_close(cuda);
        return rc;
    }
    snprintf(cuda->description, sizeof cuda->description, "cuda:%d %s%s", cuda->device, info.name,
             cuda->is_portable ? ", portable kernels" : "");
    *ctx = cuda;
    return RC_OK;
}

static const char *describe(void *ctx)
{
    return ((struct cuda *)ctx)->description;
}

static uint32_t activations(void *ctx)
{
    return ((struct cuda *)ctx)->dtype;
}

static uint32_t fusions(void *ctx)
{
    const uint32_t of_ranks = FUSION_GATHER_NORM | FUSION_LINEAR_ADD_GATHER | FUSION_GATHER_COMBINE;
    return (cuda_n_ranks((struct cuda *)ctx) > 1 ? of_ranks : 0) | FUSION_LINEAR_GATED | FUSION_ADD_NORM |
           FUSION_NORM_ADD_NORM | FUSION_SSM_GATED | FUSION_SSM_INPUTS | FUSION_NORM_ROUTE | FUSION_QKV_ATTENTION |
           FUSION_ADD_NORM_LINEAR | FUSION_LINEAR_DELTA | FUSION_VISIBLE_END | FUSION_EXPERTS_LORA |
           FUSION_LORA_BIASES | FUSION_LORA_BFLOAT16;
}

static bool supports(void *ctx, uint32_t dtype, uint32_t use)
{
    (void)ctx;
    (void)use;
    return cuda_type_of(dtype) != NULL;
}

/* ---- matrices ------------------------------------------------------------------------------------------------------------ */

static size_t round_up(size_t n, size_t step)
{
    return (n + step - 1) / step * step;
}

static void matrix_destroy(void *ctx, struct matrix *matrix)
{
    if (!matrix)
        return;
    for (struct matrix *run = matrix->runs, *next; run; run = next) {
        next = run->next;
        matrix_destroy(ctx, run);
    }
    linear_drop((struct cuda *)ctx, matrix);
    if (matrix->data)
        cuda_give((struct cuda *)ctx, matrix->data);
    mem_free(matrix);
}

/* Weights of this type alone have products with activations of 8 bits; DTYPE_NONE: the arithmetic is another one. */
static uint32_t type_of_bytes(uint32_t arithmetic)
{
    return arithmetic == ARITHMETIC_FP8 ? DTYPE_FP8 : arithmetic == ARITHMETIC_INT8 ? DTYPE_INT8_G128 : DTYPE_NONE;
}

/* What the products of the matrix round their activations to: ARITHMETIC_FP8, ARITHMETIC_INT8 or, if they do not round,
 * ARITHMETIC_FLOAT. The tensor cores want parts of one type; those of experts whole 64s of columns, for which the scratch of
 * `experts` has room, and whole eights of rows, because gate and up alternate. */
static uint32_t arithmetic_of_bytes(const struct cuda *cuda, const struct matrix *matrix, const struct matrix_desc *desc)
{
    const bool is_of_experts = desc->use & MATRIX_EXPERTS;
    bool fits = desc->arithmetic != ARITHMETIC_FLOAT && cuda->dtype != DTYPE_F32 && matrix->is_whole && matrix->n_rows;
    fits = fits && (!is_of_experts || matrix->n_cols % 64 == 0);
    for (uint32_t i = 0; i < matrix->n_parts; i++)
        fits = fits && (!is_of_experts || matrix->parts[i].n_rows % 8 == 0);
    for (uint32_t arithmetic : {ARITHMETIC_FP8, ARITHMETIC_INT8})
        if (fits && matrix->parts[0].dtype == type_of_bytes(arithmetic))
            return arithmetic;
    return ARITHMETIC_FLOAT;
}

/* Can all of the matrix lie in packed.cuh's order, for the context's type of activations? Kernels of sm_90a alone read it. */
static bool can_pack(const struct cuda *cuda, const struct matrix *matrix, uint32_t use)
{
    bool fits = use & MATRIX_EXPERTS && matrix->is_whole && matrix->n_cols % 64 == 0 && !cuda->is_portable;
    for (uint32_t i = 0; i < matrix->n_parts; i++)
        fits = fits && cuda_type_of(matrix->parts[i].dtype)->packed_for == cuda->dtype && matrix->parts[i].n_rows % 8 == 0;
    return fits;
}

/* Does the matrix lie in units? Its products have the order of linear_units.cuh then. Operations other than linears read rows;
 * those of experts read units if an expert has whole panels. */
static bool has_units(const struct cuda *cuda, const struct matrix *matrix, const struct matrix_desc *desc)
{
    const bool is_of_linears = !(desc->use & ~(MATRIX_LINEAR | MATRIX_LOGITS));
    const bool is_of_experts = desc->use == (MATRIX_LINEAR | MATRIX_EXPERTS) && desc->n_experts && matrix->rows_each % 16 == 0;
    return (is_of_linears || is_of_experts) && desc->arithmetic == ARITHMETIC_AUTO && cuda->dtype == DTYPE_BF16 &&
           matrix->is_whole && matrix->n_rows && matrix->n_cols % 64 == 0 && lies_in_units(matrix->parts[0].dtype);
}

static enum rc create_whole(void *ctx, const struct matrix_desc *desc, struct matrix **result, struct err *err)
{
    device_scope scope(((struct cuda *)ctx)->device);
    const uint32_t bytes_dtype = type_of_bytes(desc->arithmetic);
    const char *activations = desc->arithmetic == ARITHMETIC_INT8 ? "int8" : "fp8";
    if (bytes_dtype != DTYPE_NONE && ((struct cuda *)ctx)->dtype == DTYPE_F32)
        return err_set(err, RC_UNSUPPORTED, "cuda: wanted dtype bfloat16 or float16 for %s activations, have float32; set "
                       "activation_dtype to 'auto'", activations);
    struct matrix *matrix = (struct matrix *)mem_calloc(1, sizeof *matrix + desc->n_parts * sizeof *matrix->parts);
    if (!matrix)
        return err_set(err, RC_MEMORY, "cuda: no memory for a matrix");
    matrix->n_parts = desc->n_parts;
    matrix->n_cols = desc->n_cols;
    matrix->is_whole = true;
    for (uint32_t i = 0; i < desc->n_parts; i++) {
        struct cuda_part *part = &matrix->parts[i];
        const struct dtype_info *info = dtype_info(desc->parts[i].dtype);
        /* The last block of types that GGUF lacks may be cut. */
        const bool fits = info && (desc->parts[i].dtype >= DTYPE_COUNT || desc->n_cols % info->block_values == 0);
        if (!fits || !supports(ctx, desc->parts[i].dtype, desc->use)) {
            mem_free(matrix);
            return err_set(err, RC_UNSUPPORTED, "cuda: wanted whole blocks of a supported type, have %u columns of %s",
                           desc->n_cols, info ? info->name : "an unknown type");
        }
        if (bytes_dtype != DTYPE_NONE && desc->parts[i].dtype != bytes_dtype && !is_float_type(desc->parts[i].dtype)) {
            mem_free(matrix);
            return err_set(err, RC_UNSUPPORTED, "cuda: %s weights have no products with %s activations; set activation_dtype "
                           "to 'auto'", info->name, activations);
        }
        part->dtype = desc->parts[i].dtype;
        part->first_row = matrix->n_rows;
        part->n_rows = desc->parts[i].n_rows;
        part->file_row_bytes = dtype_row_bytes(part->dtype, desc->n_cols);
        part->lead_bytes = has_fp8_rows(part->dtype) ? fp8_lead_bytes(desc->n_cols) : 0;
        part->row_bytes = has_fp8_rows(part->dtype)
                              ? fp8_row_bytes(desc->n_cols)
                              : round_up(part->file_row_bytes, cuda_type_of(part->dtype)->row_step);
        if (i && part->dtype != part[-1].dtype) {
            matrix->bytes = round_up(matrix->bytes, 256);
            matrix->is_whole = false;
        }
        matrix->n_rows += part->n_rows;
        matrix->bytes += part->n_rows * part->row_bytes;
    }
    matrix->rows_each = desc->n_experts ? matrix->n_rows / desc->n_experts : matrix->n_rows;
    matrix->is_packed = can_pack((struct cuda *)ctx, matrix, desc->use);
    matrix->arithmetic = arithmetic_of_bytes((struct cuda *)ctx, matrix, desc);
    if (has_units((struct cuda *)ctx, matrix, desc)) {
        matrix->is_packed = true;
        matrix->arithmetic = ARITHMETIC_AUTO;
        matrix->bytes = units_bytes(matrix->parts[0].dtype, matrix->n_rows, matrix->n_cols);
    }
    enum rc rc = cuda_pool_create(ctx, MEMORY_WEIGHTS, matrix->bytes, (void **)&matrix->data, err);
    if (rc) {
        matrix_destroy(ctx, matrix);
        return rc;
    }
    size_t at = 0;
    for (uint32_t i = 0; i < matrix->n_parts; i++) {
        if (i && matrix->parts[i].dtype != matrix->parts[i - 1].dtype)
            at = round_up(at, 256);
        matrix->parts[i].data = matrix->data + at + matrix->parts[i].lead_bytes;
        at += matrix->parts[i].n_rows * matrix->parts[i].row_bytes;
    }
    matrix->is_logits = desc->use & MATRIX_LOGITS;
    matrix->is_router = desc->use & MATRIX_ROUTER && router_fits((struct cuda *)ctx, matrix);
    if (!(desc->use & MATRIX_EXPERTS) && !matrix->is_router)
        rc = linear_take((struct cuda *)ctx, matrix, err);
    if (rc)
        matrix_destroy(ctx, matrix);
    else
        *result = matrix;
    return rc;
}

/* The parts from the first one on that are of its type. */
static uint32_t count_run(const struct matrix_desc *desc, uint32_t first)
{
    uint32_t end = first + 1;
    while (end < desc->n_parts && desc->parts[end].dtype == desc->parts[first].dtype)
        end++;
    return end - first;
}

static enum rc create_runs(void *ctx, const struct matrix_desc *desc, struct matrix **result, struct err *err)
{
    struct matrix *matrix = (struct matrix *)mem_calloc(1, sizeof *matrix), **last;
    if (!matrix)
        return err_set(err, RC_MEMORY, "cuda: no memory for a matrix");
    matrix->n_parts = desc->n_parts;
    matrix->n_cols = desc->n_cols;
    last = &matrix->runs;
    enum rc rc = RC_OK;
    for (uint32_t first = 0, n; first < desc->n_parts && !rc; first += n) {
        struct matrix_desc run = *desc;
        run.parts = desc->parts + first;
        run.n_parts = n = count_run(desc, first);
        rc = create_whole(ctx, &run, last, err);
        if (rc)
            break;
        matrix->n_rows += (*last)->n_rows;
        matrix->bytes += (*last)->bytes;
        last = &(*last)->next;
    }
    if (rc)
        matrix_destroy(ctx, matrix);
    else
        *result = matrix;
    return rc;
}

static enum rc matrix_create(void *ctx, const struct matrix_desc *desc, struct matrix **result, struct err *err)
{
    const bool is_of_linears = !(desc->use & ~(MATRIX_LINEAR | MATRIX_LOGITS));
    return is_of_linears && count_run(desc, 0) < desc->n_parts ? create_runs(ctx, desc, result, err)
                                                               : create_whole(ctx, desc, result, err);
}

static size_t matrix_bytes(const struct matrix *matrix)
{
    return matrix->bytes;
}

static uint32_t matrix_arithmetic(const struct matrix *matrix, uint32_t part)
{
    return matrix_with_part((struct matrix *)matrix, &part)->arithmetic;
}

/* Stores rows of a part: pack(context, the first row's number in the matrix) if the matrix is packed, otherwise
 * copy(context, part, the first row's address). */
template <class PACK, class COPY>
static enum rc store_rows(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows, PACK pack,
                          COPY copy)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    const struct cuda_part *p = &matrix->parts[part];
    if (!n_rows)
        return RC_OK;
    linear_changed(matrix);
    return matrix->is_packed ? pack(cuda, p->first_row + first_row) : copy(cuda, p, p->data + first_row * p->row_bytes);
}

/* Columns of a part whose rows are split (fp8_rows.cuh); 0: they are not. */
static uint32_t fp8_cols(const struct matrix *matrix, const struct cuda_part *part)
{
    return has_fp8_rows(part->dtype) ? matrix->n_cols : 0;
}

static enum rc matrix_write(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                            const void *data, struct err *err)
{
    matrix = matrix_with_part(matrix, &part);
    return store_rows(
        ctx, matrix, part, first_row, n_rows,
        [&](struct cuda *cuda, uint32_t row) { return cuda_packed_write(cuda, matrix, row, n_rows, data, err); },
        [&](struct cuda *cuda, const struct cuda_part *p, char *to) {
            return cuda_upload_rows(cuda, to - p->lead_bytes, p->row_bytes, data, p->file_row_bytes, n_rows, err,
                                    fp8_cols(matrix, p));
        });
}

/* Computed rows that are packed: the lanes compute them and copy them to the device, which packs them. */
static enum rc load_computed(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows,
                             const struct row_source *source, struct err *err)
{
    size_t row_bytes = matrix->parts[0].file_row_bytes;
    enum rc rc = RC_OK;
    for (uint32_t row = 0, n; row < n_rows && !rc; row += n) {
        char *room;
        n = n_rows - row;
        rc = cuda_packed_room(cuda, row_bytes, &n, &room, err);
        rc = rc ? rc : cuda_upload_source(cuda, room, row_bytes, source, row, row_bytes, n, err);
        rc = rc ? rc : cuda_packed_store(cuda, matrix, first_row + row, n, err);
    }
    return rc;
}

/* Reads packed rows into a buffer of the host, then packs them on the device. */
static enum rc load_packed(struct cuda *cuda, struct matrix *matrix, uint32_t first_row, uint32_t n_rows,
                           const struct row_source *source, struct err *err)
{
    if (source->is_computed)
        return load_computed(cuda, matrix, first_row, n_rows, source, err);
    size_t row_bytes = matrix->parts[0].file_row_bytes;
    uint32_t at_once = row_bytes < LOAD_BYTES ? (uint32_t)(LOAD_BYTES / row_bytes) : 1;
    char *rows = (char *)mem_alloc(at_once * row_bytes);
    enum rc rc = rows ? RC_OK : err_set(err, RC_MEMORY, "matrix_load: no memory for %zu bytes", at_once * row_bytes);
    for (uint32_t row = 0, n; row < n_rows && !rc; row += n) {
        n = n_rows - row < at_once ? n_rows - row : at_once;
        rc = source->read(source->ctx, row, n, rows, err);
        rc = rc ? rc : cuda_packed_write(cuda, matrix, first_row + row, n, rows, err);
    }
    mem_free(rows);
    return rc;
}

static enum rc matrix_load(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                           const struct row_source *source, struct err *err)
{
    matrix = matrix_with_part(matrix, &part);
    return store_rows(
        ctx, matrix, part, first_row, n_rows,
        [&](struct cuda *cuda, uint32_t row) { return load_packed(cuda, matrix, row, n_rows, source, err); },
        [&](struct cuda *cuda, const struct cuda_part *p, char *to) {
            return cuda_upload_source(cuda, to - p->lead_bytes, p->row_bytes, source, 0, p->file_row_bytes, n_rows, err,
                                      fp8_cols(matrix, p));
        });
}

/* A row as the file has it. `stored` has room for the row as the device has it. */
static enum rc read_row(void *ctx, const struct matrix *matrix, const struct cuda_part *p, uint32_t r, char *row, char *stored,
                        struct err *err)
{
    const char *from = p->data + (r - p->first_row) * p->row_bytes - p->lead_bytes;
    if (matrix->is_packed)
        return cuda_packed_read((struct cuda *)ctx, matrix, r, row, err);
    if (!has_fp8_rows(p->dtype))
        return download(ctx, row, from, p->file_row_bytes, err);
    enum rc rc = download(ctx, stored, from, p->row_bytes, err);
    if (!rc)
        fp8_join(row, stored, matrix->n_cols);
    return rc;
}

static enum rc read_whole(void *ctx, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *values,
                          struct err *err)
{
    enum rc rc = RC_OK;
    const struct cuda_part *p = matrix->parts;
    const size_t row_bytes = (size_t)matrix->n_cols * sizeof(float) + FP8_FILE_BLOCK_BYTES;
    char *row = (char *)mem_alloc(row_bytes + fp8_row_bytes(matrix->n_cols));
    if (!row)
        return err_set(err, RC_MEMORY, "matrix_read: no memory for a row");
    for (uint32_t r = first_row; r < first_row + n_rows && !rc; r++, values += matrix->n_cols) {
        while (r >= p->first_row + p->n_rows)
            p++;
        rc = read_row(ctx, matrix, p, r, row, row + row_bytes, err);
        if (!rc)
            dtype_to_float(p->dtype, row, values, matrix->n_cols);
    }
    mem_free(row);
    return rc;
}

static enum rc matrix_read(void *ctx, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *values,
                           struct err *err)
{
    if (!matrix->runs)
        return read_whole(ctx, matrix, first_row, n_rows, values, err);
    enum rc rc = RC_OK;
    for (const struct matrix *run = matrix->runs; n_rows && !rc; run = run->next) {
        const uint32_t skipped = min(first_row, run->n_rows), n = min(n_rows, run->n_rows - skipped);
        rc = read_whole(ctx, run, skipped, n, values, err);
        first_row -= skipped;
        n_rows -= n;
        values += (size_t)n * matrix->n_cols;
    }
    return rc;
}

/* ---- pages --------------------------------------------------------------------------------------------------------------- */

static size_t kv_layer_bytes(void *ctx, uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens)
{
    (void)ctx;
    const size_t item = kv_item_bytes(dtype);
    if (!item || !block_tokens || !head_dim)
        return 0;
    if (!n_kv_heads) /* rows of latent attention */
        return item > 1 && head_dim <= 640 ? item * block_tokens * head_dim : 0;
    return head_dim > 256 ? 0 : 2 * n_kv_heads * block_tokens * (item * head_dim + kv_scale_bytes(dtype));
}

/* A snapshot of a recurrent state copies hundreds of pages. One launch makes as many copies as a kernel's arguments hold. Bound
 * by memory, which moves a page twice: 9 MB of state take 4 us at 4.55 TB/s. Recurrences read their states before they wait for
 * the kernel before them, so no kernel may begin before the copies have ended: this one never calls start_next(). */
#define COPIES_A_LAUNCH 448u
#define COPY_THREADS 256u
#define COPY_BYTES (4 * COPY_THREADS * sizeof(uint4)) /* of a block */

struct copy_list {
    struct page_copy copies[COPIES_A_LAUNCH];
};

static __global__ void __launch_bounds__(COPY_THREADS) copy_pages_listed(uint4 *pool, uint32_t page_words,
                                                                         __grid_constant__ const copy_list list)
{
    wait_for_input();
    const uint4 *source = pool + (size_t)list.copies[blockIdx.y].source * page_words;
    uint4 *target = pool + (size_t)list.copies[blockIdx.y].target * page_words;
    uint32_t first = blockIdx.x * 4 * COPY_THREADS + threadIdx.x;
    uint4 words[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (first + i * COPY_THREADS < page_words)
            words[i] = source[first + i * COPY_THREADS];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (first + i * COPY_THREADS < page_words)
            target[first + i * COPY_THREADS] = words[i];
    __threadfence(); /* the next kernel's blocks begin when these have ended */
}

enum rc cuda_copy_pages(void *ctx, const struct copy_pages_args *args, struct err *err)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (args->page_bytes % sizeof(uint4))
        return err_set(err, RC_UNSUPPORTED, "copy_pages: wanted pages of whole 16 bytes, have %zu", args->page_bytes);
    for (uint32_t first = 0; first < args->n_copies; first += COPIES_A_LAUNCH) {
        uint32_t left = args->n_copies - first, n = left < COPIES_A_LAUNCH ? left : COPIES_A_LAUNCH;
        struct copy_list list;
        memcpy(list.copies, args->copies + first, n * sizeof *list.copies);
        launch(cuda, copy_pages_listed, dim3((uint32_t)((args->page_bytes + COPY_BYTES - 1) / COPY_BYTES), n), COPY_THREADS, 0,
               (uint4 *)args->pool, (uint32_t)(args->page_bytes / sizeof(uint4)), list);
    }
    return launched(err, "copy_pages");
}

/* ---- the table ----------------------------------------------------------------------------------------------------------- */

static const struct device_traits TRAITS = {
    sizeof(struct device_traits),
    false, 8192, 256, DTYPE_BF16, /* its own memory; tokens and sequences of a step; activations over quantised weights */
    64,                           /* most rows of a linear that is never cuBLASLt's */
    8, 512,                       /* attention_few.cuh */
    true};                        /* tensor_quantise.cuh */

static struct backend make_table(void)
{
    struct backend b = {};
    b.abi = BACKEND_ABI;
    b.size_bytes = sizeof b;
    b.name = "cuda";
    b.traits = &TRAITS;
    b.open = cuda_open;
    b.close = cuda_close;
    b.describe = describe;
    b.fusions = fusions;
    b.supports = supports;
    b.buffer_create = cuda_buffer_create;
    b.buffer_destroy = cuda_buffer_destroy;
    b.upload = upload;
    b.download = download;
    b.synchronize = synchronize;
    b.matrix_create = matrix_create;
    b.matrix_destroy = matrix_destroy;
    b.matrix_bytes = matrix_bytes;
    b.matrix_arithmetic = matrix_arithmetic;
    b.matrix_write = matrix_write;
    b.matrix_load = matrix_load;
    b.matrix_read = matrix_read;
    b.kv_layer_bytes = kv_layer_bytes;
#define ENTRY(name) b.name = cuda_##name;
#define HOST_ENTRY(name) ENTRY(name)
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#include "../../entries.def"
    b.activations = activations;
    b.device_info = device_describe;
    b.matrix_fill = cuda_matrix_fill;
    b.sample_finish = cuda_sample_finish;
    b.graph_begin = cuda_graph_begin;
    b.graph_end = cuda_graph_end;
    b.graph_launch = cuda_graph_launch;
    b.graph_destroy = cuda_graph_destroy;
    b.prepare = cuda_prepare;
    b.pool_create = cuda_pool_create;
    b.pool_release = cuda_pool_release;
    b.pool_restore = cuda_pool_restore;
    b.pool_save = cuda_pool_save;
    b.pool_forget = cuda_pool_forget;
    b.memory = cuda_memory;
    b.allocations = cuda_allocations;
    b.tensor_finish = cuda_tensor_finish;
    b.matrix_rows = cuda_matrix_rows;
    b.upload_beside = cuda_upload_beside;
    b.refresh = cuda_refresh;
    b.peers = &cuda_peers;
    b.comm = &cuda_comm;
    b.moves = &cuda_moves;
    return b;
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED const struct backend *llmpy_backend(const struct backend_host *host)
{
    static const struct backend table = make_table();
    return host->size_bytes < sizeof table ? nullptr : &table;
}

/* ---- for tests ----------------------------------------------------------------------------------------------------------- */

static struct way_name name_in(uint32_t table, uint32_t row)
{
    static struct way_name (*const names[N_WAY_TABLES])(uint32_t) = {cuda_linear_way, cuda_experts_way, cuda_experts_linear_way,
                                                                     cuda_attention_way, cuda_gather_way};
    return table < N_WAY_TABLES ? names[table](row) : way_name{};
}

/* The name of a row of an enum way_table; NULL: no such row. It needs no device. */
EXPORTED const char *llmpy_cuda_way(uint32_t table, uint32_t row)
{
    return name_in(table, row).name;
}

/* Which devices have its kernels: enum way_devices. */
EXPORTED uint32_t llmpy_cuda_way_devices(uint32_t table, uint32_t row)
{
    return name_in(table, row).devices;
}

/* Puts a row of a table first in a context, or with row 0 restores the table's order; the first row is 1. Returns the rows that
 * were found since the last call, bit 0 being the first row. */
EXPORTED uint32_t llmpy_cuda_put_first(void *ctx, uint32_t table, uint32_t row)
{
    struct way_choice *choice = &((struct cuda *)ctx)->ways[table];
    const uint32_t found = choice->found;
    *choice = {row, 0};
    return found;
}
