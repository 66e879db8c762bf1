#include "check.h"

#include "../../csrc/base/dtype.h"
#include "../../csrc/base/quantise.h"

#include <math.h>
#include <string.h>

static const uint32_t TYPES[] = {DTYPE_FP8, DTYPE_INT8_G128, DTYPE_INT8_G32, DTYPE_INT4_G128, DTYPE_INT4_G32};
#define N_TYPES (sizeof TYPES / sizeof *TYPES)

/* Rounds a row and reads it back. */
static bool round_trip(uint32_t dtype, const float *row, size_t n, float *back)
{
    uint8_t stored[2048];
    bool fits = quantise_row(dtype, row, n, stored);
    return fits && dtype_to_float(dtype, stored, back, n);
}

/* All numbers of e4m3 are kept, and ties between two neighbours go to the even one. A scale of 1 makes them visible. */
TEST(fp8_rounds_to_nearest_even)
{
    for (uint32_t code = 0; code < 0x7e; code++) {
        uint8_t block[132 + 132] = {0, 0, 0x80, 0x3f, (uint8_t)code, (uint8_t)(code + 1)};
        float pair[2], back[4];
        dtype_to_float(DTYPE_FP8, block, pair, 2);
        float middle = (pair[0] + pair[1]) / 2, row[4] = {448, -pair[0], middle, nextafterf(middle, 448)};
        CHECK(round_trip(DTYPE_FP8, row, 4, back));
        CHECK_EQ(back[0], 448.0f);
        CHECK_EQ(back[1], -pair[0]);
        CHECK_EQ(back[2], pair[code % 2]);
        CHECK_EQ(back[3], pair[1]);
    }
}

TEST(numbers_on_the_grid_are_kept)
{
    float row[130], back[130];
    for (uint32_t t = 1; t < N_TYPES; t++) {
        int least = t > 2 ? -5 : -127, most = t > 2 ? 10 : 127;
        for (int i = 0; i < 130; i++)
            row[i] = 0.25f * (float)(i % 32 == 0 ? least : i % 32 == 1 ? most : least + i * 37 % (most - least));
        CHECK(round_trip(TYPES[t], row, 130, back));
        CHECK(memcmp(row, back, sizeof row) == 0);
    }
}

TEST(zeros_and_tiny_numbers_stay_finite)
{
    float row[40] = {0}, back[40];
    for (uint32_t t = 0; t < N_TYPES; t++)
        for (int i = 0; i < 3; i++) {
            row[33] = i == 0 ? 0 : i == 1 ? 1e-45f : -0x1p-126f;
            CHECK(round_trip(TYPES[t], row, 40, back));
            for (int j = 0; j < 40; j++)
                CHECK(fabsf(back[j]) <= 0x1p-100f);
        }
}

TEST(one_sided_groups_keep_their_ends)
{
    float row[32], back[32];
    for (int i = 0; i < 32; i++)
        row[i] = 1 + (float)i / 64;
    CHECK(round_trip(DTYPE_INT4_G32, row, 32, back));
    CHECK(back[0] > 0.9f && fabsf(back[31] - row[31]) < 0.06f);
}

TEST(other_values_are_refused)
{
    float row[5] = {1, 2, 3, 4, 5}, back[5];
    static const float BAD[] = {INFINITY, -INFINITY, NAN, 0x1.1p100f, -0x1.1p100f};
    for (uint32_t t = 0; t < N_TYPES; t++)
        for (size_t i = 0; i < 5; i++) {
            row[2] = BAD[i];
            CHECK(!round_trip(TYPES[t], row, 5, back));
            row[2] = 0x1p100f;
            CHECK(round_trip(TYPES[t], row, 5, back) && isfinite(back[2]));
        }
    CHECK(!quantise_has(DTYPE_Q3_K) && !quantise_has(DTYPE_BF16) && quantise_has(DTYPE_FP8));
    CHECK(quantise_on_devices(DTYPE_FP8) && quantise_on_devices(DTYPE_INT4_G32));
    CHECK(quantise_has(DTYPE_Q4_0) && !quantise_on_devices(DTYPE_Q4_0) && !quantise_on_devices(DTYPE_NF4));
}

/* Values of any bits become finite values or are refused. */
TEST(blocks_of_other_engines_stay_finite)
{
    static const uint32_t OTHERS[] = {DTYPE_Q8_0, DTYPE_Q5_0, DTYPE_Q4_1, DTYPE_Q4_0, DTYPE_Q6_K,
                                      DTYPE_Q5_K, DTYPE_Q4_K, DTYPE_Q2_K, DTYPE_NF4};
    static float row[256], back[256];
    uint32_t bits = 1, n_fitting = 0;
    for (uint32_t t = 0; t < sizeof OTHERS / sizeof *OTHERS; t++)
        for (int i = 0; i < 200; i++) {
            for (int j = 0; j < 256; j++) {
                bits = bits * 1664525u + 1013904223u;
                uint32_t value = i % 4 == 0 ? bits : i % 4 == 1 ? bits & 0x81ffffffu : (bits & 0x83ffffffu) | 0x38000000u;
                memcpy(row + j, &value, sizeof value);
                row[j] = i % 4 == 3 && j % 37 ? 0 : row[j];
            }
            if (round_trip(OTHERS[t], row, 256, back)) {
                n_fitting++;
                for (int j = 0; j < 256; j++)
                    CHECK(isfinite(back[j]));
            }
        }
    CHECK(n_fitting > 500);
}
