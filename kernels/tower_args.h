/* tower_args.h: arguments of the operations of towers, which turn the bytes of an image into rows of a text model, and of the
 * text that takes them. A part of backend.h, which includes it behind struct view. */
#ifndef LLMPY_TOWER_ARGS_H
#define LLMPY_TOWER_ARGS_H

/* out[r][(c * n_frames + t) * n + i] = table[c][bytes[r][c * n + i]] for c < 3, t < n_frames, i < n */
struct pixels_args {
    uint32_t n_rows, n_frames;
    const uint8_t *bytes;       /* [n_rows][3 * n] */
    const float *table;         /* [3][256] */
    struct view out;
};

/* out[r] = the sum over t < n_taps of weights[r][t] * row rows[r][t] of the table: a chain of float32 in the order of t. */
struct embed_taps_args {
    const float *table;         /* [..][out.width] */
    const float *weights;       /* [n_rows][n_taps] */
    uint32_t n_rows, n_taps;
    const int32_t *rows;        /* [n_rows][n_taps] */
    struct view out;
};

/* out row rows[i] = x row i; the rows differ */
struct place_rows_args {
    uint32_t n_rows;
    const int32_t *rows;
    struct view x, out;
};

/* out row i = the sum of the n rows of x from i * n on, a chain of float32, times 1 / n; out is not x */
struct mean_rows_args {
    uint32_t n_rows, n;
    struct view x, out;
};

/* row_attention over squares of side x side rows, line by line, in which a score also depends on the distances of row i from
 * row j: scale * (q[i][h] . k[j][h]) + q[i][h] . lines(y_i - y_j) + q[i][h] . columns(x_i - x_j), where row i lies in line y_i
 * and column x_i, and table(d) = the sum over t < 2 of shares[d + side - 1][t] * row rows[d + side - 1][t] of the table. A
 * product with a distance is a chain over head_dim; the three terms are added in this order. */
struct grid_attention_args {
    const struct batch_view *batch; /* its sequences are the squares */
    uint32_t n_heads, head_dim, side;
    float scale;
    const float *lines, *columns;   /* [..][head_dim] */
    const int32_t *rows;            /* [2 * side - 1][2] */
    const float *shares;            /* [2 * side - 1][2] */
    struct view q, k, v, out;       /* width = n_heads * head_dim */
};

/* x[r] = features[visual[r]], or (is_sum) x[r] + that, for the rows with visual[r] >= 0; others stay */
struct splice_args {
    uint32_t n_rows;
    bool is_sum;
    const int32_t *visual;
    struct view features, x;
};

#endif
