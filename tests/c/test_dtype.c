#include "check.h"

#include "../../csrc/base/dtype.h"

TEST(names_and_numbers_agree)
{
    int n = 0;
    for (uint32_t dtype = 0; dtype < 300; dtype++) {
        const struct dtype_info *info = dtype_info(dtype);
        if (!info)
            continue;
        n++;
        CHECK_EQ(dtype_from_name(info->name), dtype);
        CHECK(info->block_values > 0 && info->block_bytes > 0);
    }
    CHECK_EQ(n, 40);
    CHECK_EQ(dtype_from_name("float8"), DTYPE_NONE);
    CHECK(!dtype_info(DTYPE_NONE));
}

TEST(every_half_survives_the_way_through_float)
{
    for (uint32_t bits = 0; bits < 65536; bits++) {
        uint16_t half = (uint16_t)bits, back;
        float value;
        bool nan = (bits & 0x7fff) > 0x7c00;
        CHECK(dtype_to_float(DTYPE_F16, &half, &value, 1) && dtype_from_float(DTYPE_F16, &value, &back, 1));
        CHECK_EQ(back, nan ? bits | 0x200 : bits);
        nan = (bits & 0x7fff) > 0x7f80;
        CHECK(dtype_to_float(DTYPE_BF16, &half, &value, 1) && dtype_from_float(DTYPE_BF16, &value, &back, 1));
        CHECK_EQ(back, nan ? bits | 0x40 : bits);
    }
}

TEST(halves_round_to_nearest_even)
{
    static const struct {
        float value;
        uint16_t f16, bf16;
    } CASES[] = {
        {1.0f + 0x1p-11f, 0x3c00, 0x3f80}, /* a tie goes to the even fraction */
        {1.0f + 0x3p-11f, 0x3c02, 0x3f80}, {1.0f + 0x1p-8f, 0x3c04, 0x3f80},
        {1.0f + 0x3p-8f, 0x3c0c, 0x3f82},  {65519.0f, 0x7bff, 0x4780},
        {65520.0f, 0x7c00, 0x4780},        {-0x1p-24f, 0x8001, 0xb380},
        {0x1p-25f, 0x0000, 0x3300},        {0x3p-25f, 0x0002, 0x33c0},
        {0x1.ffcp-15f, 0x0400, 0x3880}, /* the largest tie below the normals */
        {-0.0f, 0x8000, 0x8000},           {3.4e38f, 0x7c00, 0x7f80},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        uint16_t f16, bf16;
        CHECK(dtype_from_float(DTYPE_F16, &CASES[i].value, &f16, 1) && dtype_from_float(DTYPE_BF16, &CASES[i].value, &bf16, 1));
        CHECK_EQ(f16, CASES[i].f16);
        CHECK_EQ(bf16, CASES[i].bf16);
    }
}

TEST(integers_have_no_float_value)
{
    int64_t source = 7;
    float target = 3;
    for (uint32_t dtype = 0; dtype < 100; dtype++)
        if (dtype == DTYPE_I8 || dtype == DTYPE_I64 || dtype == DTYPE_U8 || dtype == DTYPE_BOOL || !dtype_info(dtype))
            CHECK(!dtype_to_float(dtype, &source, &target, 1));
    CHECK(target == 3);
    CHECK(!dtype_from_float(DTYPE_Q8_0, &target, &source, 1));
}
