/* backend.h: the only interface between the engine and a device. A backend is one struct backend: a table of functions. An
 * operation only enqueues its work. The executor (csrc/program/executor.c) calls operations from the engine's driver thread,
 * one call at a time; csrc/program/weights.c calls matrix_* and buffer_* at load and at weight updates. entries.def says which
 * operations may be NULL. The core never follows a pointer to device memory: it adds offsets within one buffer, and copies with
 * upload and download. Law 2 binds every operation: an output row depends on the weights, on its input row
 * and on its position (attention and recurrences: also on rows of its own sequence), never on other sequences.
 *
 * Growth. Fields are appended to structs, never inserted, removed or changed. A release that appends some raises
 * BACKEND_REVISION and leaves BACKEND_ABI as it is, so older libraries still load: the core reads the fields that a library's
 * size_bytes covers and takes the others for zero. A library that needs fields of a newer core sees an older revision in struct
 * backend_host and returns NULL. struct peers does not grow, nor do structs that lie in arrays or inside other structs.
 * tests/c/test_abi.c holds all offsets. */
#ifndef LLMPY_BACKEND_H
#define LLMPY_BACKEND_H

#include "../csrc/base/dtype.h"
#include "../csrc/base/status.h"

#include <stdbool.h>

#define BACKEND_ABI 4u
#define BACKEND_REVISION 5u /* of BACKEND_ABI */

/* ---- tensors ------------------------------------------------------------------------------------------------------ */

/* Rows of activations: element (r, c) is data[r * stride + c], c < width. The backend's `activations` gives the type. */
struct view {
    void *data;
    uint32_t width;
    uint32_t stride;
};

/* How a linear treats its activations. FLOAT keeps them in float32. INT8 rounds them to int8 with one scale per 32 elements.
 * BF16 rounds them to bfloat16; only AUTO chooses it, for BF16 weights on processors with bfloat16 products. FP8 rounds them to
 * e4m3 with one scale per 128 elements, for FP8 weights. */
enum arithmetic { ARITHMETIC_AUTO = 0, ARITHMETIC_FLOAT = 1, ARITHMETIC_INT8 = 2, ARITHMETIC_BF16 = 3, ARITHMETIC_FP8 = 4 };
enum matrix_use {
    MATRIX_LINEAR = 1, MATRIX_EMBED = 2,
    MATRIX_EXPERTS = 4, /* or-ed to LINEAR: only `experts` reads the matrix */
    MATRIX_ROUTER = 8,  /* or-ed to LINEAR: computes router logits; the backend may sum in an order made for one row */
    MATRIX_LOGITS = 16, /* or-ed to LINEAR: computes logits, so its products are float32 */
    MATRIX_ROWS = 32    /* or-ed to LINEAR: an operation that is no linear reads rows */
};
enum act {
    ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3, ACT_RELU2 = 4, ACT_TANH = 5, ACT_SIGMOID = 6,
    /* Only the operation `act` has these. XIELU: p x^2 + beta x for x > 0, else n (exp(min(x, eps)) - 1 - x) + beta x, with
     * p = softplus(alpha_p), n = beta + softplus(alpha_n). */
    ACT_CLIP = 7, ACT_XIELU = 8,
    ACT_IDENTITY = 9, /* `gated` has it too: out = gate * up */
    ACT_SCALE = 10,   /* multiplies each column by a factor */
    ACT_QUICK_GELU = 11 /* x * sigmoid(1.702 x) */
};

/* A weight matrix [sum of n_rows][n_cols] made of named parts (q, k, v; gate, up), each stored in its own type. */
struct matrix_part {
    uint32_t n_rows;
    uint32_t dtype;
};
struct matrix_desc {
    const struct matrix_part *parts;
    uint32_t n_parts;
    uint32_t n_cols;
    uint32_t use;        /* enum matrix_use, or-ed */
    uint32_t arithmetic; /* enum arithmetic for the linear; AUTO: the backend chooses, per part */
    uint32_t n_experts;  /* whose equal numbers of rows follow each other; 0: not of experts */
};
struct matrix; /* each backend defines it */
/* Reads rows on demand: `read` stores rows first .. first + n_rows - 1 at `to`, in the file's format. Any thread may call it,
 * in any order. is_computed: `read` rounds or makes values, far slower than a copy, so a backend with several threads shares
 * even small matrices out. */
struct row_source {
    enum rc (*read)(void *ctx, uint32_t first, uint32_t n_rows, void *to, struct err *err);
    void *ctx;
    bool is_computed;
};
/* Rows first_row, first_row + 1, .. of a part come from rows source_row, source_row + step, .. of the source tensor. */
struct row_run {
    uint32_t first_row, n_rows;
    uint64_t source_row, step;
};

/* ---- the batch of one step, in device memory ----------------------------------------------------------------------- */

/* A captured batch (graph_begin) has one row a sequence. Its graph serves every such batch of up to n_rows rows: row_seq and
 * positions differ at each launch. Padding rows have position 0 and a table row in which every entry is page 0. */
struct batch_view {
    uint32_t n_rows, n_seqs;
    const int32_t *token_ids;      /* [n_rows] */
    const int32_t *positions;      /* [n_rows] position of the row in its sequence */
    const int32_t *row_seq;        /* [n_rows] page table row of the row's sequence; not the sequence's index in this batch */
    const int32_t *seq_first_row;  /* [n_seqs + 1] rows of a sequence are consecutive, positions ascend by one */
    uint32_t block_tokens;         /* 16, 32 or 64 */
    const int32_t *host_seq_first_row; /* [n_seqs + 1] seq_first_row in host memory, for choosing kernels */
    bool shares_new_keys;          /* a sequence reads keys of a page that another sequence fills in this step */
    uint32_t max_tokens;           /* all positions are below it; 0: no limit but the length of the tables */
};

/* One layer's keys and values: page p lies at pool + p * page_bytes + layer_offset. Table entry (s, b) is the page that holds
 * positions [b * block_tokens, (b + 1) * block_tokens) of the sequence with row_seq s. No visible position lies in page 0. */
struct kv_view {
    void *pool;
    size_t page_bytes, layer_offset;
    const int32_t *table; /* [table rows][table_stride]; row_seq is the row index */
    uint32_t table_stride;
    uint32_t n_kv_heads, head_dim;
    uint32_t dtype;       /* DTYPE_F32, F16, BF16; FP8: e4m3 without scales; I8: a float32 scale for each token and kv head */
};

/* ---- arguments of the operations ------------------------------------------------------------------------------------ */

/* out[r] = scale * row first_row + token_ids[r] - first_id of the matrix. A row is left as it is if its id is not in
 * [first_id, end_id). */
struct embed_args {
    const struct matrix *matrix;
    const int32_t *token_ids; /* [n_rows]; NULL: all are 0 */
    uint32_t n_rows;
    float scale;
    struct view out;
    uint32_t first_row;
    int32_t first_id, end_id; /* end_id 0: all ids */
};

/* y = f(x) W^T [+ bias] [+ add]. y may be add.
 *   LINEAR_PLAIN     f(x) = x
 *   LINEAR_RMS_NORM  f(x) = rms_norm(x) * norm_weight
 *   LINEAR_GATED     f(x) = act(gate) * up; x is gate | up, 2 * n_cols wide
 * A fused form is allowed only if the backend's fusions include it. It gives the same bits as the composed operations. */
enum linear_input { LINEAR_PLAIN = 0, LINEAR_RMS_NORM = 1, LINEAR_GATED = 2 };
/* LINEAR_PRODUCT: the matrix is gate | up. Gate and up are each rounded to the type of y, then y = act(gate) * up. */
enum linear_output { LINEAR_SUM = 0, LINEAR_PRODUCT = 1 };
struct linear_args {
    const struct matrix *matrix;
    uint32_t n_rows;
    struct view x, y;
    const float *bias;          /* [n_out] or NULL */
    const struct view *add;     /* [n_rows][n_out] or NULL */
    uint32_t input;             /* enum linear_input */
    const float *norm_weight;   /* [n_cols], LINEAR_RMS_NORM */
    float norm_eps;
    uint32_t act;               /* enum act, LINEAR_GATED, LINEAR_PRODUCT */
    bool is_float_out;          /* y is float32 for every type of activations (logits); add is then NULL */
    uint32_t output;            /* enum linear_output; LINEAR_PRODUCT: width of y = rows of the matrix / 2, add is NULL */
    struct view mid;            /* LINEAR_PRODUCT: [n_rows][rows of the matrix], scratch */
    const float *delta;         /* [n_rows][delta_stride] or NULL; FUSION_LINEAR_DELTA: added to the sums, and to the bias, */
    uint32_t delta_stride;      /* before they are rounded. Column i is that of row i of the matrix */
    bool is_mirrored;           /* struct comm says that it can: y also goes to the same place of all other ranks' COMM_ARENA */
};

#include "lora_args.h"

/* As `upload`, but another thread may call it while operations are enqueued: the copy begins after those enqueued so far, no
 * other one waits for it, and it has ended when the call returns. One call at a time. */
struct upload_beside_args {
    void *target;
    const void *host;
    size_t size_bytes;
};

/* Chooses kernels anew that depend on the values of matrices. Called after a weight update, when nothing is in flight.
 * *is_stale: recorded graphs hold kernels that are not right for the new values; it is only ever set. */
struct refresh_args {
    bool *is_stale;
};

/* out = x * rsqrt(mean(x^2) + eps) * weight, over each of n_heads equal parts of the row (1: the whole row). out may be x. */
struct rms_norm_args {
    uint32_t n_rows, n_heads;
    struct view x, out;         /* width = n_heads * size */
    const float *weight;        /* [size], or NULL: ones */
    float eps;
    uint32_t weight_stride;     /* 0: the heads share the weight; size: weight is [n_heads][size] */
};

/* out = act(gate) * up. A gate of width 1 applies to all columns. */
struct gated_args {
    uint32_t n_rows, act;
    struct view gate, up, out;
};

/* out = a + b. out may be a or b. */
struct add_args {
    uint32_t n_rows;
    struct view a, b, out;
};

/* Fused: sum = a + b, out = rms_norm(sum) over the whole row. sum may be a or b.
 *   inner_weight (FUSION_NORM_ADD_NORM)   sum = a + rms_norm(b) instead
 *   router, route (FUSION_NORM_ROUTE)     also writes the routes of out; writing the logits is optional
 *   linear (FUSION_ADD_NORM_LINEAR)       also writes the linear's y; writing out is optional
 * The routes, the logits and the linear's y must not overlap a, b or sum, because other rows of these may be read later. */
struct add_rms_norm_args {
    uint32_t n_rows;
    struct view a, b, sum, out;
    const float *weight;        /* [width], or NULL: ones */
    float eps;
    const float *inner_weight;  /* [width] or NULL */
    float inner_eps;
    const struct linear_args *router; /* FUSION_NORM_ROUTE, or NULL: its x is out, ... */
    const struct route_args *route;   /* ... and its y is the logits */
    const struct linear_args *linear; /* FUSION_ADD_NORM_LINEAR, or NULL: its x is out, and no other operation reads out */
};

/* out = act(x). out may be x. */
struct act_args {
    uint32_t n_rows, act;
    struct view x, out;
    float limit;                /* ACT_CLIP: the largest |out| */
    const float *weights;       /* ACT_XIELU: alpha_p, alpha_n, beta, eps; ACT_SCALE: [width] */
};

/* out = x * (1 + slope * log1p((position of the row + first) / every)). The quotient is rounded down; the factor is computed in
 * float32. out may be x. */
struct position_scale_args {
    uint32_t n_rows, every, first;
    float slope;
    const int32_t *positions;   /* [n_rows] */
    struct view x, out;
};

/* out column i = x column columns[i]; out is not x. */
struct take_args {
    uint32_t n_rows;
    struct view x, out;
    const float *columns;       /* [out.width] whole numbers below x.width */
};

/* out = weight * (x - mean) / sqrt(variance + eps) + bias, over each of n_heads equal parts of the row (1: the whole row); the
 * variance is the mean of (x - mean)^2. out may be x. */
struct layer_norm_args {
    uint32_t n_rows;
    struct view x, out;         /* width = n_heads * size */
    const float *weight;        /* [size], or NULL: ones */
    const float *bias;          /* same shape as weight, or NULL: none */
    float eps;
    uint32_t n_heads;
    uint32_t weight_stride;     /* of weight and bias; 0: the heads share them; size: they are [n_heads][size] */
};

/* logits = softcap * tanh(scale * logits / softcap), or scale * logits if softcap is 0. In place. */
struct scale_logits_args {
    uint32_t n_rows;
    float scale, softcap;
    struct view logits;         /* float32 for every type of activations */
};

#define NO_LOGIT -1e30f /* of an id that is never drawn; adding biases keeps it finite */

/* out column i = x column sources[i], or NO_LOGIT if that is -1. float32 for every type of activations. */
struct spread_logits_args {
    uint32_t n_rows;
    struct view x, out;
    const float *sources;       /* [out.width] whole numbers below x.width */
};

/* out row i = x row rows[i], or i without rows; of a tower also -1: zeros, -2, -3, ...: the rows of `other` */
struct select_args {
    uint32_t n_selected;
    const int32_t *rows;        /* NULL: row i */
    struct view x, out;
    const float *other;         /* [..][width] or NULL: no row is below -1 */
};

/* table[r] = {m * cos(a_i), m * sin(a_i)}, a_i = (float)positions[r] * inv_freq[i], i < n_freqs */
struct rope_table_args {
    uint32_t n_rows, n_freqs;
    const int32_t *positions;
    const float *inv_freq;
    float magnitude;
    float *table;               /* [n_rows][n_freqs][2] */
    const int32_t *axes;        /* [n_freqs] or NULL: frequency i turns by positions[axes[i] * axis_stride + r] instead */
    uint32_t axis_stride;
};

/* Rotates the first 2 * n_freqs elements of every head of q and k in place (the last ones if is_tail). */
struct rope_args {
    uint32_t n_rows, n_freqs, head_dim;
    bool interleaved;           /* pairs (2i, 2i+1), else (i, i + n_freqs) */
    const float *table;         /* written by rope_table */
    struct view q, k;           /* width = heads * head_dim */
    uint32_t k_head_dim;        /* head_dim of k; 0: same as q's. qkv does not use it */
    bool is_tail;               /* rotate the last 2 * n_freqs elements of a head instead. qkv does not use it */
};

/* Stores every row's k and v at its position. All rows are stored before any attends. */
struct kv_write_args {
    const struct batch_view *batch;
    struct kv_view kv;
    struct view k, v;           /* width = n_kv_heads * head_dim */
};

/* Fused: per-head rms_norm of q and k (if the weights are given), rope (if table is given), kv_write. The result of q replaces
 * q. The contents of k are unspecified afterwards. */
struct qkv_args {
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float eps;
    struct rope_args rope;        /* q and k are always set; table NULL: no rotation */
    struct kv_write_args write;
    uint32_t norm_stride;         /* 0: heads share q_norm and k_norm; head_dim: both are [heads][head_dim] */
};

/* Causal attention of the batch's rows over the cache. A query head h reads kv head h / (n_heads / n_kv_heads).
 * Canonical order (the same bits for every row count, page size and chunking): tiles of 64 keys at absolute positions,
 * ascending; per tile s = chain over head_dim, mn = max(m, tile max), O = a*O + p*V, l = a*l + a fixed tree of the p. */
struct attention_args {
    const struct batch_view *batch;
    struct kv_view kv;
    uint32_t n_heads;
    uint32_t window;            /* key j is visible from i iff i - window < j <= i; 0: no window */
    float scale;
    float softcap;              /* c * tanh(s / c) after scaling; 0: none */
    struct view q, out;
    const float *slopes;        /* [n_heads] or NULL: slope * (j - i) is added after scale and softcap */
    const float *sinks;         /* [n_heads] or NULL: exp(sink) joins the denominator of the softmax */
    uint32_t chunk;             /* key j <= i is visible iff j / chunk == i / chunk; 0: window decides */
    const struct qkv_args *heads; /* NULL, or FUSION_QKV_ATTENTION: run this qkv first; its q is q, updating q is optional */
    const int32_t *visible_end; /* [n_rows] or NULL; FUSION_VISIBLE_END: key j is visible iff i - window < j < visible_end[row],
                                 * which is above i, ascends within a sequence, and names keys of this step or before */
};

/* One matrix-vector product a head: out[h] = W_h x[h], or W_h^T x[h] if is_transposed. W_h is the used_rows rows of the matrix
 * from row h * head_rows + first_row on. A row of x has n_heads equal parts; x[h] is the first elements of part h. A row of out
 * is [n_heads][used_rows], or [n_heads][columns of the matrix] if is_transposed. The summation order depends on the matrix
 * alone. */
struct head_linear_args {
    const struct matrix *matrix; /* [n_heads * head_rows][...] */
    uint32_t n_rows, n_heads;
    uint32_t head_rows, first_row, used_rows;
    bool is_transposed;
    struct view x, out;
};

/* Multi-head latent attention in the absorbed form. The cache holds one latent and one rope_key for each token (kv: n_kv_heads
 * is 0, head_dim is the sum of both widths). The operation stores them for all rows before any row attends. All heads use the
 * latents as values: out[h] = sum over j <= i of p_j latent_j,
 * where p is the softmax of scale * (q[h] . latent_j + q_rope[h] . rope_key_j). */
struct latent_attention_args {
    const struct batch_view *batch;
    struct kv_view kv;
    uint32_t n_heads;
    float scale;
    struct view q;              /* width = n_heads * latent.width */
    struct view q_rope;         /* n_heads equal parts; the last rope_key.width elements of each part are used */
    struct view latent, rope_key;
    struct view out;            /* same width as q */
};

/* Attention of every row over all rows of its sequence, without a cache: the batch holds each sequence from position 0 on. Head
 * h of q reads head h / (n_heads / n_kv_heads) of k and v. Scores are chains over head_dim. The order of the sums over rows
 * depends on the sequence's length alone. */
struct row_attention_args {
    const struct batch_view *batch;
    uint32_t n_heads, n_kv_heads, head_dim;
    float scale;
    struct view q, k, v, out;   /* width = heads * head_dim */
};

/* The recurrent states of one operation, one state a sequence. A state has n_units units (channels or heads) of unit_bytes
 * bytes in float32. Unit u of the sequence with row_seq s lies at pool + table[s * table_stride + first_entry +
 * u / units_per_page] * page_bytes + u % units_per_page * unit_bytes. If the sequence's first row in the batch has position 0,
 * the state starts from zeros and the old contents of the memory are ignored. Rows of a sequence are processed in order; the
 * state after the last row is stored. */
struct state_view {
    void *pool;
    size_t page_bytes;
    const int32_t *table;
    uint32_t table_stride, first_entry;
    uint32_t n_units, unit_bytes, units_per_page;
};

/* Depthwise convolution: out_t = act(bias + sum over k < n_taps of weight[c][k] * x_{t - n_taps + 1 + k}) for each channel c; k
 * ascends. The state is the last n_taps - 1 inputs of a channel, oldest first. */
struct conv_args {
    const struct batch_view *batch;
    struct state_view state;    /* units: channels of n_taps - 1 floats */
    uint32_t n_taps;
    const float *weight;        /* [width][n_taps] */
    const float *bias;          /* [width] or NULL */
    bool has_act;
    uint32_t act;               /* enum act */
    struct view x, out;
};

/* Structured state space with one decay a head (Mamba-2, PLaMo 2). d = clamp(softplus(dt_h + dt_bias_h), dt_min, dt_max);
 * S = exp(-exp(a_log_h) * d) * S + (d * x_h) (outer) B_g; y_h = S C_g + skip_h * x_h, g = h / (n_heads / n_groups). */
struct ssm_args {
    const struct batch_view *batch;
    struct state_view state;    /* units: heads, [head_dim][n_state] */
    uint32_t n_heads, head_dim, n_groups, n_state;
    const float *a_log, *dt_bias, *skip; /* [n_heads] */
    float dt_min, dt_max;
    /* Widths: x and out n_heads * head_dim, dt n_heads, b and c n_groups * n_state. */
    struct view x, dt, b, c, out;
    struct view gate;           /* FUSION_SSM_GATED: out = act(gate) * y, with y rounded first; data NULL: no gate */
    uint32_t act;
    /* FUSION_SSM_INPUTS, if b_norm is not NULL: the operation first applies rms_norm to each row of b, c and dt, then
     * multiplies dt by dt_matrix. dt may then have any width. n_groups is 1. */
    const float *b_norm, *c_norm, *dt_norm;
    float norm_eps;
    const struct matrix *dt_matrix;
    struct view scratch;        /* [n_rows][ssm_scratch_width] */
};

/* Columns for b, c, dt before dt_matrix and dt after it, in this order; each starts at a multiple of 16. */
static inline uint32_t ssm_scratch_width(uint32_t n_state, uint32_t dt_width, uint32_t n_heads)
{
    return 2 * ((n_state + 15) & ~15u) + ((dt_width + 15) & ~15u) + ((n_heads + 15) & ~15u);
}

/* Selective scan (Mamba). d = softplus(dt_c + dt_bias_c); S_n = exp(-exp(a_log[c][n]) * d) * S_n + d * B_n * x_c;
 * y_c = sum over n of S_n C_n + skip_c * x_c. */
struct selective_scan_args {
    const struct batch_view *batch;
    struct state_view state;    /* units: channels, [n_state] */
    uint32_t n_state;
    const float *a_log;         /* [width][n_state] */
    const float *dt_bias;       /* [width] or NULL */
    const float *skip;          /* [width] */
    struct view x, dt, b, c, out; /* b, c: n_state wide */
    struct view gate;           /* as in ssm_args */
    uint32_t act;
};

/* Gated delta rule. q and k are divided by sqrt(their sum of squares + 1e-6), q times key_dim^-0.5; value head h uses key head
 * h / (n_heads / n_key_heads). g = exp(-exp(a_log_h) * softplus(a_h + dt_bias_h)); S = g * S;
 * e = sigmoid(b_h) * (v_h - k^T S); S = S + k (outer) e; out_h = q^T S. */
struct delta_args {
    const struct batch_view *batch;
    struct state_view state;    /* units: value heads, [key_dim][value_dim] */
    uint32_t n_heads, n_key_heads, key_dim, value_dim;
    const float *a_log, *dt_bias; /* [n_heads] */
    struct view q, k, v, a, b, out; /* a, b: n_heads wide */
};

#include "mixture_args.h"

/* Copies whole pages inside the pool (for copy on write). In one call no page is both source and target. */
struct page_copy {
    int32_t source, target;
};
struct copy_pages_args {
    void *pool;
    size_t page_bytes;
    const struct page_copy *copies; /* host memory */
    uint32_t n_copies;
};

/* ---- upload of a batch ----------------------------------------------------------------------------------------------- */

/* Table entries [first, first + count) have changed since the last begin. */
struct table_run {
    uint32_t first, count;
};

/* Arrays of a step in device memory. They are allocated once; begin fills them. */
struct batch_arrays {
    int32_t *token_ids, *positions, *row_seq; /* [max_rows] */
    int32_t *seq_first_row;                   /* [max_seqs + 1] */
    int32_t *logits_rows;                     /* [max_rows] */
    int32_t *tables;                          /* same layout as begin_args.tables */
};

/* Starts a step: enqueues the copies of the batch's host arrays to the device. The caller may change the host arrays as soon as
 * begin returns. A token id t < 0 stands for the token that task -1 - t of the previous step drew; the device resolves it. Rows
 * [n_rows, n_rows + n_pad_rows) pad a decode batch: each is a sequence of one row with token 0, position 0 and row_seq
 * pad_row_seq, and has logits. Steps alternate between slots 0 and 1. A slot is reused only after its sample_finish. */
struct begin_args {
    uint32_t slot;
    uint32_t n_rows, n_seqs, n_logits_rows, n_pad_rows, pad_row_seq;
    const int32_t *token_ids, *positions, *row_seq, *seq_first_row, *logits_rows; /* host memory */
    const int32_t *tables;                                                        /* host memory */
    const struct table_run *runs;
    uint32_t n_runs;
    struct batch_arrays to;
    const int32_t *row_adapters;  /* [n_rows] host memory: slots of adapters, -1: none; NULL: no row has one */
    bool has_adapters;            /* `lora` follows, even if all rows are padding */
};

#include "tower_args.h"

/* ---- the sampler ----------------------------------------------------------------------------------------------------- */

enum logprob_mode { LOGPROB_RAW = 0, LOGPROB_FULL = 1, LOGPROB_PROCESSED = 2 };
enum sample_status { SAMPLE_OK = 0, SAMPLE_NON_FINITE = 1, SAMPLE_NONE_ALLOWED = 2 };

struct token_bias {
    int32_t id;
    float value;      /* -inf removes the id (step 4 of docs/use/sampling.md); a finite value is added (step 2) */
};
struct token_seen {
    int32_t id;
    uint32_t count;   /* occurrences in the output */
    uint32_t in_prompt;
};

/* Draws one token from one row of logits, or scores one given token (is_score), by the steps of docs/use/sampling.md. The lists
 * lie in host memory; the caller leaves them unchanged until the results are written. */
struct sample_task {
    uint32_t logits_row;               /* row of sample_args.logits; several tasks may use one row */
    bool is_score, is_greedy;
    bool wants_logprobs;               /* false: raw, full, processed, kept_mass and rank may be left out */
    int32_t target;                    /* is_score: the id to score */
    float temperature;                 /* is_greedy: 1 */
    float top_p, min_p;                /* 1, 0: off */
    uint32_t top_k;                    /* 0: off */
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    uint32_t sample_index, position;   /* position: index of the drawn token in prompt + output */
    uint32_t mode;                     /* enum logprob_mode: the value that rank and the alternatives are ordered by */
    uint32_t n_top, top_offset;        /* n_top alternatives are written to sample_args.top_*[top_offset ...] */
    const struct token_bias *bias;     uint32_t n_bias;
    const struct token_seen *seen;     uint32_t n_seen;   /* unique ids; empty without penalties */
    const int32_t *banned;             uint32_t n_banned;
    const int32_t *allowed;            uint32_t n_allowed; /* ascending, unique; n_allowed 0: all ids are allowed */
    const uint32_t *mask;              /* [(vocab_size + 31) / 32] bit id % 32 of word id / 32: id is allowed; NULL: all are */
};
struct sample_result {
    int32_t id;                        /* the drawn id, or the target */
    uint32_t status;                   /* enum sample_status */
    float raw, full, processed, kept_mass;
    int32_t rank;                      /* 1 + number of ids with a strictly larger value of the task's mode */
};
struct sample_args {
    const float *logits;               /* [n_logits_rows][vocab_stride] float32; the call may overwrite them */
    uint32_t vocab_size, vocab_stride;
    uint32_t vocab_limit;              /* ids >= vocab_limit are never sampled */
    const int32_t *banned;             uint32_t n_banned;  /* the engine's banned ids, for every draw */
    const struct sample_task *tasks;   /* ordered by logits_row */
    uint32_t n_tasks, n_logits_rows;
    struct sample_result *results;     /* [n_tasks], host memory */
    int32_t *top_ids; /* of a task: [top_offset, + n_top), best first, ties by lowest id; padding: id vocab_size, value -inf */
    float *top_values;
    int32_t *top_ranks;
    uint32_t slot;                     /* the step's slot, as in begin_args */
    uint32_t first_task;               /* index of tasks[0] in the step; the next begin names tasks by this index */
};

#include "update_args.h"
#include "comm.h"

/* ---- pages in host memory ---------------------------------------------------------------------------------------------- */

enum move_way { MOVE_OUT = 0 /* from the pool to the host */, MOVE_IN = 1 };

/* A copy of one page of the pool to a slot of host memory, or from there. */
struct page_move {
    int32_t page;
    uint32_t slot;
};
/* The moves of one way that one call enqueues. They begin after all operations enqueued so far, and after the moves of the
 * other way with numbers up to `after`; moves of one way run in their order. Numbers increase from call to call. */
struct move_list {
    const struct page_move *moves;
    uint32_t n_moves;
    uint64_t number, after;
};
struct move_args {
    void *pool, *host;
    size_t page_bytes;
    struct move_list lists[2]; /* by way; those out are enqueued first, so moves in may wait for them */
    uint64_t awaited[2];       /* by way: operations enqueued later begin after the moves with numbers up to it; 0: none */
    size_t slot_bytes;         /* from a slot to the next; ranks have their parts of a slot one behind the other */
    const void *source;        /* moves in copy pages of this pool, which may be another context's; NULL: slots */
};
/* What has ended so far, by way: all moves up to a number, their bytes, and the seconds that the copies took. */
struct move_state {
    uint64_t ended[2], bytes[2];
    double seconds[2];
    uint64_t source_bytes;     /* of pages from other pools, which the others do not count */
    double source_seconds;
};

/* Copies between the pool and host memory beside the operations. Moves only enqueue. */
struct moves {
    uint32_t size_bytes;       /* sizeof(struct moves) */
    /* Host memory for the slots. size_bytes 0: none, the slots lie in memory that another rank's context has made. */
    enum rc (*create)(void *ctx, size_t size_bytes, void **host, struct err *err);
    void (*destroy)(void *ctx, void *host, size_t size_bytes); /* waits for all moves */
    enum rc (*move)(void *ctx, const struct move_args *args, struct err *err);
    enum rc (*poll)(void *ctx, struct move_state *state, struct err *err); /* does not wait */
    /* From now on moves of `reader`, another context of this process, may copy from the pool of ctx; also once the pool has
     * slept. A library without it knows neither slot_bytes nor source. */
    enum rc (*lend)(void *ctx, void *reader, struct err *err);
    /* A descriptor of the pool for other processes, which the caller closes; the pool begins `offset` bytes into size_bytes.
     * NULL: there is none. */
    enum rc (*share)(void *ctx, const void *pool, int *descriptor, size_t *offset, size_t *size_bytes, struct err *err);
};

/* ---- the table ------------------------------------------------------------------------------------------------------- */

enum fusion {
    FUSION_NORM_LINEAR = 1, FUSION_GATED_LINEAR = 2, FUSION_LINEAR_ADD = 4, FUSION_LINEAR_GATED = 8, FUSION_ADD_NORM = 16,
    FUSION_NORM_ADD_NORM = 32, FUSION_SSM_GATED = 64, FUSION_SSM_INPUTS = 128, FUSION_NORM_ROUTE = 256,
    FUSION_QKV_ATTENTION = 512, FUSION_ADD_NORM_LINEAR = 1024, FUSION_GATHER_NORM = 2048,
    FUSION_LINEAR_DELTA = 4096, /* linears add `delta`, and `lora` has is_delta */
    FUSION_VISIBLE_END = 8192, /* `attention` has visible_end */
    FUSION_EXPERTS_LORA = 16384, /* `experts` has lora */
    FUSION_LINEAR_ADD_GATHER = 32768, /* LINEAR_ADD only where the sum is gathered */
    FUSION_GATHER_COMBINE = 65536, /* `gather` has combine */
    FUSION_LORA_WHOLE = 131072, /* FUSION_LORA_BIASES, and matrices in place of the base matrix */
    FUSION_LORA_BIASES = 262144, /* `lora` has biases and token_ids, and changes logits: y is float32 then */
    FUSION_EXPERTS_LORA_RANKS = 524288, /* FUSION_EXPERTS_LORA also for the experts of a rank */
    FUSION_LORA_BFLOAT16 = 1048576 /* `lora` has is_bfloat16, with is_delta */
};

struct backend_options {
    const char *device;        /* "cpu", "cuda:0", ... */
    const char *isa;           /* CPU: "auto", "avx2", "avx512" */
    uint32_t n_threads;        /* CPU: 0 = number of physical cores that the process may use */
    uint32_t max_rows;         /* most rows of a step */
    uint32_t max_logits_rows;  /* most rows of one sample call */
    uint32_t max_cols;         /* widest input of a linear, in elements */
    uint32_t vocab_size;
    uint32_t dtype;            /* wanted type of activations: DTYPE_F32, DTYPE_F16, DTYPE_BF16 */
    uint32_t max_model_len;    /* most positions of a sequence */
    uint32_t max_group;        /* most query heads of a kv head */
    uint32_t max_head_dim;
    const char *cublaslt;      /* CUDA: path of cuBLASLt, which may compute linears of many rows; NULL or "": not used */
    uint32_t n_ranks;          /* CPU: so many contexts share the threads; 0: one */
    uint32_t max_loras;        /* slots of adapters; 0: `lora` is never called */
};

struct device_info {
    char name[128];
    uint64_t total_bytes, free_bytes;
    char uuid[48];             /* "GPU-..." */
    char kernels[96];          /* which of the backend's kernels it runs; "": they are the same for all devices */
};

/* Purposes of memory. pool_release frees the first two, and pool_restore maps them again at the same addresses. */
enum memory_use { MEMORY_WEIGHTS = 0, MEMORY_KV = 1, MEMORY_WORK = 2, MEMORY_PINNED = 3 /* host memory */ };

/* Properties that all devices of a backend share. They are known before a device is opened. */
struct device_traits {
    uint32_t size_bytes;       /* sizeof(struct device_traits) */
    bool has_host_memory;      /* device memory is host memory */
    uint32_t default_tokens;   /* default of max_num_batched_tokens */
    uint32_t default_seqs;     /* default of max_num_seqs */
    uint32_t quantised_dtype;  /* enum dtype: type of activations for quantised weights */
    uint32_t library_rows;     /* `cublaslt` may compute linears with more rows than this; 0: no library is used */
    uint32_t short_rows;       /* batches of up to short_rows sequences also have a graph for short sequences, ... */
    uint32_t short_tokens;     /* ... with faster attention; it serves while every position is below short_tokens */
    bool rounds_tensors;       /* tensor_write and tensor_sum round tensors in device memory to the types of quantise.h */
};

/* Bytes that a context holds, and the device's total and free bytes. */
struct backend_memory {
    uint64_t held_bytes[4]; /* by enum memory_use */
    uint64_t total_bytes, free_bytes;
};

struct backend {
    uint32_t abi, size_bytes;
    const char *name;
    const struct device_traits *traits;

    enum rc (*open)(const struct backend_options *options, void **ctx, struct err *err);
    void (*close)(void *ctx);
    const char *(*describe)(void *ctx);                        /* "cpu avx512 2 threads" */
    uint32_t (*fusions)(void *ctx);                            /* enum fusion, or-ed */
    bool (*supports)(void *ctx, uint32_t dtype, uint32_t use); /* true if a matrix part can have this type */

    enum rc (*buffer_create)(void *ctx, size_t size_bytes, void **buffer, struct err *err); /* zeroed */
    void (*buffer_destroy)(void *ctx, void *buffer, size_t size_bytes);
    /* The caller may change the host memory as soon as upload returns. */
    enum rc (*upload)(void *ctx, void *target, const void *host, size_t size_bytes, struct err *err);
    enum rc (*download)(void *ctx, void *host, const void *source, size_t size_bytes, struct err *err); /* synchronises */
    enum rc (*synchronize)(void *ctx, struct err *err);

    enum rc (*matrix_create)(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err);
    void (*matrix_destroy)(void *ctx, struct matrix *matrix);
    size_t (*matrix_bytes)(const struct matrix *matrix);
    /* Returns the arithmetic of a part; never AUTO. */
    uint32_t (*matrix_arithmetic)(const struct matrix *matrix, uint32_t part);
    /* Writes rows [first_row, first_row + n_rows) of a part. `rows` is row-major in the file's format of the part's type. */
    enum rc (*matrix_write)(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                            const void *rows, struct err *err);
    /* Reads the exact values as float32 [n_rows][n_cols]. first_row counts over all parts. */
    enum rc (*matrix_read)(void *ctx, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows,
                           struct err *err);
    /* Returns the bytes of one layer's keys and values in a page; 0: pages do not hold the type or size. */
    size_t (*kv_layer_bytes)(void *ctx, uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens);

    uint32_t (*activations)(void *ctx); /* enum dtype of the rows in views; CPU: DTYPE_F32 */
    /* Describes a device without opening it; an error says why the device cannot be used. free_bytes is 0 unless wants_free is
     * true; finding free_bytes may be slow. Optional. */
    enum rc (*device_info)(const char *device, bool wants_free, struct device_info *info, struct err *err);
    /* Fills rows of a part with the dummy values that csrc/base/dummy.h gives for the source rows, rounded to the part's type.
     * Optional. */
    enum rc (*matrix_fill)(void *ctx, struct matrix *matrix, uint32_t part, const struct row_run *rows, uint64_t key,
                           struct err *err);
    /* Optional. If NULL, `sample` writes its results before it returns. Else `sample` only enqueues and keeps the pointers in
     * its arguments; sample_finish waits until the device has done everything enqueued up to the slot's last `sample` (which
     * may have no tasks), then writes results and top_*. A slot has at most one sample in flight. */
    enum rc (*sample_finish)(void *ctx, uint32_t slot, struct err *err);
    /* Optional, all four or none. Operations called between graph_begin and graph_end are recorded instead of run; graph_launch
     * runs the recorded work. graph_end also ends a failed recording and then sets *graph to NULL. */
    enum rc (*graph_begin)(void *ctx, struct err *err);
    enum rc (*graph_end)(void *ctx, void **graph, struct err *err);
    enum rc (*graph_launch)(void *ctx, void *graph, struct err *err);
    void (*graph_destroy)(void *ctx, void *graph);
    /* Chooses a kernel for each matrix shape and class of row counts, among kernels that it finds to give equal bits. Call it
     * after the matrices are written and before they are used. Optional; without this call the backend uses its own kernels. */
    enum rc (*prepare)(void *ctx, struct err *err);
    /* Creates a zeroed buffer of MEMORY_WEIGHTS or MEMORY_KV; buffer_destroy frees it. Optional: the caller falls back to
     * buffer_create. */
    enum rc (*pool_create)(void *ctx, uint32_t use, size_t size_bytes, void **buffer, struct err *err);
    /* pool_release frees the device memory of all buffers and matrices of a use but keeps their addresses reserved. No work in
     * flight may access them. pool_restore allocates memory for all of them again, or for none on failure, and fills it with
     * the saved contents (pool_save); without saved contents weights are zero and pages are undefined. pool_restore may only
     * enqueue the filling. Optional. */
    enum rc (*pool_release)(void *ctx, uint32_t use, struct err *err);
    enum rc (*pool_restore)(void *ctx, uint32_t use, struct err *err);
    enum rc (*memory)(void *ctx, struct backend_memory *memory, struct err *err); /* optional */
    /* Returns the number of allocations so far: this context's of device and pinned memory, and the calling thread's of host
     * memory. Steps after warm-up make none. Optional. */
    uint64_t (*allocations)(void *ctx);
    /* Weight updates: tensor_write, tensor_sum and tensor_finish. Optional, all three or none. Values are rounded to nearest
     * even in the weight's type; quantised types fail with RC_UNSUPPORTED. tensor_write only enqueues. Work enqueued later on
     * its stream may change `from` in device memory; `from` in host memory may change after tensor_finish has returned.
     * tensor_finish waits for all writes; no other operation may use the weights between the first write and tensor_finish.
     * tensor_sum waits for its result. */
    enum rc (*tensor_finish)(void *ctx, struct err *err);
    const struct peers *peers; /* optional */
    /* Before a release, pool_save copies all buffers and matrices of a use to host memory, or only enqueues the copies;
     * pool_restore copies them back. The host memory stays allocated for the next save. pool_forget frees it and drops the
     * saved contents. Optional. */
    enum rc (*pool_save)(void *ctx, uint32_t use, struct err *err);
    void (*pool_forget)(void *ctx, uint32_t use);
    /* Like matrix_write, but the backend reads the rows from `source` on its own threads. Optional: the caller falls back to
     * matrix_write. */
    enum rc (*matrix_load)(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                           const struct row_source *source, struct err *err);

    /* The kernels, one a row of entries.def. Append new rows at its end. */
#define ENTRY(name) enum rc (*name)(void *ctx, const struct name##_args *args, struct err *err);
#define HOST_ENTRY(name) ENTRY(name)
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#define OWN_ENTRY(name) ENTRY(name)
#define TABLE(name) const struct name *name;
#include "entries.def"
};

/* What the core gives to a backend's library. The functions may be called from any thread. */
struct backend_host {
    uint32_t abi, revision;    /* of the core */
    uint32_t size_bytes;       /* of the core's struct backend */
    /* Fills err (which may be NULL) with a printf-style message and returns rc. */
    enum rc (*err_set)(struct err *err, enum rc rc, const char *format, ...);
    /* Names the option, file or operation that err is about; call it after err_set. Either name may be NULL. */
    void (*err_name)(struct err *err, const char *what, const char *tensor);
    const struct dtype_info *(*dtype_info)(uint32_t dtype); /* NULL for an unsupported type */
    /* Converts n values (a multiple of block_values) to float32, exactly as the format defines them. Returns 0 and writes
     * nothing for types without a float value (integers). */
    int (*dtype_to_float)(uint32_t dtype, const void *source, float *target, size_t n);
    /* Converts float32 to DTYPE_F32, DTYPE_F16 or DTYPE_BF16, rounded to nearest even. Returns 0 for other types. */
    int (*dtype_from_float)(uint32_t dtype, const float *source, void *target, size_t n);
};

/* The only symbol that the core wants of a library. Both structs live as long as the process. It returns NULL if the backend
 * needs a newer core. */
#define BACKEND_SYMBOL "llmpy_backend"
typedef const struct backend *(*backend_entry)(const struct backend_host *host);

#endif
