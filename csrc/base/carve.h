/* carve.h: places arrays one behind the other in one allocation. A first pass without memory counts the bytes, a second pass
 * hands out the places. */
#ifndef LLMPY_CARVE_H
#define LLMPY_CARVE_H

#include <stddef.h>

struct carver {
    char *base; /* NULL in the first pass, which gives NULL for every array */
    size_t used;
};

static inline void *carve(struct carver *carver, size_t count, size_t size_bytes)
{
    size_t at = (carver->used + 15) & ~(size_t)15;
    carver->used = at + count * size_bytes;
    return carver->base ? carver->base + at : NULL;
}

#define CARVE(carver, pointer, count) ((pointer) = carve(carver, count, sizeof *(pointer)))

#endif
