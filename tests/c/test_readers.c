#define _GNU_SOURCE
#include "check.h"

#include "../../csrc/base/file.h"
#include "../../csrc/base/json.h"
#include "../../csrc/base/mem.h"
#include "make_file.h"

#include <unistd.h>

/* What came of one file: the list (to be destroyed) and the first error. */
struct outcome {
    struct tensor_list list;
    struct gguf *gguf;
    struct err err;
    enum rc rc;
};

/* Reads from a block of exactly the file's size, so that ASan sees a step past its end. */
static struct outcome read_bytes(const uint8_t *data, size_t n)
{
    struct outcome result = {0};
    uint8_t *exact = malloc(n ? n : 1);
    memcpy(exact, data, n);
    struct file_view file = {.path = "dir/file.x", .bytes = exact, .n_bytes = n, .size_bytes = n};
    bool is_gguf = n >= 4 && memcmp(exact, "GGUF", 4) == 0;
    result.rc = is_gguf ? gguf_read(&result.list, &file, 1, &result.gguf, &result.err)
                        : safetensors_read(&result.list, &file, &result.err);
    free(exact);
    return result;
}

static void release(struct outcome *outcome)
{
    gguf_destroy(outcome->gguf);
    tensor_list_destroy(&outcome->list);
}

/* The file must be refused with this text, tensor and code; frees the bytes. */
static void refuse_as(struct bytes file, enum rc rc, const char *tensor, const char *text)
{
    struct outcome outcome = read_bytes(file.data, file.n);
    CHECK_EQ(outcome.rc, rc);
    CHECK_EQ(outcome.err.rc, rc);
    CHECK_CONTAINS(outcome.err.message, text);
    CHECK_STR(outcome.err.tensor, tensor);
    if (rc == RC_CHECKPOINT) {
        CHECK_STR(outcome.err.what, "dir/file.x");
        CHECK_CONTAINS(outcome.err.message, "file.x: ");
    }
    CHECK(!outcome.gguf);
    release(&outcome);
    free(file.data);
}

static void refuse(struct bytes file, const char *tensor, const char *text)
{
    refuse_as(file, RC_CHECKPOINT, tensor, text);
}

/* ---- JSON ---- */

static bool skips(const char *text)
{
    struct json json;
    json_begin(&json, text, strlen(text));
    bool good = json_skip(&json) && json_end(&json);
    json_release(&json);
    return good;
}

TEST(json_takes_what_the_grammar_takes)
{
    static const char *const GOOD[] = {
        "{}",
        " [ ] ",
        "0",
        "-0.5e+3",
        "1E9",
        "\"\"",
        "true",
        "[null,false]",
        "{\"a\":{\"b\":[1,2,{}]},\"c\":\"\\u00e9\\ud83d\\ude00\"}",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
        "\"\xc3\xa9\xf0\x9f\x98\x80\"",
    };
    static const char *const BAD[] = {
        "",
        "{",
        "}",
        "[1,]",
        "[,1]",
        "[1 2]",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{a:1}",
        "01",
        "-",
        "1.",
        "1e",
        ".5",
        "+1",
        "nul",
        "\"",
        "\"\\",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\ud800\"",
        "\"\\ud800\\u0041\"",
        "\"\\udc00\"",
        "\"\xff\"",
        "\"\xc0\x80\"",
        "\"\xed\xa0\x80\"",
        "\"\xf4\x90\x80\x80\"",
        "\"\xc3\"",
        "\"\n\"",
        "{} {}",
        "[1]]",
        "'a'",
    };
    for (size_t i = 0; i < sizeof GOOD / sizeof *GOOD; i++)
        if (!skips(GOOD[i]))
            CHECK_FAIL("refused %s", GOOD[i]);
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++)
        if (skips(BAD[i]))
            CHECK_FAIL("took %s", BAD[i]);
}

TEST(json_nesting_is_bounded)
{
    char text[2 * JSON_MAX_DEPTH + 3] = {0};
    memset(text, '[', JSON_MAX_DEPTH);
    memset(text + JSON_MAX_DEPTH, ']', JSON_MAX_DEPTH);
    CHECK(skips(text));
    memset(text, '[', JSON_MAX_DEPTH + 1);
    memset(text + JSON_MAX_DEPTH + 1, ']', JSON_MAX_DEPTH + 1);
    CHECK(!skips(text));
}

TEST(json_values_come_out_decoded)
{
    static const char TEXT[] = "{\"plain\":18446744073709551615,\"\\u0061\\ud83d\\ude00 end\":[\"x\\ty\", 7]}";
    struct json json;
    struct json_string text;
    uint64_t number = 0;
    json_begin(&json, TEXT, sizeof TEXT - 1);
    CHECK(json_open_object(&json) && json_key(&json, &text) && json_string_is(text, "plain") && json_u64(&json, &number));
    CHECK(number == UINT64_MAX);
    CHECK(json_key(&json, &text) && json_string_is(text, "a\xf0\x9f\x98\x80 end"));
    CHECK(json_open_array(&json) && json_element(&json) && json_text(&json, &text) && json_string_is(text, "x\ty"));
    CHECK(json_element(&json) && json_u64(&json, &number) && number == 7 && !json_element(&json));
    CHECK(!json_key(&json, &text) && json_end(&json));
    json_release(&json);
    static const char *const NUMBERS[] = {"18446744073709551616",   "-1", "1.0", "1e3", "007", "\"7\"",
                                          "99999999999999999999999"};
    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; i++) {
        json_begin(&json, NUMBERS[i], strlen(NUMBERS[i]));
        CHECK(!json_u64(&json, &number));
    }
}

/* ---- names ---- */

TEST(names_keep_their_numbers)
{
    struct name_table table = {0};
    char name[32];
    uint32_t number;
    bool was_new;
    CHECK_EQ(name_table_find(&table, "x", 1), NAME_ABSENT);
    for (uint32_t i = 0; i < 5000; i++) {
        int n = snprintf(name, sizeof name, "blk.%u.weight", i * 7919);
        CHECK(name_table_add(&table, name, (size_t)n, &number, &was_new) && was_new);
        CHECK_EQ(number, i);
    }
    for (uint32_t i = 0; i < 5000; i++) {
        int n = snprintf(name, sizeof name, "blk.%u.weight", i * 7919);
        CHECK_EQ(name_table_find(&table, name, (size_t)n), i);
        CHECK_STR(table.names[i], name);
        CHECK_EQ(name_table_find(&table, name, (size_t)n - 1), NAME_ABSENT);
    }
    CHECK(name_table_add(&table, "blk.0.weight", 12, &number, &was_new) && !was_new && number == 0);
    name_table_destroy(&table);
}

/* ---- safetensors ---- */

TEST(safetensors_reads_a_good_file)
{
    struct bytes file = safetensors_file(GOOD_HEADER, 17);
    struct outcome outcome = read_bytes(file.data, file.n);
    CHECK_EQ(outcome.rc, RC_OK);
    REQUIRE(outcome.list.n == 3);
    const struct checkpoint_tensor *tensor = outcome.list.tensors;
    CHECK_STR(tensor[0].name, "a");
    CHECK_EQ(tensor[0].dtype, DTYPE_F32);
    CHECK(tensor[0].n_dims == 2 && tensor[0].shape[0] == 2 && tensor[0].shape[1] == 2 && tensor[0].size_bytes == 16);
    CHECK(tensor[1].dtype == DTYPE_I64 && tensor[1].size_bytes == 0);
    CHECK_STR(tensor[2].name, "b\n");
    CHECK_STR(tensor[2].type, "F8_E4M3");
    CHECK_EQ(tensor[2].dtype, DTYPE_NONE);
    release(&outcome);
    free(file.data);
}

#define ENTRY(dtype, shape, offsets) "{\"t\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"

TEST(safetensors_refuses_wrong_headers)
{
    refuse((struct bytes){calloc(1, 7), 7, 7}, "", "size: wanted at least 8 bytes, have 7");
    struct bytes huge = {0};
    put_u64(&huge, UINT64_MAX);
    put_zeros(&huge, 100);
    refuse(huge, "", "header length: wanted at most 100 bytes, have 18446744073709551615");
    refuse(safetensors_file("[]", 0), "", "at byte 0: wanted an object");
    refuse(safetensors_file("{} x", 0), "", "at byte 3: wanted the end");
    refuse(safetensors_file("{}", 1), "", "size: wanted 10 bytes, have 11");
    refuse(safetensors_file("{\"__metadata__\":{\"a\":1}}", 0), "", "wanted a string");
    refuse(safetensors_file("{\"t\":3}", 0), "t", "wanted an object");
    refuse(safetensors_file("{\"a\\u0000b\":{}}", 0), "a?b", "wanted valid UTF-8 without NUL");
    refuse(safetensors_file("{\"\xff\":{}}", 0), "", "wanted valid UTF-8");
    refuse(safetensors_file("{\"t\":{\"shape\":[],\"data_offsets\":[0,4]}}", 4), "t", "dtype: wanted in the header, have none");
    refuse(safetensors_file("{\"t\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4), "t", "shape: wanted in the header");
    refuse(safetensors_file("{\"t\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4), "t", "data_offsets: wanted in the header");
    refuse(safetensors_file("{\"t\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 4), "t", "dtype: wanted once, have it twice");
}

TEST(safetensors_refuses_wrong_tensors)
{
    refuse(safetensors_file(ENTRY("F32", "[2]", "[0,4]"), 4), "t", "data: wanted 8 bytes for F32 [2], have 4");
    refuse(safetensors_file(ENTRY("F32", "[1]", "[0,4]"), 3), "t", "data_offsets: wanted begin <= end <= 3 bytes");
    refuse(safetensors_file(ENTRY("F32", "[1]", "[4,0]"), 4), "t", "have [4, 0]");
    refuse(safetensors_file(ENTRY("F32", "[1]", "[0]"), 4), "t", "another number of them");
    refuse(safetensors_file(ENTRY("F32", "[1]", "[0,4,4]"), 4), "t", "another number of them");
    refuse(safetensors_file(ENTRY("F32", "[1]", "[0,18446744073709551616]"), 4), "t", "an integer below 2^64");
    refuse(safetensors_file(ENTRY("F32", "[-1]", "[0,4]"), 4), "t", "a non-negative integer");
    refuse(safetensors_file(ENTRY("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4), "t", "at most 8 dimensions");
    refuse(safetensors_file(ENTRY("F32", "[4294967296,4294967296]", "[0,0]"), 0), "t", "size below 2^64 bytes");
    refuse(safetensors_file(ENTRY("F32", "[0,4294967296,4294967296,0]", "[0,0]"), 0), "t", "size below 2^64 bytes");
    refuse(safetensors_file(ENTRY("F32", "[1]", "[4,8]"), 8), "t", "without a hole");
    refuse(safetensors_file("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                            "\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                            2),
           "t", "name: wanted once, have it twice");
    refuse(safetensors_file("{\"s\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                            "\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
                            6),
           "t", "wanted at byte");
}

/* ---- GGUF ---- */

TEST(gguf_reads_a_good_file)
{
    struct bytes file = good_gguf();
    struct outcome outcome = read_bytes(file.data, file.n);
    CHECK_STR(outcome.err.message, "");
    REQUIRE(outcome.rc == RC_OK && outcome.list.n == 2);
    const struct checkpoint_tensor *tensor = outcome.list.tensors;
    CHECK(tensor[0].dtype == DTYPE_Q4_1 && tensor[0].shape[0] == 2 && tensor[0].shape[1] == 32 && tensor[0].size_bytes == 40);
    CHECK_STR(tensor[1].type, "F32");
    CHECK_EQ(tensor[1].offset - tensor[0].offset, 64);
    CHECK_EQ(gguf_n_keys(outcome.gguf), 8);
    CHECK_STR(gguf_key(outcome.gguf, 3), "yes");
    struct gguf_value value;
    CHECK(gguf_find(outcome.gguf, "tokens", &value) && value.type == GGUF_ARRAY);
    CHECK(!gguf_find(outcome.gguf, "token", &value));
    release(&outcome);
    free(file.data);
}

TEST(gguf_refuses_other_versions_and_parts)
{
    struct bytes file = gguf_begin(0, 0);
    file.data[4] = 1;
    refuse_as(file, RC_UNSUPPORTED, "", "wanted version 2 or 3, have version 1");
    file = gguf_begin(0, 0);
    memcpy(file.data + 4, "\0\0\0\3", 4);
    refuse_as(file, RC_UNSUPPORTED, "", "big-endian");
    file = gguf_begin(0, 1);
    put_key(&file, "split.count", GGUF_U16);
    put(&file, "\2\0", 2);
    refuse_as(file, RC_CHECKPOINT, "", "wanted part 1 of 1, have part 1 of 2");
}

TEST(gguf_refuses_wrong_key_values)
{
    refuse(gguf_begin(UINT64_MAX, 0), "", "wanted counts that fit in 0 bytes");
    refuse(gguf_begin(0, UINT64_MAX), "", "18446744073709551615 keys");
    struct bytes file = gguf_begin(0, 1);
    put_key(&file, "tokens", GGUF_ARRAY);
    put_u32(&file, GGUF_F64);
    put_u64(&file, UINT64_MAX / 2);
    refuse(file, "", "tokens: wanted 18446744073709551615 more bytes, have 0");
    file = gguf_begin(0, 1);
    put_key(&file, "tokens", GGUF_ARRAY);
    put_u32(&file, GGUF_STRING);
    put_u64(&file, UINT64_MAX);
    refuse(file, "", "tokens: wanted 8 more bytes, have 0");
    file = gguf_begin(0, 1);
    put_key(&file, "key", 13);
    put_u64(&file, 0);
    refuse(file, "", "key: wanted a type below 13, have 13");
    file = gguf_begin(0, 1);
    put_key(&file, "flag", GGUF_BOOL);
    put(&file, "\2", 1);
    refuse(file, "", "flag: wanted a bool of 0 or 1, have 2");
    file = gguf_begin(0, 1);
    put_key(&file, "deep", GGUF_ARRAY);
    for (int i = 0; i < 6; i++) {
        put_u32(&file, GGUF_ARRAY);
        put_u64(&file, 1);
    }
    refuse(file, "", "deep: wanted at most 4 nested arrays");
    file = gguf_begin(0, 1);
    put_key(&file, "bad\xffkey", GGUF_U8);
    put(&file, "", 1);
    refuse(file, "", "key bad?key: wanted valid UTF-8");
    file = gguf_begin(0, 2);
    for (int i = 0; i < 2; i++) {
        put_key(&file, "twin", GGUF_U8);
        put(&file, "", 1);
    }
    refuse(file, "", "key twin: wanted once, have it twice");
}

static struct bytes with_alignment(uint32_t type, uint32_t alignment)
{
    struct bytes file = gguf_begin(0, 1);
    put_key(&file, "general.alignment", type);
    put_u32(&file, alignment);
    return file;
}

/* One tensor and n_data_bytes behind the padding. */
static struct bytes with_tensor(uint64_t columns, uint64_t rows, uint32_t type, uint64_t offset, size_t n_data_bytes)
{
    struct bytes file = gguf_begin(1, 0);
    put_tensor(&file, "t", columns, rows, type, offset);
    pad_to(&file, 32);
    put_zeros(&file, n_data_bytes);
    return file;
}

TEST(gguf_refuses_wrong_tensors)
{
    refuse(with_alignment(GGUF_U32, 0), "", "general.alignment: wanted a power of two, have 0");
    refuse(with_alignment(GGUF_U32, 48), "", "wanted a power of two, have 48");
    refuse(with_alignment(GGUF_I32, 32), "", "general.alignment: wanted type 4, have type 5");
    refuse(with_tensor(32, 2, DTYPE_Q4_1, 0, 39), "t", "data: wanted 40 bytes for Q4_1 [2, 32] at offset 0, have 39 in all");
    refuse(with_tensor(4, 1, DTYPE_F32, 32, 40), "t", "at offset 32, have 40 in all");
    refuse(with_tensor(4, 1, DTYPE_F32, 96, 64), "t", "at offset 96");
    refuse(with_tensor(4, 1, DTYPE_F32, UINT64_MAX - 31, 64), "t", "at offset 18446744073709551584");
    refuse(with_tensor(4, 1, DTYPE_F32, 4, 64), "t", "offset: wanted a multiple of 32, have 4");
    refuse(with_tensor(33, 1, DTYPE_Q8_0, 0, 64), "t", "wanted rows of whole blocks of 32");
    refuse(with_tensor(1ull << 33, 1ull << 33, DTYPE_F32, 0, 64), "t", "size below 2^64");
    struct bytes file = gguf_begin(1, 0);
    put_string(&file, "t");
    put_u32(&file, 5);
    put_zeros(&file, 64);
    refuse(file, "t", "at most 4 dimensions, have 5");
    file = gguf_begin(2, 0);
    put_tensor(&file, "s", 16, 1, DTYPE_F32, 0);
    put_tensor(&file, "t", 4, 1, DTYPE_F32, 32);
    pad_to(&file, 32);
    put_zeros(&file, 96);
    refuse(file, "t", "behind s, have byte");
    file = gguf_begin(2, 0);
    put_tensor(&file, "t", 4, 1, DTYPE_F32, 0);
    put_tensor(&file, "t", 4, 1, DTYPE_F32, 32);
    refuse(file, "t", "name: wanted once, have it twice");
    file = gguf_begin(1, 0);
    put_tensor(&file, "t", 4, 0, DTYPE_F32, 0);
    refuse(file, "t", "data: wanted to start at byte");
}

TEST(gguf_opens_with_types_that_we_do_not_read)
{
    static const struct {
        uint32_t type;
        const char *name;
    } CASES[] = {{40, "NVFP4"}, {41, "Q1_0"}, {64, "type 64"}, {UINT32_MAX, "type 4294967295"}};
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        struct bytes file = with_tensor(4, 1, CASES[i].type, 0, 8);
        struct outcome outcome = read_bytes(file.data, file.n);
        CHECK_EQ(outcome.rc, RC_OK);
        CHECK_EQ(outcome.list.tensors[0].dtype, DTYPE_NONE);
        CHECK_STR(outcome.list.tensors[0].type, CASES[i].name);
        release(&outcome);
        free(file.data);
    }
}

/* ---- both ---- */

static struct bytes good_file(int kind)
{
    return kind ? good_gguf() : safetensors_file(GOOD_HEADER, 17);
}

TEST(every_truncation_is_refused)
{
    for (int kind = 0; kind < 2; kind++) {
        struct bytes file = good_file(kind);
        for (size_t n = 0; n < file.n; n++) {
            struct outcome outcome = read_bytes(file.data, n);
            if (outcome.rc != RC_CHECKPOINT)
                CHECK_FAIL("kind %d cut to %zu bytes: rc %d", kind, n, (int)outcome.rc);
            release(&outcome);
        }
        free(file.data);
    }
}

TEST(no_changed_byte_is_fatal)
{
    static const uint8_t MASKS[] = {1, 2, 4, 8, 16, 32, 64, 128, 255};
    for (int kind = 0; kind < 2; kind++) {
        struct bytes file = good_file(kind);
        for (size_t i = 0; i < file.n; i++)
            for (size_t m = 0; m < sizeof MASKS; m++) {
                file.data[i] ^= MASKS[m];
                struct outcome outcome = read_bytes(file.data, file.n);
                CHECK((outcome.rc == RC_OK) == (outcome.err.message[0] == 0));
                release(&outcome);
                file.data[i] ^= MASKS[m];
            }
        free(file.data);
    }
}

TEST(every_failed_allocation_is_an_error)
{
    for (int kind = 0; kind < 2; kind++) {
        struct bytes file = good_file(kind);
        enum rc rc = RC_MEMORY;
        int n_failed = -1;
        for (int after = 0; rc == RC_MEMORY && after < 1000; after++, n_failed++) {
            mem_fail_after(after);
            struct outcome outcome = read_bytes(file.data, file.n);
            mem_fail_after(-1);
            rc = outcome.rc;
            release(&outcome);
        }
        CHECK_EQ(rc, RC_OK);
        CHECK(n_failed >= 5);
        free(file.data);
    }
}

static const char *write_file(const char *path, struct bytes file)
{
    FILE *out = fopen(path, "wb");
    if (out && file.n)
        fwrite(file.data, 1, file.n, out);
    if (out)
        fclose(out);
    free(file.data);
    return path;
}

TEST(checkpoint_opens_files)
{
    struct err err;
    struct checkpoint *checkpoint;
    const struct checkpoint_tensor *tensor;
    const char *one = write_file("one.safetensors", safetensors_file(GOOD_HEADER, 17));
    const char *two = write_file("two.safetensors", safetensors_file(ENTRY("F16", "[3]", "[0,6]"), 6));
    const char *gguf = write_file("three.gguf", good_gguf());
    REQUIRE_OK(checkpoint_open((const char *[]){one, two}, 2, &checkpoint, &err));
    CHECK_EQ(checkpoint_n_tensors(checkpoint), 4);
    CHECK(!checkpoint_is_gguf(checkpoint) && !checkpoint_find(checkpoint, "c"));
    tensor = checkpoint_find(checkpoint, "t");
    CHECK(tensor && tensor->file == 1);
    CHECK_STR(checkpoint_path(checkpoint, 1), two);
    CHECK_OK(checkpoint_need(checkpoint, "a", &tensor, &err));
    CHECK_OK(checkpoint_has(checkpoint, tensor, &err));
    uint8_t data[16] = {1, [15] = 1};
    CHECK_OK(checkpoint_read(checkpoint, tensor, 0, 16, data, &err));
    CHECK_EQ(data[0] + data[15], 0);
    CHECK_EQ(checkpoint_need(checkpoint, "c", &tensor, &err), RC_CHECKPOINT);
    CHECK_STR(err.tensor, "c");
    CHECK_EQ(checkpoint_need(checkpoint, "b\n", &tensor, &err), RC_UNSUPPORTED);
    CHECK_CONTAINS(err.message, "have F8_E4M3");
    checkpoint_close(checkpoint);
    REQUIRE_OK(checkpoint_open(&gguf, 1, &checkpoint, &err));
    CHECK(checkpoint_is_gguf(checkpoint) && checkpoint_gguf(checkpoint));
    checkpoint_close(checkpoint);
    CHECK_EQ(checkpoint_open((const char *[]){one, one}, 2, &checkpoint, &err), RC_CHECKPOINT);
    CHECK_CONTAINS(err.message, "name: wanted in one file, have it in file 1 too");
    CHECK_EQ(checkpoint_open((const char *[]){one, gguf}, 2, &checkpoint, &err), RC_CHECKPOINT);
    CHECK_CONTAINS(err.message, "wanted files of one format");
    CHECK_EQ(checkpoint_open((const char *[]){gguf, one}, 2, &checkpoint, &err), RC_CHECKPOINT);
    CHECK_EQ(checkpoint_open(NULL, 0, &checkpoint, &err), RC_CHECKPOINT);
    CHECK_EQ(checkpoint_open((const char *[]){"absent"}, 1, &checkpoint, &err), RC_IO);
    CHECK_STR(err.what, "absent");
    CHECK_EQ(checkpoint_open((const char *[]){"."}, 1, &checkpoint, &err), RC_IO);
    CHECK_EQ(checkpoint_open((const char *[]){write_file("empty", (struct bytes){0})}, 1, &checkpoint, &err), RC_CHECKPOINT);
    CHECK(!checkpoint);
    checkpoint_close(NULL);
}

/* ---- bounds themselves ---- */

static struct bytes nested_arrays(uint32_t n)
{
    struct bytes file = gguf_begin(0, 1);
    put_key(&file, "deep", GGUF_ARRAY);
    for (uint32_t i = 1; i < n; i++) {
        put_u32(&file, GGUF_ARRAY);
        put_u64(&file, 1);
    }
    put_u32(&file, GGUF_U8);
    put_u64(&file, 1);
    put(&file, "x", 1);
    return file;
}

TEST(gguf_takes_four_nested_arrays_and_no_fifth)
{
    struct bytes file = nested_arrays(4);
    struct outcome outcome = read_bytes(file.data, file.n);
    CHECK_EQ(outcome.rc, RC_OK);
    release(&outcome);
    free(file.data);
    refuse(nested_arrays(5), "", "deep: wanted at most 4 nested arrays");
}

TEST(utf8_has_one_form_for_a_character)
{
    static const char *const SHORTEST[] = {"\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80",
                                           "\xf4\x8f\xbf\xbf", "\xed\x9f\xbf", "\xee\x80\x80"};
    static const char *const LONGER[] = {"\xc1\xbf", "\xc0\x80", "\xe0\x9f\xbf", "\xe0\x80\x80", "\xf0\x8f\xbf\xbf",
                                         "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xed\xa0\x80", "\xed\xbf\xbf"};
    for (size_t i = 0; i < sizeof SHORTEST / sizeof *SHORTEST; i++)
        CHECK(utf8_valid(SHORTEST[i], strlen(SHORTEST[i])));
    for (size_t i = 0; i < sizeof LONGER / sizeof *LONGER; i++)
        CHECK(!utf8_valid(LONGER[i], strlen(LONGER[i])));
}

/* A file of n float32 numbers 0, 1, ... in one tensor [n / 4, 4], behind a header. */
static const char *write_numbers(const char *path, uint32_t n)
{
    char header[160];
    snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"F32\",\"shape\":[%u,4],\"data_offsets\":[0,%u]}}", n / 4, n * 4);
    struct bytes file = {0};
    put_string(&file, header);
    for (uint32_t i = 0; i < n; i++) {
        float number = (float)i;
        put(&file, &number, sizeof number);
    }
    return write_file(path, file);
}

TEST(checkpoint_reads_items_that_lie_apart)
{
    enum { N = 600000 }; /* more than is read at once */
    struct err err;
    struct checkpoint *checkpoint;
    const struct checkpoint_tensor *tensor;
    const char *path = write_numbers("numbers.safetensors", N);
    static const uint64_t STEPS[] = {1, 2, 3, 7, 5000};
    static float row[4 * (N / 4)];
    REQUIRE_OK(checkpoint_open(&path, 1, &checkpoint, &err));
    REQUIRE_OK(checkpoint_need(checkpoint, "t", &tensor, &err));
    for (uint32_t i = 0; i < 5; i++) {
        uint64_t n = (N / 4 - 1 - i) / STEPS[i] + 1;
        REQUIRE_OK(checkpoint_rows(checkpoint, tensor, i, STEPS[i], n, row, &err));
        for (uint64_t r = 0; r < n; r++)
            for (uint32_t c = 0; c < 4; c++)
                CHECK(row[r * 4 + c] == (float)((i + r * STEPS[i]) * 4 + c));
        REQUIRE_OK(checkpoint_items(checkpoint, tensor, sizeof(float), i, STEPS[i], n, row, &err));
        for (uint64_t r = 0; r < n; r++)
            CHECK(row[r] == (float)(i + r * STEPS[i]));
    }
    checkpoint_close(checkpoint);
}

/* Others may cut a file off at any time. That is an error, which names the file, what was wanted and what there is. */
TEST(a_file_that_is_cut_off_is_an_error)
{
    struct err err;
    struct checkpoint *checkpoint;
    const struct checkpoint_tensor *tensor;
    const char *path = write_numbers("cut.safetensors", 40000);
    static float row[40000];
    REQUIRE_OK(checkpoint_open(&path, 1, &checkpoint, &err));
    REQUIRE_OK(checkpoint_need(checkpoint, "t", &tensor, &err));
    CHECK_OK(truncate(path, 4096));
    CHECK_EQ(checkpoint_has(checkpoint, tensor, &err), RC_CHECKPOINT);
    CHECK_CONTAINS(err.message, "cut.safetensors: tensor t: data: wanted a file of ");
    CHECK_EQ(checkpoint_rows(checkpoint, tensor, 0, 1, 10000, row, &err), RC_CHECKPOINT);
    CHECK_CONTAINS(err.message, "bytes, have 4096; it was cut off while it was read");
    CHECK_STR(err.what, path);
    CHECK_STR(err.tensor, "t");
    CHECK_EQ(checkpoint_rows(checkpoint, tensor, 0, 3, 3000, row, &err), RC_CHECKPOINT);
    CHECK_EQ(checkpoint_items(checkpoint, tensor, 4, 39000, 1, 100, row, &err), RC_CHECKPOINT);
    CHECK_OK(checkpoint_read(checkpoint, tensor, 0, 1000, row, &err)); /* what is still there */
    checkpoint_close(checkpoint);
    write_numbers(path, 40000);
    REQUIRE_OK(checkpoint_open(&path, 1, &checkpoint, &err));
    CHECK_OK(truncate(path, 0));
    CHECK_OK(checkpoint_need(checkpoint, "t", &tensor, &err));
    CHECK_EQ(checkpoint_read(checkpoint, tensor, 0, 4, row, &err), RC_CHECKPOINT);
    checkpoint_close(checkpoint);
    /* A header that goes while it is read: the size that it had is what its lengths were checked against. */
    struct file_view view = {.path = path, .size_bytes = 1 << 20};
    uint64_t size_bytes;
    REQUIRE_OK(file_open(path, &view.descriptor, &size_bytes));
    CHECK_EQ(file_view_need(&view, 8, &err), RC_CHECKPOINT);
    CHECK_CONTAINS(err.message, "cut.safetensors: header: wanted 8 bytes, have 0; the file was cut off while it was read");
    file_close(view.descriptor);
    mem_free(view.bytes);
}
