/* backend.h: the only door to a device. A backend is one struct backend: a table of operations, each enqueue-only.
 * The executor (csrc/program/executor.c) calls it from the engine's driver thread, one call at a time; csrc/program/weights.c
 * calls matrix_* and buffer_* at load and at weight updates. An optional operation that is NULL is composed from the others.
 * Law 2 binds every operation: what a row gets depends on the weight, the row and its position, never on the other rows.
 * The ABI grows by appending only; abi and size_bytes are checked when a backend is taken. */
#ifndef LLMPY_BACKEND_H
#define LLMPY_BACKEND_H

#include "../csrc/base/dtype.h"
#include "../csrc/base/status.h"

#include <stdbool.h>

#define BACKEND_ABI 3u

/* ---- tensors ------------------------------------------------------------------------------------------------------ */

/* Rows of activations: element (r, c) is data[r * stride + c], c < width, in the type that the backend's `activations`
 * names. */
struct view {
    void *data;
    uint32_t width;
    uint32_t stride;
};

/* What a linear does with its activations: keeps them in float32, or rounds them to int8 with a scale per 32, or to bfloat16
 * (BF16 weights on processors with bfloat16 products; AUTO alone chooses it). */
enum arithmetic { ARITHMETIC_AUTO = 0, ARITHMETIC_FLOAT = 1, ARITHMETIC_INT8 = 2, ARITHMETIC_BF16 = 3 };
enum matrix_use {
    MATRIX_LINEAR = 1, MATRIX_EMBED = 2,
    MATRIX_EXPERTS = 4, /* or-ed to LINEAR: read by `experts` alone */
    MATRIX_ROUTER = 8   /* or-ed to LINEAR: its products go to routes, so the backend may sum in an order made for one row */
};
enum act {
    ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3, ACT_RELU2 = 4, ACT_TANH = 5, ACT_SIGMOID = 6,
    /* Of the operation `act` alone. XIELU: p x^2 + beta x above 0, else n (exp(min(x, eps)) - 1 - x) + beta x, with
     * p = softplus(alpha_p), n = beta + softplus(alpha_n). */
    ACT_CLIP = 7, ACT_XIELU = 8,
    ACT_IDENTITY = 9, /* also of `gated`: a product */
    ACT_SCALE = 10    /* times a factor of each column */
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
};
struct matrix; /* the backend's own */
/* Rows that are read when they are asked for: rows first ... of so many, as a file has them. Any thread may ask, for any. */
struct row_source {
    enum rc (*read)(void *ctx, uint32_t first, uint32_t n_rows, void *to, struct err *err);
    void *ctx;
};
/* Rows first_row, .. of a part, which are rows source_row, source_row + step, .. of the tensor that they come from. */
struct row_run {
    uint32_t first_row, n_rows;
    uint64_t source_row, step;
};

/* ---- the batch of one step, in device memory ----------------------------------------------------------------------- */

/* A captured batch (graph_begin) holds one row a sequence, and stands for every such batch of its size or below: row_seq and
 * positions differ at each launch, rows that pad it up lie at position 0 of a table row that names page 0 alone. */
struct batch_view {
    uint32_t n_rows, n_seqs;
    const int32_t *token_ids;      /* [n_rows] */
    const int32_t *positions;      /* [n_rows] place of the row in its sequence */
    const int32_t *row_seq;        /* [n_rows] row of the page tables that its sequence has, which is not its index here */
    const int32_t *seq_first_row;  /* [n_seqs + 1] rows of a sequence are consecutive, positions ascending by one */
    uint32_t block_tokens;         /* 16, 32 or 64 */
    const int32_t *host_seq_first_row; /* [n_seqs + 1] seq_first_row in host memory, for the choice of kernels */
    bool shares_new_keys;          /* a sequence reads keys of a page that another one fills in this step */
    uint32_t max_tokens;           /* every position is below it; 0: as far as the tables reach */
};

/* One layer's keys and values: page p lies at pool + p * page_bytes + layer_offset. Table entry (s, b) is the page that holds
 * positions [b * block_tokens, (b + 1) * block_tokens) of the sequence whose row_seq is s; page 0 is never read for a visible
 * position. */
struct kv_view {
    void *pool;
    size_t page_bytes, layer_offset;
    const int32_t *table; /* [table rows][table_stride], as row_seq counts them */
    uint32_t table_stride;
    uint32_t n_kv_heads, head_dim;
    uint32_t dtype;       /* DTYPE_F32, DTYPE_F16, DTYPE_BF16 */
};

/* ---- arguments of the operations ------------------------------------------------------------------------------------ */

/* out[r] = scale * row first_row + token_ids[r] of the matrix */
struct embed_args {
    const struct matrix *matrix;
    const int32_t *token_ids; /* [n_rows]; NULL: all are 0 */
    uint32_t n_rows;
    float scale;
    struct view out;
    uint32_t first_row;
};

/* y = f(x) W^T [+ bias] [+ add]. f: plain; rms_norm(x) * norm_weight; act(gate) * up with x = [.., 2 * n_cols] as gate | up.
 * The fused forms are allowed only where the backend's fusions say so, and equal the composed ones bit for bit. y may be add.
 */
enum linear_input { LINEAR_PLAIN = 0, LINEAR_RMS_NORM = 1, LINEAR_GATED = 2 };
/* LINEAR_PRODUCT: the matrix is gate | up; gate and up are each rounded as y would be, then y = act(gate) * up. */
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
    bool is_float_out;          /* y is float32 whatever the type of activations (logits); then add is NULL */
    uint32_t output;            /* enum linear_output; LINEAR_PRODUCT: y has half the matrix's rows for columns, add is NULL */
    struct view mid;            /* LINEAR_PRODUCT: [n_rows][rows of the matrix] for the backend's use */
};

/* out = x * rsqrt(mean(x^2) + eps) * weight, over each of n_heads equal parts of the row (1: the whole row). In place is fine.
 */
struct rms_norm_args {
    uint32_t n_rows, n_heads;
    struct view x, out;         /* width = n_heads * size */
    const float *weight;        /* [size], or NULL: ones */
    float eps;
    uint32_t weight_stride;     /* 0: the heads share the weight; size: weight is [n_heads][size] */
};

/* out = act(gate) * up; a gate of one column is that of all columns. */
struct gated_args {
    uint32_t n_rows, act;
    struct view gate, up, out;
};

/* out = a + b. In place is fine. */
struct add_args {
    uint32_t n_rows;
    struct view a, b, out;
};

/* Fused: sum = a + b, out = rms_norm(sum), the whole row one head. sum may be a or b. With inner_weight (FUSION_NORM_ADD_NORM)
 * b is normed first: sum = a + rms_norm(b). With router and route (FUSION_NORM_ROUTE) the routes of out are made, too; the
 * logits need not be. With linear (FUSION_ADD_NORM_LINEAR) its y is made, too; out need not be. What they make lies apart from
 * a, b and sum, of which other rows may still be read. */
struct add_rms_norm_args {
    uint32_t n_rows;
    struct view a, b, sum, out;
    const float *weight;        /* [width], or NULL: ones */
    float eps;
    const float *inner_weight;  /* [width] or NULL */
    float inner_eps;
    const struct linear_args *router; /* FUSION_NORM_ROUTE, or NULL: its x is out, ... */
    const struct route_args *route;   /* ... its y the logits */
    const struct linear_args *linear; /* FUSION_ADD_NORM_LINEAR, or NULL: its x is out, which nothing else reads */
};

/* out = act(x). In place is fine. */
struct act_args {
    uint32_t n_rows, act;
    struct view x, out;
    float limit;                /* ACT_CLIP: of |out| */
    const float *weights;       /* ACT_XIELU: alpha_p, alpha_n, beta, eps; ACT_SCALE: [width] */
};

/* out = x * (1 + slope * log1p((position of the row + first) / every)), the quotient rounded down; the factor is made in
 * float32. In place is fine. */
struct position_scale_args {
    uint32_t n_rows, every, first;
    float slope;
    const int32_t *positions;   /* [n_rows] */
    struct view x, out;
};

/* out = weight * (x - mean) / sqrt(variance + eps) + bias, over each of n_heads equal parts of the row (1: the whole row); the
 * variance is the mean of (x - mean)^2. In place is fine. */
struct layer_norm_args {
    uint32_t n_rows;
    struct view x, out;         /* width = n_heads * size */
    const float *weight;        /* [size], or NULL: ones */
    const float *bias;          /* as weight, or NULL: none */
    float eps;
    uint32_t n_heads;
    uint32_t weight_stride;     /* of weight and bias; 0: the heads share them; size: they are [n_heads][size] */
};

/* logits = softcap * tanh(scale * logits / softcap), without the cap where it is 0; float32, in place. */
struct scale_logits_args {
    uint32_t n_rows;
    float scale, softcap;
    struct view logits;         /* of float32, whatever the type of activations */
};

/* out row i = x row rows[i] */
struct select_args {
    uint32_t n_selected;
    const int32_t *rows;
    struct view x, out;
};

/* table[r] = {m * cos(a_i), m * sin(a_i)}, a_i = (float)positions[r] * inv_freq[i], i < n_freqs */
struct rope_table_args {
    uint32_t n_rows, n_freqs;
    const int32_t *positions;
    const float *inv_freq;
    float magnitude;
    float *table;               /* [n_rows][n_freqs][2] */
};

/* Rotates the first 2 * n_freqs elements of every head of q and k in place. */
struct rope_args {
    uint32_t n_rows, n_freqs, head_dim;
    bool interleaved;           /* pairs (2i, 2i+1), else (i, i + n_freqs) */
    const float *table;         /* of rope_table */
    struct view q, k;           /* width = heads * head_dim */
    uint32_t k_head_dim;        /* of k, where it differs; 0: as q's. Not in qkv */
    bool is_tail;               /* the last 2 * n_freqs elements of a head instead. Not in qkv */
};

/* Stores every row's k and v at its position. All rows are stored before any attends. */
struct kv_write_args {
    const struct batch_view *batch;
    struct kv_view kv;
    struct view k, v;           /* width = n_kv_heads * head_dim */
};

/* Fused: per-head rms_norm of q and k (where the weights are given), rope (where table is given), kv_write. q ends in its own
 * place; what is left in k's is the backend's choice. */
struct qkv_args {
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float eps;
    struct rope_args rope;        /* q and k always set; table NULL: no rotation */
    struct kv_write_args write;
    uint32_t norm_stride;         /* 0: heads share the norms' weights; head_dim: they are [heads][head_dim] */
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
    uint32_t chunk;             /* key j <= i is visible iff j / chunk == i / chunk; 0: by window */
    const struct qkv_args *heads; /* NULL, or FUSION_QKV_ATTENTION: what qkv would do first; its q is q and may stay as it is */
};

/* One product a head: out[h] = W_h x[h], or W_h^T x[h] where is_transposed, W_h being rows h * head_rows + first_row .. +
 * used_rows of the matrix. x[h] is the head of the h-th of n_heads equal parts of x's row; out has [n_heads][used_rows], or
 * [n_heads][columns of the matrix]. A sum's order depends on the matrix alone. */
struct head_linear_args {
    const struct matrix *matrix; /* [n_heads * head_rows][...] */
    uint32_t n_rows, n_heads;
    uint32_t head_rows, first_row, used_rows;
    bool is_transposed;
    struct view x, out;
};

/* Multi-head latent attention, absorbed. A token is one latent and one rope_key (kv: n_kv_heads 0, head_dim their widths
 * together), both stored here before any row attends; latents are the values of all heads:
 * out[h] = sum over j <= i of p_j latent_j, p the softmax of scale * (q[h] . latent_j + q_rope[h] . rope_key_j). */
struct latent_attention_args {
    const struct batch_view *batch;
    struct kv_view kv;
    uint32_t n_heads;
    float scale;
    struct view q;              /* width = n_heads * latent.width */
    struct view q_rope;         /* n_heads equal parts, each with rope_key.width elements at its end */
    struct view latent, rope_key;
    struct view out;            /* as q */
};

/* Attention of every row over all rows of its sequence, which lie in this batch from position 0 on; no cache. Head h of q reads
 * head h / (n_heads / n_kv_heads) of k and v. Scores are chains over head_dim, sums over the rows run in a fixed order that
 * depends on the sequence's length alone. */
struct row_attention_args {
    const struct batch_view *batch;
    uint32_t n_heads, n_kv_heads, head_dim;
    float scale;
    struct view q, k, v, out;   /* width = heads * head_dim */
};

/* The recurrent state of one operation, one for every sequence: n_units pieces (channels, heads) of unit_bytes, float32. Unit u
 * of the sequence whose row_seq is s lies at pool + table[s * table_stride + first_entry + u / units_per_page] * page_bytes +
 * u % units_per_page * unit_bytes. A sequence whose first row in the batch is at position 0 starts from zeros, whatever the
 * memory holds; the state behind its last row is left there. Rows of a sequence are taken one by one in their order. */
struct state_view {
    void *pool;
    size_t page_bytes;
    const int32_t *table;
    uint32_t table_stride, first_entry;
    uint32_t n_units, unit_bytes, units_per_page;
};

/* out_t = act(bias + sum over k < n_taps of weight[c][k] * x_{t - n_taps + 1 + k}), each channel alone; k ascends. The state is
 * the last n_taps - 1 inputs of a channel, oldest first. */
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
    struct view x, dt, b, c, out; /* widths n_heads * head_dim, n_heads, n_groups * n_state twice, as x */
    struct view gate;           /* FUSION_SSM_GATED: data NULL, or out = act(gate) * y, y rounded before */
    uint32_t act;
    /* FUSION_SSM_INPUTS, where b_norm is not NULL: b, c and dt are yet to be normed by rms_norm, each over its row, and dt,
     * which may have any width, is then multiplied by dt_matrix. One group. */
    const float *b_norm, *c_norm, *dt_norm;
    float norm_eps;
    const struct matrix *dt_matrix;
    struct view scratch;        /* [n_rows][ssm_scratch_width] for the backend's use */
};

/* Columns of b, c, dt before and behind its matrix, one behind the other, each from a multiple of 16 on. */
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
    struct view gate;           /* as of ssm_args */
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

/* What a row goes to: n_chosen of these, best first, ties by the lowest expert. */
struct route {
    int32_t expert;
    float weight;
};
enum route_score {
    ROUTE_SOFTMAX,        /* over all experts */
    ROUTE_SIGMOID,
    ROUTE_CHOSEN_SOFTMAX, /* chosen by logits; softmax over the chosen */
    ROUTE_CHOSEN_SIGMOID  /* chosen by logits; their sigmoid */
};

/* Experts by score + selection_bias, of the chosen_groups of n_groups equal groups whose best (or, sums_two, two best) add up
 * to most; a weight is its score without that bias, divided by (their sum + sum_eps) if is_normalised, times scale. */
struct route_args {
    uint32_t n_rows, n_experts, n_chosen;
    uint32_t score;             /* enum route_score */
    uint32_t n_groups, chosen_groups;
    bool sums_two, is_normalised;
    float sum_eps, scale;
    const float *logits;        /* [n_rows][logits_stride] */
    uint32_t logits_stride;
    const float *selection_bias; /* [n_experts] or NULL */
    struct route *routes;       /* [n_rows][route_stride] */
    uint32_t route_stride;
};

enum expert_form {
    EXPERT_GATED,   /* act(gate) * up */
    EXPERT_CLAMPED, /* min(gate, limit) * sigmoid(1.702 min(gate, limit)) * (clamp(up, -limit, limit) + 1) */
    EXPERT_PLAIN    /* act(up) */
};

/* y = sum over a row's routes, in their order, of weight * (down_e(form(up_e(x))) + down_bias_e); is_input_scaled: the weight
 * multiplies x instead. The sum is one chain of float32 from 0, rounded once. up holds gate_e | up_e (or up_e) of expert after
 * expert, down likewise; products are those of a linear of that expert alone, and what lies between is rounded as its y is. */
struct experts_args {
    uint32_t n_rows, n_experts, n_chosen;
    uint32_t form, act;
    float limit;
    bool is_input_scaled;
    const struct matrix *up;    /* [n_experts * (2 | 1) * inner][x.width] */
    const struct matrix *down;  /* [n_experts * y.width][inner] */
    const float *up_bias, *down_bias; /* [n_experts][...] or NULL */
    const struct route *routes; /* [n_rows][route_stride] */
    uint32_t route_stride;
    struct view x, y;
    struct view scratch;        /* width n_chosen * 4 * max(inner, y.width) + 2 * n_experts + 16; n_rows * stride values in one
                                 * piece, for the backend's use */
};

/* Copies whole pages inside the pool (copy on write). No page is both source and target in one call. */
struct page_copy {
    int32_t source, target;
};
struct copy_pages_args {
    void *pool;
    size_t page_bytes;
    const struct page_copy *copies; /* host memory */
    uint32_t n_copies;
};

/* ---- the way of a batch to the device -------------------------------------------------------------------------------- */

/* Entries first .. first + count of the tables have changed since the last begin. */
struct table_run {
    uint32_t first, count;
};

/* Arrays of a step in device memory, made once; begin fills them. */
struct batch_arrays {
    int32_t *token_ids, *positions, *row_seq; /* [max_rows] */
    int32_t *seq_first_row;                   /* [max_seqs + 1] */
    int32_t *logits_rows;                     /* [max_rows] */
    int32_t *tables;                          /* as the host's */
};

/* Starts a step: enqueues the way of the batch's host arrays, which the caller may change at once, into the device's. A
 * token id below 0 is resolved there: it means the id that task -1 - id of the step before drew. Rows n_rows .. n_rows +
 * n_pad_rows pad a decode batch: token 0, position 0, row_seq pad_row_seq, each a sequence whose logits are wanted. Steps take
 * slots 0 and 1 by turns; a slot is begun again only after its sample_finish. */
struct begin_args {
    uint32_t slot;
    uint32_t n_rows, n_seqs, n_logits_rows, n_pad_rows, pad_row_seq;
    const int32_t *token_ids, *positions, *row_seq, *seq_first_row, *logits_rows; /* host memory */
    const int32_t *tables;                                                        /* host memory */
    const struct table_run *runs;
    uint32_t n_runs;
    struct batch_arrays to;
};

/* ---- the sampler ----------------------------------------------------------------------------------------------------- */

enum logprob_mode { LOGPROB_RAW = 0, LOGPROB_FULL = 1, LOGPROB_PROCESSED = 2 };
enum sample_status { SAMPLE_OK = 0, SAMPLE_NON_FINITE = 1, SAMPLE_NONE_ALLOWED = 2 };

struct token_bias {
    int32_t id;
    float value;      /* -inf removes the id (step 4), finite values are added (step 2) */
};
struct token_seen {
    int32_t id;
    uint32_t count;   /* occurrences in the output */
    uint32_t in_prompt;
};

/* One token to draw, or one given token to score (is_score), from one row of logits. Steps are those of docs/use/sampling.md.
 * The lists lie in host memory and stay unchanged until the results are there. */
struct sample_task {
    uint32_t logits_row;               /* row of the logits given to the call; several tasks may name one row */
    bool is_score, is_greedy;
    bool wants_logprobs;               /* else raw, full, processed, kept_mass, rank need not be computed */
    int32_t target;                    /* is_score: the id to score */
    float temperature;                 /* is_greedy: 1 */
    float top_p, min_p;                /* 1, 0: off */
    uint32_t top_k;                    /* 0: off */
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint64_t seed;
    uint32_t sample_index, position;   /* position = place in prompt + output of the token drawn */
    uint32_t mode;                     /* enum logprob_mode: what rank and the alternatives go by */
    uint32_t n_top, top_offset;        /* alternatives wanted; they go to results->top_*[top_offset ...] */
    const struct token_bias *bias;     uint32_t n_bias;
    const struct token_seen *seen;     uint32_t n_seen;   /* unique ids; only with penalties */
    const int32_t *banned;             uint32_t n_banned;
    const int32_t *allowed;            uint32_t n_allowed; /* 0: all are allowed; ascending, unique */
    const uint32_t *mask;              /* [(vocab_size + 31) / 32] bit id % 32 of word id / 32: allowed; NULL: all are */
};
struct sample_result {
    int32_t id;                        /* drawn, or the target */
    uint32_t status;                   /* enum sample_status */
    float raw, full, processed, kept_mass;
    int32_t rank;                      /* 1 + number of ids with a strictly larger value in the mode */
};
struct sample_args {
    const float *logits;               /* [n_logits_rows][vocab_stride] float32; the call may overwrite them */
    uint32_t vocab_size, vocab_stride;
    uint32_t vocab_limit;              /* ids from here on are never sampled */
    const int32_t *banned;             uint32_t n_banned;  /* of the engine, for every draw */
    const struct sample_task *tasks;   /* ordered by logits_row */
    uint32_t n_tasks, n_logits_rows;
    struct sample_result *results;     /* [n_tasks], host memory */
    int32_t *top_ids; /* n_top entries from top_offset on, best first, ties by lowest id; padding: id vocab_size, value -inf */
    float *top_values;
    int32_t *top_ranks;
    uint32_t slot;                     /* of the step, as in begin_args */
    uint32_t first_task;               /* number of tasks[0] among the step's tasks, for ids that a later begin resolves */
};

/* ---- tensors of the caller's as new weights --------------------------------------------------------------------------- */

/* A tensor as its owner has it: element (r, c) is item r * row_stride + c * col_stride of data. A vector is one row. */
struct tensor_view {
    const void *data;
    uint32_t dtype;                  /* DTYPE_F32, DTYPE_F16, DTYPE_BF16 */
    uint32_t n_rows, n_cols;
    int64_t row_stride, col_stride;  /* in items; of either sign */
    bool is_host;                    /* in host memory, else in the device's; on the CPU they are one */
};

/* A weight, or a piece of one, under one name: rows of a part of a matrix, or (matrix NULL) a piece of a vector, whose elements
 * are stored as x + offset. Element (r, c) is number first_index + r * row_step + c * col_step of the checkpoint's tensor. */
struct tensor_place {
    struct matrix *matrix;
    uint32_t part;
    float *vector;
    uint32_t n_values;               /* of the vector's piece */
    float offset;
    uint32_t first_row, n_rows;      /* of the matrix's part */
    uint64_t first_index, row_step, col_step;
};

/* stream: the device's stream that produced `from` and that all of this is enqueued on; NULL is the device's default. */
struct tensor_write_args {
    struct tensor_place to;
    struct tensor_view from;         /* of the place's shape */
    void *stream;
};

/* Sum over a weight's elements of mix64(index in the checkpoint's tensor, stored bits) (csrc/base/mix.h), modulo 2^64. Elements
 * of a quantised type count with the bits of their float32 value. */
struct tensor_sum {
    uint64_t sum, n_non_finite;
};
struct tensor_sum_args {
    struct tensor_place of;
    const struct tensor_view *from;  /* what `of` would hold had this been written to it; NULL: what it holds */
    void *stream;
    struct tensor_sum *result;
};

/* ---- other processes -------------------------------------------------------------------------------------------------- */

/* Memory that another process exported. */
struct import_args {
    const char *device;
    const uint8_t *handle; /* [64] as export_memory gave it, or NULL: descriptor says it */
    int descriptor;        /* of an allocation (cuMemExportToShareableHandle); stays the caller's */
    size_t size_bytes;     /* wanted, from the allocation's start */
    const uint8_t *event;  /* [64] of an event to wait for, or NULL */
};
struct imported;           /* the backend's own */

/* Processes that broadcast to each other over NCCL. A function of a group fails once and for all: the group is aborted then. */
#define GROUP_SLOTS 8u
#define GROUP_ID_BYTES 128u
struct group_options {
    const char *device, *nccl; /* nccl: path of the library */
    const uint8_t *id;         /* [GROUP_ID_BYTES] */
    uint32_t rank, n_ranks;
};
struct process_group;

/* Needs no context of the backend: a trainer's process has none. */
struct peers {
    enum rc (*import_memory)(const struct import_args *args, struct imported **imported, void **memory, struct err *err);
    void (*release_memory)(struct imported *imported);
    /* The handle of the allocation that memory lies in, and its place and size there. */
    enum rc (*export_memory)(const char *device, const void *memory, uint8_t *handle, size_t *offset, size_t *size_bytes,
                             struct err *err);
    enum rc (*group_id)(const char *nccl, uint8_t *id, struct err *err);
    /* Returns before the others are there; group_settle says when they are. */
    enum rc (*group_open)(const struct group_options *options, struct process_group **group, struct err *err);
    /* Waits at most so long until the last call on the group has been enqueued on the device; the next comes after that. */
    enum rc (*group_settle)(struct process_group *group, double seconds, bool *is_done, struct err *err);
    /* Memory of a slot, of this size or above until the group closes. */
    enum rc (*group_buffer)(struct process_group *group, uint32_t slot, size_t size_bytes, void **memory, struct err *err);
    /* One float is summed over all ranks, as slot 0: the first connection, which vLLM makes so, too. */
    enum rc (*group_greet)(struct process_group *group, struct err *err);
    /* From rank 0 to the others' memory. */
    enum rc (*group_broadcast)(struct process_group *group, uint32_t slot, void *memory, size_t size_bytes, struct err *err);
    /* Waits at most so long until the slot's broadcast has been done; after group_settle. */
    enum rc (*group_wait)(struct process_group *group, uint32_t slot, double seconds, bool *is_done, struct err *err);
    /* Copies memory of the group's into a slot's, and waits for that, not for broadcasts. */
    enum rc (*group_copy)(struct process_group *group, uint32_t slot, const void *memory, size_t size_bytes, void **copy,
                          struct err *err);
    void (*group_close)(struct process_group *group);
};

/* ---- the table ------------------------------------------------------------------------------------------------------- */

enum fusion {
    FUSION_NORM_LINEAR = 1, FUSION_GATED_LINEAR = 2, FUSION_LINEAR_ADD = 4, FUSION_LINEAR_GATED = 8, FUSION_ADD_NORM = 16,
    FUSION_NORM_ADD_NORM = 32, FUSION_SSM_GATED = 64, FUSION_SSM_INPUTS = 128, FUSION_NORM_ROUTE = 256,
    FUSION_QKV_ATTENTION = 512, FUSION_ADD_NORM_LINEAR = 1024
};

struct backend_options {
    const char *device;        /* "cpu", "cuda:0", ... */
    const char *isa;           /* CPU: "auto", "avx2", "avx512" */
    uint32_t n_threads;        /* CPU: 0 = physical cores allowed */
    uint32_t max_rows;         /* most rows of a step */
    uint32_t max_logits_rows;  /* most rows of one sample call */
    uint32_t max_cols;         /* widest input of a linear, in elements */
    uint32_t vocab_size;
    uint32_t dtype;            /* type of activations wanted: DTYPE_F32, DTYPE_F16, DTYPE_BF16 */
    uint32_t max_model_len;    /* most positions of a sequence */
    uint32_t max_group;        /* most query heads of a kv head */
    uint32_t max_head_dim;
    const char *cublaslt;      /* CUDA: path of a library that may serve linears of many rows; NULL or "": none */
};

struct device_info {
    char name[128];
    uint64_t total_bytes, free_bytes;
    char uuid[48];             /* "GPU-..." */
};

/* What memory of a device is for. The first two are given back and taken again at the same addresses (pool_release). */
enum memory_use { MEMORY_WEIGHTS = 0, MEMORY_KV = 1, MEMORY_WORK = 2, MEMORY_PINNED = 3 /* the host's */ };

/* What every device of a backend is like; known before one is opened. */
struct device_traits {
    bool has_host_memory;      /* memory of the device is the host's */
    uint32_t default_tokens;   /* of a step, where the user says nothing */
    uint32_t default_seqs;     /* at a time, likewise */
    uint32_t quantised_dtype;  /* of activations, where the weights are quantised: enum dtype */
    uint32_t library_rows;     /* `cublaslt` may serve linears of more rows; 0: no library is used */
    uint32_t short_rows;       /* batches of up to so many sequences have a graph of their own ... */
    uint32_t short_tokens;     /* ... while every sequence is this short, for which attention is faster */
};

/* Bytes that a context holds, and the device's. */
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
    bool (*supports)(void *ctx, uint32_t dtype, uint32_t use); /* can a matrix part have this type? */

    enum rc (*buffer_create)(void *ctx, size_t size_bytes, void **buffer, struct err *err); /* zeroed */
    void (*buffer_destroy)(void *ctx, void *buffer, size_t size_bytes);
    enum rc (*upload)(void *ctx, void *target, const void *host, size_t size_bytes, struct err *err);
    enum rc (*download)(void *ctx, void *host, const void *source, size_t size_bytes, struct err *err); /* synchronises */
    enum rc (*synchronize)(void *ctx, struct err *err);

    enum rc (*matrix_create)(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err);
    void (*matrix_destroy)(void *ctx, struct matrix *matrix);
    size_t (*matrix_bytes)(const struct matrix *matrix);
    /* Arithmetic that AUTO became, for a part. */
    uint32_t (*matrix_arithmetic)(const struct matrix *matrix, uint32_t part);
    /* rows: n_rows rows of the part's type as the file has them, row-major, from first_row of the part on. */
    enum rc (*matrix_write)(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                            const void *rows, struct err *err);
    /* The exact values back as float32 [n_rows][n_cols]; first_row counts over all parts. */
    enum rc (*matrix_read)(void *ctx, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows,
                           struct err *err);
    /* Bytes of one layer's keys and values in a page. */
    size_t (*kv_layer_bytes)(void *ctx, uint32_t n_kv_heads, uint32_t head_dim, uint32_t dtype, uint32_t block_tokens);

    uint32_t (*activations)(void *ctx); /* enum dtype of the rows in views; CPU: DTYPE_F32 */
    /* What a device is, without opening it; an error says why it cannot be used. free_bytes is 0 unless it is asked for, which
     * may take a while. Optional. */
    enum rc (*device_info)(const char *device, bool wants_free, struct device_info *info, struct err *err);
    /* Fills rows of a part with csrc/base/dummy.h's values of the source's rows, rounded to its type. Optional. */
    enum rc (*matrix_fill)(void *ctx, struct matrix *matrix, uint32_t part, const struct row_run *rows, uint64_t key,
                           struct err *err);
    /* Optional: without it `sample` returns with its results. With it `sample` only enqueues, keeps the pointers of its
     * arguments, and this waits until the device has done all that was enqueued up to the slot's last `sample` (which may have
     * had no task), and fills results and top_*. A slot has one sample in flight. */
    enum rc (*sample_finish)(void *ctx, uint32_t slot, struct err *err);
    /* Optional, all four or none. What operations enqueue between graph_begin and graph_end is recorded instead of run; a
     * launch runs it. graph_end also ends a recording that has failed, then *graph is NULL. */
    enum rc (*graph_begin)(void *ctx, struct err *err);
    enum rc (*graph_end)(void *ctx, void **graph, struct err *err);
    enum rc (*graph_launch)(void *ctx, void *graph, struct err *err);
    void (*graph_destroy)(void *ctx, void *graph);
    /* Chooses, once the matrices are written and before they are used, the kernel for each of their shapes and for classes of
     * row counts, among those whose bits it finds equal. Optional; without the call a backend's own kernels serve. */
    enum rc (*prepare)(void *ctx, struct err *err);
    /* A buffer of MEMORY_WEIGHTS or MEMORY_KV, zeroed; buffer_destroy ends it. Optional: buffer_create serves. */
    enum rc (*pool_create)(void *ctx, uint32_t use, size_t size_bytes, void **buffer, struct err *err);
    /* Gives the memory of all buffers and matrices of a use, which nothing in flight may touch, back to the device; their
     * addresses stay theirs. restore takes memory for them again, or for none of them: with what was saved, else with zeros
     * for weights and anything for pages; it may only enqueue that. Optional. */
    enum rc (*pool_release)(void *ctx, uint32_t use, struct err *err);
    enum rc (*pool_restore)(void *ctx, uint32_t use, struct err *err);
    enum rc (*memory)(void *ctx, struct backend_memory *memory, struct err *err); /* optional */
    /* Allocations of any kind made so far; stands still in a step after warm-up. Optional. */
    uint64_t (*allocations)(void *ctx);
    /* New values for a weight, rounded to its type, to nearest even. Optional, all three or none; quantised types are
     * RC_UNSUPPORTED. tensor_write enqueues: `from` in device memory may be changed by what its stream runs afterwards, in host
     * memory once tensor_finish has returned. Nothing else may use the weights between the first write and tensor_finish, which
     * waits for all that was written. tensor_sum waits for its result. */
    enum rc (*tensor_finish)(void *ctx, struct err *err);
    const struct peers *peers; /* optional */
    /* Copies what all buffers and matrices of a use hold to the host, or only enqueues that, before a release; restore brings
     * it back. The host's memory stays taken for the next time; forget gives it back, with what was saved. Optional. */
    enum rc (*pool_save)(void *ctx, uint32_t use, struct err *err);
    void (*pool_forget)(void *ctx, uint32_t use);
    /* As matrix_write, of rows that the backend reads itself, on its threads. Optional: matrix_write serves. */
    enum rc (*matrix_load)(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                           const struct row_source *source, struct err *err);

    /* The kernels; a new row of the table goes to its end. */
#define ENTRY(name) enum rc (*name)(void *ctx, const struct name##_args *args, struct err *err);
#define HOST_ENTRY(name) ENTRY(name)
#include "entries.def"
};

/* The one symbol that a backend's library exports. */
#define BACKEND_SYMBOL "llmpy_backend"
typedef const struct backend *(*backend_entry)(void);

const struct backend *backend_cpu(void);

#endif
