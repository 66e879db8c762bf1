/* A weight update over a backend that notes what it is asked to write: names, checks, and every refusal. */
#include "check.h"

#include "../../csrc/program/model_state.h"
#include "../../csrc/program/settle.h"
#include "../../csrc/program/update.h"

#define N_WRITES 8

struct matrix {
    struct matrix_part parts[2];
    float values[64];
};

/* What the backend was told. */
static struct {
    struct tensor_write_args writes[N_WRITES];
    struct matrix_borrow_args borrows[N_WRITES];
    uint32_t n_writes, n_borrows, n_finished, n_refreshed;
    bool fails;
    uint64_t n_non_finite;
} noted;

/* In place of csrc/program/executor.c. */
enum rc graphs_refresh(struct model *model, struct err *err)
{
    (void)model;
    (void)err;
    noted.n_refreshed++;
    return RC_OK;
}

static enum rc create_matrix(void *ctx, const struct matrix_desc *desc, struct matrix **matrix, struct err *err)
{
    (void)ctx;
    (void)err;
    *matrix = calloc(1, sizeof **matrix);
    memcpy((*matrix)->parts, desc->parts, desc->n_parts * sizeof *desc->parts);
    return RC_OK;
}

static void destroy_matrix(void *ctx, struct matrix *matrix)
{
    (void)ctx;
    free(matrix);
}

static size_t matrix_bytes(const struct matrix *matrix)
{
    (void)matrix;
    return 0;
}

static enum rc write_matrix(void *ctx, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                            const void *rows, struct err *err)
{
    (void)ctx, (void)matrix, (void)part, (void)first_row, (void)n_rows, (void)rows, (void)err;
    return RC_OK;
}

static bool supports(void *ctx, uint32_t dtype, uint32_t use)
{
    (void)ctx, (void)dtype, (void)use;
    return true;
}

static enum rc create_buffer(void *ctx, size_t size_bytes, void **buffer, struct err *err)
{
    (void)ctx, (void)err;
    *buffer = calloc(1, size_bytes);
    return RC_OK;
}

static void destroy_buffer(void *ctx, void *buffer, size_t size_bytes)
{
    (void)ctx, (void)size_bytes;
    free(buffer);
}

static enum rc upload(void *ctx, void *target, const void *host, size_t size_bytes, struct err *err)
{
    (void)ctx, (void)err;
    memcpy(target, host, size_bytes);
    return RC_OK;
}

static enum rc download(void *ctx, void *host, const void *source, size_t size_bytes, struct err *err)
{
    (void)ctx, (void)err;
    memcpy(host, source, size_bytes);
    return RC_OK;
}

static enum rc write_tensor(void *ctx, const struct tensor_write_args *args, struct err *err)
{
    (void)ctx;
    if (noted.fails || noted.n_writes == N_WRITES)
        return err_set(err, RC_DEVICE, "it fails");
    noted.writes[noted.n_writes++] = *args;
    return RC_OK;
}

static enum rc finish_tensors(void *ctx, struct err *err)
{
    (void)ctx, (void)err;
    noted.n_finished++;
    return RC_OK;
}

static enum rc sum_tensor(void *ctx, const struct tensor_sum_args *args, struct err *err)
{
    (void)ctx, (void)err;
    *args->result = (struct tensor_sum){args->from ? 11 : 22, args->from ? noted.n_non_finite : 0};
    return RC_OK;
}

static enum rc borrow_rows(void *ctx, const struct matrix_borrow_args *args, struct err *err)
{
    (void)ctx, (void)err;
    noted.borrows[noted.n_borrows++] = *args;
    return RC_OK;
}

static const struct backend BACKEND = {
    .name = "noting", .supports = supports, .matrix_create = create_matrix, .matrix_destroy = destroy_matrix,
    .matrix_bytes = matrix_bytes, .matrix_write = write_matrix, .buffer_create = create_buffer,
    .buffer_destroy = destroy_buffer, .upload = upload, .download = download, .tensor_write = write_tensor,
    .tensor_finish = finish_tensors, .tensor_sum = sum_tensor, .matrix_borrow = borrow_rows,
};

#define PART(name, rows, cols) {name, name, rows, (cols) ? 2 : 1, {rows, cols}, 0, rows, rows, false, false, 0}
#define CONSTANT(name, value) {name, name, 1, 0, {0}, 0, 1, 1, false, true, value}

/* q and k in one matrix, a norm and a bias in two pieces, a constant, a curve with a buffer; lm_head is an
 * alias. */
static struct weight_part QK[] = {PART("a.q.weight", 4, 8), PART("a.k.weight", 2, 8)};
static struct weight_part NORM[] = {PART("norm.weight", 8, 0)};
static struct weight_part BIAS[] = {PART("a.q.bias", 4, 0), PART("a.k.bias", 2, 0)};
static float SLOPES[] = {1, 2};
static struct weight_part CURVE[] = {PART("alpha", 1, 0), CONSTANT("beta", 0.5f)};
static struct weight WEIGHTS[] = {
    {.kind = WEIGHT_MATRIX, .rows = 6, .cols = 8, .n_parts = 2, .parts = QK},
    {.kind = WEIGHT_VECTOR, .rows = 8, .cols = 1, .n_parts = 1, .parts = NORM, .offset = 1},
    {.kind = WEIGHT_VECTOR, .rows = 6, .cols = 1, .n_parts = 2, .parts = BIAS},
    {.kind = WEIGHT_VECTOR, .rows = 2, .cols = 1, .values = SLOPES},
    {.kind = WEIGHT_VECTOR, .rows = 2, .cols = 1, .n_parts = 2, .parts = CURVE}};
static char *IGNORED[] = {"lm_head.weight", "*.rotary_emb.inv_freq"};
static struct program PROGRAM = {
    .n_weights = 5, .weights = WEIGHTS, .architecture = "TinyForCausalLM", .n_ignored = 2, .ignored = IGNORED};

static struct model make_model(uint32_t dtype)
{
    struct model model = {.program = &PROGRAM, .backend = &BACKEND};
    struct weights_options options = {.dtype = dtype, .is_dummy = true};
    struct err err;
    memset(&noted, 0, sizeof noted);
    if (weights_load(&PROGRAM, NULL, &options, &BACKEND, NULL, &model.weights, &err))
        CHECK_FAIL("%s\n", err.message);
    return model;
}

static struct update_tensor tensor_of(uint32_t dtype, uint32_t n_dims, int64_t rows, int64_t cols)
{
    static const float data[64];
    struct update_tensor t = {.data = data, .dtype = dtype, .type = "int8", .n_dims = n_dims, .shape = {rows, cols},
                              .strides = {n_dims == 2 ? cols : 1, 1}, .is_host = true};
    return t;
}

TEST(parts_have_places)
{
    struct model model = make_model(DTYPE_BF16);
    struct update *u = NULL;
    struct err err;
    enum update_fate fate;
    REQUIRE(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_OK);
    CHECK(update_n_entries(u) == 7 && update_n_written(u) == 0 && !update_has_written(u));
    struct update_tensor k = tensor_of(DTYPE_F32, 2, 2, 8), bias = tensor_of(DTYPE_F16, 1, 2, 0);
    CHECK(update_write(u, "a.k.weight", &k, &fate, &err) == RC_OK && fate == UPDATE_FRESH);
    CHECK(update_write(u, "a.k.weight", &k, &fate, &err) == RC_OK && fate == UPDATE_REPEATED);
    CHECK(update_write(u, "a.k.bias", &bias, &fate, &err) == RC_OK && fate == UPDATE_FRESH);
    CHECK(update_write(u, "lm_head.weight", &bias, &fate, &err) == RC_OK && fate == UPDATE_SKIPPED);
    CHECK(update_write(u, "layers.3.rotary_emb.inv_freq", &bias, &fate, &err) == RC_OK && fate == UPDATE_SKIPPED);
    REQUIRE(noted.n_writes == 3);
    CHECK(noted.writes[0].to.matrix == weights_matrix(model.weights, 0) && noted.writes[0].to.part == 1);
    CHECK(noted.writes[0].from.n_rows == 2 && noted.writes[0].from.n_cols == 8 && noted.writes[0].from.row_stride == 8);
    CHECK(noted.writes[2].to.vector == weights_vector(model.weights, 2) + 4 && noted.writes[2].to.n_values == 2);
    CHECK(update_n_written(u) == 2 && update_has_written(u) && update_bytes(u) == 2 * 64 + 4);
    CHECK(update_entry(u, 1)->n_writes == 2 && strcmp(update_entry(u, 1)->name, "a.k.weight") == 0);
    CHECK(update_finish(u, &err) == RC_OK && noted.n_finished == 1);
    struct update_tensor norm = tensor_of(DTYPE_F32, 1, 8, 0);
    CHECK(update_write(u, "norm.weight", &norm, &fate, &err) == RC_OK && noted.writes[3].to.offset == 1);
    struct tensor_sum sum;
    CHECK(update_sum(u, "norm.weight", NULL, &sum, &fate, &err) == RC_OK && sum.sum == 22);
    CHECK(update_sum(u, "norm.weight", &norm, &sum, &fate, &err) == RC_OK && sum.sum == 11);
    CHECK(update_sum(u, "lm_head.weight", NULL, &sum, &fate, &err) == RC_OK && fate == UPDATE_SKIPPED);
    update_end(u);
    weights_destroy(model.weights);
}

TEST(tensors_are_read_in_place_where_they_fit)
{
    struct model model = make_model(DTYPE_BF16);
    struct backend without = BACKEND;
    struct update *u = NULL;
    struct err err;
    enum update_fate fate;
    REQUIRE(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_OK);
    struct update_tensor k = tensor_of(DTYPE_BF16, 2, 2, 8), other = tensor_of(DTYPE_F32, 2, 2, 8),
                         norm = tensor_of(DTYPE_F32, 1, 8, 0);
    k.is_lent = other.is_lent = norm.is_lent = true;
    k.strides[0] = 24;
    CHECK(update_write(u, "a.k.weight", &k, &fate, &err) == RC_OK && update_find(u, "a.k.weight")->lent_bytes == 32);
    REQUIRE(noted.n_borrows == 1 && noted.n_writes == 0 && update_has_written(u));
    CHECK(noted.borrows[0].matrix == weights_matrix(model.weights, 0) && noted.borrows[0].part == 1);
    CHECK(noted.borrows[0].rows == k.data && noted.borrows[0].row_bytes == 48);
    CHECK(update_write(u, "norm.weight", &norm, &fate, &err) == RC_OK && noted.n_writes == 1); /* a vector */
    CHECK(update_write(u, "a.k.weight", &other, &fate, &err) == RC_OK && noted.n_writes == 2); /* another type */
    CHECK(noted.n_borrows == 1 && update_find(u, "a.k.weight")->lent_bytes == 0 && !update_find(u, "no.weight"));
    k.strides[1] = 2; /* columns apart */
    CHECK(update_write(u, "a.k.weight", &k, &fate, &err) == RC_OK && noted.n_writes == 3 && noted.n_borrows == 1);
    update_end(u);
    without.matrix_borrow = NULL;
    model.backend = &without;
    REQUIRE(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_OK);
    CHECK(update_write(u, "a.k.weight", &k, &fate, &err) == RC_UNSUPPORTED && !update_has_written(u));
    update_end(u);
    model.backend = &BACKEND;
    weights_destroy(model.weights);
}

static enum rc rows_of(void *ctx, const struct matrix_rows_args *args, struct err *err)
{
    (void)ctx, (void)err;
    *args->rows = args->matrix->values + args->part;
    *args->row_bytes = 48;
    return RC_OK;
}

/* The entry of a name; its rows in *rows. */
static enum rc rows_by_name(struct update *u, const char *name, struct update_rows *rows, struct err *err)
{
    uint32_t i = 0;
    while (strcmp(update_entry(u, i)->name, name) != 0)
        i++;
    return update_rows(u, i, rows, err);
}

TEST(matrices_in_rows_can_be_shared)
{
    struct model model = make_model(DTYPE_BF16);
    struct backend shares = BACKEND;
    struct update *u = NULL;
    struct err err;
    struct update_rows rows;
    shares.matrix_rows = rows_of;
    model.backend = &shares;
    REQUIRE(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_OK);
    REQUIRE(rows_by_name(u, "a.k.weight", &rows, &err) == RC_OK);
    CHECK(rows.rows == weights_matrix(model.weights, 0)->values + 1 && rows.row_bytes == 48);
    CHECK(rows.dtype == DTYPE_BF16 && rows.n_rows == 2 && rows.n_cols == 8);
    CHECK(rows_by_name(u, "norm.weight", &rows, &err) == RC_OK && !rows.rows); /* a vector */
    model.backend = &BACKEND;
    CHECK(rows_by_name(u, "a.k.weight", &rows, &err) == RC_UNSUPPORTED && strstr(err.message, "shares no weights"));
    update_end(u);
    weights_destroy(model.weights);
}

static void refused(struct update *u, const char *name, struct update_tensor tensor, enum weights_fault code, const char *text)
{
    struct err err;
    enum update_fate fate;
    CHECK(update_write(u, name, &tensor, &fate, &err) == RC_WEIGHTS);
    CHECK(err.code == code && strcmp(err.what, name) == 0);
    CHECK(update_check(u, name, &tensor, false, &fate, &err) == RC_WEIGHTS);
    if (strcmp(err.message, text) != 0)
        CHECK_FAIL("wanted: %s\nhave: %s\n", text, err.message);
}

TEST(what_does_not_fit_is_refused_before_it_is_written)
{
    struct model model = make_model(DTYPE_BF16);
    struct update *u = NULL;
    struct err err;
    enum update_fate fate;
    REQUIRE(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_OK);
    refused(u, "b.q.weight", tensor_of(DTYPE_F32, 2, 4, 8), WEIGHTS_UNKNOWN,
            "weight 'b.q.weight' is not part of TinyForCausalLM; nearest: 'a.q.weight'");
    refused(u, "a.q.weight", tensor_of(DTYPE_F32, 2, 8, 4), WEIGHTS_MISMATCHED,
            "weight 'a.q.weight': wanted (4, 8) bfloat16, have (8, 4) float32");
    refused(u, "a.q.weight", tensor_of(DTYPE_NONE, 2, 4, 8), WEIGHTS_MISMATCHED,
            "weight 'a.q.weight': wanted (4, 8) bfloat16, have (4, 8) int8");
    refused(u, "a.q.weight", tensor_of(DTYPE_F32, 0, 0, 0), WEIGHTS_MISMATCHED,
            "weight 'a.q.weight': wanted (4, 8) bfloat16, have () float32");
    refused(u, "norm.weight", tensor_of(DTYPE_F32, 2, 1, 8), WEIGHTS_MISMATCHED,
            "weight 'norm.weight': wanted (8,) float32, have (1, 8) float32");
    char long_name[600];
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    struct update_tensor norm = tensor_of(DTYPE_F32, 1, 8, 0);
    CHECK(update_write(u, long_name, &norm, &fate, &err) == RC_WEIGHTS && err.code == WEIGHTS_UNKNOWN);
    CHECK(update_write(u, "", &norm, &fate, &err) == RC_WEIGHTS && err.code == WEIGHTS_UNKNOWN);
    noted.n_non_finite = 3;
    CHECK(update_check(u, "norm.weight", &norm, true, &fate, &err) == RC_WEIGHTS && err.code == WEIGHTS_MISMATCHED);
    CHECK(strcmp(err.message, "weight 'norm.weight': 3 of its values are not finite") == 0);
    CHECK(noted.n_writes == 0 && !update_has_written(u) && update_n_written(u) == 0);
    noted.fails = true; /* from here on a byte may have been written */
    CHECK(update_write(u, "norm.weight", &norm, &fate, &err) == RC_DEVICE);
    CHECK(update_has_written(u) && update_n_written(u) == 0);
    update_end(u);
    weights_destroy(model.weights);
}

static float *held(const struct model *model, uint32_t weight)
{
    return (float *)weights_vector(model->weights, weight);
}

TEST(constants_keep_their_values)
{
    struct model model = make_model(DTYPE_BF16);
    struct update *u = NULL;
    struct err err;
    enum update_fate fate;
    struct update_tensor one = {.data = &SLOPES[1], .dtype = DTYPE_F32, .is_host = true};
    REQUIRE(settle_all(&model, &err) == RC_OK && update_begin(&(struct model *){&model}, 1, &u, &err) == RC_OK);
    CHECK(held(&model, 4)[1] == 0.5f && held(&model, 4)[0] > 0.5f); /* made up but for the constant */
    CHECK(update_is_missing(update_entry(u, 5)) && !update_is_missing(update_entry(u, 6)));
    held(&model, 4)[1] = 0; /* as memory that was given back and taken again */
    noted.n_refreshed = 0;
    CHECK(update_settle(u, &err) == RC_OK && held(&model, 4)[1] == 0.5f);
    CHECK_EQ(noted.n_refreshed, 1);
    CHECK(update_write(u, "beta", &one, &fate, &err) == RC_OK && fate == UPDATE_FRESH);
    held(&model, 4)[1] = 2; /* what a backend that writes would have done */
    CHECK(update_settle(u, &err) == RC_OK && held(&model, 4)[1] == 2);
    update_end(u);
    REQUIRE(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_OK); /* from here on it is this value that is kept */
    held(&model, 4)[1] = 0;
    CHECK(update_settle(u, &err) == RC_OK && held(&model, 4)[1] == 2);
    update_end(u);
    weights_destroy(model.weights);
}

TEST(weights_that_cannot_be_updated)
{
    struct model model = make_model(DTYPE_BF16);
    struct backend without = BACKEND;
    struct update *u = NULL;
    struct err err;
    without.tensor_write = NULL;
    model.backend = &without;
    CHECK(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_UNSUPPORTED);
    model.backend = &BACKEND;
    PROGRAM.is_reordered = true;
    CHECK(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_UNSUPPORTED);
    PROGRAM.is_reordered = false;
    NORM[0].name = "a.q.weight";
    CHECK(update_begin(&(struct model *){&model}, 1, &u, &err) == RC_INTERNAL);
    NORM[0].name = "norm.weight";
    update_end(NULL);
    weights_destroy(model.weights);
}
