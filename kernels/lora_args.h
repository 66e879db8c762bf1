/* lora_args.h: arguments of the operation `lora`. A part of backend.h, which includes it behind struct view. */
#ifndef LLMPY_LORA_ARGS_H
#define LLMPY_LORA_ARGS_H

/* Adapters (LoRA): for each row that has one, y += scale * B (A x), part by part of a matrix. x is the input of the matrix's
 * linear. With is_delta y is set instead: to scale * B (A x), and to -0.0 for rows without an adapter, because x + -0.0 has the
 * bits of x. A slot of the adapters' memory holds one adapter. A part's head, a, b are offsets in bytes inside a slot:
 *   head   uint32 rank, then float32 scale; rank 0: the adapter has no factors for the part. FUSION_LORA_BIASES: then uint32
 *          enum lora_bias. FUSION_LORA_WHOLE: at 16 uint64, 0 or where host memory has float32 [n_rows][n_cols] in place of the
 *          base matrix
 *   a      [max_rank][n_cols], of which rank rows are used, float32 or bfloat16
 *   b      [max_rank][n_rows] of the same type, the transpose of B. FUSION_LORA_BIASES: at the next multiple of 4 bytes a bias,
 *          float32 [n_rows]
 * t = A x and B t are sums in float32 whose order the part alone decides. Rows without an adapter keep their bits. */
struct lora_part {
    uint32_t first_row, n_rows; /* of the matrix */
    size_t head, a, b;
};
/* y += bias; LORA_BIAS_REPLACES: y += bias - base_bias */
enum lora_bias { LORA_BIAS_NONE = 0, LORA_BIAS_ADDS = 1, LORA_BIAS_REPLACES = 2 };
struct lora_args {
    uint32_t n_rows, n_parts, max_rank;
    const struct lora_part *parts; /* [n_parts] in host memory, of one matrix */
    const void *slots;
    size_t slot_bytes;
    const int32_t *row_slots;   /* a row's slot; -1: the row has no adapter. NULL: `begin` has brought row_adapters */
    const int32_t *rows;        /* [n_rows] where row_slots has the slot of each row; NULL: at 0, 1, ... */
    struct view x, y;           /* y holds the linear's result */
    float *scratch;             /* [n_rows][n_parts][columns of x / LORA_CHUNK, rounded up][max_rank]; without is_delta
                                 * [n_rows][n_parts][max_rank] */
    bool is_delta;              /* y is float32 for every type of activations; FUSION_LINEAR_DELTA */
    bool is_bfloat16;           /* a and b are bfloat16; FUSION_LORA_BFLOAT16 */
    uint32_t first_row;         /* without row_slots: rows first_row, first_row + 1, ... of the step, or of the rows that `rows`
                                 * lists; is_delta: a multiple of LORA_ROWS, and n_rows is at most LORA_ROWS */
    const float *base_bias;     /* of the linear, or NULL; this and what follows: FUSION_LORA_BIASES */
    const int32_t *token_ids;   /* an embedding's: A x is the column of A of the row's id, times factor. x has no data, and a
                                 * column for each id. NULL: a linear's */
    float factor;
    int32_t first_id, end_id;   /* 0, 0, or the range of ids whose rows of y are written; those of other ids stay */
};
#define LORA_ROWS 1024u
#define LORA_CHUNK 1024u /* columns of x */

#endif
