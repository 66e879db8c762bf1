/* image.h: resizes images of three bytes a pixel and cuts them to patches. A resize has the bits of Pillow 11 and 12: per axis
 * a filter in fixed point, first along rows, then along columns, rounded to a byte after each. Sums are integers, so any order
 * of them gives the same bits. Pure functions, any thread. */
#ifndef LLMPY_IMAGE_H
#define LLMPY_IMAGE_H

#include "status.h"

#include <stdbool.h>
#include <stddef.h>

#define IMAGE_CHANNELS 3
#define IMAGE_MAX_SIDE 65535u

enum image_filter { IMAGE_LANCZOS = 1, IMAGE_BILINEAR = 2, IMAGE_BICUBIC = 3 }; /* Pillow's numbers */

struct image {
    const uint8_t *pixels; /* [height][width][3], rows row_bytes apart */
    uint32_t height, width;
    ptrdiff_t row_bytes;
};

bool image_has_filter(long number);
/* to: [height][width][3]. RC_MEMORY: out of memory. Sides are from 1 to IMAGE_MAX_SIDE. */
enum rc image_resize(const struct image *image, enum image_filter filter, uint32_t height, uint32_t width, uint8_t *to,
                     struct err *err);
/* to: [height / patch * width / patch][3][patch][patch]. Patches lie in squares of merge x merge, row by row; merge 1: row by
 * row. patch * merge divides both sides. */
void image_patches(const struct image *image, uint32_t patch, uint32_t merge, uint8_t *to);

#endif
