#include "packed.h"

#include "../base/file.h"
#include "../base/mem.h"

#include <inttypes.h>
#include <string.h>

#define SPAN_BYTES ((uint64_t)64 << 20) /* of numbers in memory at once */
#define TILE_ROWS 16u                   /* rows joined at once: a cache line of a transposed tensor has 16 words */
#define TABLE_VALUES 16u                /* of a row whose numbers choose values */

enum { NUMBERS, SCALES, ZEROS }; /* SCALES: the values of each row where a way has tables */

struct packing {
    const char *scheme;
    const char *endings[3];  /* of the names of the numbers, scales and zeros; NULL: none */
    const char *order;       /* ending of the tensor that has the group of each column; NULL: none */
    const char *shape;       /* ending of the tensor that has rows and columns; NULL: the numbers' shape gives them */
    bool is_transposed;      /* all tensors: columns or groups first, then rows */
    bool is_interleaved;     /* a word of numbers has 8 rows, and words have the order of AWQ */
    bool needs_zeros;
    bool has_tables;         /* in place of scales: 16 values for each row, not transposed */
    uint32_t zero_offset;    /* added to a stored zero */
    void (*numbers)(const struct checkpoint_span *span, uint64_t row, uint64_t step, uint32_t n, uint8_t *to);
};

/* The tensors of a range of rows of a weight. */
struct checkpoint_span {
    const struct checkpoint *checkpoint;
    const struct checkpoint_tensor *tensor;
    uint64_t first[3], n[3]; /* words or items of each tensor, along the rows */
    uint8_t *bytes[3];       /* transposed: [columns, words or groups][n]; else [n][...] */
};

static uint32_t load_word(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t divide_up(uint64_t n, uint64_t by)
{
    return n / by + (n % by != 0);
}

/* Place of item i of a word. */
static uint32_t shift_of(const struct packing *way, uint32_t bits, uint64_t i)
{
    static const uint32_t interleaved[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    uint32_t slot = (uint32_t)(i % (32 / bits));
    return bits * (way->is_interleaved ? interleaved[slot] : slot);
}

/* Bytes of a joined block before its numbers. */
static size_t header_bytes(const struct checkpoint_tensor *tensor)
{
    const struct dtype_info *info = dtype_info(tensor->dtype);
    return info->block_bytes - info->block_values * tensor->bits / 8;
}

/* Bytes from the start of a joined row to a column's number. */
static size_t place_of(const struct checkpoint_tensor *tensor, uint64_t col)
{
    const struct dtype_info *info = dtype_info(tensor->dtype);
    return col / info->block_values * info->block_bytes + header_bytes(tensor) + col % info->block_values * tensor->bits / 8;
}

/* ---- numbers: of n rows row, row + step, ... of a span ---- */

static void flip_signs(uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        bytes[i] ^= 0x80;
}

/* Words [rows][columns]. */
static void row_numbers(const struct checkpoint_span *span, uint64_t row, uint64_t step, uint32_t n, uint8_t *to)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    uint64_t cols = tensor->shape[1], block = dtype_info(tensor->dtype)->block_values;
    size_t row_bytes = dtype_row_bytes(tensor->dtype, cols), stored = tensor->pieces[NUMBERS].cols * 4;
    for (uint32_t i = 0; i < n; i++, to += row_bytes) {
        const uint8_t *from = span->bytes[NUMBERS] + (row + i * step - span->first[NUMBERS]) * stored;
        for (uint64_t col = 0; col < cols; col += block) {
            uint64_t some = cols - col < block ? cols - col : block;
            size_t n_bytes = (size_t)divide_up(some * tensor->bits, 8);
            uint8_t *numbers = to + place_of(tensor, col);
            memcpy(numbers, from + col * tensor->bits / 8, n_bytes);
            if (tensor->bits == 8)
                flip_signs(numbers, n_bytes);
        }
    }
}

/* Words [columns][rows]; a word has adjacent columns of a row. */
static void column_numbers(const struct checkpoint_span *span, uint64_t row, uint64_t step, uint32_t n, uint8_t *to)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    size_t row_bytes = dtype_row_bytes(tensor->dtype, tensor->shape[1]);
    for (uint64_t w = 0; w < tensor->pieces[NUMBERS].rows; w++) {
        const uint8_t *from = span->bytes[NUMBERS] + (w * span->n[NUMBERS] + row - span->first[NUMBERS]) * 4;
        uint8_t *numbers = to + place_of(tensor, w * 32 / tensor->bits);
        for (uint32_t i = 0; i < n; i++, from += 4 * step, numbers += row_bytes) {
            memcpy(numbers, from, 4);
            if (tensor->bits == 8)
                flip_signs(numbers, 4);
        }
    }
}

/* Words [columns][rows / 8]; a word has 8 adjacent rows of a column. */
static void interleaved_numbers(const struct checkpoint_span *span, uint64_t row, uint64_t step, uint32_t n, uint8_t *to)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    size_t row_bytes = dtype_row_bytes(tensor->dtype, tensor->shape[1]);
    for (uint64_t col = 0; col < tensor->shape[1]; col++) {
        const uint8_t *from = span->bytes[NUMBERS] + col * span->n[NUMBERS] * 4;
        uint8_t *numbers = to + place_of(tensor, col);
        for (uint32_t i = 0; i < n; i++, numbers += row_bytes) {
            uint64_t r = row + i * step;
            uint32_t word = load_word(from + (r / 8 - span->first[NUMBERS]) * 4);
            *numbers |= (uint8_t)((word >> shift_of(tensor->packing, 4, r) & 15) << col % 2 * 4);
        }
    }
}

/* ---- the table -------------------------------------------------------------------------------------------------------- */

static const struct packing PACKINGS[] = {
    {"compressed-tensors", {".weight_packed", ".weight_scale", ".weight_zero_point"}, ".weight_g_idx", ".weight_shape",
     false, false, false, false, 0, row_numbers},
    {"gptq", {".qweight", ".scales", ".qzeros"}, ".g_idx", NULL, true, false, true, false, 1, column_numbers},
    {"gptq_v2", {".qweight", ".scales", ".qzeros"}, ".g_idx", NULL, true, false, true, false, 0, column_numbers},
    {"awq", {".qweight", ".scales", ".qzeros"}, ".g_idx", NULL, true, true, true, false, 0, interleaved_numbers},
    {"squeezellm", {".qweight", ".lookup_table", NULL}, NULL, NULL, true, false, false, true, 0, column_numbers},
};

/* ---- pairing ---------------------------------------------------------------------------------------------------------- */

struct pairing {
    struct tensor_list *list;
    const struct file_view *files;
    const struct packing *way;
    char *name;  /* room for the longest name */
    size_t stem; /* letters before the ending */
};

/* NULL: there is no such ending, or no such tensor. */
static const struct checkpoint_tensor *find(const struct pairing *p, const char *ending)
{
    if (!ending)
        return NULL;
    memcpy(p->name + p->stem, ending, strlen(ending) + 1);
    uint32_t index = name_table_find(&p->list->names, p->name, p->stem + strlen(ending));
    return index == NAME_ABSENT ? NULL : &p->list->tensors[index];
}

/* Takes tensors of two dimensions. A piece without a name is absent. */
static bool take_pieces(const struct pairing *p, struct checkpoint_tensor *joined)
{
    for (uint32_t i = NUMBERS; i <= ZEROS; i++) {
        const struct checkpoint_tensor *tensor = find(p, p->way->endings[i]);
        joined->pieces[i] = (struct checkpoint_piece){0};
        if (!tensor && i == ZEROS && !p->way->needs_zeros)
            return true;
        bool is_scale = tensor && (tensor->dtype == DTYPE_F32 || tensor->dtype == DTYPE_F16 || tensor->dtype == DTYPE_BF16);
        if (!tensor || tensor->n_dims != 2 || !(i == SCALES ? is_scale : tensor->dtype == DTYPE_I32))
            return false;
        joined->pieces[i] = (struct checkpoint_piece){tensor->name, tensor->file, tensor->dtype, tensor->offset,
                                                      tensor->shape[0], tensor->shape[1]};
    }
    return true;
}

/* Reads a small tensor of integers; a list that mem_free releases, or NULL. */
static int64_t *read_integers(const struct pairing *p, const struct checkpoint_tensor *tensor, uint64_t wanted)
{
    size_t item = tensor->dtype == DTYPE_I64 ? 8 : 4, n_read = 0;
    if (tensor->n_dims != 1 || tensor->shape[0] != wanted || (tensor->dtype != DTYPE_I64 && tensor->dtype != DTYPE_I32))
        return NULL;
    int64_t *values = mem_alloc(wanted * sizeof *values);
    uint8_t *bytes = mem_alloc(wanted * item);
    bool is_read = values && bytes &&
                   file_read(p->files[tensor->file].descriptor, tensor->offset, bytes, wanted * item, &n_read) == 0;
    for (uint64_t i = 0; is_read && n_read == wanted * item && i < wanted; i++) {
        uint32_t low = load_word(bytes + i * item);
        values[i] = item == 4 ? (int32_t)low : (int64_t)(low | (uint64_t)load_word(bytes + i * item + 4) << 32);
    }
    mem_free(bytes);
    if (n_read == wanted * item)
        return values;
    mem_free(values);
    return NULL;
}

/* shapes_fit of a way with tables. */
static bool tables_fit(uint32_t bits, struct checkpoint_tensor *joined)
{
    const struct checkpoint_piece *numbers = &joined->pieces[NUMBERS], *tables = &joined->pieces[SCALES];
    joined->n_dims = 2;
    joined->shape[0] = numbers->cols;
    joined->shape[1] = joined->group = numbers->rows * (32 / bits);
    joined->n_groups = TABLE_VALUES;
    joined->bits = bits;
    return bits == 4 && numbers->cols && numbers->rows && tables->rows == numbers->cols && tables->cols == TABLE_VALUES;
}

/* Whether the numbers, with `bits` each, and the other tensors have the shapes of one matrix. Sets the matrix's shape. */
static bool shapes_fit(const struct packing *way, uint32_t bits, const int64_t *stated, struct checkpoint_tensor *joined)
{
    const struct checkpoint_piece *numbers = &joined->pieces[NUMBERS], *scales = &joined->pieces[SCALES];
    const struct checkpoint_piece *zeros = &joined->pieces[ZEROS];
    uint64_t per_word = 32 / bits, rows = numbers->rows, cols = numbers->cols;
    if (way->has_tables)
        return tables_fit(bits, joined);
    if (way->is_interleaved) {
        rows = numbers->cols * per_word;
        cols = numbers->rows;
    } else if (way->is_transposed) {
        rows = numbers->cols;
        cols = numbers->rows * per_word;
    } else {
        cols = (uint64_t)stated[1];
        if ((uint64_t)stated[0] != rows || divide_up(cols, per_word) != numbers->cols)
            return false;
    }
    uint64_t n_groups = way->is_transposed ? scales->rows : scales->cols;
    uint64_t of_scales = way->is_transposed ? scales->cols : scales->rows;
    uint64_t of_zeros = way->is_transposed ? zeros->cols : zeros->rows;
    uint64_t zero_groups = way->is_transposed ? zeros->rows : zeros->cols;
    if (!rows || !cols || !n_groups || n_groups > cols || of_scales != rows)
        return false;
    if (zeros->name && (of_zeros != divide_up(rows, per_word) || zero_groups != n_groups))
        return false;
    joined->n_dims = 2;
    joined->shape[0] = rows;
    joined->shape[1] = cols;
    joined->n_groups = n_groups;
    joined->bits = bits;
    return true;
}

static bool take_type(struct checkpoint_tensor *joined, uint32_t dtype)
{
    joined->dtype = dtype;
    joined->type = dtype_info(dtype)->name;
    return true;
}

/* Chooses the type by the columns of a group: all, or a power of 2. False: no type has such groups. */
static bool choose_type(const struct packing *way, struct checkpoint_tensor *joined)
{
    if (way->has_tables)
        return take_type(joined, DTYPE_TABLE4);
    uint64_t cols = joined->shape[1], n = joined->n_groups, group = n > 1 ? 32 : cols;
    while (divide_up(cols, group) > n)
        group *= 2;
    if (divide_up(cols, group) != n)
        return false;
    bool is_wide = n == 1 || group >= 128;
    joined->group = group;
    return take_type(joined, joined->bits == 4 ? (is_wide ? DTYPE_INT4_G128 : DTYPE_INT4_G32)
                                               : (is_wide ? DTYPE_INT8_G128 : DTYPE_INT8_G32));
}

/* Sorts columns by their groups, columns of a group by their numbers. False: a group has another number of columns. */
static bool sort_columns(const int64_t *groups, const struct checkpoint_tensor *joined, uint32_t *order)
{
    uint64_t cols = joined->shape[1];
    uint32_t *n_sorted = mem_calloc(joined->n_groups, sizeof *n_sorted);
    bool fits = n_sorted != NULL;
    for (uint64_t col = 0; col < cols && fits; col++) {
        uint64_t group = (uint64_t)groups[col], first = group * joined->group;
        fits = group < joined->n_groups && n_sorted[group] < joined->group && first + n_sorted[group] < cols;
        if (fits)
            order[first + n_sorted[group]++] = (uint32_t)col;
    }
    mem_free(n_sorted);
    return fits;
}

/* Reads the tensor of groups. Sets joined->order if groups have columns that are not adjacent. Files whose tensor of groups is
 * all zero do not use it. False: the groups do not fit. */
static bool take_order(const struct pairing *p, struct checkpoint_tensor *joined)
{
    const struct checkpoint_tensor *order = find(p, p->way->order);
    if (!order)
        return true;
    int64_t *groups = read_integers(p, order, joined->shape[1]);
    bool is_zero = groups != NULL, is_usual = is_zero;
    for (uint64_t i = 0; i < joined->shape[1] && is_zero + is_usual > 0; i++) {
        is_zero = is_zero && groups[i] == 0;
        is_usual = is_usual && groups[i] == (int64_t)(i / joined->group);
    }
    bool fits = is_zero || is_usual;
    if (groups && !fits && joined->shape[1] <= UINT32_MAX) {
        joined->order = mem_alloc(joined->shape[1] * sizeof *joined->order);
        fits = joined->order && sort_columns(groups, joined, joined->order);
    }
    mem_free(groups);
    return fits;
}

/* Adds the joined tensor if its pieces fit. */
static enum rc pair(const struct pairing *p, uint32_t i, struct err *err)
{
    struct checkpoint_tensor joined = p->list->tensors[i], *made;
    const struct checkpoint_tensor *shape = p->way->shape ? find(p, p->way->shape) : NULL;
    int64_t *stated = shape ? read_integers(p, shape, 2) : NULL;
    bool fits = take_pieces(p, &joined) && (stated || !p->way->shape);
    fits = fits && (shapes_fit(p->way, 4, stated, &joined) ||
                    (!p->way->is_interleaved && shapes_fit(p->way, 8, stated, &joined)));
    mem_free(stated);
    enum rc rc = RC_OK;
    fits = fits && choose_type(p->way, &joined) && take_order(p, &joined);
    memcpy(p->name + p->stem, ".weight", sizeof ".weight");
    if (fits)
        rc = tensor_list_add(p->list, &p->files[joined.file], p->name, p->stem + strlen(".weight"), &made, err);
    if (!fits || rc) {
        mem_free(joined.order);
        return rc;
    }
    joined.packing = p->way;
    joined.name = made->name;
    *made = joined;
    return RC_OK;
}

/* Pairs tensor i if it has a way's numbers. */
static enum rc pair_any(struct pairing *p, uint32_t i, struct err *err)
{
    const char *name = p->list->tensors[i].name, *ending = p->way->endings[NUMBERS];
    size_t length = strlen(name);
    if (length <= strlen(ending) || strcmp(name + length - strlen(ending), ending) != 0)
        return RC_OK;
    p->stem = length - strlen(ending);
    p->name = mem_alloc(length + sizeof ".weight_zero_point");
    if (!p->name)
        return err_set(err, RC_MEMORY, "checkpoint: out of memory");
    memcpy(p->name, name, length);
    enum rc rc = pair(p, i, err);
    mem_free(p->name);
    return rc;
}

enum rc packed_pair(struct tensor_list *list, const struct file_view *files, const char *scheme, struct err *err)
{
    struct pairing pairing = {.list = list, .files = files};
    enum rc rc = RC_OK;
    for (const struct packing *way = PACKINGS; way < PACKINGS + sizeof PACKINGS / sizeof *PACKINGS; way++) {
        pairing.way = way;
        for (uint32_t i = 0, n = list->n; i < n && !rc && strcmp(scheme, way->scheme) == 0; i++)
            rc = pair_any(&pairing, i, err);
    }
    return rc;
}

/* ---- spans ------------------------------------------------------------------------------------------------------------ */

/* Rows of the weight in an item of a piece, along its rows. */
static uint32_t rows_each(const struct checkpoint_tensor *tensor, uint32_t i)
{
    bool has_several = i == ZEROS || (i == NUMBERS && tensor->packing->is_interleaved);
    return has_several ? 32 / tensor->bits : 1;
}

/* Whether a piece has columns or groups first, then rows. */
static bool is_transposed(const struct packing *way, uint32_t i)
{
    return way->is_transposed && !(way->has_tables && i == SCALES);
}

static enum rc read_piece(struct checkpoint_span *span, uint32_t i, struct err *err)
{
    const struct checkpoint_piece *piece = &span->tensor->pieces[i];
    const struct checkpoint_tensor view = {.name = piece->name, .file = piece->file, .offset = piece->offset};
    size_t item = dtype_info(piece->dtype)->block_bytes;
    bool crosses = is_transposed(span->tensor->packing, i), is_whole = span->n[i] == piece->cols;
    uint64_t outer = !crosses || is_whole ? 1 : piece->rows, pitch = piece->cols * item;
    size_t n_bytes = span->n[i] * item * (crosses ? is_whole ? piece->rows : 1 : piece->cols);
    uint64_t first = span->first[i] * (crosses ? item : pitch);
    span->bytes[i] = mem_alloc(outer * n_bytes + 1);
    enum rc rc = span->bytes[i] ? RC_OK : err_set(err, RC_MEMORY, "checkpoint: out of memory");
    for (uint64_t j = 0; j < outer && !rc; j++)
        rc = checkpoint_read(span->checkpoint, &view, first + j * pitch, n_bytes, span->bytes[i] + j * n_bytes, err);
    return rc;
}

uint64_t checkpoint_span_rows(const struct checkpoint_tensor *tensor)
{
    if (!tensor->packing || !tensor->packing->is_transposed)
        return 0;
    uint64_t rows = SPAN_BYTES / dtype_row_bytes(tensor->dtype, tensor->shape[1]);
    return rows < TILE_ROWS ? TILE_ROWS : rows;
}

enum rc checkpoint_span_open(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first,
                             uint64_t n_rows, struct checkpoint_span **span, struct err *err)
{
    struct checkpoint_span *made = mem_calloc(1, sizeof *made);
    enum rc rc = made ? RC_OK : err_set(err, RC_MEMORY, "checkpoint: out of memory");
    for (uint32_t i = NUMBERS; i <= ZEROS && !rc; i++) {
        uint32_t each = rows_each(tensor, i);
        made->checkpoint = checkpoint;
        made->tensor = tensor;
        made->first[i] = first / each;
        made->n[i] = (first + n_rows - 1) / each + 1 - made->first[i];
        rc = tensor->pieces[i].name ? read_piece(made, i, err) : RC_OK;
    }
    if (rc)
        checkpoint_span_close(made);
    else
        *span = made;
    return rc;
}

void checkpoint_span_close(struct checkpoint_span *span)
{
    for (uint32_t i = NUMBERS; span && i <= ZEROS; i++)
        mem_free(span->bytes[i]);
    mem_free(span);
}

/* ---- joining ---------------------------------------------------------------------------------------------------------- */

/* Item `row` (a row or a word of rows) of a group of scales or zeros. */
static const uint8_t *item_of(const struct checkpoint_span *span, uint32_t i, uint64_t row, uint64_t group)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    uint64_t at = row / rows_each(tensor, i) - span->first[i];
    uint64_t index = is_transposed(tensor->packing, i) ? group * span->n[i] + at : at * tensor->n_groups + group;
    return span->bytes[i] + index * dtype_info(tensor->pieces[i].dtype)->block_bytes;
}

static uint32_t zero_of(const struct checkpoint_span *span, uint64_t row, uint64_t group)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    uint32_t half = 1u << (tensor->bits - 1);
    if (!span->bytes[ZEROS])
        return half;
    uint32_t word = load_word(item_of(span, ZEROS, row, group));
    return ((word >> shift_of(tensor->packing, tensor->bits, row)) + tensor->packing->zero_offset) & (2 * half - 1);
}

static enum rc bad(const struct checkpoint_span *span, uint32_t i, enum rc rc, uint64_t row, const char *why, struct err *err)
{
    const struct checkpoint_piece *piece = &span->tensor->pieces[i];
    const char *file = checkpoint_path(span->checkpoint, piece->file);
    err_set(err, rc, "%s: tensor %.160s: row %" PRIu64 " of the weight (%s, %" PRIu32 " bits): %s", file, piece->name, row,
            span->tensor->packing->scheme, span->tensor->bits, why);
    err_name(err, file, piece->name);
    return rc;
}

/* Writes a row's 16 values before the numbers of each block. */
static enum rc write_tables(const struct checkpoint_span *span, uint64_t row, uint8_t *to, struct err *err)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    const struct dtype_info *info = dtype_info(tensor->dtype);
    float values[TABLE_VALUES];
    dtype_to_float(tensor->pieces[SCALES].dtype, item_of(span, SCALES, row, 0), values, TABLE_VALUES);
    for (uint32_t i = 0; i < TABLE_VALUES; i++)
        if (!__builtin_isfinite(values[i]))
            return bad(span, SCALES, RC_CHECKPOINT, row, "wanted finite values, have a NaN or an infinity", err);
    for (uint64_t col = 0; col < tensor->shape[1]; col += info->block_values, to += info->block_bytes)
        memcpy(to, values, sizeof values);
    return RC_OK;
}

/* Writes a row's scales, and for 4 bits its zeros, before the numbers of each block. */
static enum rc write_headers(const struct checkpoint_span *span, uint64_t row, uint8_t *to, struct err *err)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    uint64_t block = dtype_info(tensor->dtype)->block_values;
    for (uint64_t col = 0; col < tensor->shape[1]; col += block) {
        uint64_t group = col / tensor->group;
        uint32_t header, zero = zero_of(span, row, group);
        float scale;
        dtype_to_float(tensor->pieces[SCALES].dtype, item_of(span, SCALES, row, group), &scale, 1);
        memcpy(&header, &scale, sizeof header);
        if (!__builtin_isfinite(scale))
            return bad(span, SCALES, RC_CHECKPOINT, row, "wanted finite scales, have a NaN or an infinity", err);
        if (!(__builtin_fabsf(scale) < 0x1p120f)) /* the kernels multiply a scale by up to 31 */
            return bad(span, SCALES, RC_CHECKPOINT, row, "wanted scales below 2^120", err);
        if (tensor->bits == 4 && (header & 0xff))
            return bad(span, SCALES, RC_UNSUPPORTED, row,
                       "a float32 scale of more than 16 significant bits is not supported; store scales as bfloat16 or float16",
                       err);
        if (tensor->bits == 8 && zero != 128)
            return bad(span, ZEROS, RC_UNSUPPORTED, row,
                       "a zero other than 128 is not supported; quantise with sym (GPTQ) or symmetric true, or 4 bits", err);
        header |= tensor->bits == 4 ? zero : 0;
        memcpy(to + place_of(tensor, col) - header_bytes(tensor), &header, sizeof header);
    }
    return RC_OK;
}

/* Moves the numbers of a row to the places of their sorted columns. */
static void sort_numbers(const struct checkpoint_tensor *tensor, const uint8_t *from, uint8_t *to)
{
    uint32_t mask = (1u << tensor->bits) - 1;
    for (uint64_t col = 0; col < tensor->shape[1]; col++) {
        uint32_t other = tensor->order[col], slot = tensor->bits == 4 ? other % 2 * 4 : 0;
        uint32_t number = from[place_of(tensor, other)] >> slot & mask;
        to[place_of(tensor, col)] |= (uint8_t)(number << (tensor->bits == 4 ? col % 2 * 4 : 0));
    }
}

/* Writes the numbers of n zeroed rows. unsorted: room for TILE_ROWS rows if the columns are sorted. */
static void write_numbers(const struct checkpoint_span *span, uint64_t row, uint64_t step, uint32_t n, uint8_t *unsorted,
                          uint8_t *rows)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    size_t row_bytes = dtype_row_bytes(tensor->dtype, tensor->shape[1]);
    if (!tensor->order) {
        tensor->packing->numbers(span, row, step, n, rows);
        return;
    }
    memset(unsorted, 0, n * row_bytes);
    tensor->packing->numbers(span, row, step, n, unsorted);
    for (uint32_t i = 0; i < n; i++)
        sort_numbers(tensor, unsorted + i * row_bytes, rows + i * row_bytes);
}

enum rc checkpoint_span_read(const struct checkpoint_span *span, uint64_t first, uint64_t step, uint64_t n_rows, uint8_t *rows,
                             struct err *err)
{
    const struct checkpoint_tensor *tensor = span->tensor;
    size_t row_bytes = dtype_row_bytes(tensor->dtype, tensor->shape[1]);
    uint8_t *unsorted = tensor->order ? mem_alloc(TILE_ROWS * row_bytes) : NULL;
    enum rc rc = tensor->order && !unsorted ? err_set(err, RC_MEMORY, "checkpoint: out of memory") : RC_OK;
    enum rc (*write)(const struct checkpoint_span *, uint64_t, uint8_t *, struct err *) =
        tensor->packing->has_tables ? write_tables : write_headers;
    memset(rows, 0, n_rows * row_bytes);
    for (uint64_t i = 0; i < n_rows && !rc; i += TILE_ROWS, rows += TILE_ROWS * row_bytes) {
        uint32_t n = n_rows - i < TILE_ROWS ? (uint32_t)(n_rows - i) : TILE_ROWS;
        write_numbers(span, first + i * step, step, n, unsorted, rows);
        for (uint32_t j = 0; j < n && !rc; j++)
            rc = write(span, first + (i + j) * step, rows + j * row_bytes, err);
    }
    mem_free(unsorted);
    return rc;
}

enum rc packed_rows(const struct checkpoint *checkpoint, const struct checkpoint_tensor *tensor, uint64_t first, uint64_t step,
                    uint64_t n_rows, uint8_t *rows, struct err *err)
{
    size_t row_bytes = dtype_row_bytes(tensor->dtype, tensor->shape[1]);
    uint64_t at_once = SPAN_BYTES / row_bytes / step + 1;
    enum rc rc = RC_OK;
    for (uint64_t i = 0, n; i < n_rows && !rc; i += n) {
        struct checkpoint_span *span = NULL;
        n = n_rows - i < at_once ? n_rows - i : at_once;
        rc = checkpoint_span_open(checkpoint, tensor, first + i * step, (n - 1) * step + 1, &span, err);
        rc = rc ? rc : checkpoint_span_read(span, first + i * step, step, n, rows + i * row_bytes, err);
        checkpoint_span_close(span);
    }
    return rc;
}
