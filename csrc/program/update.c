#define _GNU_SOURCE
#include "update.h"

#include "../base/mem.h"
#include "../base/quantise.h"
#include "../base/name_table.h"
#include "layout.h"
#include "model_state.h"
#include "settle.h"
#include "update_quantise.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#define NEAREST_LETTERS 160
#define WINDOW_BYTES ((size_t)8 << 20) /* read at once by tensor->read; more if a row is longer */

/* A part of a weight of a rank. next: another part that comes from the same tensor, or NO_INDEX. */
struct piece {
    uint32_t rank, weight, part, next;
};

struct update {
    struct model **models;        /* [n_ranks]; NULL: the rank is on another host */
    const struct program **programs; /* [n_ranks] */
    uint32_t n_ranks, first;      /* first: rank of this host */
    struct name_table names;      /* numbered as the entries */
    struct update_entry *entries; /* [n_entries] */
    struct piece *pieces;         /* one for each part of each weight of each rank, by rank */
    uint32_t n_entries, n_written;
    uint64_t n_bytes;
    bool has_written, is_quantised; /* is_quantised: some weight of this host is */
    void *window;                 /* what tensor->read gave last */
    size_t window_bytes;
};

static enum rc out_of_memory(struct err *err)
{
    return err_set(err, RC_MEMORY, "weight update: out of memory");
}

static struct model *model_of(const struct update *u, const struct piece *piece)
{
    return u->models[piece->rank];
}

static const struct weight *weight_of(const struct update *u, const struct piece *piece)
{
    return &u->programs[piece->rank]->weights[piece->weight];
}

static const struct weight_part *part_of(const struct update *u, const struct piece *piece)
{
    return &weight_of(u, piece)->parts[piece->part];
}

/* Of a piece on another host, which that host checks, a type that is always right. */
static uint32_t stored_type(const struct update *u, const struct piece *piece)
{
    if (!model_of(u, piece))
        return DTYPE_F32;
    return weight_of(u, piece)->kind == WEIGHT_VECTOR ? (uint32_t)DTYPE_F32
                                                      : weights_stored(model_of(u, piece)->weights, piece->weight, piece->part);
}

/* Whether tensors of floats are quantised when they are written to the piece. */
static bool is_quantised(const struct update *u, const struct piece *piece)
{
    return quantise_has(stored_type(u, piece));
}

/* To loop over an entry's pieces, call first_piece, then next_piece until it returns NULL. */
static const struct piece *first_piece(const struct update *u, const struct update_entry *entry)
{
    return &u->pieces[entry->piece];
}

static const struct piece *next_piece(const struct update *u, const struct piece *piece)
{
    return piece->next == NO_INDEX ? NULL : &u->pieces[piece->next];
}

static bool are_of_one_tensor(const struct weight_part *a, const struct weight_part *b)
{
    return strcmp(a->source, b->source) == 0 && a->n_dims == b->n_dims &&
           memcmp(a->dims, b->dims, a->n_dims * sizeof *a->dims) == 0;
}

/* Adds the piece with number n to the entry of its tensor's name. */
static enum rc add_piece(struct update *u, uint32_t n, struct err *err)
{
    const struct weight_part *part = part_of(u, &u->pieces[n]);
    uint32_t number;
    bool was_new;
    if (!name_table_add(&u->names, part->name, strlen(part->name), &number, &was_new))
        return out_of_memory(err);
    if (was_new)
        u->entries[u->n_entries++] = (struct update_entry){u->names.names[number], n, 0, 0, part->is_constant};
    struct piece *first = &u->pieces[u->entries[number].piece];
    u->pieces[n].next = was_new ? NO_INDEX : first->next;
    if (was_new)
        return RC_OK;
    first->next = n;
    if (!are_of_one_tensor(part_of(u, first), part))
        return err_set(err, RC_INTERNAL, "weight update: two tensors are called %s", part->name);
    return RC_OK;
}

static enum rc list_entries(struct update *u, struct err *err)
{
    uint32_t n = 0;
    for (uint32_t rank = 0; rank < u->n_ranks; rank++)
        for (uint32_t w = 0; w < u->programs[rank]->n_weights; w++)
            n += u->programs[rank]->weights[w].n_parts;
    u->entries = mem_calloc(n + 1, sizeof *u->entries);
    u->pieces = mem_calloc(n + 1, sizeof *u->pieces);
    enum rc rc = u->entries && u->pieces ? RC_OK : out_of_memory(err);
    n = 0;
    for (uint32_t rank = 0; rank < u->n_ranks; rank++)
        for (uint32_t w = 0; w < u->programs[rank]->n_weights; w++)
            for (uint32_t i = 0; i < u->programs[rank]->weights[w].n_parts && !rc; i++, n++) {
                u->pieces[n] = (struct piece){rank, w, i, NO_INDEX};
                u->is_quantised |= is_quantised(u, &u->pieces[n]);
                rc = add_piece(u, n, err);
            }
    return rc;
}

enum rc update_begin(struct model *const *models, uint32_t n_ranks, struct update **update, struct err *err)
{
    return update_begin_of(models, NULL, n_ranks, update, err);
}

enum rc update_begin_of(struct model *const *models, const struct program *const *programs, uint32_t n_ranks,
                        struct update **update, struct err *err)
{
    uint32_t first_rank = 0;
    while (!models[first_rank])
        first_rank++;
    const struct model *first = models[first_rank];
    if (!first->backend->tensor_write)
        return err_set(err, RC_UNSUPPORTED, "weight update: the backend %s takes no tensors; make a new engine",
                       first->backend->name);
    if (first->program->is_reordered)
        return err_set(err, RC_UNSUPPORTED,
                       "weights by name (updates, comparisons, checksums): this GGUF file orders the rows of q and k "
                       "differently, or this checkpoint stores weights in another form (act-order is one); load the model's "
                       "safetensors of floats");
    struct update *u = mem_calloc(1, sizeof *u);
    if (!u)
        return out_of_memory(err);
    u->models = mem_calloc(n_ranks, sizeof *u->models);
    u->programs = mem_calloc(n_ranks, sizeof *u->programs);
    u->n_ranks = n_ranks;
    u->first = first_rank;
    enum rc rc = u->models && u->programs ? RC_OK : out_of_memory(err);
    for (uint32_t rank = 0; rank < n_ranks && !rc; rank++) {
        u->models[rank] = models[rank];
        u->programs[rank] = models[rank] ? models[rank]->program : programs[rank];
    }
    rc = rc ? rc : list_entries(u, err);
    if (rc)
        update_end(u);
    else
        *update = u;
    return rc;
}

void update_end(struct update *u)
{
    if (!u)
        return;
    name_table_destroy(&u->names);
    mem_free(u->models);
    mem_free(u->programs);
    mem_free(u->entries);
    mem_free(u->pieces);
    mem_free(u->window);
    mem_free(u);
}

/* ---- checks ------------------------------------------------------------------------------------------------------------ */

/* Levenshtein distance of the first NEAREST_LETTERS letters of two names. */
static uint32_t distance(const char *a, const char *b)
{
    uint32_t row[NEAREST_LETTERS + 1];
    size_t n = strnlen(a, NEAREST_LETTERS), m = strnlen(b, NEAREST_LETTERS);
    for (uint32_t j = 0; j <= m; j++)
        row[j] = j;
    for (uint32_t i = 1; i <= n; i++) {
        uint32_t diagonal = row[0];
        row[0] = i;
        for (uint32_t j = 1; j <= m; j++) {
            uint32_t best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            best = row[j] + 1 < best ? row[j] + 1 : best;
            row[j] = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
        }
    }
    return row[m];
}

static const char *nearest(const struct update *u, const char *name)
{
    uint32_t best = UINT32_MAX;
    const char *found = "";
    for (uint32_t i = 0; i < u->n_entries; i++) {
        uint32_t d = distance(name, u->entries[i].name);
        if (d < best) {
            best = d;
            found = u->entries[i].name;
        }
    }
    return found;
}

static enum rc fault(struct err *err, enum weights_fault code, const char *name)
{
    if (err)
        err->code = code;
    err_name(err, name, NULL);
    return RC_WEIGHTS;
}

static bool is_ignored(const struct program *p, const char *name)
{
    for (uint32_t i = 0; i < p->n_ignored; i++)
        if (fnmatch(p->ignored[i], name, 0) == 0)
            return true;
    return false;
}

/* The entry of a name. NULL: the name is skipped (*rc is RC_OK) or unknown (*rc is RC_WEIGHTS). */
static struct update_entry *find(const struct update *u, const char *name, enum rc *rc, struct err *err)
{
    uint32_t number = name_table_find(&u->names, name, strlen(name));
    *rc = RC_OK;
    if (number != NAME_ABSENT)
        return &u->entries[number];
    if (is_ignored(u->programs[0], name))
        return NULL;
    const char *architecture = u->programs[0]->architecture;
    err_set(err, RC_WEIGHTS, "weight '%.160s' is not part of %.60s; nearest: '%.160s'", name,
            architecture ? architecture : "the model", nearest(u, name));
    *rc = fault(err, WEIGHTS_UNKNOWN, name);
    return NULL;
}

static void print_shape(char *text, size_t size, uint32_t n_dims, const int64_t *shape)
{
    size_t at = (size_t)snprintf(text, size, "(");
    for (uint32_t i = 0; i < n_dims && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, i ? ", %lld" : "%lld", (long long)shape[i]);
    if (at < size)
        snprintf(text + at, size - at, n_dims == 1 ? ",)" : ")");
}

/* A piece of the entry on this host; the first one of all if there is none. */
static const struct piece *local_piece(const struct update *u, const struct update_entry *entry)
{
    const struct piece *piece = first_piece(u, entry);
    while (piece && !model_of(u, piece))
        piece = next_piece(u, piece);
    return piece ? piece : first_piece(u, entry);
}

static enum rc mismatch(const struct update *u, const struct update_entry *entry, const struct update_tensor *have,
                        struct err *err)
{
    char shapes[2][160];
    int64_t wanted[PART_MAX_DIMS];
    const struct dtype_info *info = dtype_info(have->dtype);
    const struct weight_part *part = part_of(u, first_piece(u, entry));
    const char *type = dtype_info(stored_type(u, local_piece(u, entry)))->name;
    for (uint32_t i = 0; i < part->n_dims; i++)
        wanted[i] = part->dims[i];
    print_shape(shapes[0], sizeof shapes[0], part->n_dims, wanted);
    print_shape(shapes[1], sizeof shapes[1], have->n_dims, have->shape);
    err_set(err, RC_WEIGHTS, "weight '%.160s': wanted %s %s, have %s %s", entry->name, shapes[0], type, shapes[1],
            info ? info->name : have->type);
    return fault(err, WEIGHTS_MISMATCHED, entry->name);
}

static bool is_float(uint32_t dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

bool update_takes(uint32_t dtype)
{
    return is_float(dtype) || quantise_has(dtype);
}

static const struct device_traits *traits_of(const struct update *u, const struct piece *piece)
{
    return model_of(u, piece)->backend->traits;
}

/* Whether rows of a tensor are quantised here, not by the backend. */
static bool rounds_on_host(const struct update *u, const struct piece *piece, const struct update_tensor *tensor)
{
    return tensor->is_host || traits_of(u, piece)->has_host_memory;
}

static bool rounds_on_device(const struct update *u, const struct piece *piece)
{
    return traits_of(u, piece)->rounds_tensors && quantise_on_devices(stored_type(u, piece));
}

/* Checks that a tensor can be written to the entry's weights: shape, type, and a stored type that floats are rounded to. */
static enum rc check_tensor(const struct update *u, const struct update_entry *entry, const struct update_tensor *tensor,
                            struct err *err)
{
    const struct weight_part *part = part_of(u, first_piece(u, entry));
    const struct backend *backend = u->models[u->first]->backend;
    if (tensor->is_lent && !backend->matrix_borrow)
        return err_set(err, RC_UNSUPPORTED, "weight '%.160s': the backend %s reads weights from its own memory alone; use "
                       "borrow=False", entry->name, backend->name);
    bool fits = tensor->n_dims == part->n_dims && is_float(tensor->dtype);
    for (uint32_t i = 0; i < part->n_dims && fits; i++)
        fits = tensor->shape[i] == part->dims[i];
    if (!fits)
        return mismatch(u, entry, tensor, err);
    for (const struct piece *piece = first_piece(u, entry); piece; piece = next_piece(u, piece))
        if (!update_takes(stored_type(u, piece)))
            return err_set(err, RC_UNSUPPORTED, "weight '%.160s' is stored as %s, which updates cannot write; load a "
                           "checkpoint of floats", entry->name, dtype_info(stored_type(u, piece))->name);
        else if (is_quantised(u, piece) && !rounds_on_host(u, piece, tensor) && !rounds_on_device(u, piece))
            return err_set(err, RC_UNSUPPORTED, "weight '%.160s': the backend %s rounds to %s on the host; wanted a tensor in "
                           "host memory, have one of the device", entry->name, model_of(u, piece)->backend->name,
                           dtype_info(stored_type(u, piece))->name);
    return RC_OK;
}

/* The dimensions that the rows of a tensor are counted over, innermost first. */
struct row_dims {
    uint32_t n;
    int64_t shape[PART_MAX_DIMS], strides[PART_MAX_DIMS];
};

/* How many dimensions the columns of a matrix are: the last ones, of a convolution several. */
static uint32_t n_column_dims(const struct weight *weight, const struct weight_part *part)
{
    uint32_t n = 1;
    if (weight->kind == WEIGHT_VECTOR) /* it may have no dimension */
        return 0;
    uint64_t cols = part->dims[part->n_dims - 1];
    while (!part->is_transposed && n < part->n_dims && cols < weight->cols)
        cols *= part->dims[part->n_dims - ++n];
    return n;
}

/* Whether one stride steps through the columns. */
static bool has_even_columns(const struct weight *weight, const struct weight_part *part, const struct update_tensor *tensor)
{
    for (uint32_t i = 1, last = part->n_dims - 1; i < n_column_dims(weight, part); i++, last--)
        if (tensor->strides[last - 1] != tensor->shape[last] * tensor->strides[last])
            return false;
    return true;
}

/* Merges adjacent dimensions into one if a single stride steps through both. */
static struct row_dims row_dims_of(const struct weight *weight, const struct weight_part *part,
                                   const struct update_tensor *tensor)
{
    struct row_dims dims = {1, {1}, {0}};
    uint32_t end = part->n_dims - part->is_transposed, first = end - n_column_dims(weight, part);
    for (uint32_t i = part->n_dims; i-- > 0;) {
        uint32_t last = dims.n - 1;
        if ((i >= first && i < end) || tensor->shape[i] == 1)
            continue;
        bool is_first = dims.shape[last] == 1;
        if (!is_first && (part->is_transposed || tensor->strides[i] != dims.shape[last] * dims.strides[last])) {
            dims.shape[dims.n] = tensor->shape[i];
            dims.strides[dims.n++] = tensor->strides[i];
        } else {
            dims.shape[last] *= tensor->shape[i];
            dims.strides[last] = is_first ? tensor->strides[i] : dims.strides[last];
        }
    }
    return dims;
}

/* The bytes from the first item of a view to the end of its last item. */
static uint64_t span_of(const struct tensor_view *view)
{
    uint64_t items = (uint64_t)(view->n_rows - 1) * (uint64_t)view->row_stride +
                     (uint64_t)(view->n_cols - 1) * (uint64_t)view->col_stride + 1;
    return items * dtype_info(view->dtype)->block_bytes;
}

/* The number of rows of a view to read at once. All rows, if one row alone spans WINDOW_BYTES (as in a transposed tensor). */
static uint32_t rows_at_once(const struct tensor_view *view)
{
    struct tensor_view one = *view;
    uint64_t pitch = (uint64_t)view->row_stride * dtype_info(view->dtype)->block_bytes;
    one.n_rows = 1;
    uint64_t first = span_of(&one);
    if (!view->n_rows || !view->n_cols || first >= WINDOW_BYTES || !pitch)
        return view->n_rows;
    uint64_t n = (WINDOW_BYTES - first) / pitch + 1;
    return n < view->n_rows ? (uint32_t)n : view->n_rows;
}

/* Reads the items of a view into the window. The view's first item is item `at` of the tensor. */
static enum rc read_view(struct update *u, const struct update_tensor *tensor, int64_t at, struct tensor_view *view,
                         struct err *err)
{
    uint64_t n_bytes = view->n_rows && view->n_cols ? span_of(view) : 0;
    if (n_bytes > u->window_bytes || !u->window) {
        mem_free(u->window);
        u->window_bytes = n_bytes > WINDOW_BYTES ? n_bytes : WINDOW_BYTES;
        if (!(u->window = mem_alloc(u->window_bytes))) {
            u->window_bytes = 0;
            return out_of_memory(err);
        }
    }
    view->data = u->window;
    return tensor->read(tensor->read_ctx, (uint64_t)at * dtype_info(tensor->dtype)->block_bytes, n_bytes, u->window, err);
}

/* A place of an entry, and the tensor's rows that belong there (NULL if the caller gave no tensor). quantised: the rows as the
 * place stores them; NULL unless they are quantised. */
struct visit {
    const struct tensor_place *place;
    const struct tensor_view *view;
    const void *quantised;
    uint32_t stored; /* enum dtype of the place */
    bool is_whole;   /* the place is the whole part */
    void *stream;
    bool is_check;   /* of the values as given */
};
typedef enum rc (*place_visit)(struct model *model, const struct visit *visit, void *ctx, struct err *err);

/* Whether a part has a row of its tensor. */
static bool has_row(const struct weight_part *part, uint64_t source_row)
{
    if (source_row < part->base)
        return false;
    uint64_t group = (source_row - part->base) / part->stride, in_group = (source_row - part->base) % part->stride;
    return in_group < part->inner && group * part->inner + in_group < part->rows;
}

/* Whether a rank before this one has a row of the tensor in the same weight. */
static bool is_copy(const struct update *u, const struct update_entry *entry, const struct piece *piece, uint64_t source_row)
{
    for (const struct piece *other = first_piece(u, entry); other; other = next_piece(u, other))
        if (other->rank < piece->rank && other->weight == piece->weight && has_row(part_of(u, other), source_row))
            return true;
    return false;
}

/* Shortens a run to its first rows that are all copies of rows of other ranks, or that are all none. Returns whether they are
 * copies. */
static bool split_copies(const struct update *u, const struct update_entry *entry, const struct piece *piece,
                         struct row_run *run)
{
    bool is_first = piece->rank && is_copy(u, entry, piece, run->source_row);
    for (uint32_t i = 1; piece->rank && i < run->n_rows; i++)
        if (is_copy(u, entry, piece, run->source_row + i * run->step) != is_first)
            run->n_rows = i;
    return is_first;
}

/* SKIPS_COPIES leaves out rows that a rank before has in the same weight; AS_GIVEN checks the values and quantises nothing. */
enum visit_flag { SKIPS_COPIES = 1, AS_GIVEN = 2 };

static enum rc visit_piece(struct update *u, const struct update_entry *entry, const struct piece *piece,
                           const struct update_tensor *tensor, uint32_t flags, place_visit f, void *ctx, struct err *err)
{
    struct model *model = model_of(u, piece);
    const struct weight *weight = weight_of(u, piece);
    const struct weight_part *part = part_of(u, piece);
    bool is_vector = weight->kind == WEIGHT_VECTOR;
    bool quantises = tensor && !(flags & AS_GIVEN) && is_quantised(u, piece) && rounds_on_host(u, piece, tensor);
    uint32_t stored = stored_type(u, piece), most_rows = 1 + (uint32_t)(QUANTISED_BYTES / sizeof(float) / weight->cols);
    struct row_dims dims = {1, {INT64_MAX}, {0}};
    if (tensor && !has_even_columns(weight, part, tensor))
        return err_set(err, RC_UNSUPPORTED, "weight '%.160s': wanted a contiguous tensor, whose last dimensions are columns",
                       entry->name);
    if (tensor)
        dims = row_dims_of(weight, part, tensor);
    uint64_t slice = layout_slice(part) < (uint64_t)dims.shape[0] ? layout_slice(part) : (uint64_t)dims.shape[0];
    struct row_run run = {0};
    enum rc rc = RC_OK;
    for (uint32_t row = 0; row < part->rows && !rc; row += run.n_rows) {
        run = layout_run(part, row, slice);
        if (quantises && run.n_rows > most_rows)
            run.n_rows = most_rows;
        if ((flags & SKIPS_COPIES) && split_copies(u, entry, piece, &run))
            continue;
        if (!tensor) {
            struct tensor_place place = weights_place(model_of(u, piece)->weights, piece->weight, piece->part, &run);
            rc = f(model, &(struct visit){.place = &place, .stored = stored}, ctx, err);
            continue;
        }
        int64_t at = 0, left = (int64_t)run.source_row, step = dims.strides[0] * (int64_t)run.step;
        for (uint32_t i = 0; i < dims.n; left /= dims.shape[i++])
            at += left % dims.shape[i] * dims.strides[i];
        struct tensor_view view = {
            .data = (const char *)tensor->data + at * (int64_t)dtype_info(tensor->dtype)->block_bytes,
            .dtype = tensor->dtype,
            .n_rows = is_vector ? 1 : run.n_rows,
            .n_cols = is_vector ? run.n_rows : weight->cols,
            .row_stride = is_vector ? 0 : step,
            .col_stride = is_vector ? step : tensor->strides[part->n_dims - 1 - part->is_transposed],
            .is_host = tensor->is_host,
        };
        if (tensor->read && !is_vector)
            view.n_rows = run.n_rows = rows_at_once(&view);
        if (tensor->read)
            rc = read_view(u, tensor, at, &view, err);
        struct tensor_place place = weights_place(model_of(u, piece)->weights, piece->weight, piece->part, &run);
        void *rows = NULL;
        if (!rc && quantises)
            rc = update_quantise(&view, stored, &rows, err);
        struct visit visit = {&place, &view, rows, stored, run.n_rows == part->rows, tensor->stream, flags & AS_GIVEN};
        rc = rc ? rc : f(model, &visit, ctx, err);
        mem_free(rows);
        if (tensor->read && !rc)
            rc = update_finish(u, err); /* the next read overwrites the window */
    }
    return rc;
}

static enum rc visit_places(struct update *u, const struct update_entry *entry, const struct update_tensor *tensor,
                            uint32_t flags, place_visit f, void *ctx, struct err *err)
{
    enum rc rc = RC_OK;
    for (const struct piece *piece = first_piece(u, entry); piece && !rc; piece = next_piece(u, piece))
        rc = !model_of(u, piece) ? RC_OK : visit_piece(u, entry, piece, tensor, flags, f, ctx, err);
    return rc;
}

static enum rc add_sum(struct model *model, const struct visit *visit, void *total, struct err *err)
{
    struct tensor_sum sum = {0, 0}, *all = total;
    struct tensor_sum_args args = {*visit->place, visit->view, visit->stream, &sum, visit->is_check};
    enum rc rc = visit->quantised
                     ? update_sum_rows(model->backend, model->ctx, &args, visit->stored, visit->quantised, err)
                     : model->backend->tensor_sum(model->ctx, &args, err);
    all->sum += sum.sum;
    all->n_non_finite += sum.n_non_finite;
    return rc;
}

static enum rc check_values(struct update *u, const struct update_entry *entry, const struct update_tensor *tensor,
                            struct err *err)
{
    struct tensor_sum sum = {0, 0};
    enum rc rc = visit_places(u, entry, tensor, SKIPS_COPIES | AS_GIVEN, add_sum, &sum, err);
    if (rc || !sum.n_non_finite)
        return rc;
    err_set(err, RC_WEIGHTS, "weight '%.160s': %llu of its values are not finite%s", entry->name,
            (unsigned long long)sum.n_non_finite, is_quantised(u, local_piece(u, entry)) ? " or beyond 2^100" : "");
    return fault(err, WEIGHTS_MISMATCHED, entry->name);
}

static enum rc check_form(struct update *u, const char *name, const struct update_tensor *tensor, struct update_entry **entry,
                          enum update_fate *fate, struct err *err)
{
    enum rc rc;
    *entry = find(u, name, &rc, err);
    *fate = !*entry ? UPDATE_SKIPPED : (*entry)->n_writes ? UPDATE_REPEATED : UPDATE_FRESH;
    return *entry ? check_tensor(u, *entry, tensor, err) : rc;
}

enum rc update_check_form(struct update *u, const char *name, const struct update_tensor *tensor, enum update_fate *fate,
                          struct err *err)
{
    struct update_entry *entry;
    return check_form(u, name, tensor, &entry, fate, err);
}

enum rc update_check(struct update *u, const char *name, const struct update_tensor *tensor, bool is_finite,
                     enum update_fate *fate, struct err *err)
{
    struct update_entry *entry;
    enum rc rc = check_form(u, name, tensor, &entry, fate, err);
    if (entry && !rc && (is_finite || is_quantised(u, local_piece(u, entry))))
        rc = check_values(u, entry, tensor, err);
    return rc;
}

bool update_reads_values(const struct update *u)
{
    return u->is_quantised;
}

/* ---- writes ------------------------------------------------------------------------------------------------------------ */

struct writing {
    bool is_lent, has_written;
    uint64_t lent_bytes;
};

/* Whether a place can be read from the tensor that would be written to it. */
static bool can_borrow(const struct visit *visit)
{
    const struct tensor_view *view = visit->view;
    return visit->place->matrix && visit->is_whole && !visit->quantised && view->dtype == visit->stored && view->is_host &&
           view->col_stride == 1 && view->row_stride >= view->n_cols;
}

static enum rc write_place(struct model *model, const struct visit *visit, void *ctx, struct err *err)
{
    struct tensor_write_args args = {*visit->place, *visit->view, visit->stream};
    struct writing *writing = ctx;
    writing->has_written = true;
    if (writing->is_lent && can_borrow(visit)) {
        size_t item = dtype_info(visit->stored)->block_bytes;
        struct matrix_borrow_args borrow = {args.to.matrix, args.to.part, args.from.data, item * (size_t)args.from.row_stride};
        writing->lent_bytes += item * args.from.n_rows * args.from.n_cols;
        return model->backend->matrix_borrow(model->ctx, &borrow, err);
    }
    if (visit->quantised)
        return update_write_rows(model->backend, model->ctx, visit->place, visit->quantised, err);
    return model->backend->tensor_write(model->ctx, &args, err);
}

enum rc update_write(struct update *u, const char *name, const struct update_tensor *tensor, enum update_fate *fate,
                     struct err *err)
{
    struct update_entry *entry;
    enum rc rc = check_form(u, name, tensor, &entry, fate, err);
    if (rc || !entry)
        return rc;
    struct writing writing = {.is_lent = tensor->is_lent && !weight_of(u, first_piece(u, entry))->has_unit_rows};
    rc = visit_places(u, entry, tensor, 0, write_place, &writing, err);
    u->has_written |= writing.has_written;
    entry->lent_bytes = writing.lent_bytes;
    if (rc)
        return rc;
    u->n_written += entry->n_writes == 0;
    entry->n_writes++;
    uint64_t n_bytes = dtype_info(tensor->dtype)->block_bytes;
    for (uint32_t i = 0; i < tensor->n_dims; i++)
        n_bytes *= (uint64_t)tensor->shape[i];
    u->n_bytes += n_bytes;
    return RC_OK;
}

enum rc update_finish(struct update *u, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t rank = 0; rank < u->n_ranks && !rc; rank++)
        if (u->models[rank])
            rc = u->models[rank]->backend->tensor_finish(u->models[rank]->ctx, err);
    return rc;
}

enum rc update_settle(struct update *u, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < u->n_entries; i++)
        for (const struct piece *piece = first_piece(u, &u->entries[i]); piece && !rc; piece = next_piece(u, piece))
            if (model_of(u, piece))
                rc = settle_part(model_of(u, piece), piece->weight, piece->part, u->entries[i].n_writes > 0, err);
    for (uint32_t rank = 0; rank < u->n_ranks && !rc; rank++)
        if (u->models[rank])
            rc = settle_values(u->models[rank], err);
    for (uint32_t rank = 0; rank < u->n_ranks && !rc; rank++)
        if (u->models[rank])
            rc = graphs_refresh(u->models[rank], err);
    return rc;
}

enum rc update_sum(struct update *u, const char *name, const struct update_tensor *tensor, struct tensor_sum *sum,
                   enum update_fate *fate, struct err *err)
{
    enum rc rc;
    const struct update_entry *entry = find(u, name, &rc, err);
    *fate = entry ? UPDATE_FRESH : UPDATE_SKIPPED;
    *sum = (struct tensor_sum){0, 0};
    if (entry && tensor && weight_of(u, first_piece(u, entry))->has_unit_rows)
        return err_set(err, RC_UNSUPPORTED,
                       "weight '%.160s': its rows are divided by their lengths at load, so a source cannot be compared with "
                       "it; drop it by rename, or compare weight_checksum() of two engines", name);
    if (entry && tensor)
        rc = check_tensor(u, entry, tensor, err);
    return !entry || rc ? rc : visit_places(u, entry, tensor, SKIPS_COPIES, add_sum, sum, err);
}

enum rc update_rows(const struct update *u, uint32_t index, struct update_rows *rows, struct err *err)
{
    const struct piece *piece = first_piece(u, &u->entries[index]);
    const struct weight_part *part = part_of(u, piece);
    const struct weight *weight = weight_of(u, piece);
    const struct model *model = u->models[u->first];
    if (u->n_ranks > 1 || !model->backend->matrix_rows)
        return err_set(err, RC_UNSUPPORTED, u->n_ranks > 1 ? "sharing weights with several ranks is not supported; use "
                       "tensor_parallel_size=1" : "the backend %s shares no weights; use borrow=True of update_weights",
                       model->backend->name);
    *rows = (struct update_rows){NULL, stored_type(u, piece), part->rows, weight->cols, 0};
    bool is_plain = weight->kind == WEIGHT_MATRIX && part->n_dims == 2 && !part->is_transposed && !weight->has_unit_rows;
    if (!is_plain || next_piece(u, piece) || part->dims[0] != part->rows || part->dims[1] != weight->cols)
        return RC_OK;
    struct row_run run = layout_run(part, 0, part->rows);
    if (run.source_row || run.n_rows != part->rows || (run.step != 1 && run.n_rows > 1))
        return RC_OK;
    struct tensor_place place = weights_place(model->weights, piece->weight, piece->part, &run);
    struct matrix_rows_args args = {place.matrix, place.part, &rows->rows, &rows->row_bytes};
    return model->backend->matrix_rows(model->ctx, &args, err);
}

bool update_knows(const struct update *u, const char *name)
{
    return name_table_find(&u->names, name, strlen(name)) != NAME_ABSENT || is_ignored(u->programs[0], name);
}

bool update_skips(const struct update *u, const char *name)
{
    return name_table_find(&u->names, name, strlen(name)) == NAME_ABSENT && is_ignored(u->programs[0], name);
}

const struct update_entry *update_find(const struct update *u, const char *name)
{
    uint32_t number = name_table_find(&u->names, name, strlen(name));
    return number == NAME_ABSENT ? NULL : &u->entries[number];
}

uint32_t update_n_entries(const struct update *u)
{
    return u->n_entries;
}

const struct update_entry *update_entry(const struct update *u, uint32_t index)
{
    return &u->entries[index];
}

uint32_t update_n_written(const struct update *u)
{
    return u->n_written;
}

bool update_is_missing(const struct update_entry *entry)
{
    return entry->n_writes == 0 && !entry->is_constant;
}

bool update_has_written(const struct update *u)
{
    return u->has_written;
}

uint64_t update_bytes(const struct update *u)
{
    return u->n_bytes;
}
