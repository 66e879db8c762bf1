#include "companions.h"

#include "../base/mem.h"

#include <string.h>

#define BLOCK 128u

/* ---- MXFP4: blocks [..., n, 16] of nibbles in the order of the values, exponents [..., n] ---- */

static bool mxfp4_fits(const struct checkpoint_tensor *scales, struct checkpoint_tensor *joined)
{
    if (joined->n_dims < 2 || joined->shape[joined->n_dims - 1] != 16 || scales->dtype != DTYPE_U8 ||
        scales->n_dims != joined->n_dims - 1 ||
        memcmp(scales->shape, joined->shape, scales->n_dims * sizeof *scales->shape) != 0)
        return false;
    joined->n_dims--;
    joined->scales.cols = joined->shape[joined->n_dims - 1];
    joined->scales.rows_each = 1;
    joined->shape[joined->n_dims - 1] *= 32;
    return true;
}

static enum companion_fault mxfp4_join(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                       const uint8_t *numbers, uint8_t *to)
{
    (void)row;
    for (uint64_t b = 0; b < tensor->scales.cols; b++, numbers += 16, to += 17) {
        if (scales[b] == 0xff) /* the NaN of e8m0 */
            return COMPANION_BAD_SCALE;
        to[0] = scales[b];
        for (uint32_t j = 0; j < 16; j++) /* from values 2j, 2j + 1 in a byte to values j, j + 16 */
            to[1 + j] = (uint8_t)((numbers[j / 2] >> j % 2 * 4 & 15) | (numbers[8 + j / 2] >> j % 2 * 4 & 15) << 4);
    }
    return COMPANION_FINE;
}

/* ---- FP8 and INT8: bytes [rows, cols], scales of 128 x 128 blocks, of 128 columns of a row, of rows, or of the tensor ---- */

/* Whether scales have a shape [dims of the stack][rows][cols]. */
static bool has_shape(const struct checkpoint_tensor *scales, const struct checkpoint_tensor *weight, uint64_t rows,
                      uint64_t cols)
{
    uint32_t n = weight->n_dims;
    return scales->n_dims == n && (n == 2 || scales->shape[0] == weight->shape[0]) && scales->shape[n - 2] == rows &&
           scales->shape[n - 1] == cols;
}

/* Numbers [rows, cols], or of stacked matrices [n, rows, cols], whose rows are whole blocks if blocks have scales. */
static bool bytes_fit(const struct checkpoint_tensor *scales, struct checkpoint_tensor *joined)
{
    uint32_t dims = joined->n_dims;
    if (dims < 2 || dims > 3 || (scales->dtype != DTYPE_F32 && scales->dtype != DTYPE_F16 && scales->dtype != DTYPE_BF16))
        return false;
    uint64_t stack = dims == 3 ? joined->shape[0] : 1, rows = joined->shape[dims - 2], cols = joined->shape[dims - 1];
    uint64_t block_rows = rows / BLOCK + (rows % BLOCK != 0), block_cols = cols / BLOCK + (cols % BLOCK != 0);
    uint64_t n = 1, size_bytes;
    if (!cols || scales->n_dims > dims || __builtin_mul_overflow(rows, cols, &size_bytes) ||
        __builtin_mul_overflow(size_bytes, stack, &size_bytes) || size_bytes != joined->size_bytes)
        return false;
    for (uint32_t i = 0; i < scales->n_dims; i++)
        n *= scales->shape[i];
    bool is_blocks = has_shape(scales, joined, block_rows, block_cols) && (dims == 2 || rows % BLOCK == 0);
    bool is_rows = !is_blocks && has_shape(scales, joined, rows, 1);
    bool is_groups = !is_blocks && !is_rows && dims == 2 && has_shape(scales, joined, rows, block_cols);
    bool is_matrices = dims == 3 && n == stack && scales->n_dims && scales->shape[0] == stack && !is_blocks && !is_rows;
    bool is_columns = dims == 3 && !is_blocks && !is_rows && !is_matrices &&
                      (has_shape(scales, joined, 1, cols) || has_shape(scales, joined, cols, 1));
    joined->scales.cols = is_blocks || is_groups ? block_cols : 1;
    joined->scales.rows_each = is_rows || is_groups || is_columns ? 1 : is_blocks ? BLOCK : is_matrices ? rows : UINT64_MAX;
    joined->scales.by_columns = is_columns;
    return n > 0 && rows && (is_blocks || is_rows || is_groups || is_matrices || is_columns || n == 1);
}

static bool has_nan(const uint8_t *numbers, uint64_t n)
{
    uint8_t found = 0;
    for (uint64_t i = 0; i < n; i++)
        found |= (numbers[i] & 0x7f) == 0x7f;
    return found;
}

/* Bytes with a float32 scale before each block, which is the file's divided by `by`. */
static enum companion_fault put_bytes(const struct checkpoint_tensor *tensor, float by, const uint8_t *scales,
                                      const uint8_t *numbers, uint8_t *to)
{
    uint64_t cols = tensor->shape[tensor->n_dims - 1];
    size_t item = dtype_info(tensor->scales.dtype)->block_bytes;
    for (uint64_t first = 0; first < cols; first += BLOCK, to += 4 + BLOCK) {
        uint64_t n = cols - first < BLOCK ? cols - first : BLOCK;
        float scale;
        dtype_to_float(tensor->scales.dtype, scales, &scale, 1);
        scale /= by;
        if (!companion_scale_fits(scale))
            return COMPANION_BAD_SCALE;
        memcpy(to, &scale, 4);
        memcpy(to + 4, numbers + first, n);
        memset(to + 4 + n, 0, BLOCK - n);
        if (tensor->scales.cols > 1)
            scales += item;
    }
    return COMPANION_FINE;
}

static enum companion_fault fp8_join(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                     const uint8_t *numbers, uint8_t *to)
{
    (void)row;
    bool fits = !has_nan(numbers, tensor->shape[tensor->n_dims - 1]);
    return fits ? put_bytes(tensor, 1, scales, numbers, to) : COMPANION_BAD_NUMBER;
}

static enum companion_fault int8_join(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                      const uint8_t *numbers, uint8_t *to)
{
    (void)row;
    return put_bytes(tensor, 1, scales, numbers, to);
}

/* bitsandbytes stores the largest magnitude of each row. */
static bool largest_fit(const struct checkpoint_tensor *largest, struct checkpoint_tensor *joined)
{
    joined->scales.cols = joined->scales.rows_each = 1;
    return joined->n_dims == 2 && joined->shape[1] && largest->dtype == DTYPE_F32 && largest->n_dims == 1 &&
           largest->shape[0] == joined->shape[0];
}

static enum companion_fault largest_join(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                         const uint8_t *numbers, uint8_t *to)
{
    (void)row;
    return put_bytes(tensor, 127, scales, numbers, to);
}

/* ---- the table -------------------------------------------------------------------------------------------------------- */

static const struct companion COMPANIONS[] = {
    {"_blocks", "_scales", "", "U8", "MXFP4", DTYPE_MXFP4, 32, 16, mxfp4_fits, mxfp4_join},
    {"", "_scale_inv", "", "F8_E4M3", "F8_E4M3", DTYPE_FP8, 1, 1, bytes_fit, fp8_join},
    {"", "_scale", "", "F8_E4M3", "F8_E4M3", DTYPE_FP8, 1, 1, bytes_fit, fp8_join},
    {"", "_scale", "", "I8", "I8", DTYPE_INT8_G128, 1, 1, bytes_fit, int8_join},
    {".weight", ".SCB", ".weight", "I8", "I8", DTYPE_INT8_G128, 1, 1, largest_fit, largest_join},
};

/* Finds stem + ending in the list. */
static const struct checkpoint_tensor *find(const struct tensor_list *list, char *name, size_t stem, const char *ending)
{
    memcpy(name + stem, ending, strlen(ending) + 1);
    uint32_t index = name_table_find(&list->names, name, stem + strlen(ending));
    return index == NAME_ABSENT ? NULL : &list->tensors[index];
}

void companion_take(const struct companion *way, const struct checkpoint_tensor *scales, struct checkpoint_tensor *joined)
{
    joined->scales.name = scales->name;
    joined->scales.file = scales->file;
    joined->scales.dtype = scales->dtype;
    joined->scales.offset = scales->offset;
    joined->companion = way;
    joined->type = way->type;
    joined->dtype = way->dtype;
}

/* Pairs tensor i by one row of the table. name: room for the longest name. */
static enum rc pair(struct tensor_list *list, const struct file_view *files, const struct companion *way, uint32_t i,
                    size_t stem, char *name, struct err *err)
{
    struct checkpoint_tensor joined = list->tensors[i], *made = &list->tensors[i];
    const struct checkpoint_tensor *scales = find(list, name, stem, way->scales);
    if (!scales || !way->fits(scales, &joined))
        return RC_OK;
    companion_take(way, scales, &joined);
    if (strcmp(way->name, way->numbers) != 0) {
        enum rc rc = tensor_list_add(list, &files[joined.file], name, stem + strlen(way->name), &made, err);
        if (rc)
            return rc;
        joined.name = made->name;
    }
    *made = joined;
    return RC_OK;
}

static enum rc pair_any(struct tensor_list *list, const struct file_view *files, uint32_t i, struct err *err)
{
    enum rc rc = RC_OK;
    for (const struct companion *way = COMPANIONS; way < COMPANIONS + sizeof COMPANIONS / sizeof *COMPANIONS && !rc; way++) {
        const struct checkpoint_tensor *tensor = &list->tensors[i];
        size_t length = strlen(tensor->name), ending = strlen(way->numbers);
        if (tensor->companion || strcmp(tensor->type, way->file_type) != 0 || length <= ending ||
            strcmp(tensor->name + length - ending, way->numbers) != 0)
            continue;
        char *name = mem_alloc(length + strlen(way->scales) + 1);
        if (!name)
            return err_set(err, RC_MEMORY, "checkpoint: out of memory");
        memcpy(name, tensor->name, length);
        rc = pair(list, files, way, i, length - ending, name, err);
        mem_free(name);
    }
    return rc;
}

enum rc companions_pair(struct tensor_list *list, const struct file_view *files, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0, n = list->n; i < n && !rc; i++)
        rc = pair_any(list, files, i, err);
    return rc;
}

bool companion_scale_fits(float scale)
{
    return __builtin_fabsf(scale) < 0x1p118f;
}

size_t companion_row_bytes(const struct companion *companion, uint64_t cols)
{
    return cols / companion->values * companion->bytes;
}

enum companion_fault companion_join(const struct checkpoint_tensor *tensor, uint64_t row, const uint8_t *scales,
                                    const uint8_t *numbers, uint8_t *to)
{
    return tensor->companion->join(tensor, row, scales, numbers, to);
}
