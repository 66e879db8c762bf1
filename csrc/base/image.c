#include "image.h"

#include "mem.h"

#include <math.h>
#include <string.h>

#define BITS 22   /* of a weight of 1 */
#define LANES 16  /* rows or columns that are summed at once */
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

/* LANES sums of count terms. from: [count][LANES], step bytes apart. */
INLINE void sum_lanes(const uint8_t *from, ptrdiff_t step, const int32_t *weights, uint32_t count, uint8_t *to)
{
    int32_t sums[LANES];
    for (uint32_t lane = 0; lane < LANES; lane++)
        sums[lane] = 1 << (BITS - 1);
    for (uint32_t k = 0; k < count; k++)
        for (uint32_t lane = 0; lane < LANES; lane++)
            sums[lane] += weights[k] * from[(ptrdiff_t)k * step + lane];
    for (uint32_t lane = 0; lane < LANES; lane++)
        to[lane] = to_byte(sums[lane]);
}

/* Along the columns: one row of outputs. */
INLINE void blend_rows(const struct image *image, const int32_t *weights, uint32_t count, uint8_t *to)
{
    uint32_t n = image->width * IMAGE_CHANNELS, i = 0;
    for (; i + LANES <= n; i += LANES)
        sum_lanes(image->pixels + i, image->row_bytes, weights, count, to + i);
    for (; i < n; i++) {
        int32_t sum = 1 << (BITS - 1);
        for (uint32_t k = 0; k < count; k++)
            sum += weights[k] * image->pixels[(ptrdiff_t)k * image->row_bytes + i];
        to[i] = to_byte(sum);
    }
}

/* Along a row: n_rows <= LANES rows at once, which lie in `turned` as columns. turned: [width * 3][LANES]. */
INLINE void blend_columns(const struct image *image, uint32_t n_rows, const struct weights *w, uint32_t width, uint8_t *turned,
                          uint8_t *to)
{
    uint32_t n = image->width * IMAGE_CHANNELS;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t row = 0; row < n_rows; row++)
            turned[(size_t)i * LANES + row] = image->pixels[(ptrdiff_t)row * image->row_bytes + i];
    for (uint32_t i = 0; i < width; i++)
        for (uint32_t channel = 0; channel < IMAGE_CHANNELS; channel++) {
            uint8_t out[LANES];
            const uint8_t *from = turned + ((size_t)w->first[i] * IMAGE_CHANNELS + channel) * LANES;
            sum_lanes(from, IMAGE_CHANNELS * LANES, w->values + (size_t)i * w->most, w->count[i], out);
            for (uint32_t row = 0; row < n_rows; row++)
                to[((size_t)row * width + i) * IMAGE_CHANNELS + channel] = out[row];
        }
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
    for (uint32_t y = 0; y < image->height; y += LANES) {
        struct image part = *image;
        part.pixels += (ptrdiff_t)y * image->row_bytes;
        uint32_t n_rows = image->height - y < LANES ? image->height - y : LANES;
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
    size_t turned_bytes = (size_t)image->width * IMAGE_CHANNELS * LANES;
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
