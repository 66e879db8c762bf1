/* program.h: a model as plain arrays, written by the Python front end (llmpy/models), checked once here, then constant.
 * Values are tensors of rows; an operation reads values and weights and writes new values. plan.c gives the values their places
 * in one arena and fuses neighbours; executor.c walks the result. */
#ifndef LLMPY_PROGRAM_H
#define LLMPY_PROGRAM_H

#include "../../kernels/backend.h"

#define NO_INDEX UINT32_MAX

enum op_code {
    OP_EMBED,     /* out0 = embed(weight0) * f0, of what u0 says (enum embed_source), from row u1 on */
    OP_LINEAR,    /* out0 = in0 weight0^T + weight1 (bias, optional) */
    OP_RMS_NORM,  /* out0 = rms_norm(in0, weight0 (optional; of all heads or of each), eps f0) over u0 heads */
    OP_ROPE,      /* out0, out1 = rope u0 of in0 (q), in1 (k), head_dim u1, k's u2 (0: the same); u3: at the heads' ends */
    OP_ATTENTION, /* out0 = attention(in0 q, in1 k, in2 v), layer u0 of the cache; scale f0, softcap f1; slopes weight0, sinks
                   * weight1 (optional); u1: 0, or the chunk, which is the layer's window then */
    OP_GATED,     /* out0 = act u0 (in0) * in1; in0 may be one column wide, for all */
    OP_ADD,       /* out0 = in0 + in1 */
    OP_LOGITS,    /* logits = (in0 of the wanted rows, weight0^T, + weight1 (optional)) * f0, softly capped at f1 (0: not) */
    OP_STATES,    /* in0 of the wanted rows is what pooling reads */
    OP_ACT,       /* out0 = act u0 (in0); f0: ACT_CLIP's limit; weight0: ACT_XIELU's */
    OP_LAYER_NORM, /* out0 = layer_norm(in0, weight0 and bias weight1 (both optional), eps f0) over u0 heads */
    OP_ROW_ATTENTION, /* out0 = attention of a row over its whole sequence (in0 q, in1 k, in2 v), heads u0, u1; scale f0 */
    /* Recurrent mixers, each with state u0 of every sequence (backend.h has the formulas). */
    OP_CONV,           /* out0 = conv(in0) with weight0 and the bias weight1 (optional), u1 taps; act u2 - 1, 0: none */
    OP_SSM,            /* out0 = ssm(in0 x, in1 dt, in2 b, in3 c), weights a_log, dt_bias, skip; u1 groups; dt within f0, f1 */
    OP_SELECTIVE_SCAN, /* out0 = selective_scan(in0 x, in1 dt, in2 b, in3 c), weights a_log, skip, dt_bias (optional) */
    OP_DELTA,          /* out0 = delta(in0 q, in1 k, in2 v, in3 a, in4 b), weights a_log, dt_bias; u1 key heads */
    OP_ROUTE,     /* out0 = routes of in0 weight0^T + weight1 (optional), selection bias weight2 (optional); u0 chosen, u1 enum
                   * route_score, u2 groups, u3 of them chosen, u4 sums_two, u5 is_normalised; f0 sum_eps, f1 scale; out0: 8
                   * bytes a route in items of at least two, out1: room for the float logits */
    OP_EXPERTS,   /* out0 = sum of experts of in0 by routes in1; weight0 up, weight1 down, weight2, weight3 their biases
                   * (optional); u0 experts, u1 chosen, u2 enum expert_form, u3 act, u4 is_input_scaled; f0 limit; out1 is
                   * scratch */
    OP_HEAD_LINEAR, /* out0 = a product a head of u0 heads: in0 with rows u2 .. + u3 of every u1 of weight0; u4: transposed */
    OP_LATENT_ATTENTION, /* out0 = attention of in0 (on the latents) and the tails of in1's heads (on the rope keys) over in2
                          * latents and in3 rope keys, layer u0 of the cache; scale f0 */
    OP_POSITION_SCALE, /* out0 = in0 * (1 + f0 * log1p((position + u1) / u0)), the quotient rounded down */
    OP_COUNT
};

#define OP_INPUTS 6
#define OP_OUTPUTS 2
#define OP_WEIGHTS 6
#define OP_INTEGERS 8
#define OP_FLOATS 4

/* Which rows of its matrix an embedding takes: those of the tokens, of their positions, or of their types, which are 0 unless a
 * request says otherwise. */
enum embed_source { EMBED_TOKENS = 0, EMBED_POSITIONS, EMBED_TYPES };

struct op {
    uint32_t code;
    uint32_t in[OP_INPUTS], out[OP_OUTPUTS]; /* value numbers, NO_INDEX where unused */
    uint32_t weight[OP_WEIGHTS];
    uint32_t u[OP_INTEGERS];
    float f[OP_FLOATS];
};

/* A value, or a column range of another value (of = NO_INDEX: its own). */
struct value {
    uint32_t width, of, offset;
};

enum weight_kind { WEIGHT_MATRIX, WEIGHT_VECTOR };

/* Rows of a matrix, or elements of a vector, that come from one named tensor of the checkpoint, which others may come from too:
 * row r is row base + r / inner * stride + r % inner of the tensor (layout.h). */
#define PART_MAX_DIMS 4
struct weight_part {
    char *name;    /* the Hugging Face name, the one that users and updates see */
    char *source;  /* the name in the file */
    uint32_t rows; /* matrix: rows; vector: elements */
    uint32_t n_dims, dims[PART_MAX_DIMS]; /* of the whole tensor */
    uint32_t base, inner, stride;
    bool is_transposed;                   /* its last two dimensions are [columns, rows] */
    bool is_constant;                     /* a buffer of a vector: updates may leave it out, and it keeps its values then */
    float constant;                       /* its values where no checkpoint is read */
};
struct weight {
    enum weight_kind kind;
    uint32_t rows, cols;  /* a vector has rows elements, cols 1 */
    uint32_t n_parts;
    struct weight_part *parts;
    float offset;         /* added to every element of a vector at load */
    float *values;        /* [rows] of a vector that is no tensor of the checkpoint, and has no parts; else NULL */
    bool has_unit_rows;   /* a matrix whose rows are divided by their lengths once they are written */
};

struct rope {
    uint32_t n_freqs;
    float *inv_freq;
    float magnitude;
    bool interleaved;
};

struct cache_layer {
    uint32_t n_heads, n_kv_heads, head_dim; /* n_kv_heads 0: latents with their rope keys, head_dim together */
    uint32_t window;      /* 0: full attention */
};

/* The recurrent state of one operation, for every sequence: pieces that stay together, of float32. */
struct state_layer {
    uint32_t n_units, unit_floats;
};

struct program {
    uint32_t n_ops, n_values, n_weights, n_ropes, n_layers, n_states;
    struct op *ops;
    struct value *values;
    struct weight *weights;
    struct rope *ropes;
    struct cache_layer *layers;
    struct state_layer *states;
    uint32_t vocab_size;  /* rows of the logits */
    char *architecture;   /* NULL: has no name */
    /* Shell patterns of names that the checkpoint may have and that have no weight: tied aliases, what is derived. */
    uint32_t n_ignored;
    char **ignored;
    bool is_reordered;    /* the file orders rows otherwise than the checkpoints whose names updates bring */
};

const char *op_name(uint32_t code);
/* What a row gets depends on more than the row: on others of its sequence, or on its position. */
bool op_crosses_rows(uint32_t code);
/* A program ends with its logits, with the states that pooling reads, or with both in this order. */
bool program_has_logits(const struct program *program);
uint32_t program_states_width(const struct program *program); /* 0: it has none */
uint32_t program_n_token_types(const struct program *program); /* 0: it has none */
bool program_takes_whole_prompts(const struct program *program); /* rows see later ones, so a prompt is never cut */
/* RC_INVALID with a text that names the operation and what does not fit. */
enum rc program_check(const struct program *program, struct err *err);
void program_destroy(struct program *program);

#endif
