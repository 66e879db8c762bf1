/* linear_library.cuh: which linears of linear.cu cuBLASLt computes. For more than SKINNY_ROWS rows, library_prepare times our
 * own kernel and the library's first proposals for every shape of a weight and every class of row counts. The library serves a
 * class where it is faster and gives equal bits. */
#ifndef LLMPY_CUDA_LINEAR_LIBRARY_CUH
#define LLMPY_CUDA_LINEAR_LIBRARY_CUH

#include "cublaslt.cuh"
#include "linear_skinny.cuh"

#include <stdio.h>
#include <string.h>

/* The classes of row counts. A class ends at its number; the last one also has all larger counts. */
static const uint32_t CLASS_ROWS[] = {128, 192, 256, 384, 512, 1024, 2048, 4096};
#define N_CLASSES (sizeof CLASS_ROWS / sizeof *CLASS_ROWS)
#define N_SHAPES 24u
#define N_SAMPLES 4u

struct linear_shape {
    uint32_t n_out, n_cols;
    bool is_float;                           /* its products are logits */
    const struct matrix *samples[N_SAMPLES]; /* some weights of the shape */
    uint32_t n_samples;
    uint32_t n_tried, n_chosen;              /* classes */
    bool is_library[N_CLASSES];              /* use cuBLASLt with this algorithm, which gave equal bits */
    struct lt_algorithm algorithms[N_CLASSES];
};
struct library {
    struct lt *lt; /* NULL: turned off, or not found */
    struct linear_shape shapes[N_SHAPES];
    uint32_t n_shapes;
};

/* Multiplies by our own kernels. */
typedef enum rc (*own_linear)(struct cuda *cuda, const struct linear_args *args);

static bool has_shape(const struct matrix *matrix, const struct linear_shape *shape)
{
    return shape->n_out == matrix->n_rows && shape->n_cols == matrix->n_cols && shape->is_float == matrix->is_logits;
}

static void library_take(struct library *library, struct matrix *matrix)
{
    uint32_t i = 0;
    while (i < library->n_shapes && !has_shape(matrix, &library->shapes[i]))
        i++;
    if (i == N_SHAPES)
        return;
    struct linear_shape *shape = &library->shapes[i];
    if (i == library->n_shapes) {
        library->n_shapes++;
        shape->n_out = matrix->n_rows;
        shape->n_cols = matrix->n_cols;
        shape->is_float = matrix->is_logits;
    }
    matrix->shape = i + 1;
    if (shape->n_samples < N_SAMPLES)
        shape->samples[shape->n_samples++] = matrix;
}

static void library_drop(struct library *library, const struct matrix *matrix)
{
    if (!matrix->shape)
        return;
    struct linear_shape *shape = &library->shapes[matrix->shape - 1];
    for (uint32_t i = 0; i < shape->n_samples; i++)
        if (shape->samples[i] == matrix)
            shape->samples[i--] = shape->samples[--shape->n_samples];
}

/* The class that n_rows, more than SKINNY_ROWS, are of. */
static uint32_t class_of(uint32_t n_rows)
{
    uint32_t i = 0;
    while (i + 1 < N_CLASSES && CLASS_ROWS[i] < n_rows)
        i++;
    return i;
}

static const struct lt_algorithm *find_algorithm(const struct library *library, const struct matrix *matrix, uint32_t n_rows)
{
    if (!library->lt || !matrix->shape || n_rows <= SKINNY_ROWS)
        return NULL;
    const struct linear_shape *shape = &library->shapes[matrix->shape - 1];
    uint32_t i = class_of(n_rows);
    return shape->is_library[i] ? &shape->algorithms[i] : NULL;
}

static struct lt_product product_of(const struct linear_args *args)
{
    const struct matrix *matrix = args->matrix;
    struct lt_product product = {};
    product.w = matrix->data;
    product.x = args->x.data;
    product.y = args->y.data;
    product.w_stride = (int64_t)(matrix->parts[0].row_bytes / 2);
    product.x_stride = args->x.stride;
    product.y_stride = args->y.stride;
    product.n_rows = args->n_rows;
    product.n_out = matrix->n_rows;
    product.n_cols = matrix->n_cols;
    product.is_float = args->is_float_out;
    return product;
}

#define N_ALGORITHMS 4u

/* What is tried, and memory: rows of x, the library's y, our y, and the result of the comparison. */
struct trial {
    struct cuda *cuda;
    struct lt *lt;
    own_linear multiply;
    char *x, *y, *own;
    uint32_t *n_unequal;
    cudaEvent_t start, end;
    size_t x_bytes;
};

/* Values of both signs over eight binary orders. */
template <class T> static __global__ void linear_trial_fill(T *x, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 0x9E3779B1u ^ (uint32_t)(i >> 32);
        h = (h ^ h >> 15) * 0x85EBCA77u;
        h ^= h >> 13;
        x[i] = round_to<T>(ldexpf((float)(int32_t)h * 0x1p-31f, -(int)(h & 7)));
    }
}

static __global__ void linear_trial_compare(const uint32_t *a, const uint32_t *b, size_t n, uint32_t *count)
{
    uint32_t found = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        found += a[i] != b[i];
    if (found)
        atomicAdd(count, found);
}

static struct linear_args trial_args(const struct linear_shape *shape, uint32_t sample, uint32_t n_rows, char *x, char *y)
{
    struct linear_args args = {};
    args.matrix = shape->samples[sample % shape->n_samples];
    args.n_rows = n_rows;
    args.x = {x, shape->n_cols, shape->n_cols};
    args.y = {y, shape->n_out, shape->n_out};
    args.is_float_out = shape->is_float;
    return args;
}

/* Milliseconds of a call by an algorithm, or by our own kernel; below zero: the library refuses. */
static float time_trial(const struct trial *t, const struct linear_shape *shape, uint32_t n_rows,
                        const struct lt_algorithm *algorithm)
{
    struct cuda *cuda = t->cuda;
    uint32_t n_calls = n_rows < 1024 ? shape->n_samples : 1;
    float ms = -1;
    for (uint32_t i = 0; i <= n_calls; i++) { /* the first warms up */
        struct linear_args args = trial_args(shape, i, n_rows, t->x, t->y);
        struct lt_product product = product_of(&args);
        if (i == 1)
            cudaEventRecord(t->start, cuda->stream);
        if (algorithm ? !lt_multiply(t->lt, &product, cuda->dtype, algorithm, cuda->stream)
                      : t->multiply(cuda, &args) != RC_OK)
            return -1;
    }
    cudaEventRecord(t->end, cuda->stream);
    if (cudaEventSynchronize(t->end) != cudaSuccess || cudaEventElapsedTime(&ms, t->start, t->end) != cudaSuccess)
        return -1;
    return ms / (float)n_calls;
}

/* True if the library and our kernel give equal bits for all outputs of the first and last rows. */
static bool is_proven(const struct trial *t, const struct linear_shape *shape, uint32_t n_rows,
                      const struct lt_algorithm *algorithm)
{
    struct cuda *cuda = t->cuda;
    uint32_t n_unequal = 1;
    size_t x_bytes = (size_t)shape->n_cols * 2, y_bytes = (size_t)shape->n_out * (shape->is_float ? 4 : 2);
    if (cudaMemsetAsync(t->n_unequal, 0, sizeof n_unequal, cuda->stream) != cudaSuccess)
        return false;
    for (uint32_t n : {n_rows, n_rows - 27}) {
        struct linear_args args = trial_args(shape, 0, n, t->x, t->y);
        struct lt_product product = product_of(&args);
        if (!lt_multiply(t->lt, &product, cuda->dtype, algorithm, cuda->stream))
            return false;
        for (uint32_t first : {0u, n - SKINNY_ROWS}) {
            struct linear_args own = trial_args(shape, 0, SKINNY_ROWS, t->x + first * x_bytes, t->own);
            if (t->multiply(cuda, &own))
                return false;
            linear_trial_compare<<<256, 256, 0, cuda->stream>>>(
                (const uint32_t *)t->own, (const uint32_t *)(t->y + first * y_bytes), SKINNY_ROWS * y_bytes / 4, t->n_unequal);
        }
    }
    cudaMemcpyAsync(&n_unequal, t->n_unequal, sizeof n_unequal, cudaMemcpyDeviceToHost, cuda->stream);
    return cudaStreamSynchronize(cuda->stream) == cudaSuccess && n_unequal == 0;
}

/* True if the library gains more time than it loses because its kernels do not overlap with their neighbours. */
static bool is_worth(float ms, float own_ms)
{
    return ms > 0 && ms < 0.97f * own_ms - 0.001f;
}

/* The fastest of the library's first proposals for a class of row counts, if it beats our kernel and gives its bits. */
static void choose_class(const struct trial *t, struct linear_shape *shape, uint32_t index)
{
    uint32_t n_rows = CLASS_ROWS[index];
    struct lt_algorithm found[N_ALGORITHMS];
    struct linear_args args = trial_args(shape, 0, n_rows, t->x, t->y);
    struct lt_product product = product_of(&args);
    uint32_t n = lt_find(t->lt, &product, t->cuda->dtype, found, n_rows < 1024 ? N_ALGORITHMS : 1);
    float ms[N_ALGORITHMS], own = time_trial(t, shape, n_rows, NULL);
    for (uint32_t i = 0; i < n; i++)
        ms[i] = time_trial(t, shape, n_rows, &found[i]);
    shape->n_tried++;
    for (;;) {
        uint32_t best = n;
        for (uint32_t i = 0; i < n; i++)
            if (is_worth(ms[i], own) && (best == n || ms[i] < ms[best]))
                best = i;
        if (best == n)
            return;
        if (is_proven(t, shape, n_rows, &found[best])) {
            shape->is_library[index] = true;
            shape->algorithms[index] = found[best];
            shape->n_chosen++;
            return;
        }
        ms[best] = -1;
    }
}

/* Most rows that products of a shape have. */
static uint32_t shape_rows(const struct cuda *cuda, const struct linear_shape *shape)
{
    return shape->is_float ? cuda->options.max_logits_rows : cuda->options.max_rows;
}

static void choose_all(struct library *library, const struct trial *t)
{
    const struct cuda *cuda = t->cuda;
    visit_type(cuda->dtype, [&](auto value) {
        using T = decltype(value);
        linear_trial_fill<T><<<1024, 256, 0, cuda->stream>>>((T *)t->x, t->x_bytes / sizeof(T));
    });
    for (uint32_t s = 0; s < library->n_shapes; s++) {
        struct linear_shape *shape = &library->shapes[s];
        uint32_t n_rows = shape_rows(cuda, shape);
        if (shape->n_samples && !shape->n_tried && shape->n_out % 8 == 0 && n_rows > SKINNY_ROWS)
            for (uint32_t i = 0; i <= class_of(n_rows); i++)
                choose_class(t, shape, i);
    }
}

static enum rc take_trial(const struct library *library, struct trial *t, struct err *err)
{
    struct cuda *cuda = t->cuda;
    size_t y_bytes = 0, own_bytes = 0;
    for (uint32_t s = 0; s < library->n_shapes; s++) {
        const struct linear_shape *shape = &library->shapes[s];
        size_t n_rows = CLASS_ROWS[class_of(shape_rows(cuda, shape))], row = (size_t)shape->n_out * (shape->is_float ? 4 : 2);
        t->x_bytes = n_rows * shape->n_cols * 2 > t->x_bytes ? n_rows * shape->n_cols * 2 : t->x_bytes;
        y_bytes = n_rows * row > y_bytes ? n_rows * row : y_bytes;
        own_bytes = SKINNY_ROWS * row > own_bytes ? SKINNY_ROWS * row : own_bytes;
    }
    cudaError_t code = cudaEventCreate(&t->start);
    code = code ? code : cudaEventCreate(&t->end);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "prepare");
    enum rc rc = cuda_take(cuda, MEMORY_WORK, t->x_bytes, &t->x, err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, y_bytes, &t->y, err);
    rc = rc ? rc : cuda_take(cuda, MEMORY_WORK, own_bytes, &t->own, err);
    return rc ? rc : cuda_take(cuda, MEMORY_WORK, sizeof *t->n_unequal, &t->n_unequal, err);
}

static void describe_choice(struct cuda *cuda, const struct library *library)
{
    uint32_t n_tried = 0, n_chosen = 0;
    for (uint32_t s = 0; s < library->n_shapes; s++) {
        n_tried += library->shapes[s].n_tried;
        n_chosen += library->shapes[s].n_chosen;
    }
    char *text = strstr(cuda->description, ", cuBLASLt"), *end = cuda->description + sizeof cuda->description;
    text = text ? text : cuda->description + strlen(cuda->description);
    snprintf(text, (size_t)(end - text), ", cuBLASLt %zu for %u of %u kinds of linears beyond %u rows",
             library->lt->call.version(), n_chosen, n_tried, SKINNY_ROWS);
}

/* Nothing to do without the library. */
static enum rc library_prepare(struct cuda *cuda, struct library *library, own_linear multiply, struct err *err)
{
    if (!library->lt)
        return RC_OK;
    struct trial t = {};
    t.cuda = cuda;
    t.lt = library->lt;
    t.multiply = multiply;
    enum rc rc = take_trial(library, &t, err);
    if (!rc) {
        choose_all(library, &t);
        rc = launched(err, "prepare");
    }
    describe_choice(cuda, library);
    for (void *memory : {(void *)t.x, (void *)t.y, (void *)t.own, (void *)t.n_unequal})
        cuda_give(cuda, memory);
    for (cudaEvent_t event : {t.start, t.end})
        if (event)
            cudaEventDestroy(event);
    return rc;
}

#endif
