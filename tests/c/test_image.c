/* Resizing and cutting of images at sides around the blocks of the sums, under the sanitizers; tests/unit/test_image.py compares
 * with Pillow. */
#include "check.h"

#include "../../csrc/base/image.h"

#define MOST 150 /* pixels of a side: more than two blocks of rows */

static uint8_t pixels[MOST * MOST * 3], made[MOST * MOST * 3];

static const uint32_t SIDES[] = {1, 2, 7, 8, 9, 63, 64, 65, 129, MOST};
#define N_SIDES (sizeof SIDES / sizeof *SIDES)

static struct image image_of(uint32_t height, uint32_t width)
{
    return (struct image){pixels, height, width, (ptrdiff_t)width * 3};
}

static bool are_all(const uint8_t *bytes, size_t n, uint8_t value)
{
    for (size_t i = 0; i < n; i++)
        if (bytes[i] != value)
            return false;
    return true;
}

TEST(an_even_image_stays_even_at_every_size)
{
    memset(pixels, 201, sizeof pixels);
    for (size_t i = 0; i < N_SIDES * N_SIDES; i++)
        for (long filter = 0; filter < 5; filter++) {
            if (!image_has_filter(filter))
                continue;
            uint32_t height = SIDES[i / N_SIDES], width = SIDES[i % N_SIDES];
            struct image image = image_of(width, height);
            struct err err;
            memset(made, 0, sizeof made);
            REQUIRE(image_resize(&image, (enum image_filter)filter, height, width, made, &err) == RC_OK);
            CHECK(are_all(made, (size_t)height * width * 3, 201));
            CHECK(are_all(made + (size_t)height * width * 3, sizeof made - (size_t)height * width * 3, 0));
        }
}

TEST(extremes_are_clipped)
{
    for (size_t i = 0; i < sizeof pixels; i++)
        pixels[i] = i / 3 % 2 ? 255 : 0;
    struct image image = image_of(MOST, MOST);
    struct err err;
    for (uint32_t side = 1; side <= MOST; side += 37)
        CHECK(image_resize(&image, IMAGE_LANCZOS, side, side + 1 > MOST ? 1 : side + 1, made, &err) == RC_OK);
}

TEST(patches_hold_their_channels_apart)
{
    for (uint32_t i = 0; i < 8 * 8 * 3; i++)
        pixels[i] = (uint8_t)(i % 3 * 64 + i / 3);
    struct image image = image_of(8, 8);
    image_patches(&image, 2, 2, made);
    static const uint8_t first[] = {0, 1, 8, 9, 64, 65, 72, 73, 128, 129, 136, 137};
    CHECK(memcmp(made, first, sizeof first) == 0);
    CHECK(made[12] == 2 && made[24] == 16 && made[36] == 18 && made[48] == 4); /* the square, then the next one */
}
