/* mixture_args.h: arguments of the operations of mixtures of experts. A part of backend.h, which includes it behind struct
 * view. */
#ifndef LLMPY_MIXTURE_ARGS_H
#define LLMPY_MIXTURE_ARGS_H

/* One chosen expert of a row. A row has n_chosen routes, best first; the lower expert wins a tie. */
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

/* Chooses experts for each row:
 * 1. Score every expert by `score`. Experts are ranked by score + selection_bias.
 * 2. Split the experts into n_groups equal groups. Keep the chosen_groups groups with the largest best rank value (sums_two:
 *    with the largest sum of their two best).
 * 3. Choose the n_chosen best experts of these groups.
 * 4. The weight of an expert is its score without the bias; is_normalised divides the weight by (the sum of the chosen experts'
 *    weights + sum_eps). Then the weight is multiplied by scale. */
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

/* What ranks compute that have a part of every expert. Only backends with `combine` get another than EXPERTS_WHOLE. */
enum experts_half {
    EXPERTS_WHOLE,
    EXPERTS_UP,   /* y has n_chosen equal parts a row. Part j gets form(up_e(x)) of route j in its columns from first_column on,
                   * as many as `up` makes here, and keeps its other columns. down is NULL */
    EXPERTS_DOWN  /* part j of x is the whole form(up_e(..)) of route j; y = the sum over the routes. up is NULL */
};

/* What adapters add to the products of experts before they are rounded: scale * B (A x), as `lora`. Part p of expert e lies at
 * parts[p] + e * step; expert 0 is the first that is held. */
struct experts_lora_parts {
    struct lora_part parts[2]; /* of an expert's rows; up: gate, up, or the one matrix of both; down: one */
    uint32_t n_parts;
    size_t step;
};
struct experts_lora {
    struct experts_lora_parts up, down; /* of struct lora_part, first_row and n_rows are of the expert's matrix */
    uint32_t max_rank;
    const void *slots;
    size_t slot_bytes;
    const int32_t *row_slots, *rows; /* as those of struct lora_args */
    float *scratch;                  /* [n_rows * n_chosen][2][max_rank] */
};

/* y = sum over a row's routes, in their order, of weight * (down_e(form(up_e(x))) + down_bias_e); is_input_scaled: the weight
 * multiplies x instead. The sum is one float32 chain that starts from 0 and is rounded once at the end. The matrix up holds
 * gate_e | up_e (EXPERT_PLAIN: up_e) for expert 0, 1, ..; down holds down_e in the same order. Each product has the bits of a
 * linear with that expert's matrix alone; intermediate values are rounded like the y of such a linear. */
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
    struct view scratch;        /* width n_chosen * 4 * max(inner, width of down) + 2 * n_experts + 16; n_rows * stride
                                 * contiguous values */
    uint32_t first, n_local;    /* the matrices and the biases hold experts [first, first + n_local); n_local 0: all experts */
    bool is_by_route;           /* y has n_chosen equal parts a row. Part j gets the result of route j before the sum, if the
                                 * route's expert is held, and stays as it is if not. Only backends with `combine` get this */
    uint32_t half, first_column; /* half: enum experts_half */
    const struct experts_lora *lora; /* FUSION_EXPERTS_LORA; NULL: no row has an adapter. Without FUSION_EXPERTS_LORA_RANKS
                                      * EXPERTS_WHOLE of all experts alone */
    bool is_mirrored;           /* struct comm says that it can: parts of y also go to the same places of all other ranks */
};

/* y = the sum of `experts`, of the same bits: part j of a row of results is the result of route j */
struct combine_args {
    uint32_t n_rows, n_chosen;
    bool is_input_scaled;
    const struct route *routes; /* [n_rows][route_stride] */
    uint32_t route_stride;
    struct view results, y;     /* results: n_chosen equal parts a row */
};

#endif
