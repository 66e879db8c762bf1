/* common.cuh: the context, conversions between activation types and float32, and the check of a launch, which all files of the
 * CUDA backend share. backend_cuda.cu owns the context and returns the table. Files of operations have the names of
 * kernels/cpu. All work of a context goes to its one stream, so operations run in the order of the calls. The build does not
 * fuse products and sums (-fmad=false); the source says fmaf where they are fused. */
#ifndef LLMPY_CUDA_COMMON_CUH
#define LLMPY_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

extern "C" {
#include "../../../csrc/base/mem.h"
#include "../../backend.h"
}

/* The sample that a slot's launches compute. */
struct running_sample {
    cudaEvent_t done;
    bool is_running;
    struct sample_args args;
    uint32_t first, n_tasks, n_tops; /* tasks of the call that are running; earlier ones have been collected */
};

/* State of the weight updates of tensor.cu. */
struct tensor_state {
    cudaEvent_t written;
    cudaStream_t stream;      /* the last that was used, if one was since the last tensor_finish */
    bool is_used;
    char *bucket;             /* on the device, of tensors that come from the host */
    struct tensor_sum *total; /* on the device */
};

/* The tables of ways.cuh. */
enum way_table { WAYS_LINEAR, WAYS_EXPERTS, WAYS_EXPERTS_LINEAR, WAYS_ATTENTION, WAYS_GATHER, N_WAY_TABLES };
/* Devices that run the code for sm_90a, or the code for compute_80. */
enum way_devices { SM_90A = 1, PORTABLE = 2, ANY_GPU = 3 };
struct way_name {
    const char *name; /* NULL: no such row */
    uint32_t devices; /* enum way_devices */
};
struct way_choice {
    uint32_t first; /* 1 + the row that tests put first; 0: the table's order */
    uint32_t found; /* bit i: row i has been found since the last llmpy_cuda_put_first */
};

struct cuda {
    struct backend_options options;
    uint32_t dtype;             /* of activations */
    int device;
    cudaStream_t stream;
    char *pinned;               /* [2][staged_bytes] host memory of the sampler's slots: lists, tasks, results */
    char *staged;               /* [2][lists_bytes] long lists on the device */
    size_t staged_bytes, lists_bytes;
    uint32_t max_wave, max_tops; /* tasks and alternatives that a slot's memory holds */
    struct running_sample samples[2];
    int32_t *sampled;           /* [2][max_tasks]: id that each task of a slot's step drew, for the begin of the next step */
    uint32_t max_tasks;
    void *greedy;               /* [max_wave] struct greedy_row (sample_greedy.cuh) */
    char *sample_rooms;         /* without sm_90a: what the sampler's blocks hold (sample_row.cuh), and where they meet */
    uint32_t *sample_meetings;
    int32_t *begun;             /* pinned, [2][begun_values]: batches that the device copies (staging.cu) */
    size_t begun_values;
    struct linear_state *linear; /* linear.cu's own */
    struct experts_state *experts; /* experts.cu's own */
    struct beside *beside;        /* upload.cu's; NULL: there are no adapters */
    struct lora_rows *lora_rows; /* lora.cu's: rows in the order of their adapters; NULL: there are no adapters */
    float *partials;            /* sums of the splits of long sequences, before they are folded (attention_decode.cuh) */
    size_t partials_bytes;
    const struct route *awaited_routes; /* of the last norm_route (norm_route.cuh); NULL once they are read or replaced */
    uint32_t *arrivals;         /* [2 * n_processors], zero between launches */
    uint32_t n_processors;
    uint32_t shared_bytes;      /* of a block, at most */
    uint32_t processor_bytes;   /* shared memory of a processor */
    bool is_portable;           /* the device runs the code for compute_80, without the kernels of sm_90a */
    struct memory_block *blocks; /* memory.cu's */
    struct memory_chunk *chunks;
    uint64_t held_bytes[4];     /* by enum memory_use */
    uint64_t n_allocations;
    struct upload_lanes *uploads; /* upload.cu's */
    struct move_lanes *moves;     /* moves.cu's; NULL: there is no host cache */
    struct tensor_state tensors;  /* tensor.cu's */
    struct way_choice ways[N_WAY_TABLES];
    struct cuda_team *team;       /* ranks/comm.cu's; NULL: the context runs a model alone */
    uint32_t rank;                /* of the team */
    struct link *link;            /* of a process's first rank, to other processes (ranks/link.cu); else NULL */
    char description[192];
};

/* Parts follow each other, without a gap between parts of the same type. Rows are row_bytes apart. Rows of two-byte floats are
 * padded with zeros to whole k16 steps; rows of FP8 and INT8 lie as fp8_rows.cuh has them; others have the file's bytes. */
struct cuda_part {
    uint32_t dtype, first_row, n_rows;
    uint32_t lead_bytes; /* of a row before `data` (fp8_rows.cuh) */
    size_t row_bytes, file_row_bytes;
    char *data;
};

/* A tensor map of the driver (tensor_map.cuh). */
struct tensor_map {
    uint64_t words[16];
};
/* Rows of x: one; up to 32; more. */
enum skinny_rows { SKINNY_ONE, SKINNY_FEW, SKINNY_MANY, SKINNY_FORMS };
/* How linear_skinny.cuh reads a matrix: tiles of tile_rows rows (0: it does not read it), in stages of some columns. */
struct skinny_form {
    uint32_t tile_rows, n_tiles;
    struct tensor_map map;
};

struct matrix {
    uint32_t n_parts, n_rows, n_cols;
    bool is_whole;             /* all parts are of one type: one launch reads them */
    bool is_router;            /* its products have router.cuh's chain */
    bool is_logits;            /* its products are logits */
    bool is_packed;            /* all parts in one: MXFP4 of experts as packed.cuh has it, or 4 bits in groups as units.cuh
                                * has them; row_bytes mean nothing then */
    uint32_t arithmetic;       /* of its products, enum arithmetic: FP8 and INT8 round activations; AUTO: that of units */
    uint32_t rows_each;        /* of an expert; of a linear all rows */
    uint32_t shape;            /* 1 + number among linear.cu's shapes; 0: not multiplied on tensor cores in one piece */
    size_t bytes;
    char *data;
    struct skinny_form skinny[SKINNY_FORMS], skinny_pairs[SKINNY_FORMS]; /* the latter as gate | up, by eight rows of each */
    struct fp8_matrix *fp8;    /* linear_fp8.cuh's, where products round activations; else NULL */
    /* Not NULL: parts of several types that linears alone read. Each run of parts of one type is a matrix of its own, in a list
     * by `next`; this one has no data. */
    struct matrix *runs, *next;
    struct cuda_part parts[1]; /* [n_parts] */
};

/* The matrix that holds a part: this one or a run of it. part becomes the part's number there. */
static inline struct matrix *matrix_with_part(struct matrix *matrix, uint32_t *part)
{
    struct matrix *run = matrix->runs ? matrix->runs : matrix;
    for (; matrix->runs && *part >= run->n_parts; run = run->next)
        *part -= run->n_parts;
    return run;
}

/* Do its products round activations to the 8 bits of its numbers? */
static inline bool rounds_to_bytes(const struct matrix *matrix)
{
    return matrix->arithmetic == ARITHMETIC_FP8 || matrix->arithmetic == ARITHMETIC_INT8;
}

/* Makes the context's device current for one call and gives the caller's context back. */
struct device_scope {
    bool is_pushed;
    explicit device_scope(int device);
    ~device_scope();
};

/* Makes the kernels of this file known, so that device.cu can load them before the first step. */
struct module_anchor {
    explicit module_anchor(const void *kernel);
};
static __global__ void anchor_kernel(void)
{
}
static const module_anchor this_file((const void *)anchor_kernel);

/* memory.cu: cuda_take makes every allocation of a context. use is an enum memory_use, pointer the address of the pointer to
 * fill. Closing the context frees everything that cuda_give has not freed. */
enum rc cuda_take(struct cuda *cuda, uint32_t use, size_t size_bytes, void *pointer, struct err *err);
void cuda_give(struct cuda *cuda, void *memory);
void cuda_give_all(struct cuda *cuda);
/* upload.cu: of models with adapters */
enum rc cuda_beside_open(struct cuda *cuda, struct err *err);
void cuda_beside_close(struct cuda *cuda);
enum rc cuda_refresh(void *ctx, const struct refresh_args *args, struct err *err);
enum rc cuda_upload_beside(void *ctx, const struct upload_beside_args *args, struct err *err);
/* upload.cu: copies n_rows rows of file_row_bytes from the host to rows row_bytes apart. Returns when the copy has ended. Rows
 * of FP8, of fp8_cols columns, are split (fp8_rows.cuh); target is then the first row's first scale. */
enum rc cuda_upload_rows(struct cuda *cuda, char *target, size_t row_bytes, const void *rows, size_t file_row_bytes,
                         uint32_t n_rows, struct err *err, uint32_t fp8_cols = 0);
/* The same for rows that the lanes read themselves; source_row: the first of them. */
enum rc cuda_upload_source(struct cuda *cuda, char *target, size_t row_bytes, const struct row_source *source,
                           uint32_t source_row, size_t file_row_bytes, uint32_t n_rows, struct err *err, uint32_t fp8_cols = 0);
void cuda_uploads_close(struct cuda *cuda);
/* The number in "cuda:N". Fails if the device does not exist. */
enum rc cuda_find_device(const char *name, int *device, struct err *err);
/* is_portable: the driver runs the code for compute_80 on the device. */
enum rc cuda_context_open(int device, bool *is_portable, struct err *err);
enum rc cuda_free_memory(int device, uint64_t *free_bytes, struct err *err);

enum rc cuda_fail(struct err *err, cudaError_t code, const char *operation);

/* Returns the error of an operation's launches, if there was one. */
static inline enum rc launched(struct err *err, const char *operation)
{
    cudaError_t code = cudaGetLastError();
    return code == cudaSuccess ? RC_OK : cuda_fail(err, code, operation);
}

/* Has the device instructions of sm_90a? The code is compiled twice, for sm_90a and, as PTX, for compute_80, which the driver
 * translates for all other devices. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define IS_SM_90A 1
#else
#define IS_SM_90A 0
#endif

/* The first line of a kernel of sm_90a. In the code for compute_80 nothing of the kernel is left behind it: the host starts it
 * on devices of sm_90a alone (ways.cuh). */
static __device__ __forceinline__ void only_sm_90a(void)
{
#if defined(__CUDA_ARCH__) && !IS_SM_90A
    __trap();
    __builtin_unreachable();
#endif
}

/* Waits for n_threads threads at the named barrier `number`. */
static __device__ __forceinline__ void meet(uint32_t number, uint32_t n_threads)
{
    asm volatile("bar.sync %0,%1;" ::"r"(number), "r"(n_threads) : "memory");
}

/* Arrives at a named barrier without waiting. */
static __device__ __forceinline__ void reach(uint32_t number, uint32_t n_threads)
{
    asm volatile("bar.arrive %0,%1;" ::"r"(number), "r"(n_threads) : "memory");
}

static inline uint32_t ceil_div(uint32_t n, uint32_t step)
{
    return (n + step - 1) / step;
}

/* Calls f with a value of the type that dtype names. */
template <class F> static void visit_type(uint32_t dtype, F f)
{
    if (dtype == DTYPE_BF16)
        f(__nv_bfloat16());
    else if (dtype == DTYPE_F16)
        f(__half());
    else
        f(float());
}

/* An operation on n_rows rows: start(context, a value of the type of activations) launches it. */
template <class F> static enum rc run_rows(void *ctx, uint32_t n_rows, const char *name, struct err *err, F start)
{
    struct cuda *cuda = (struct cuda *)ctx;
    device_scope scope(cuda->device);
    if (!n_rows)
        return RC_OK;
    visit_type(cuda->dtype, [&](auto value) { start(cuda, value); });
    return launched(err, name);
}

static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
static __device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/* Rounds once, to nearest even. */
template <class T> __device__ __forceinline__ T round_to(float x);
template <> __device__ __forceinline__ float round_to<float>(float x) { return x; }
template <> __device__ __forceinline__ __half round_to<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 round_to<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

/* A view with its type. */
template <class T> struct rows {
    T *data;
    uint32_t width, stride;
    explicit rows(const struct view &v) : data((T *)v.data), width(v.width), stride(v.stride) {}
    __device__ __forceinline__ T *at(uint32_t row, uint32_t column) const { return data + (size_t)row * stride + column; }
};

/* Joins the values of all threads in one fixed tree. All threads get the result. The block is a power of two of at most 1024
 * threads. */
template <class T, class F> static __device__ T block_reduce(T value, F join)
{
    __shared__ T shared[1024];
    uint32_t t = threadIdx.x;
    __syncthreads();
    shared[t] = value;
    __syncthreads();
    for (uint32_t half = blockDim.x / 2; half; half /= 2) {
        if (t < half)
            shared[t] = join(shared[t], shared[t + half]);
        __syncthreads();
    }
    value = shared[0];
    __syncthreads();
    return value;
}

struct add_of {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct max_of {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

enum rc cuda_buffer_create(void *ctx, size_t size_bytes, void **buffer, struct err *err);
void cuda_buffer_destroy(void *ctx, void *buffer, size_t size_bytes);
enum rc cuda_pool_create(void *ctx, uint32_t use, size_t size_bytes, void **buffer, struct err *err);
enum rc cuda_pool_release(void *ctx, uint32_t use, struct err *err);
enum rc cuda_pool_restore(void *ctx, uint32_t use, struct err *err);
enum rc cuda_pool_save(void *ctx, uint32_t use, struct err *err);
void cuda_pool_forget(void *ctx, uint32_t use);
enum rc cuda_memory(void *ctx, struct backend_memory *memory, struct err *err);
uint64_t cuda_allocations(void *ctx);
enum rc cuda_matrix_fill(void *ctx, struct matrix *matrix, uint32_t part, const struct row_run *rows, uint64_t key,
                         struct err *err);
enum rc cuda_tensor_finish(void *ctx, struct err *err);
enum rc cuda_matrix_rows(void *ctx, const struct matrix_rows_args *args, struct err *err);
void cuda_tensors_close(struct cuda *cuda);
enum rc linear_open(struct cuda *cuda, struct err *err);
void linear_close(struct cuda *cuda);
/* Completes a matrix whose parts have addresses. Call linear_drop before the matrix is destroyed. */
enum rc linear_take(struct cuda *cuda, struct matrix *matrix, struct err *err);
void linear_drop(struct cuda *cuda, const struct matrix *matrix);
/* Forgets what prepare found out about the values of a matrix. */
void linear_changed(struct matrix *matrix);
/* A row of LINEAR_WAYS, EXPERTS_WAYS, EXPERTS_LINEAR_WAYS, ATTENTION_WAYS, GATHER_WAYS. */
struct way_name cuda_linear_way(uint32_t row);
struct way_name cuda_experts_way(uint32_t row);
struct way_name cuda_experts_linear_way(uint32_t row);
struct way_name cuda_attention_way(uint32_t row);
struct way_name cuda_gather_way(uint32_t row);
/* Does add_rms_norm and its linear in one launch; false: did nothing. */
bool linear_normed(struct cuda *cuda, const struct add_rms_norm_args *args);
enum rc cuda_prepare(void *ctx, struct err *err);
#define ENTRY(name) enum rc cuda_##name(void *ctx, const struct name##_args *args, struct err *err);
#define HOST_ENTRY(name) ENTRY(name)
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#include "../../entries.def"
/* lora.cu; sorts the rows of a step, whose slots and wanted rows lie in pinned memory. */
enum rc cuda_lora_open(struct cuda *cuda, struct err *err);
void cuda_lora_close(struct cuda *cuda);
enum rc cuda_lora_begin(struct cuda *cuda, const int32_t *slots, const int32_t *wanted, uint32_t n_rows, uint32_t n_wanted,
                        uint32_t n_pad, struct err *err);
enum rc cuda_router_open(struct cuda *cuda, struct err *err);
enum rc cuda_router(struct cuda *cuda, const struct linear_args *args, struct err *err);
enum rc cuda_experts_open(struct cuda *cuda, struct err *err);
void cuda_experts_close(struct cuda *cuda);
void cuda_sample_size(struct cuda *cuda); /* how much memory the sampler wants */
enum rc cuda_sample_open(struct cuda *cuda, struct err *err);
void cuda_sample_close(struct cuda *cuda);
enum rc cuda_sample_finish(void *ctx, uint32_t slot, struct err *err);

/* staging.cu */
size_t cuda_begun_values(const struct backend_options *options);
enum rc cuda_graph_begin(void *ctx, struct err *err);
enum rc cuda_graph_end(void *ctx, void **graph, struct err *err);
enum rc cuda_graph_launch(void *ctx, void *graph, struct err *err);
void cuda_graph_destroy(void *ctx, void *graph);

/* ipc.cu and comm_nccl.cu, by way of the first */
extern const struct peers cuda_peers;
/* moves.cu */
extern const struct moves cuda_moves;
/* ranks/comm.cu */
extern const struct comm cuda_comm;
uint32_t cuda_n_ranks(const struct cuda *cuda); /* that run a model together in one process alone; else 0 */

#endif
