/* kernel_bits.c: runs the CPU backend's operations on made-up values and prints a checksum a case. tests/unit/test_neon.py
 * compares the lines of two instruction sets. Usage: kernel_bits ISA */
#include "../../csrc/base/mem.h"
#include "../../kernels/cpu/backend_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_ROWS 64u

#ifndef __aarch64__
const struct cpu_kernels *cpu_kernels_avx512(void) /* not linked */
{
    return NULL;
}
#endif

static const struct backend *b;
static void *ctx;
static uint64_t state = 1;

static uint32_t draw(void)
{
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    return (uint32_t)((z ^ z >> 27) * 0x94D049BB133111EBu >> 32);
}

/* Sums of four uniform numbers, times scale; some are 0. */
static float *floats(size_t n, float scale)
{
    float *made = aligned_alloc(64, (n * sizeof *made + 63) / 64 * 64);
    for (size_t i = 0; made && i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (float)(draw() >> 8) * 0x1p-24f - 0.5f;
        made[i] = draw() % 50 ? sum * scale : 0;
    }
    return made ? made : (exit(2), NULL);
}

static void must(enum rc rc, const struct err *err, const char *what)
{
    if (rc) {
        printf("%s: %s\n", what, err->message);
        exit(2);
    }
}

/* Prints the checksum of bytes; every NaN counts as the same one, because its sign and payload are the processor's. */
static void print_sum(const char *name, const float *values, size_t n)
{
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        hash = (hash ^ (values[i] == values[i] ? bits : 0x7fc00000u)) * 1099511628211u;
    }
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

#define RUN(name, ...) must(b->name(ctx, &(struct name##_args){__VA_ARGS__}, &err), &err, #name)

/* ---- weights ------------------------------------------------------------------------------------------------------------ */

/* One block with finite values of moderate size. */
static void draw_block(const struct dtype_info *info, uint32_t dtype, uint8_t *block)
{
    float values[512]; /* of the largest block */
    bool is_good = false;
    for (uint32_t attempt = 0; !is_good; attempt++) {
        for (uint32_t i = 0; i < info->block_bytes; i++)
            block[i] = (uint8_t)(draw() & (attempt < 30 ? 0xff : 0xbf));
        is_good = dtype_to_float(dtype, block, values, info->block_values);
        for (uint32_t i = 0; i < info->block_values && is_good; i++)
            is_good = fabsf(values[i]) < 1e3f;
    }
}

static void try_linear(uint32_t dtype, uint32_t arithmetic, uint32_t n_out, uint32_t n_cols)
{
    static const uint32_t COUNTS[] = {1, 2, 5, 40};
    const struct dtype_info *info = dtype_info(dtype);
    struct err err = {0};
    struct matrix *matrix;
    struct matrix_part part = {n_out, dtype};
    struct matrix_desc desc = {.parts = &part, .n_parts = 1, .n_cols = n_cols, .use = MATRIX_LINEAR | MATRIX_EMBED,
                               .arithmetic = arithmetic};
    if (b->matrix_create(ctx, &desc, &matrix, &err))
        return; /* the type does not have the arithmetic */
    size_t n_blocks = (size_t)n_out * (n_cols / info->block_values);
    uint8_t *rows = malloc(n_blocks * info->block_bytes);
    for (size_t i = 0; i < n_blocks; i++)
        draw_block(info, dtype, rows + i * info->block_bytes);
    must(b->matrix_write(ctx, matrix, 0, 0, n_out, rows, &err), &err, "matrix_write");
    float *x = floats((size_t)MAX_ROWS * n_cols, 2), *y = floats((size_t)MAX_ROWS * n_out, 0);
    for (uint32_t i = 0; i < sizeof COUNTS / sizeof *COUNTS; i++) {
        char name[80];
        RUN(linear, .matrix = matrix, .n_rows = COUNTS[i], .x = {x, n_cols, n_cols}, .y = {y, n_out, n_out});
        snprintf(name, sizeof name, "linear %s %s %u rows", info->name, arithmetic == ARITHMETIC_INT8 ? "int8" : "float",
                 COUNTS[i]);
        print_sum(name, y, (size_t)COUNTS[i] * n_out);
    }
    must(b->matrix_read(ctx, matrix, 0, 3, y, &err), &err, "matrix_read");
    b->matrix_destroy(ctx, matrix);
    free(rows);
    free(x);
    free(y);
}

static void try_linears(void)
{
    for (uint32_t dtype = 0; dtype < DTYPE_NONE; dtype++)
        if (dtype_info(dtype) && b->supports(ctx, dtype, MATRIX_LINEAR)) {
            try_linear(dtype, ARITHMETIC_FLOAT, 37, 512);
            try_linear(dtype, ARITHMETIC_INT8, 37, 512);
        }
}

/* ---- rows --------------------------------------------------------------------------------------------------------------- */

static void try_rows(uint32_t width)
{
    struct err err = {0};
    float *x = floats((size_t)9 * width, 12), *up = floats((size_t)9 * width, 3), *weight = floats(width, 1);
    float *out = floats((size_t)9 * width, 0);
    struct view in = {x, width, width}, other = {up, width, width}, to = {out, width, width};
    char name[40];
    for (uint32_t act = 0; act <= ACT_IDENTITY; act++) {
        if (act == ACT_CLIP || act == ACT_XIELU)
            continue;
        RUN(gated, .n_rows = 9, .act = act, .gate = in, .up = other, .out = to);
        snprintf(name, sizeof name, "gated %u of %u", act, width);
        print_sum(name, out, (size_t)9 * width);
    }
    RUN(rms_norm, .n_rows = 9, .n_heads = 1, .x = in, .out = to, .weight = weight, .eps = 1e-5f);
    print_sum("rms_norm", out, (size_t)9 * width);
    RUN(layer_norm, .n_rows = 9, .n_heads = 1, .x = in, .out = to, .weight = weight, .bias = up, .eps = 1e-5f);
    print_sum("layer_norm", out, (size_t)9 * width);
    RUN(add, .n_rows = 9, .a = in, .b = other, .out = to);
    print_sum("add", out, (size_t)9 * width);
    RUN(scale_logits, .n_rows = 9, .scale = 0.5f, .softcap = 5, .logits = {x, width, width});
    print_sum("scale_logits", x, (size_t)9 * width);
    free(x);
    free(up);
    free(weight);
    free(out);
}

/* ---- positions and the cache -------------------------------------------------------------------------------------------- */

#define N_TOKENS 150u
#define N_HEADS 6u
#define N_KV_HEADS 2u

static void try_attention(uint32_t dtype, uint32_t head_dim, bool interleaved, float softcap, uint32_t window)
{
    struct err err = {0};
    int32_t positions[N_TOKENS], seqs[N_TOKENS] = {0}, starts[2] = {0, N_TOKENS}, table[10];
    uint32_t q_width = N_HEADS * head_dim, kv_width = N_KV_HEADS * head_dim, n_freqs = head_dim / 4;
    size_t page_bytes = b->kv_layer_bytes(ctx, N_KV_HEADS, head_dim, dtype, 16);
    void *pool;
    must(b->buffer_create(ctx, 11 * page_bytes, &pool, &err), &err, "buffer_create");
    for (int32_t i = 0; i < (int32_t)N_TOKENS; i++)
        positions[i] = i;
    for (int32_t i = 0; i < 10; i++)
        table[i] = 10 - i;
    float *q = floats((size_t)N_TOKENS * q_width, 2), *k = floats((size_t)N_TOKENS * kv_width, 2);
    float *v = floats((size_t)N_TOKENS * kv_width, 2), *angles = floats((size_t)N_TOKENS * n_freqs * 2, 1);
    float *out = floats((size_t)N_TOKENS * q_width, 0);
    struct view query = {q, q_width, q_width}, key = {k, kv_width, kv_width}, to = {out, q_width, q_width};
    struct batch_view batch = {.n_rows = N_TOKENS, .n_seqs = 1, .positions = positions, .row_seq = seqs,
                               .seq_first_row = starts, .host_seq_first_row = starts, .block_tokens = 16};
    struct kv_view kv = {.pool = pool, .page_bytes = page_bytes, .table = table, .table_stride = 10, .n_kv_heads = N_KV_HEADS,
                         .head_dim = head_dim, .dtype = dtype};
    char name[60];
    RUN(rope, .n_rows = N_TOKENS, .n_freqs = n_freqs, .head_dim = head_dim, .interleaved = interleaved, .table = angles,
        .q = query, .k = key);
    print_sum("rope", q, (size_t)N_TOKENS * q_width);
    RUN(kv_write, .batch = &batch, .kv = kv, .k = key, .v = {v, kv_width, kv_width});
    RUN(attention, .batch = &batch, .kv = kv, .n_heads = N_HEADS, .window = window, .scale = 0.2f, .softcap = softcap,
        .q = query, .out = to);
    snprintf(name, sizeof name, "attention %s head %u", dtype_info(dtype)->name, head_dim);
    print_sum(name, out, (size_t)N_TOKENS * q_width);
    b->buffer_destroy(ctx, pool, 11 * page_bytes);
    free(q);
    free(k);
    free(v);
    free(angles);
    free(out);
}

/* ---- towers and other rows ------------------------------------------------------------------------------------------------ */

static struct view view_of(float *data, uint32_t width)
{
    return (struct view){data, width, width};
}

static void try_activations(uint32_t width)
{
    struct err err = {0};
    float *x = floats((size_t)9 * width, 9), *out = floats((size_t)9 * width, 0), *factors = floats(width, 2);
    static const float XIELU[] = {0.8f, 0.7f, 0.5f, -1e-6f};
    char name[40];
    for (uint32_t act = 0; act <= ACT_QUICK_GELU; act++) {
        RUN(act, .n_rows = 9, .act = act, .x = view_of(x, width), .out = view_of(out, width), .limit = 3,
            .weights = act == ACT_XIELU ? XIELU : factors);
        snprintf(name, sizeof name, "act %u of %u", act, width);
        print_sum(name, out, (size_t)9 * width);
    }
    int32_t positions[9];
    for (int32_t i = 0; i < 9; i++)
        positions[i] = 37 * i;
    RUN(position_scale, .n_rows = 9, .every = 16, .first = 1, .slope = 0.3f, .positions = positions, .x = view_of(x, width),
        .out = view_of(out, width));
    print_sum("position_scale", out, (size_t)9 * width);
    for (uint32_t i = 0; i < width; i++)
        factors[i] = (float)(i * 7 % width);
    RUN(take, .n_rows = 9, .x = view_of(x, width), .out = view_of(out, width), .columns = factors);
    print_sum("take", out, (size_t)9 * width);
    free(x);
    free(out);
    free(factors);
}

static void try_tower_rows(uint32_t width)
{
    struct err err = {0};
    uint8_t bytes[8 * 3 * 10];
    int32_t rows[24], visual[8] = {3, -1, 0, 7, -1, 5, 2, 1};
    float *table = floats(3 * 256, 2), *weights = floats(24, 1), *x = floats((size_t)8 * width, 3);
    float *out = floats((size_t)8 * (width > 30 ? width : 30), 0);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)draw();
    for (uint32_t i = 0; i < 24; i++)
        rows[i] = (int32_t)(draw() % 8);
    RUN(pixels, .n_rows = 8, .n_frames = 1, .bytes = bytes, .table = table, .out = view_of(out, 30));
    print_sum("pixels", out, 8 * 30);
    RUN(embed_taps, .table = x, .weights = weights, .n_rows = 8, .n_taps = 3, .rows = rows, .out = view_of(out, width));
    print_sum("embed_taps", out, (size_t)8 * width);
    RUN(mean_rows, .n_rows = 4, .n = 2, .x = view_of(x, width), .out = view_of(out, width));
    print_sum("mean_rows", out, (size_t)4 * width);
    RUN(select, .n_selected = 8, .rows = rows, .x = view_of(x, width), .out = view_of(out, width));
    print_sum("select", out, (size_t)8 * width);
    RUN(splice, .n_rows = 8, .is_sum = true, .visual = visual, .features = view_of(x, width), .x = view_of(out, width));
    print_sum("splice", out, (size_t)8 * width);
    free(table);
    free(weights);
    free(x);
    free(out);
}

/* Attention of encoders: over the rows of each sequence, and over a square of 5 x 5 rows with distances. */
static void try_row_attention(uint32_t head_dim)
{
    struct err err = {0};
    int32_t starts[] = {0, 25, 50, 143, 150}, seqs[N_TOKENS], positions[N_TOKENS], taps[18];
    for (int32_t s = 0; s < 4; s++)
        for (int32_t i = starts[s]; i < starts[s + 1]; i++)
            seqs[i] = s, positions[i] = i - starts[s];
    uint32_t width = N_HEADS * head_dim;
    float *q = floats((size_t)N_TOKENS * width, 1), *k = floats((size_t)N_TOKENS * width, 1);
    float *v = floats((size_t)N_TOKENS * width, 1), *out = floats((size_t)N_TOKENS * width, 0);
    float *lines = floats((size_t)9 * head_dim, 1), *shares = floats(18, 1);
    for (int32_t i = 0; i < 18; i++)
        taps[i] = i / 2;
    struct batch_view batch = {.n_rows = N_TOKENS, .n_seqs = 4, .positions = positions, .row_seq = seqs,
                               .seq_first_row = starts, .host_seq_first_row = starts, .block_tokens = 16};
    char name[40];
    RUN(row_attention, .batch = &batch, .n_heads = N_HEADS, .n_kv_heads = N_HEADS, .head_dim = head_dim, .scale = 0.2f,
        .q = view_of(q, width), .k = view_of(k, width), .v = view_of(v, width), .out = view_of(out, width));
    snprintf(name, sizeof name, "row_attention head %u", head_dim);
    print_sum(name, out, (size_t)N_TOKENS * width);
    batch.n_rows = 50;
    batch.n_seqs = 2;
    RUN(grid_attention, .batch = &batch, .n_heads = N_HEADS, .head_dim = head_dim, .side = 5, .scale = 0.2f, .lines = lines,
        .columns = lines, .rows = taps, .shares = shares, .q = view_of(q, width), .k = view_of(k, width),
        .v = view_of(v, width), .out = view_of(out, width));
    print_sum("grid_attention", out, (size_t)50 * width);
    free(q);
    free(k);
    free(v);
    free(out);
    free(lines);
    free(shares);
}

/* ---- recurrences --------------------------------------------------------------------------------------------------------- */

#define N_STATES 2u

/* Two sequences of 30 and 1 rows; the second one goes on from a state. */
struct recurrence {
    int32_t positions[31], seqs[31], starts[3], table[N_STATES];
    struct batch_view batch;
    struct state_view state;
    float *pool;
};

static struct recurrence *begin_recurrence(uint32_t n_units, uint32_t unit_floats)
{
    struct recurrence *r = calloc(1, sizeof *r);
    size_t n = (size_t)n_units * unit_floats;
    r->pool = floats(N_STATES * n, 0.5f);
    for (int32_t i = 0; i < 31; i++) {
        r->seqs[i] = i == 30;
        r->positions[i] = i == 30 ? 9 : i;
    }
    r->starts[1] = 30;
    r->starts[2] = 31;
    r->table[1] = 1;
    r->batch = (struct batch_view){.n_rows = 31, .n_seqs = 2, .positions = r->positions, .row_seq = r->seqs,
                                   .seq_first_row = r->starts, .host_seq_first_row = r->starts, .block_tokens = 16};
    r->state = (struct state_view){.pool = r->pool, .page_bytes = n * sizeof(float), .table = r->table, .table_stride = 1,
                                   .n_units = n_units, .unit_bytes = unit_floats * (uint32_t)sizeof(float),
                                   .units_per_page = n_units};
    return r;
}

static void end_recurrence(struct recurrence *r, const char *name, const float *out, uint32_t width)
{
    print_sum(name, out, (size_t)31 * width);
    print_sum("its states", r->pool, N_STATES * r->state.page_bytes / sizeof(float));
    free(r->pool);
    free(r);
}

static void try_recurrences(uint32_t n_heads, uint32_t head_dim, uint32_t n_state)
{
    struct err err = {0};
    uint32_t width = n_heads * head_dim;
    float *x = floats((size_t)31 * width, 1), *out = floats((size_t)31 * width, 0), *wide = floats((size_t)31 * width, 2);
    float *b_rows = floats((size_t)31 * width, 1), *c_rows = floats((size_t)31 * width, 1);
    float *weight = floats((size_t)width * (n_state > 4 ? n_state : 4), 1), *bias = floats(width, 1);
    struct recurrence *r = begin_recurrence(width, 3);
    RUN(conv, .batch = &r->batch, .state = r->state, .n_taps = 4, .weight = weight, .bias = bias, .has_act = true,
        .x = view_of(x, width), .out = view_of(out, width));
    end_recurrence(r, "conv", out, width);
    r = begin_recurrence(n_heads, head_dim * n_state);
    RUN(ssm, .batch = &r->batch, .state = r->state, .n_heads = n_heads, .head_dim = head_dim, .n_groups = 1,
        .n_state = n_state, .a_log = bias, .dt_bias = weight, .skip = bias, .dt_max = INFINITY, .x = view_of(x, width),
        .dt = view_of(wide, n_heads), .b = view_of(b_rows, n_state), .c = view_of(c_rows, n_state), .out = view_of(out, width));
    end_recurrence(r, "ssm", out, width);
    r = begin_recurrence(width, n_state);
    RUN(selective_scan, .batch = &r->batch, .state = r->state, .n_state = n_state, .a_log = weight, .dt_bias = bias,
        .skip = bias, .x = view_of(x, width), .dt = view_of(wide, width), .b = view_of(b_rows, n_state),
        .c = view_of(c_rows, n_state), .out = view_of(out, width));
    end_recurrence(r, "selective_scan", out, width);
    r = begin_recurrence(n_heads, head_dim * head_dim);
    RUN(delta, .batch = &r->batch, .state = r->state, .n_heads = n_heads, .n_key_heads = n_heads, .key_dim = head_dim,
        .value_dim = head_dim, .a_log = bias, .dt_bias = weight, .q = view_of(x, width), .k = view_of(b_rows, width),
        .v = view_of(c_rows, width), .a = view_of(wide, n_heads), .b = view_of(wide, n_heads), .out = view_of(out, width));
    end_recurrence(r, "delta", out, width);
    free(x);
    free(out);
    free(wide);
    free(b_rows);
    free(c_rows);
    free(weight);
    free(bias);
}

/* ---- mixtures and latents ------------------------------------------------------------------------------------------------ */

/* A matrix of n_experts equal parts, or (0) of one. */
static struct matrix *matrix_of(uint32_t dtype, uint32_t n_out, uint32_t n_cols, uint32_t use, uint32_t n_experts)
{
    const struct dtype_info *info = dtype_info(dtype);
    struct err err = {0};
    struct matrix *matrix;
    struct matrix_part parts[8];
    uint32_t n_parts = n_experts ? n_experts : 1, n_rows = n_out / n_parts;
    for (uint32_t i = 0; i < n_parts; i++)
        parts[i] = (struct matrix_part){n_rows, dtype};
    struct matrix_desc desc = {.parts = parts, .n_parts = n_parts, .n_cols = n_cols, .use = use, .n_experts = n_experts};
    must(b->matrix_create(ctx, &desc, &matrix, &err), &err, "matrix_create");
    size_t n_blocks = (size_t)n_rows * (n_cols / info->block_values);
    uint8_t *rows = malloc(n_blocks * info->block_bytes);
    for (uint32_t part = 0; part < n_parts; part++) {
        for (size_t i = 0; i < n_blocks; i++)
            draw_block(info, dtype, rows + i * info->block_bytes);
        must(b->matrix_write(ctx, matrix, part, 0, n_rows, rows, &err), &err, "matrix_write");
    }
    free(rows);
    return matrix;
}

static void try_route(uint32_t score, bool is_normalised, struct route *routes)
{
    struct err err = {0};
    float *logits = floats(MAX_ROWS * 8, 3), *bias = floats(8, 1), weights[MAX_ROWS * 2];
    RUN(route, .n_rows = MAX_ROWS, .n_experts = 8, .n_chosen = 2, .score = score, .n_groups = 2, .chosen_groups = 1,
        .sums_two = score == ROUTE_SIGMOID, .is_normalised = is_normalised, .sum_eps = 1e-20f, .scale = 1.5f,
        .logits = logits, .logits_stride = 8, .selection_bias = bias, .routes = routes, .route_stride = 2);
    for (uint32_t i = 0; i < MAX_ROWS * 2; i++)
        weights[i] = routes[i].weight + (float)routes[i].expert * 100;
    print_sum("route", weights, MAX_ROWS * 2);
    free(logits);
    free(bias);
}

static void try_experts(uint32_t dtype, const struct route *routes)
{
    struct err err = {0};
    const uint32_t inner = 512, width = 512; /* a multiple of every block */
    if (!b->supports(ctx, dtype, MATRIX_LINEAR | MATRIX_EXPERTS))
        return;
    struct matrix *up = matrix_of(dtype, 8 * 2 * inner, width, MATRIX_LINEAR | MATRIX_EXPERTS, 8);
    struct matrix *down = matrix_of(dtype, 8 * width, inner, MATRIX_LINEAR | MATRIX_EXPERTS, 8);
    uint32_t scratch_width = 2 * 4 * width + 2 * 8 + 16;
    float *x = floats((size_t)MAX_ROWS * width, 1), *y = floats((size_t)MAX_ROWS * width, 0);
    float *scratch = floats((size_t)MAX_ROWS * scratch_width, 0);
    char name[60];
    for (uint32_t n_rows = 1; n_rows <= MAX_ROWS; n_rows *= 8) {
        RUN(experts, .n_rows = n_rows, .n_experts = 8, .n_chosen = 2, .form = EXPERT_GATED, .up = up, .down = down,
            .routes = routes, .route_stride = 2, .x = view_of(x, width), .y = view_of(y, width),
            .scratch = view_of(scratch, scratch_width));
        snprintf(name, sizeof name, "experts %s %u rows", dtype_info(dtype)->name, n_rows);
        print_sum(name, y, (size_t)n_rows * width);
    }
    b->matrix_destroy(ctx, up);
    b->matrix_destroy(ctx, down);
    free(x);
    free(y);
    free(scratch);
}

static void try_mixtures(void)
{
    struct route routes[MAX_ROWS * 2];
    try_route(ROUTE_SOFTMAX, true, routes);
    try_route(ROUTE_SIGMOID, false, routes);
    try_route(ROUTE_CHOSEN_SIGMOID, false, routes);
    try_route(ROUTE_CHOSEN_SOFTMAX, false, routes);
    for (uint32_t dtype = 0; dtype < DTYPE_NONE; dtype++)
        if (dtype_info(dtype))
            try_experts(dtype, routes);
}

static void try_latents(uint32_t dtype)
{
    struct err err = {0};
    const uint32_t latent = 64, turned = 16;
    int32_t positions[N_TOKENS], seqs[N_TOKENS] = {0}, starts[2] = {0, N_TOKENS}, table[10];
    size_t page_bytes = b->kv_layer_bytes(ctx, 0, latent + turned, dtype, 16);
    void *pool;
    must(b->buffer_create(ctx, 11 * page_bytes, &pool, &err), &err, "buffer_create");
    for (int32_t i = 0; i < (int32_t)N_TOKENS; i++)
        positions[i] = i;
    for (int32_t i = 0; i < 10; i++)
        table[i] = 10 - i;
    float *q = floats((size_t)N_TOKENS * N_HEADS * latent, 1), *q_rope = floats((size_t)N_TOKENS * N_HEADS * turned, 1);
    float *rows = floats((size_t)N_TOKENS * latent, 1), *keys = floats((size_t)N_TOKENS * turned, 1);
    float *out = floats((size_t)N_TOKENS * N_HEADS * latent, 0);
    struct batch_view batch = {.n_rows = N_TOKENS, .n_seqs = 1, .positions = positions, .row_seq = seqs,
                               .seq_first_row = starts, .host_seq_first_row = starts, .block_tokens = 16};
    struct kv_view kv = {.pool = pool, .page_bytes = page_bytes, .table = table, .table_stride = 10,
                         .head_dim = latent + turned, .dtype = dtype};
    RUN(latent_attention, .batch = &batch, .kv = kv, .n_heads = N_HEADS, .scale = 0.2f, .q = view_of(q, N_HEADS * latent),
        .q_rope = view_of(q_rope, N_HEADS * turned), .latent = view_of(rows, latent), .rope_key = view_of(keys, turned),
        .out = view_of(out, N_HEADS * latent));
    print_sum("latent_attention", out, (size_t)N_TOKENS * N_HEADS * latent);
    b->buffer_destroy(ctx, pool, 11 * page_bytes);
    free(q);
    free(q_rope);
    free(rows);
    free(keys);
    free(out);
}

static void try_head_linear(uint32_t dtype)
{
    struct err err = {0};
    const uint32_t head_rows = 24, n_cols = 512;
    if (!b->supports(ctx, dtype, MATRIX_LINEAR | MATRIX_ROWS))
        return;
    struct matrix *matrix = matrix_of(dtype, N_HEADS * head_rows, n_cols, MATRIX_LINEAR | MATRIX_ROWS, 0);
    float *x = floats((size_t)MAX_ROWS * N_HEADS * n_cols, 1), *out = floats((size_t)MAX_ROWS * N_HEADS * n_cols, 0);
    RUN(head_linear, .matrix = matrix, .n_rows = MAX_ROWS, .n_heads = N_HEADS, .head_rows = head_rows, .first_row = 8,
        .used_rows = 16, .x = view_of(x, N_HEADS * n_cols), .out = view_of(out, N_HEADS * 16));
    print_sum("head_linear", out, (size_t)MAX_ROWS * N_HEADS * 16);
    RUN(head_linear, .matrix = matrix, .n_rows = MAX_ROWS, .n_heads = N_HEADS, .head_rows = head_rows, .used_rows = 8,
        .is_transposed = true, .x = view_of(x, N_HEADS * 8), .out = view_of(out, N_HEADS * n_cols));
    print_sum("head_linear turned", out, (size_t)MAX_ROWS * N_HEADS * n_cols);
    b->matrix_destroy(ctx, matrix);
    free(x);
    free(out);
}

/* An adapter of rank 5 in a slot for 8, for two rows of three. */
static void try_lora(uint32_t n_cols, uint32_t n_out)
{
    struct err err = {0};
    const uint32_t rank = 5, max_rank = 8;
    size_t n_floats = 16 + (size_t)max_rank * (n_cols + n_out);
    float *slot = floats(n_floats, 1), *x = floats((size_t)3 * n_cols, 1), *y = floats((size_t)3 * n_out, 1);
    float *scratch = floats((size_t)3 * max_rank, 0), scale = 0.5f;
    memcpy(slot, &rank, sizeof rank);
    memcpy(slot + 1, &scale, sizeof scale);
    struct lora_part part = {.n_rows = n_out, .a = 64, .b = 64 + sizeof(float) * max_rank * n_cols};
    const int32_t row_slots[] = {0, -1, 0};
    RUN(lora, .n_rows = 3, .n_parts = 1, .max_rank = max_rank, .parts = &part, .slots = slot,
        .slot_bytes = n_floats * sizeof(float), .row_slots = row_slots, .x = view_of(x, n_cols), .y = view_of(y, n_out),
        .scratch = scratch);
    print_sum("lora", y, (size_t)3 * n_out);
    free(slot);
    free(x);
    free(y);
    free(scratch);
}

/* ---- logits -------------------------------------------------------------------------------------------------------------- */

#define VOCAB 1000u

static void try_sample(void)
{
    struct err err = {0};
    float *logits = floats(8 * VOCAB, 9);
    struct sample_task tasks[8];
    struct sample_result results[8];
    for (uint32_t i = 0; i < 8; i++)
        tasks[i] = (struct sample_task){.logits_row = i, .is_greedy = i == 0, .wants_logprobs = true,
                                        .temperature = i ? 0.5f + 0.2f * (float)i : 1, .top_p = i % 3 ? 0.9f : 1,
                                        .min_p = i % 2 ? 0.01f : 0, .top_k = i % 4 ? 40 : 0, .repetition_penalty = 1,
                                        .seed = 7 + i, .position = i};
    RUN(sample, .logits = logits, .vocab_size = VOCAB, .vocab_stride = VOCAB, .vocab_limit = VOCAB, .tasks = tasks,
        .n_tasks = 8, .n_logits_rows = 8, .results = results);
    for (uint32_t i = 0; i < 8; i++) {
        printf("sample %d rank %d ", results[i].id, results[i].rank);
        print_sum("of", (float[]){results[i].raw, results[i].full, results[i].processed, results[i].kept_mass}, 4);
    }
    free(logits);
}

int main(int n_words, char **words)
{
    struct err err = {0};
    struct backend_options options = {.device = "cpu", .isa = n_words > 1 ? words[1] : "auto", .n_threads = 1, .max_rows = 256,
                                      .max_logits_rows = 8, .max_cols = 2048, .vocab_size = VOCAB, .max_model_len = 256,
                                      .max_group = 3, .max_head_dim = 64};
    b = backend_cpu();
    must(b->open(&options, &ctx, &err), &err, "open");
    try_rows(31);
    try_rows(1030);
    try_attention(DTYPE_F32, 20, false, 0, 0);
    try_attention(DTYPE_BF16, 64, true, 30, 0);
    try_attention(DTYPE_F16, 64, false, 0, 40);
    try_attention(DTYPE_FP8, 32, false, 0, 0);
    try_attention(DTYPE_I8, 32, false, 0, 0);
    try_activations(31);
    try_activations(1030);
    try_tower_rows(31);
    try_tower_rows(260);
    try_row_attention(20);
    try_row_attention(64);
    try_recurrences(4, 16, 16);
    try_recurrences(2, 32, 8);
    try_mixtures();
    try_latents(DTYPE_F32);
    try_latents(DTYPE_BF16);
    for (uint32_t dtype = 0; dtype < DTYPE_NONE; dtype++)
        if (dtype_info(dtype))
            try_head_linear(dtype);
    try_lora(96, 40);
    try_lora(1000, 37);
    try_sample();
    try_linears();
    b->close(ctx);
    return 0;
}
