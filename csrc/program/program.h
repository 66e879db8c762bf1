/* program.h: a model as plain arrays. The Python front end (llmpy/models) writes it, program_check checks it once, and it is
 * constant afterwards. Values are tensors of rows; an operation reads values and weights and writes new values. patterns.c
 * fuses operations, plan.c gives each value a place in one arena, and executor.c runs the steps. */
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
#define OP_ATTRIBUTES 9

/* What indexes an embedding's matrix: token ids, positions, or token types. Token types are 0 unless a request sets them. */
enum embed_source { EMBED_TOKENS = 0, EMBED_POSITIONS, EMBED_TYPES };

#define OPERATION(CODE, name, n_in, n_out, WEIGHT, ROWS, COLUMNS, check, entry, attributes) \
    struct name##_attributes { attributes };
#define INTEGER(field) uint32_t field;
#define REAL(field) float field;
#include "operations.def"

struct op {
    uint32_t code;
    uint32_t in[OP_INPUTS], out[OP_OUTPUTS]; /* value numbers, NO_INDEX where unused */
    uint32_t weight[OP_WEIGHTS];
    union {
        uint32_t words[OP_ATTRIBUTES]; /* all attributes by index; floats as their bits */
#define OPERATION(CODE, name, ...) struct name##_attributes name;
#include "operations.def"
    };
    bool is_equal; /* of a rank's program: its outputs are equal on all ranks */
};

enum attribute_kind { ATTRIBUTE_INTEGER, ATTRIBUTE_REAL };
struct attribute {
    const char *name;
    enum attribute_kind kind;
    const char *const *choices; /* names of its values, ended by NULL; NULL: any number */
};

/* Rows of a tower's value. All but the first are the entries of a list of the piece. */
enum row_list {
    ROWS_OF_PIECE,     /* with a list as long: class rows go into their places, or windows are undone */
    ROWS_OF_PATCHES,   /* rows that go on, such as all but class rows */
    ROWS_OF_FEATURES,
    ROWS_OF_WINDOWS,   /* windows, filled up with zeros */
    ROWS_NEAR,         /* the 3 x 3 rows around each row ... */
    ROWS_NEAR_HALF,    /* ... around every second row of every second line ... */
    ROWS_NEAR_QUARTER, /* ... and again of those */
    ROWS_OF_CELLS,     /* of a second encoder behind the first one: what is left, and a class row */
    N_ROW_LISTS
};
/* How many entries the list may have for each row of the largest piece. */
uint32_t row_list_room(uint32_t list);

/* A value, or columns offset .. offset + width of the value `of`. of = NO_INDEX: not a range of another value. room: the
 * largest width of the value over all ranks; the plan lays out memory by it, so places are equal on all ranks. A value of a
 * tower has a `per`-th of the rows of a piece (list 0), or of the entries of one of its lists. */
struct value {
    uint32_t width, of, offset, room;
    uint32_t list, per;
};

enum weight_kind { WEIGHT_MATRIX, WEIGHT_VECTOR };

/* Rows of a matrix, or elements of a vector, that come from one named tensor of the checkpoint. Several parts may come from the
 * same tensor. Row r of the part is row base + r / inner * stride + r % inner of the tensor (layout.h). */
#define PART_MAX_DIMS 5
struct weight_part {
    char *name;    /* the Hugging Face name, which users and updates give */
    char *source;  /* the name in the file */
    uint32_t rows; /* matrix: rows; vector: elements */
    uint32_t n_dims, dims[PART_MAX_DIMS]; /* of the whole tensor */
    uint32_t base, inner, stride;
    bool is_transposed;                   /* the tensor's last two dimensions are [columns, rows] */
    bool is_constant;                     /* of a vector only: if an update leaves the part out, it keeps its values */
    float constant;                       /* of a constant part: the value of its elements in dummy weights */
};
struct weight {
    enum weight_kind kind;
    uint32_t rows, cols;  /* a vector has rows elements, cols 1 */
    uint32_t n_parts;
    struct weight_part *parts;
    float offset;         /* added to every element of a vector at load and update */
    float *values;        /* [rows] values of a vector that has no parts, so no tensor of the checkpoint; else NULL */
    uint32_t quantised;   /* enum dtype of a matrix that is quantised at load and update if its tensors are floats; 0: is not */
    bool has_unit_rows;   /* each row of the matrix is divided by its length after it is written */
    uint32_t lent;        /* of a matrix without parts: 1 + the number of this weight in the model that lends it; else 0 */
};

struct rope {
    uint32_t n_freqs;
    float *inv_freq;
    float magnitude;
    bool interleaved;
    uint32_t n_axes;      /* 0: all frequencies turn by the row's position */
    int32_t *axes;        /* [n_freqs] below n_axes, whose position turns each frequency */
};
#define MAX_AXES 3u

struct cache_layer {
    uint32_t n_heads, n_kv_heads, head_dim; /* n_kv_heads 0: latents and rope keys, head_dim values in all */
    uint32_t window;      /* 0: full attention */
};

/* The recurrent state of one operation, per sequence: n_units units of unit_floats float32. A unit is never split. */
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
    char *architecture;   /* NULL: the program has no name */
    /* Shell patterns of tensor names that a checkpoint may have but the program does not use: tied aliases, derived buffers. */
    uint32_t n_ignored;
    char **ignored;
    bool is_reordered;    /* the file has another order of rows than the safetensors that updates bring */
    bool is_of_rank;      /* one rank's program: it has its own columns of some values, and gathers */
    bool is_by_data;      /* each rank has rows of its own, and gathers rows and results of all ranks around experts */
    struct program *tower; /* NULL: there is none; its weights are those of this program */
    bool is_tower;        /* its weights belong to the program that has it */
    uint32_t feature_id;  /* of a program with a tower: the token that stands for a feature */
};

const char *op_name(uint32_t code);
const struct attribute *op_attributes(uint32_t code); /* in the order of op->words; ended by a row without a name */
/* Whether an output row depends on other rows of its sequence or on its position (attention, recurrence). */
bool op_crosses_rows(uint32_t code);
/* Whether an output column depends on the same column of the inputs only (sums, activations). */
bool op_is_by_column(uint32_t code);
size_t op_entry(uint32_t code); /* offset in struct backend of the function that the operation requires */
bool op_scales_logits(const struct op *op); /* logits with a factor or a cap, which need the function scale_logits */
bool op_spreads_logits(const struct op *op); /* logits of some token ids, which need the function spread_logits */
/* The requirement that the operation does not meet, or NULL. written: nonzero for values that earlier operations write. */
const char *op_check(const struct program *program, const struct op *op, const uint8_t *written);
/* A program ends with its logits, with the states that pooling reads, or with both in this order. */
bool program_has_logits(const struct program *program);
uint32_t program_states_width(const struct program *program); /* 0: the program has no states */
uint32_t program_n_token_types(const struct program *program); /* 0: the program reads no token types */
uint32_t program_kept_width(const struct program *program); /* 0: the program keeps no rows */
bool program_is_head(const struct program *program); /* it reads rows that another program keeps */
bool program_takes_whole_prompts(const struct program *program); /* rows attend to later rows, so prompts are not split */
uint32_t program_spans(const struct program *program); /* enum spans */
/* Rows that most operations of a tower compute, for each row of the largest piece. */
uint32_t program_row_room(const struct program *program);
uint32_t program_n_axes(const struct program *program); /* most axes of a rope; 0: rows have one position each */
/* RC_INVALID with a text that names the operation and the requirement that it does not meet. */
enum rc program_check(const struct program *program, struct err *err);
void program_destroy(struct program *program);

#endif
