#include "image.h"

#include "mem.h"

#include <math.h>
#include <string.h>

#define BITS 22   /* of a weight of 1 */
#define LANES 128 /* most columns that are summed at once */
#define ROWS 64   /* rows that are summed at once */
#define IS_LITTLE (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
#define PI 3.14159265358979323846

/* The instructions of a function's vectors. Its numbers are integers, so both builds of it give the same bits. */
#if defined __x86_64__ && defined __GNUC__
#define WITH_AVX2 __attribute__((target("avx2")))
#define HAS_AVX2 __builtin_cpu_supports("avx2")
#else
#define WITH_AVX2
#define HAS_AVX2 false
#endif
#define INLINE static inline __attribute__((always_inline))

/* ---- weights ------------------------------------------------------------------------------------------------------------ */

/* The weights of one axis: output i is the sum of weights[i * most + k] * input[first[i] + k] over k < count[i]. */
struct weights {
    int32_t *values;
    uint32_t *first, *count;
    uint32_t most;
};

static double bilinear(double x)
{
    x = fabs(x);
    return x < 1 ? 1 - x : 0;
}

static double bicubic(double x)
{
    const double a = -0.5;
    x = fabs(x);
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

static double sinc(double x)
{
    return x == 0 ? 1 : sin(x * PI) / (x * PI);
}

static double lanczos(double x)
{
    return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0;
}

static const struct {
    double (*value)(double);
    double support;
} filters[] = {
    [IMAGE_LANCZOS] = {lanczos, 3},
    [IMAGE_BILINEAR] = {bilinear, 1},
    [IMAGE_BICUBIC] = {bicubic, 2},
};

bool image_has_filter(long number)
{
    return number >= IMAGE_LANCZOS && number <= IMAGE_BICUBIC;
}

static int32_t to_fixed(double weight)
{
    double scaled = weight * (1 << BITS);
    return (int32_t)(weight < 0 ? scaled - 0.5 : scaled + 0.5);
}

/* floats: room for w->most. */
static void weigh_one(struct weights *w, uint32_t i, enum image_filter filter, uint32_t n_in, double scale, double *floats)
{
    double wide = scale > 1 ? scale : 1, support = filters[filter].support * wide, shrink = 1 / wide;
    double centre = (i + 0.5) * scale, sum = 0;
    long first = (long)(centre - support + 0.5), end = (long)(centre + support + 0.5);
    first = first < 0 ? 0 : first;
    end = end > (long)n_in ? (long)n_in : end;
    w->first[i] = (uint32_t)first;
    w->count[i] = (uint32_t)(end - first);
    for (long k = 0; k < end - first; k++)
        sum += floats[k] = filters[filter].value(((double)(k + first) - centre + 0.5) * shrink);
    for (long k = 0; k < end - first; k++)
        w->values[(size_t)i * w->most + (size_t)k] = to_fixed(sum != 0 ? floats[k] / sum : floats[k]);
}

/* One block holds all arrays; w->values frees it. */
static enum rc weigh(struct weights *w, enum image_filter filter, uint32_t n_in, uint32_t n_out, struct err *err)
{
    double scale = (double)n_in / n_out;
    w->most = 2 * (uint32_t)ceil(filters[filter].support * (scale > 1 ? scale : 1)) + 1;
    size_t n_values = (size_t)n_out * w->most;
    w->values = mem_alloc(n_values * sizeof *w->values + 2 * (size_t)n_out * sizeof *w->first);
    double *floats = mem_alloc(w->most * sizeof *floats);
    if (!w->values || !floats) {
        mem_free(floats);
        return err_set(err, RC_MEMORY, "image: out of memory for the weights of a resize");
    }
    w->first = (uint32_t *)(w->values + n_values);
    w->count = w->first + n_out;
    for (uint32_t i = 0; i < n_out; i++)
        weigh_one(w, i, filter, n_in, scale, floats);
    mem_free(floats);
    return RC_OK;
}

/* ---- sums --------------------------------------------------------------------------------------------------------------- */

INLINE uint8_t to_byte(int32_t sum)
{
    int32_t value = sum >> BITS;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* n <= LANES sums of count terms. from: [count][n], step bytes apart. Four terms at once, to load sums less often. */
INLINE void sum_lanes(const uint8_t *from, ptrdiff_t step, const int32_t *weights, uint32_t count, uint32_t n, uint8_t *to)
{
    int32_t sums[LANES];
    for (uint32_t lane = 0; lane < n; lane++)
        sums[lane] = 1 << (BITS - 1);
    for (uint32_t k = 0; k < count; k += 4) {
        const uint8_t *terms[4] = {from + (ptrdiff_t)k * step};
        int32_t w[4] = {weights[k]};
        for (uint32_t i = 1; i < 4; i++) {
            terms[i] = k + i < count ? terms[i - 1] + step : terms[0];
            w[i] = k + i < count ? weights[k + i] : 0;
        }
        const uint8_t *t0 = terms[0], *t1 = terms[1], *t2 = terms[2], *t3 = terms[3];
        for (uint32_t lane = 0; lane < n; lane++)
            sums[lane] += w[0] * t0[lane] + w[1] * t1[lane] + w[2] * t2[lane] + w[3] * t3[lane];
    }
    for (uint32_t lane = 0; lane < n; lane++)
        to[lane] = to_byte(sums[lane]);
}

/* Along the columns: one row of outputs. */
INLINE void blend_rows(const struct image *image, const int32_t *weights, uint32_t count, uint8_t *to)
{
    uint32_t n = image->width * IMAGE_CHANNELS, i = 0;
    for (; i + LANES <= n; i += LANES)
        sum_lanes(image->pixels + i, image->row_bytes, weights, count, LANES, to + i);
    sum_lanes(image->pixels + i, image->row_bytes, weights, count, n - i, to + i);
}

/* Exchanges, between two rows, every second part of `bits` bits: a step of turning 8 x 8 bytes. */
INLINE void exchange(uint64_t *low, uint64_t *high, uint32_t bits, uint64_t mask)
{
    uint64_t changed = (*low >> bits ^ *high) & mask;
    *high ^= changed;
    *low ^= changed << bits;
}

INLINE void turn_block(const uint8_t *from, ptrdiff_t from_step, uint8_t *to, ptrdiff_t to_step)
{
    uint64_t rows[8];
    for (uint32_t i = 0; i < 8; i++)
        memcpy(&rows[i], from + (ptrdiff_t)i * from_step, 8);
    for (uint32_t i = 0; i < 4; i++)
        exchange(&rows[i], &rows[i + 4], 32, 0x00000000ffffffffu);
    for (uint32_t i = 0; i < 4; i++)
        exchange(&rows[i / 2 * 4 + i % 2], &rows[i / 2 * 4 + i % 2 + 2], 16, 0x0000ffff0000ffffu);
    for (uint32_t i = 0; i < 8; i += 2)
        exchange(&rows[i], &rows[i + 1], 8, 0x00ff00ff00ff00ffu);
    for (uint32_t i = 0; i < 8; i++)
        memcpy(to + (ptrdiff_t)i * to_step, &rows[i], 8);
}

/* to[i][row] = from[row][i]; steps in bytes. */
INLINE void turn(const uint8_t *from, ptrdiff_t from_step, uint32_t n_rows, uint32_t n, uint8_t *to, ptrdiff_t to_step)
{
    uint32_t whole_rows = IS_LITTLE ? n_rows & ~7u : 0, whole = n & ~7u;
    for (uint32_t row = 0; row < whole_rows; row += 8)
        for (uint32_t i = 0; i < whole; i += 8)
            turn_block(from + (ptrdiff_t)row * from_step + i, from_step, to + (ptrdiff_t)i * to_step + row, to_step);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t i = row < whole_rows ? whole : 0; i < n; i++)
            to[(ptrdiff_t)i * to_step + row] = from[(ptrdiff_t)row * from_step + i];
}

/* Along a row: n_rows <= ROWS rows at once, which lie in `turned` as columns, as their results do behind them.
 * turned: [image->width * 3 + width * 3][ROWS]. */
INLINE void blend_columns(const struct image *image, uint32_t n_rows, const struct weights *w, uint32_t width, uint8_t *turned,
                          uint8_t *to)
{
    uint32_t n = image->width * IMAGE_CHANNELS, n_to = width * IMAGE_CHANNELS;
    uint8_t *out = turned + (size_t)n * ROWS;
    turn(image->pixels, image->row_bytes, n_rows, n, turned, ROWS);
    for (uint32_t i = 0; i < width; i++)
        for (uint32_t channel = 0; channel < IMAGE_CHANNELS; channel++) {
            const uint8_t *from = turned + ((size_t)w->first[i] * IMAGE_CHANNELS + channel) * ROWS;
            sum_lanes(from, IMAGE_CHANNELS * ROWS, w->values + (size_t)i * w->most, w->count[i], ROWS,
                      out + ((size_t)i * IMAGE_CHANNELS + channel) * ROWS);
        }
    turn(out, ROWS, n_to, n_rows, to, n_to);
}

INLINE void blend_all_rows(const struct image *image, const struct weights *w, uint32_t height, uint8_t *to)
{
    size_t row_bytes = (size_t)image->width * IMAGE_CHANNELS;
    for (uint32_t i = 0; i < height; i++) {
        struct image part = *image;
        part.pixels += (ptrdiff_t)w->first[i] * image->row_bytes;
        blend_rows(&part, w->values + (size_t)i * w->most, w->count[i], to + i * row_bytes);
    }
}

INLINE void blend_all_columns(const struct image *image, const struct weights *w, uint32_t width, uint8_t *turned, uint8_t *to)
{
    for (uint32_t y = 0; y < image->height; y += ROWS) {
        struct image part = *image;
        part.pixels += (ptrdiff_t)y * image->row_bytes;
        uint32_t n_rows = image->height - y < ROWS ? image->height - y : ROWS;
        blend_columns(&part, n_rows, w, width, turned, to + (size_t)y * width * IMAGE_CHANNELS);
    }
}

WITH_AVX2 static void rows_avx2(const struct image *image, const struct weights *w, uint32_t height, uint8_t *to)
{
    blend_all_rows(image, w, height, to);
}

WITH_AVX2 static void columns_avx2(const struct image *image, const struct weights *w, uint32_t width, uint8_t *turned,
                                   uint8_t *to)
{
    blend_all_columns(image, w, width, turned, to);
}

/* ---- resize ------------------------------------------------------------------------------------------------------------- */

/* Makes every row `width` pixels long. */
static enum rc resize_columns(const struct image *image, enum image_filter filter, uint32_t width, uint8_t *to, struct err *err)
{
    struct weights w = {0};
    size_t turned_bytes = ((size_t)image->width + width) * IMAGE_CHANNELS * ROWS;
    uint8_t *turned = mem_calloc(turned_bytes, 1);
    enum rc rc = turned ? weigh(&w, filter, image->width, width, err)
                        : err_set(err, RC_MEMORY, "image: out of memory for %zu bytes", turned_bytes);
    if (!rc && HAS_AVX2)
        columns_avx2(image, &w, width, turned, to);
    else if (!rc)
        blend_all_columns(image, &w, width, turned, to);
    mem_free(w.values);
    mem_free(turned);
    return rc;
}

static enum rc resize_rows(const struct image *image, enum image_filter filter, uint32_t height, uint8_t *to, struct err *err)
{
    struct weights w = {0};
    enum rc rc = weigh(&w, filter, image->height, height, err);
    if (!rc && HAS_AVX2)
        rows_avx2(image, &w, height, to);
    else if (!rc)
        blend_all_rows(image, &w, height, to);
    mem_free(w.values);
    return rc;
}

static void copy_rows(const struct image *image, uint8_t *to)
{
    size_t row_bytes = (size_t)image->width * IMAGE_CHANNELS;
    for (uint32_t y = 0; y < image->height; y++)
        memcpy(to + y * row_bytes, image->pixels + (ptrdiff_t)y * image->row_bytes, row_bytes);
}

enum rc image_resize(const struct image *image, enum image_filter filter, uint32_t height, uint32_t width, uint8_t *to,
                     struct err *err)
{
    if (image->width == width && image->height == height) {
        copy_rows(image, to);
        return RC_OK;
    }
    if (image->width == width)
        return resize_rows(image, filter, height, to, err);
    if (image->height == height)
        return resize_columns(image, filter, width, to, err);
    size_t row_bytes = (size_t)width * IMAGE_CHANNELS;
    uint8_t *narrow = mem_alloc(row_bytes * image->height);
    if (!narrow)
        return err_set(err, RC_MEMORY, "image: out of memory for %zu bytes", row_bytes * image->height);
    enum rc rc = resize_columns(image, filter, width, narrow, err);
    struct image between = {narrow, image->height, width, (ptrdiff_t)row_bytes};
    if (!rc)
        rc = resize_rows(&between, filter, height, to, err);
    mem_free(narrow);
    return rc;
}

/* ---- patches ------------------------------------------------------------------------------------------------------------ */

INLINE void copy_patch(const uint8_t *pixels, ptrdiff_t row_bytes, uint32_t patch, uint8_t *to)
{
    for (uint32_t y = 0; y < patch; y++)
        for (uint32_t x = 0; x < patch; x++)
            for (uint32_t channel = 0; channel < IMAGE_CHANNELS; channel++)
                to[(channel * patch + y) * patch + x] = pixels[(ptrdiff_t)y * row_bytes + x * IMAGE_CHANNELS + channel];
}

void image_patches(const struct image *image, uint32_t patch, uint32_t merge, uint8_t *to)
{
    uint32_t rows = image->height / patch, cols = image->width / patch;
    for (uint32_t row = 0; row < rows; row += merge)
        for (uint32_t col = 0; col < cols; col += merge)
            for (uint32_t i = 0; i < merge * merge; i++, to += IMAGE_CHANNELS * patch * patch) {
                ptrdiff_t y = (ptrdiff_t)(row + i / merge) * patch, x = (ptrdiff_t)(col + i % merge) * patch;
                copy_patch(image->pixels + y * image->row_bytes + x * IMAGE_CHANNELS, image->row_bytes, patch, to);
            }
}
