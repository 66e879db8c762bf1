/* kernels.cl: the operations, in OpenCL C 1.2. Activations are float32. What a row gets depends on its own values and on widths:
 * no work item reads another row, and the order of each sum is fixed. exp, tanh and erf are our own, so that devices differ
 * little. F16 and BF16 are numbers of enum dtype; every other type is float32. */
#pragma OPENCL FP_CONTRACT OFF

#define PANEL 16
#define TILE 64 /* keys that attention takes at once, and work items of a group of rms_norm and attention */
#define MAX_HEAD_DIM 512

/* ---- types ---------------------------------------------------------------------------------------------------------------- */

float load(global const void *items, uint type, size_t i)
{
    if (type == F16)
        return vload_half(i, (global const half *)items);
    if (type == BF16)
        return as_float((uint)((global const ushort *)items)[i] << 16);
    return ((global const float *)items)[i];
}

/* Rounds to nearest even; a NaN stays one. */
ushort to_bf16(float x)
{
    uint u = as_uint(x);
    return x != x ? (u | 0x400000) >> 16 : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

void store(global void *items, uint type, size_t i, float x)
{
    if (type == F16)
        vstore_half_rte(x, i, (global half *)items);
    else if (type == BF16)
        ((global ushort *)items)[i] = to_bf16(x);
    else
        ((global float *)items)[i] = x;
}

/* ---- functions ------------------------------------------------------------------------------------------------------------- */

float power2(int n)
{
    return as_float((n + 127) << 23);
}

/* e^x within 1.1 ulp: 2^n (1 + (r + r^2 q(r))), r = x - n ln 2; a NaN stays. */
float exponential(float x)
{
    x = x < -105.0f ? -105.0f : x > 90.0f ? 90.0f : x;
    float n = rint(x * 0x1.715476p+0f), r = fma(-n, 0x1.62e400p-1f, x), q;
    r = fma(-n, 0x1.7f7d1cp-20f, r);
    q = fma(fma(fma(0x1.6a234ep-10f, r, 0x1.123a6cp-7f), r, 0x1.5558f4p-5f), r, 0x1.555490p-3f);
    q = fma(q, r, 0x1.fffffcp-2f);
    int whole = x == x ? (int)n : 0, part = whole >> 1;
    return (fma(r * r, q, r) + 1.0f) * power2(part) * power2(whole - part);
}

/* tanh within 1.5 ulp: x (1 + x^2 q(x^2)) near 0, else from e^2|x|. */
float hyperbolic_tangent(float x)
{
    float size = fabs(x), square = x * x, q;
    q = fma(fma(-0x1.75d774p-8f, square, 0x1.522460p-6f), square, -0x1.b83c06p-5f);
    q = fma(fma(q, square, 0x1.110724p-3f), square, -0x1.555532p-2f);
    return size < 0.625f ? fma(x * square, q, x) : copysign(1.0f - 2.0f / (exponential(size + size) + 1.0f), x);
}

/* erf within 2 ulp: x p(x^2) below 1, else 1 - e^(-x^2) q(|x|). */
float error_function(float x)
{
    float size = fabs(x) > 4.0f ? 4.0f : fabs(x), square = size * size, p, q;
    p = fma(fma(fma(0x1.496a32p-14f, square, -0x1.a3f700p-11f), square, 0x1.5405b2p-8f), square, -0x1.b7f90ep-6f);
    p = fma(fma(fma(p, square, 0x1.ce2cf8p-4f), square, -0x1.81273ep-2f), square, 0x1.20dd74p+0f);
    q = fma(fma(fma(0x1.c5ce76p-14f, size, -0x1.fa5f6cp-10f), size, 0x1.f98392p-7f), size, -0x1.2bd154p-4f);
    q = fma(fma(fma(q, size, 0x1.da23b8p-3f), size, -0x1.0a4e84p-1f), size, 0x1.ba3fd8p-1f);
    q = fma(fma(q, size, -0x1.14906ap+0f), size, 0x1.fc15eep-1f);
    return fabs(x) < 1.0f ? x * p : copysign(fma(-exponential(-square), q, 1.0f), x);
}

/* enum act of llmpy_backend.h */
float activate(uint act, float x)
{
    float positive = x > 0 || x != x ? x : 0;
    switch (act) {
    case 0: return x / (1.0f + exponential(-x));
    case 1: return 0.5f * x * (1.0f + error_function(x * 0x1.6a09e6p-1f));
    case 2: return 0.5f * x * (1.0f + hyperbolic_tangent(0x1.988454p-1f * fma(x * x * x, 0.044715f, x)));
    case 3: return positive;
    case 4: return positive * positive;
    case 5: return hyperbolic_tangent(x);
    case 6: return 1.0f / (1.0f + exponential(-x));
    default: return x;
    }
}

/* ---- weights --------------------------------------------------------------------------------------------------------------- */

/* Rows of one block of a matrix, by id. The matrix's first block also writes NaN for ids of no row. */
kernel void embed(global const void *items, uint type, uint block_first, uint block_rows, uint n_rows, uint n_cols,
                  global const int *ids, uint has_ids, int first_id, int end_id, uint first_row, float scale,
                  global float *out, uint stride)
{
    size_t c = get_global_id(0), r = get_global_id(1);
    int id = has_ids ? ids[r] : 0;
    if (c >= n_cols || (end_id && (id < first_id || id >= end_id)))
        return;
    long row = (long)first_row + id - first_id;
    if (row < 0 || row >= n_rows) {
        if (block_first == 0)
            out[r * stride + c] = NAN;
        return;
    }
    row -= block_first;
    if (row >= 0 && row < block_rows)
        out[r * stride + c] = scale * load(items, type, ((size_t)row / PANEL * n_cols + c) * PANEL + row % PANEL);
}

#define LOAD_F32(w, k) vload16(k, w)
#define LOAD_F16(w, k) vload_half16(k, w)
#define LOAD_BF16(w, k) as_float16(convert_uint16(vload16(k, w)) << 16)

/* Each work item makes a panel of outputs for ROWS rows: one chain over k an output. Behind the last row it repeats that row. */
#define LINEAR(name, ROWS, item, LOAD) \
kernel void name(global const float *x, uint x_stride, global const item *items, global const float *bias, uint has_bias, \
                 global float *y, uint y_stride, uint n_rows, uint n_out, uint n_cols) \
{ \
    size_t first = get_global_id(0) * PANEL; \
    uint row = get_global_id(1) * ROWS; \
    if (first >= n_out) \
        return; \
    global const item *w = items + first * n_cols; \
    global const float *from[ROWS]; \
    float16 sum[ROWS]; \
    for (uint r = 0; r < ROWS; r++) { \
        from[r] = x + (size_t)min(row + r, n_rows - 1) * x_stride; \
        sum[r] = 0; \
    } \
    for (uint k = 0; k < n_cols; k++) { \
        float16 weights = LOAD(w, k); \
        for (uint r = 0; r < ROWS; r++) \
            sum[r] = fma((float16)(from[r][k]), weights, sum[r]); \
    } \
    for (uint r = 0; r < ROWS && row + r < n_rows; r++) { \
        float sums[PANEL]; \
        vstore16(sum[r], 0, sums); \
        for (uint i = 0; i < PANEL && first + i < n_out; i++) \
            y[(size_t)(row + r) * y_stride + first + i] = has_bias ? sums[i] + bias[first + i] : sums[i]; \
    } \
}

LINEAR(linear_row_f32, 1, float, LOAD_F32)
LINEAR(linear_row_f16, 1, half, LOAD_F16)
LINEAR(linear_row_bf16, 1, ushort, LOAD_BF16)
LINEAR(linear_rows_f32, 4, float, LOAD_F32)
LINEAR(linear_rows_f16, 4, half, LOAD_F16)
LINEAR(linear_rows_bf16, 4, ushort, LOAD_BF16)

/* ---- rows ------------------------------------------------------------------------------------------------------------------ */

/* The sum of the values of a group of TILE work items, in a tree; every work item gets it. */
float sum_of_group(local float *values, uint lane, float value)
{
    values[lane] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint apart = TILE / 2; apart > 0; apart /= 2) {
        if (lane < apart)
            values[lane] += values[lane + apart];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float sum = values[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}

/* A group for each head of each row. */
kernel void rms_norm(global const float *x, uint x_stride, global const float *weight, uint has_weight, uint weight_stride,
                     global float *out, uint out_stride, uint size, float eps)
{
    local float values[TILE];
    uint lane = get_local_id(0), head = get_group_id(0);
    global const float *from = x + get_global_id(1) * x_stride + (size_t)head * size;
    global float *to = out + get_global_id(1) * out_stride + (size_t)head * size;
    float sum = 0;
    for (uint c = lane; c < size; c += TILE)
        sum = fma(from[c], from[c], sum);
    sum = sum_of_group(values, lane, sum);
    float scale = 1.0f / sqrt(sum / size + eps);
    for (uint c = lane; c < size; c += TILE)
        to[c] = has_weight ? from[c] * scale * weight[head * weight_stride + c] : from[c] * scale;
}

/* A group for each head of each row. The variance is the mean of (x - mean)^2. */
kernel void layer_norm(global const float *x, uint x_stride, global const float *weight, uint has_weight,
                       global const float *bias, uint has_bias, uint weight_stride, global float *out, uint out_stride,
                       uint size, float eps)
{
    local float values[TILE];
    uint lane = get_local_id(0), head = get_group_id(0), of_head = head * weight_stride;
    global const float *from = x + get_global_id(1) * x_stride + (size_t)head * size;
    global float *to = out + get_global_id(1) * out_stride + (size_t)head * size;
    float sum = 0, squares = 0;
    for (uint c = lane; c < size; c += TILE)
        sum += from[c];
    float mean = sum_of_group(values, lane, sum) / size;
    for (uint c = lane; c < size; c += TILE)
        squares = fma(from[c] - mean, from[c] - mean, squares);
    float scale = 1.0f / sqrt(sum_of_group(values, lane, squares) / size + eps);
    for (uint c = lane; c < size; c += TILE) {
        float unit = (from[c] - mean) * scale;
        to[c] = (has_weight ? unit * weight[of_head + c] : unit) + (has_bias ? bias[of_head + c] : 0);
    }
}

/* A gate of one column may lie in `out`, so all work items read it before one writes. */
kernel void gated(global const float *gate, uint gate_stride, uint has_one, uint act, global const float *up, uint up_stride,
                  global float *out, uint out_stride, uint width)
{
    size_t r = get_global_id(1);
    float one = gate[r * gate_stride];
    barrier(CLK_GLOBAL_MEM_FENCE);
    for (size_t c = get_global_id(0); c < width; c += get_global_size(0))
        out[r * out_stride + c] = activate(act, has_one ? one : gate[r * gate_stride + c]) * up[r * up_stride + c];
}

/* Acts of `act` alone: 7 clips to +-limit, 8 is xIELU with four weights, 10 multiplies by the column's weight. */
float softplus(float x)
{
    return x > 20 ? x : log1p(exponential(x));
}

float bend(global const float *weights, float x)
{
    float positive = softplus(weights[0]) * x * x;
    float negative = (exponential(x > weights[3] ? weights[3] : x) - 1.0f - x) * (weights[2] + softplus(weights[1]));
    return (x > 0 ? positive : negative) + weights[2] * x;
}

kernel void act(global const float *x, uint x_stride, uint act, float limit, global const float *weights, global float *out,
                uint out_stride, uint width)
{
    size_t c = get_global_id(0), r = get_global_id(1);
    if (c >= width)
        return;
    float value = x[r * x_stride + c], result;
    if (act == 7)
        result = value > limit ? limit : value < -limit ? -limit : value;
    else if (act == 8)
        result = bend(weights, value);
    else
        result = act == 10 ? value * weights[c] : activate(act, value);
    out[r * out_stride + c] = result;
}

kernel void add(global const float *a, uint a_stride, global const float *b, uint b_stride, global float *out, uint out_stride,
                uint width)
{
    size_t c = get_global_id(0), r = get_global_id(1);
    if (c < width)
        out[r * out_stride + c] = a[r * a_stride + c] + b[r * b_stride + c];
}

kernel void select_rows(global const float *x, uint x_stride, global const int *rows, uint is_all, global float *out,
                        uint out_stride, uint width)
{
    size_t c = get_global_id(0), r = get_global_id(1);
    if (c < width)
        out[r * out_stride + c] = x[(is_all ? r : (size_t)rows[r]) * x_stride + c];
}

kernel void take(global const float *x, uint x_stride, global const float *columns, global float *out, uint out_stride,
                 uint width)
{
    size_t c = get_global_id(0), r = get_global_id(1);
    if (c < width)
        out[r * out_stride + c] = x[r * x_stride + (size_t)columns[c]];
}

kernel void position_scale(global const float *x, uint x_stride, global const int *positions, uint every, uint first,
                           float slope, global float *out, uint out_stride, uint width)
{
    size_t c = get_global_id(0), r = get_global_id(1);
    if (c < width)
        out[r * out_stride + c] = x[r * x_stride + c] * (1.0f + slope * log1p((float)(((uint)positions[r] + first) / every)));
}

kernel void scale_logits(global float *logits, uint stride, float scale, float softcap, uint width)
{
    size_t c = get_global_id(0), i = get_global_id(1) * stride + c;
    if (c < width)
        logits[i] = softcap > 0 ? softcap * hyperbolic_tangent(scale * logits[i] / softcap) : scale * logits[i];
}

/* ---- positions and the cache ----------------------------------------------------------------------------------------------- */

kernel void rope_table(global const int *positions, global const float *inv_freq, float magnitude, global float *table,
                       uint n_freqs)
{
    size_t i = get_global_id(0), r = get_global_id(1);
    if (i >= n_freqs)
        return;
    float angle = (float)positions[r] * inv_freq[i];
    table[(r * n_freqs + i) * 2] = magnitude * cos(angle);
    table[(r * n_freqs + i) * 2 + 1] = magnitude * sin(angle);
}

/* A work item for each pair of each head. Pairs of a head are `apart` columns apart and begin at column `first`. */
kernel void rope(global float *x, uint stride, uint head_dim, uint n_pairs, uint n_freqs, uint first, uint is_interleaved,
                 global const float *table)
{
    size_t pair = get_global_id(0), r = get_global_id(1);
    if (pair >= n_pairs)
        return;
    size_t i = pair % n_freqs, c = r * stride + pair / n_freqs * head_dim + first + (is_interleaved ? 2 * i : i);
    size_t other = c + (is_interleaved ? 1 : n_freqs);
    float a = x[c], b = x[other], cosine = table[(r * n_freqs + i) * 2], sine = table[(r * n_freqs + i) * 2 + 1];
    x[c] = a * cosine - b * sine;
    x[other] = b * cosine + a * sine;
}

/* A layer of a page is [keys | values][block_tokens][kv heads][head_dim]. Returns the keys of a position; the values lie
 * block_tokens rows behind. */
global char *token_of(global char *layers, ulong page_bytes, global const int *table, uint block_tokens, ulong row_bytes,
                      uint position)
{
    return layers + (size_t)table[position / block_tokens] * page_bytes + position % block_tokens * row_bytes;
}

kernel void kv_write(global char *layers, ulong page_bytes, global const int *table, uint table_stride, uint type,
                     uint item_bytes, uint block_tokens, global const int *positions, global const int *row_seq,
                     global const float *k, uint k_stride, global const float *v, uint v_stride, uint width)
{
    size_t c = get_global_id(0), r = get_global_id(1), row_bytes = (size_t)width * item_bytes;
    if (c >= width)
        return;
    global char *token = token_of(layers, page_bytes, table + (size_t)row_seq[r] * table_stride, block_tokens, row_bytes,
                                  positions[r]);
    store(token, type, c, k[r * k_stride + c]);
    store(token + block_tokens * row_bytes, type, c, v[r * v_stride + c]);
}

float larger(float a, float b)
{
    return a > b ? a : b;
}

float max_of_group(local float *values, uint lane, float value)
{
    values[lane] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint apart = TILE / 2; apart > 0; apart /= 2) {
        if (lane < apart)
            values[lane] = larger(values[lane], values[lane + apart]);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float most = values[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return most;
}

/* A group for each query head of each row: tiles of TILE keys at absolute positions, ascending, with a running maximum. A work
 * item makes the score of one key, then some columns of the output. */
kernel void attention(global char *layers, ulong page_bytes, global const int *table, uint table_stride, uint type,
                      uint item_bytes, uint block_tokens, global const int *positions, global const int *row_seq,
                      global const float *q, uint q_stride, global float *out, uint out_stride, uint n_kv_heads, uint head_dim,
                      uint heads_a_kv_head, uint window, uint chunk, float scale, float softcap, global const float *slopes,
                      uint has_slopes, global const float *sinks, uint has_sinks, global const int *ends, uint has_ends)
{
    local float values[TILE], weights[TILE];
    local ulong tokens[TILE];
    uint lane = get_local_id(0), head = get_group_id(0), row = get_global_id(1), position = positions[row], first = 0;
    size_t row_bytes = (size_t)n_kv_heads * head_dim * item_bytes, column = (size_t)(head / heads_a_kv_head) * head_dim;
    global const float *query = q + (size_t)row * q_stride + (size_t)head * head_dim;
    global const int *pages = table + (size_t)row_seq[row] * table_stride;
    float sums[MAX_HEAD_DIM / TILE], most = -INFINITY, total = 0;
    uint last = has_ends ? ends[row] - 1 : position;
    for (uint i = 0; i < MAX_HEAD_DIM / TILE; i++)
        sums[i] = 0;
    if (chunk)
        first = position / chunk * chunk;
    else if (window && position >= window)
        first = position - window + 1;
    for (uint tile = first / TILE * TILE; tile <= last; tile += TILE) {
        uint j = tile + lane;
        bool is_visible = j >= first && j <= last;
        float score = -INFINITY;
        if (is_visible) {
            global char *token = token_of(layers, page_bytes, pages, block_tokens, row_bytes, j);
            tokens[lane] = token - layers;
            score = 0;
            for (uint c = 0; c < head_dim; c++)
                score = fma(query[c], load(token, type, column + c), score);
            score *= scale;
            if (softcap > 0)
                score = softcap * hyperbolic_tangent(score / softcap);
            if (has_slopes)
                score += slopes[head] * ((float)j - (float)position);
        }
        float larger_most = larger(most, max_of_group(values, lane, score));
        weights[lane] = is_visible ? exponential(score - larger_most) : 0;
        float before = exponential(most - larger_most);
        total = before * total + sum_of_group(values, lane, weights[lane]);
        most = larger_most;
        uint begin = max(first, tile) - tile, end = min(last - tile + 1, (uint)TILE);
        for (uint i = 0; i * TILE + lane < head_dim; i++) {
            float sum = before * sums[i];
            for (uint n = begin; n < end; n++)
                sum = fma(weights[n], load(layers + tokens[n] + block_tokens * row_bytes, type, column + i * TILE + lane), sum);
            sums[i] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float share = 1;
    if (has_sinks) {
        float larger_most = larger(most, sinks[head]);
        share = exponential(most - larger_most);
        total = share * total + exponential(sinks[head] - larger_most);
    }
    for (uint i = 0; i * TILE + lane < head_dim; i++)
        out[(size_t)row * out_stride + (size_t)head * head_dim + i * TILE + lane] = share * sums[i] / total + 0.0f;
}
