#define _GNU_SOURCE
#include "tables.h"

#include "../base/file.h"
#include "../base/json.h"
#include "../base/mem.h"
#include "companions.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64u
#define NESTED_BLOCK 256u
#define STATE_BYTES 4096u /* most bytes of the text of a state; writers need some 200 */

struct nested_scales {
    float offset, values[NESTED_BLOCK];
    float scales[]; /* one for each NESTED_BLOCK scales */
};

/* What the text of a state says. */
struct state {
    uint64_t rows, cols, n_dims, block, nested_block;
    float offset;
};

/* ---- rows -------------------------------------------------------------------------------------------------------------- */

static float scale_of(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales, uint64_t i)
{
    float scale;
    if (!tensor->nested) {
        memcpy(&scale, scales + i * sizeof scale, sizeof scale);
        return scale;
    }
    float product = tensor->nested->values[scales[i]] *
                    tensor->nested->scales[(row * tensor->scales.cols + i) / NESTED_BLOCK];
    return product + tensor->nested->offset;
}

/* The file has the first number of a byte in its high half. */
static enum companion_fault table_join(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                       const uint8_t *numbers, uint8_t *to)
{
    for (uint64_t i = 0; i < tensor->scales.cols; i++, to += sizeof(float) + BLOCK / 2, numbers += BLOCK / 2) {
        float scale = scale_of(tensor, row, scales, i);
        if (!companion_scale_fits(scale))
            return COMPANION_BAD_SCALE;
        memcpy(to, &scale, sizeof scale);
        for (uint32_t j = 0; j < BLOCK / 2; j++)
            to[sizeof scale + j] = (uint8_t)(numbers[j] >> 4 | numbers[j] << 4);
    }
    return COMPANION_FINE;
}

static const struct companion TABLES[] = {
    {"", ".quant_state.bitsandbytes__nf4", "", "U8", "NF4", DTYPE_NF4, 2, 1, NULL, table_join},
    {"", ".quant_state.bitsandbytes__fp4", "", "U8", "FP4", DTYPE_FP4, 2, 1, NULL, table_join},
};

/* ---- pairing ----------------------------------------------------------------------------------------------------------- */

struct pairing {
    struct tensor_list *list;
    const struct file_view *files;
    char *name; /* room for the longest name */
    size_t stem;
};

static const struct checkpoint_tensor *find(const struct pairing *p, const char *ending)
{
    memcpy(p->name + p->stem, ending, strlen(ending) + 1);
    uint32_t index = name_table_find(&p->list->names, p->name, p->stem + strlen(ending));
    return index == NAME_ABSENT ? NULL : &p->list->tensors[index];
}

static bool read_whole(const struct pairing *p, const struct checkpoint_tensor *tensor, void *to, size_t n_bytes)
{
    size_t n_read = 0;
    return tensor->size_bytes == n_bytes &&
           file_read(p->files[tensor->file].descriptor, tensor->offset, to, n_bytes, &n_read) == 0 && n_read == n_bytes;
}

static void read_shape(struct json *json, struct state *state)
{
    uint64_t size;
    json_open_array(json);
    for (; json_element(json) && json_u64(json, &size); state->n_dims++) {
        state->rows = state->cols;
        state->cols = size;
    }
}

/* A number with a fraction, whatever the process's locale is. The text ends with a NUL. */
static float read_number(struct json *json)
{
    const char *at = json->at;
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    double value = json_skip(json) && plain ? strtod_l(at, NULL, plain) : NAN; /* a NaN makes all scales NaN, an error */
    if (plain)
        freelocale(plain);
    return (float)value;
}

static bool read_state(const struct pairing *p, const struct checkpoint_tensor *tensor, struct state *state)
{
    char text[STATE_BYTES + 1];
    if (tensor->size_bytes > STATE_BYTES || !read_whole(p, tensor, text, tensor->size_bytes))
        return false;
    text[tensor->size_bytes] = 0;
    *state = (struct state){.nested_block = NESTED_BLOCK};
    struct json json;
    struct json_string key;
    json_begin(&json, text, tensor->size_bytes);
    json_open_object(&json);
    while (json_key(&json, &key)) {
        if (json_string_is(key, "shape"))
            read_shape(&json, state);
        else if (json_string_is(key, "blocksize"))
            json_u64(&json, &state->block);
        else if (json_string_is(key, "nested_blocksize"))
            json_u64(&json, &state->nested_block);
        else if (json_string_is(key, "nested_offset"))
            state->offset = read_number(&json);
        else
            json_skip(&json);
    }
    bool is_whole = json_end(&json);
    json_release(&json);
    return is_whole;
}

static bool is_list(const struct checkpoint_tensor *tensor, uint32_t dtype, uint64_t n)
{
    return tensor && tensor->dtype == dtype && tensor->n_dims == 1 && tensor->shape[0] == n;
}

/* Whether the file's 16 values are those of the type. */
static bool has_values(const struct pairing *p, uint32_t dtype)
{
    const struct checkpoint_tensor *map = find(p, ".quant_map");
    uint8_t block[36] = {0, 0, 0x80, 0x3f}; /* a scale of 1 */
    float stored[16], wanted[BLOCK];
    for (uint8_t i = 0; i < 8; i++)
        block[4 + i] = (uint8_t)(2 * i | (2 * i + 1) << 4);
    dtype_to_float(dtype, block, wanted, BLOCK);
    if (!is_list(map, DTYPE_F32, 16) || !read_whole(p, map, stored, sizeof stored))
        return false;
    for (uint32_t i = 0; i < 16; i++)
        if (stored[i] != wanted[i])
            return false;
    return true;
}

/* Reads the second scales of n scales. NULL: they do not fit, or there is no memory. */
static struct nested_scales *read_nested(const struct pairing *p, const struct state *state, uint64_t n)
{
    const struct checkpoint_tensor *values = find(p, ".nested_quant_map"), *scales;
    uint64_t n_scales = (n + NESTED_BLOCK - 1) / NESTED_BLOCK;
    if (!is_list(values, DTYPE_F32, NESTED_BLOCK) || state->nested_block != NESTED_BLOCK ||
        !is_list(scales = find(p, ".nested_absmax"), DTYPE_F32, n_scales))
        return NULL;
    struct nested_scales *nested = mem_alloc(sizeof *nested + n_scales * sizeof(float));
    if (!nested)
        return NULL;
    nested->offset = state->offset;
    if (read_whole(p, values, nested->values, sizeof nested->values) &&
        read_whole(p, scales, nested->scales, n_scales * sizeof(float)))
        return nested;
    mem_free(nested);
    return NULL;
}

/* Joins a tensor of numbers with its scales if they fit. */
static void take(const struct pairing *p, const struct companion *way, struct checkpoint_tensor *numbers)
{
    struct state state;
    uint64_t n;
    const struct checkpoint_tensor *text = find(p, way->scales), *scales = find(p, ".absmax");
    if (!text || !scales || !read_state(p, text, &state) || state.n_dims != 2 || state.block != BLOCK || !state.rows ||
        !state.cols || state.cols % BLOCK || __builtin_mul_overflow(state.rows, state.cols, &n) ||
        numbers->size_bytes != n / 2 || !has_values(p, way->dtype))
        return;
    struct nested_scales *nested = NULL;
    if (is_list(scales, DTYPE_U8, n / BLOCK) && !(nested = read_nested(p, &state, n / BLOCK)))
        return;
    if (!nested && !is_list(scales, DTYPE_F32, n / BLOCK))
        return;
    numbers->n_dims = 2;
    numbers->shape[0] = state.rows;
    numbers->shape[1] = state.cols;
    numbers->scales.cols = state.cols / BLOCK;
    numbers->scales.rows_each = 1;
    numbers->nested = nested;
    companion_take(way, scales, numbers);
}

enum rc tables_pair(struct tensor_list *list, const struct file_view *files, struct err *err)
{
    for (uint32_t i = 0; i < list->n; i++) {
        struct checkpoint_tensor *tensor = &list->tensors[i];
        if (tensor->dtype != DTYPE_U8 || tensor->companion)
            continue;
        struct pairing pairing = {list, files, NULL, strlen(tensor->name)};
        pairing.name = mem_alloc(pairing.stem + sizeof ".quant_state.bitsandbytes__nf4");
        if (!pairing.name)
            return err_set(err, RC_MEMORY, "checkpoint: out of memory");
        memcpy(pairing.name, tensor->name, pairing.stem);
        for (uint32_t t = 0; t < sizeof TABLES / sizeof *TABLES && !tensor->companion; t++)
            take(&pairing, &TABLES[t], tensor);
        mem_free(pairing.name);
    }
    return RC_OK;
}
