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
    try_sample();
    try_linears();
    b->close(ctx);
    return 0;
}
