/* program.h: a model as plain arrays, written by the Python front end (llmpy/models), checked once here, then constant.
 * Values are tensors of rows; an operation reads values and weights and writes new values. plan.c gives the values their places
 * in one arena and fuses neighbours; executor.c walks the result. */
#ifndef LLMPY_PROGRAM_H
#define LLMPY_PROGRAM_H

#include "../../kernels/backend.h"

#define NO_INDEX UINT32_MAX

/* Operations and their attributes: operations.def. */
enum op_code {
#define OPERATION(CODE, ...) OP_##CODE,
#include "operations.def"
    OP_COUNT
};

#define OP_INPUTS 6
#define OP_OUTPUTS 2
#define OP_WEIGHTS 6
#define OP_ATTRIBUTES 8

/* Which rows of its matrix an embedding takes: those of the tokens, of their positions, or of their types, which are 0 unless a
 * request says otherwise. */
enum embed_source { EMBED_TOKENS = 0, EMBED_POSITIONS, EMBED_TYPES };

#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, check, RUN, entry, attributes) struct name##_attributes { attributes };
#define INTEGER(field) uint32_t field;
#define REAL(field) float field;
#include "operations.def"

struct op {
    uint32_t code;
    uint32_t in[OP_INPUTS], out[OP_OUTPUTS]; /* value numbers, NO_INDEX where unused */
    uint32_t weight[OP_WEIGHTS];
    union {
        uint32_t words[OP_ATTRIBUTES]; /* of all attributes, floats too */
#define OPERATION(CODE, name, ...) struct name##_attributes name;
#include "operations.def"
    };
};

enum attribute_kind { ATTRIBUTE_INTEGER, ATTRIBUTE_REAL };
struct attribute {
    const char *name;
    enum attribute_kind kind;
    const char *const *choices; /* names of its values, NULL behind the last; NULL: numbers */
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
const struct attribute *op_attributes(uint32_t code); /* in the order of op->words; behind the last is one without a name */
/* Whether an output row depends on other rows of its sequence or on its position (attention, recurrence). */
bool op_crosses_rows(uint32_t code);
bool op_is_known(const struct backend *backend, uint32_t code); /* whether the backend has the operation's entry */
/* What the operation lacks, or NULL; written: values that operations before it have made. */
const char *op_check(const struct program *program, const struct op *op, const uint8_t *written);
/* A program ends with its logits, with the states that pooling reads, or with both in this order. */
bool program_has_logits(const struct program *program);
uint32_t program_states_width(const struct program *program); /* 0: it has none */
uint32_t program_n_token_types(const struct program *program); /* 0: it has none */
bool program_takes_whole_prompts(const struct program *program); /* rows see later ones, so a prompt is never cut */
/* RC_INVALID with a text that names the operation and what does not fit. */
enum rc program_check(const struct program *program, struct err *err);
void program_destroy(struct program *program);

#endif
