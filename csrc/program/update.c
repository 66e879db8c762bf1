#define _GNU_SOURCE
#include "update.h"

#include "../base/mem.h"
#include "../base/name_table.h"
#include "model_state.h"

#include <fnmatch.h>
#include <stdio.h>
#include <string.h>

#define NEAREST_LETTERS 160

struct update {
    struct model *model;
    struct name_table names;      /* numbered as the entries */
    struct update_entry *entries; /* [n_entries] */
    uint32_t n_entries, n_missing;
    uint64_t n_bytes;
    bool has_written;
};

static enum rc out_of_memory(struct err *err)
{
    return err_set(err, RC_MEMORY, "weight update: out of memory");
}

static const struct weight *weight_of(const struct update *u, const struct update_entry *entry)
{
    return &u->model->program->weights[entry->weight];
}

static enum rc list_entries(struct update *u, struct err *err)
{
    const struct program *p = u->model->program;
    uint32_t n = 0;
    for (uint32_t w = 0; w < p->n_weights; w++)
        n += p->weights[w].n_parts;
    u->entries = mem_calloc(n + 1, sizeof *u->entries);
    if (!u->entries)
        return out_of_memory(err);
    for (uint32_t w = 0; w < p->n_weights; w++)
        for (uint32_t i = 0; i < p->weights[w].n_parts; i++) {
            const char *name = p->weights[w].parts[i].name;
            uint32_t number;
            bool was_new;
            if (!name_table_add(&u->names, name, strlen(name), &number, &was_new))
                return out_of_memory(err);
            if (!was_new)
                return err_set(err, RC_INTERNAL, "weight update: two weights are called %s", name);
            u->entries[u->n_entries++] = (struct update_entry){u->names.names[number], w, i, 0};
        }
    u->n_missing = u->n_entries;
    return RC_OK;
}

/* GGUF files of Llamas order them for interleaved rotation; the tensors that updates bring do not. */
static bool reorders_rows(const struct program *p)
{
    bool is_renamed = p->n_weights && strcmp(p->weights[0].parts[0].name, p->weights[0].parts[0].source) != 0;
    for (uint32_t r = 0; r < p->n_ropes; r++)
        if (is_renamed && p->ropes[r].interleaved)
            return true;
    return false;
}

enum rc update_begin(struct model *model, struct update **update, struct err *err)
{
    if (!model->backend->tensor_write)
        return err_set(err, RC_UNSUPPORTED, "weight update: the backend %s takes no tensors; make a new engine",
                       model->backend->name);
    if (reorders_rows(model->program))
        return err_set(err, RC_UNSUPPORTED,
                       "weight update: this GGUF file orders the rows of q and k in its own way; load the model's safetensors");
    struct update *u = mem_calloc(1, sizeof *u);
    if (!u)
        return out_of_memory(err);
    u->model = model;
    enum rc rc = list_entries(u, err);
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
    mem_free(u->entries);
    mem_free(u);
}

/* ---- checks ------------------------------------------------------------------------------------------------------------ */

/* Letters to insert, remove or replace to get from one name to the other (Levenshtein's distance), of their first so many. */
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

/* NULL: a name that is passed over, or (*rc) an unknown one. */
static struct update_entry *find(const struct update *u, const char *name, enum rc *rc, struct err *err)
{
    uint32_t number = name_table_find(&u->names, name, strlen(name));
    *rc = RC_OK;
    if (number != NAME_ABSENT)
        return &u->entries[number];
    if (is_ignored(u->model->program, name))
        return NULL;
    const char *architecture = u->model->program->architecture;
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

static enum rc mismatch(const struct update *u, const struct update_entry *entry, uint32_t n_dims, const int64_t *wanted,
                        const struct update_tensor *have, struct err *err)
{
    char shapes[2][160];
    const struct dtype_info *info = dtype_info(have->dtype);
    const char *type = weight_of(u, entry)->kind == WEIGHT_VECTOR
                           ? "float32" : dtype_info(weights_stored(u->model->weights, entry->weight, entry->part))->name;
    print_shape(shapes[0], sizeof shapes[0], n_dims, wanted);
    print_shape(shapes[1], sizeof shapes[1], have->n_dims, have->shape);
    err_set(err, RC_WEIGHTS, "weight '%.160s': wanted %s %s, have %s %s", entry->name, shapes[0], type, shapes[1],
            info ? info->name : have->type);
    return fault(err, WEIGHTS_MISMATCHED, entry->name);
}

static bool is_float(uint32_t dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_F16 || dtype == DTYPE_BF16;
}

/* A tensor as rows of the entry's weight. */
static enum rc view_of(const struct update *u, const struct update_entry *entry, const struct update_tensor *tensor,
                       struct tensor_view *view, struct err *err)
{
    const struct weight *weight = weight_of(u, entry);
    bool is_vector = weight->kind == WEIGHT_VECTOR;
    int64_t shape[2] = {weight->parts[entry->part].rows, weight->cols};
    uint32_t n_dims = is_vector ? 1 : 2;
    bool fits = tensor->n_dims == n_dims && is_float(tensor->dtype);
    for (uint32_t i = 0; i < n_dims && fits; i++)
        fits = tensor->shape[i] == shape[i];
    if (!fits)
        return mismatch(u, entry, n_dims, shape, tensor, err);
    *view = (struct tensor_view){
        .data = tensor->data,
        .dtype = tensor->dtype,
        .n_rows = is_vector ? 1 : (uint32_t)shape[0],
        .n_cols = (uint32_t)shape[is_vector ? 0 : 1],
        .row_stride = is_vector ? 0 : tensor->strides[0],
        .col_stride = tensor->strides[is_vector ? 0 : 1],
        .is_host = tensor->is_host,
    };
    uint32_t stored = is_vector ? DTYPE_F32 : weights_stored(u->model->weights, entry->weight, entry->part);
    if (!is_float(stored))
        return err_set(err, RC_UNSUPPORTED, "weight '%.160s' is stored as %s, which updates cannot make; load a checkpoint of "
                       "floats", entry->name, dtype_info(stored)->name);
    return RC_OK;
}

static enum rc check_values(struct update *u, const struct update_entry *entry, const struct tensor_view *view, void *stream,
                            struct err *err)
{
    struct tensor_sum sum;
    struct tensor_sum_args args = {weights_place(u->model->weights, entry->weight, entry->part), view, stream, &sum};
    enum rc rc = u->model->backend->tensor_sum(u->model->ctx, &args, err);
    if (rc || !sum.n_non_finite)
        return rc;
    err_set(err, RC_WEIGHTS, "weight '%.160s': %llu of its values are not finite", entry->name,
            (unsigned long long)sum.n_non_finite);
    return fault(err, WEIGHTS_MISMATCHED, entry->name);
}

static enum rc check(struct update *u, const char *name, const struct update_tensor *tensor, bool is_finite,
                     struct update_entry **entry, struct tensor_view *view, enum update_fate *fate, struct err *err)
{
    enum rc rc;
    *entry = find(u, name, &rc, err);
    *fate = !*entry ? UPDATE_SKIPPED : (*entry)->n_writes ? UPDATE_REPEATED : UPDATE_FRESH;
    if (*entry)
        rc = view_of(u, *entry, tensor, view, err);
    if (*entry && !rc && is_finite)
        rc = check_values(u, *entry, view, tensor->stream, err);
    return rc;
}

/* ---- writes ------------------------------------------------------------------------------------------------------------ */

enum rc update_check(struct update *u, const char *name, const struct update_tensor *tensor, bool is_finite,
                     enum update_fate *fate, struct err *err)
{
    struct update_entry *entry;
    struct tensor_view view;
    return check(u, name, tensor, is_finite, &entry, &view, fate, err);
}

enum rc update_write(struct update *u, const char *name, const struct update_tensor *tensor, bool is_finite,
                     enum update_fate *fate, struct err *err)
{
    struct update_entry *entry;
    struct tensor_write_args args = {.stream = tensor->stream};
    enum rc rc = check(u, name, tensor, is_finite, &entry, &args.from, fate, err);
    if (rc || !entry)
        return rc;
    args.to = weights_place(u->model->weights, entry->weight, entry->part);
    u->has_written = true;
    rc = u->model->backend->tensor_write(u->model->ctx, &args, err);
    if (rc)
        return rc;
    u->n_missing -= entry->n_writes == 0;
    entry->n_writes++;
    u->n_bytes += (uint64_t)args.from.n_rows * args.from.n_cols * dtype_info(tensor->dtype)->block_bytes;
    return RC_OK;
}

enum rc update_finish(struct update *u, struct err *err)
{
    return u->model->backend->tensor_finish(u->model->ctx, err);
}

enum rc update_sum(struct update *u, const char *name, const struct update_tensor *tensor, struct tensor_sum *sum,
                   enum update_fate *fate, struct err *err)
{
    enum rc rc;
    struct tensor_view view;
    const struct update_entry *entry = find(u, name, &rc, err);
    *fate = entry ? UPDATE_FRESH : UPDATE_SKIPPED;
    if (entry && tensor)
        rc = view_of(u, entry, tensor, &view, err);
    if (!entry || rc)
        return rc;
    struct tensor_sum_args args = {weights_place(u->model->weights, entry->weight, entry->part), tensor ? &view : NULL,
                                   tensor ? tensor->stream : NULL, sum};
    return u->model->backend->tensor_sum(u->model->ctx, &args, err);
}

bool update_knows(const struct update *u, const char *name)
{
    return name_table_find(&u->names, name, strlen(name)) != NAME_ABSENT || is_ignored(u->model->program, name);
}

bool update_skips(const struct update *u, const char *name)
{
    return name_table_find(&u->names, name, strlen(name)) == NAME_ABSENT && is_ignored(u->model->program, name);
}

uint32_t update_n_entries(const struct update *u)
{
    return u->n_entries;
}

const struct update_entry *update_entry(const struct update *u, uint32_t index)
{
    return &u->entries[index];
}

uint32_t update_n_missing(const struct update *u)
{
    return u->n_missing;
}

bool update_has_written(const struct update *u)
{
    return u->has_written;
}

uint64_t update_bytes(const struct update *u)
{
    return u->n_bytes;
}
