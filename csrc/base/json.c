#include "json.h"

#include "mem.h"

#include <stdio.h>
#include <string.h>

size_t utf8_sequence(const char *bytes, size_t n)
{
    const uint8_t *b = (const uint8_t *)bytes;
    if (!n)
        return 0;
    if (b[0] < 0x80)
        return 1;
    size_t length = b[0] >= 0xf0 ? 4 : b[0] >= 0xe0 ? 3 : 2;
    if (b[0] < 0xc2 || b[0] > 0xf4 || length > n)
        return 0;
    for (size_t i = 1; i < length; i++)
        if ((b[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (b[0] == 0xe0 && b[1] < 0xa0) || (b[0] == 0xf0 && b[1] < 0x90);
    bool surrogate = b[0] == 0xed && b[1] > 0x9f, too_large = b[0] == 0xf4 && b[1] > 0x8f;
    return overlong || surrogate || too_large ? 0 : length;
}

bool utf8_valid(const char *bytes, size_t n)
{
    for (size_t i = 0, step; i < n; i += step) {
        step = utf8_sequence(bytes + i, n - i);
        if (!step)
            return false;
    }
    return true;
}

static bool fail(struct json *json, const char *wanted)
{
    if (!json->wanted)
        json->wanted = wanted;
    return false;
}

void json_begin(struct json *json, const char *text, size_t n_bytes)
{
    *json = (struct json){.begin = text, .at = text, .end = text + n_bytes};
}

void json_release(struct json *json)
{
    mem_free(json->scratch);
    json->scratch = NULL;
    json->scratch_bytes = 0;
}

void json_problem(const struct json *json, char *text, size_t n_bytes)
{
    if (json->out_of_memory)
        snprintf(text, n_bytes, "out of memory");
    else
        snprintf(text, n_bytes, "at byte %zu: wanted %s", (size_t)(json->at - json->begin),
                 json->wanted ? json->wanted : "nothing");
}

static void skip_space(struct json *json)
{
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\n' || *json->at == '\r' || *json->at == '\t'))
        json->at++;
}

/* Skips white space, then consumes the character c if it is next. */
static bool take(struct json *json, char c)
{
    skip_space(json);
    if (json->wanted || json->at >= json->end || *json->at != c)
        return false;
    json->at++;
    return true;
}

bool json_end(struct json *json)
{
    skip_space(json);
    if (json->at != json->end)
        fail(json, "the end");
    return !json->wanted;
}

static bool enter(struct json *json, char open, const char *wanted)
{
    if (json->depth == JSON_MAX_DEPTH)
        return fail(json, "less nesting");
    if (!take(json, open))
        return fail(json, wanted);
    json->started[json->depth++] = 0;
    return true;
}

/* True if another member follows; else closes the object or array. */
static bool next_member(struct json *json, char close, const char *wanted)
{
    if (json->wanted)
        return false;
    uint8_t *started = &json->started[json->depth - 1];
    if (take(json, close)) {
        json->depth--;
        return false;
    }
    if (*started && !take(json, ','))
        return fail(json, wanted);
    *started = 1;
    return true;
}

bool json_open_object(struct json *json)
{
    return enter(json, '{', "an object");
}

bool json_key(struct json *json, struct json_string *key)
{
    if (!next_member(json, '}', "',' or '}'") || !json_text(json, key))
        return false;
    return take(json, ':') || fail(json, "':'");
}

bool json_open_array(struct json *json)
{
    return enter(json, '[', "an array");
}

bool json_element(struct json *json)
{
    return next_member(json, ']', "',' or ']'");
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The four digits after "\u". */
static bool hex_unit(struct json *json, uint32_t *unit)
{
    if (json->end - json->at < 4)
        return fail(json, "four hexadecimal digits");
    *unit = 0;
    for (int i = 0; i < 4; i++, json->at++) {
        int digit = hex_digit(*json->at);
        if (digit < 0)
            return fail(json, "four hexadecimal digits");
        *unit = *unit << 4 | (uint32_t)digit;
    }
    return true;
}

static size_t encode_utf8(uint32_t code, char *target)
{
    if (code < 0x80) {
        target[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const uint8_t LEAD[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n - 1; i > 0; i--, code >>= 6)
        target[i] = (char)(0x80 | (code & 63));
    target[0] = (char)(LEAD[n] | code);
    return n;
}

/* Decodes the escape after a backslash. Writes at most 4 bytes and never more than the escape's length. */
static bool decode_escape(struct json *json, char *target, size_t *n)
{
    static const char NAMES[] = "\"\\/bfnrt", VALUES[] = "\"\\/\b\f\n\r\t";
    char c = json->at < json->end ? *json->at : 0;
    const char *found = c ? strchr(NAMES, c) : NULL;
    if (found) {
        json->at++;
        target[(*n)++] = VALUES[found - NAMES];
        return true;
    }
    if (c != 'u')
        return fail(json, "an escape");
    json->at++;
    uint32_t code, low;
    if (!hex_unit(json, &code))
        return false;
    if (code >= 0xd800 && code < 0xdc00) {
        if (json->end - json->at < 2 || json->at[0] != '\\' || json->at[1] != 'u')
            return fail(json, "the second half of a surrogate pair");
        json->at += 2;
        if (!hex_unit(json, &low))
            return false;
        if (low < 0xdc00 || low > 0xdfff)
            return fail(json, "the second half of a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
        return fail(json, "the first half of a surrogate pair");
    }
    *n += encode_utf8(code, target + *n);
    return true;
}

/* Advances to the next quote, backslash or error. */
static bool plain_run(struct json *json)
{
    while (json->at < json->end && *json->at != '"' && *json->at != '\\') {
        if ((uint8_t)*json->at < 0x20)
            return fail(json, "no control character in a string");
        size_t step = utf8_sequence(json->at, (size_t)(json->end - json->at));
        if (!step)
            return fail(json, "valid UTF-8");
        json->at += step;
    }
    return json->at < json->end || fail(json, "a closing quote");
}

static bool reserve_scratch(struct json *json, size_t n_bytes)
{
    if (n_bytes <= json->scratch_bytes)
        return true;
    mem_free(json->scratch);
    json->scratch_bytes = 0;
    json->scratch = mem_alloc(n_bytes);
    if (!json->scratch) {
        json->out_of_memory = true;
        return fail(json, "memory");
    }
    json->scratch_bytes = n_bytes;
    return true;
}

/* The length of the undecoded string that starts at json->at, without checks. */
static size_t raw_length(const struct json *json)
{
    const char *p = json->at;
    while (p < json->end && *p != '"')
        p += *p == '\\' && p + 1 < json->end ? 2 : 1;
    return (size_t)(p - json->at);
}

bool json_text(struct json *json, struct json_string *value)
{
    if (!take(json, '"'))
        return fail(json, "a string");
    const char *begin = json->at;
    if (!plain_run(json))
        return false;
    size_t n = (size_t)(json->at - begin);
    if (*json->at == '"') {
        json->at++;
        *value = (struct json_string){begin, n};
        return true;
    }
    if (!reserve_scratch(json, n + raw_length(json)))
        return false;
    memcpy(json->scratch, begin, n);
    while (*json->at == '\\') {
        json->at++;
        if (!decode_escape(json, json->scratch, &n))
            return false;
        const char *run = json->at;
        if (!plain_run(json))
            return false;
        memcpy(json->scratch + n, run, (size_t)(json->at - run));
        n += (size_t)(json->at - run);
    }
    json->at++;
    *value = (struct json_string){json->scratch, n};
    return true;
}

static bool is_digit(const struct json *json)
{
    return json->at < json->end && *json->at >= '0' && *json->at <= '9';
}

bool json_u64(struct json *json, uint64_t *value)
{
    skip_space(json);
    if (json->wanted || !is_digit(json))
        return fail(json, "a non-negative integer");
    const char *begin = json->at;
    for (*value = 0; is_digit(json); json->at++)
        if (__builtin_mul_overflow(*value, 10, value) || __builtin_add_overflow(*value, (uint64_t)(*json->at - '0'), value))
            return fail(json, "an integer below 2^64");
    if (*begin == '0' && json->at > begin + 1)
        return fail(json, "no leading zero");
    if (json->at < json->end && (*json->at == '.' || *json->at == 'e' || *json->at == 'E'))
        return fail(json, "a non-negative integer");
    return true;
}

static bool skip_digits(struct json *json)
{
    if (!is_digit(json))
        return fail(json, "a digit");
    while (is_digit(json))
        json->at++;
    return true;
}

static bool skip_number(struct json *json)
{
    if (*json->at == '-')
        json->at++;
    if (json->at < json->end && *json->at == '0')
        json->at++;
    else if (!skip_digits(json))
        return false;
    if (json->at < json->end && *json->at == '.') {
        json->at++;
        if (!skip_digits(json))
            return false;
    }
    if (json->at < json->end && (*json->at == 'e' || *json->at == 'E')) {
        json->at++;
        if (json->at < json->end && (*json->at == '+' || *json->at == '-'))
            json->at++;
        return skip_digits(json);
    }
    return true;
}

static bool skip_word(struct json *json)
{
    static const char *const WORDS[] = {"true", "false", "null"};
    for (size_t i = 0; i < sizeof WORDS / sizeof *WORDS; i++) {
        size_t n = strlen(WORDS[i]);
        if ((size_t)(json->end - json->at) >= n && memcmp(json->at, WORDS[i], n) == 0) {
            json->at += n;
            return true;
        }
    }
    return fail(json, "a value");
}

/* The recursion is bounded by JSON_MAX_DEPTH. */
bool json_skip(struct json *json)
{
    struct json_string ignored;
    skip_space(json);
    if (json->wanted || json->at >= json->end)
        return fail(json, "a value");
    char c = *json->at;
    if (c == '"')
        return json_text(json, &ignored);
    if (c == '-' || is_digit(json))
        return skip_number(json);
    if (c == '{')
        for (json_open_object(json); json_key(json, &ignored);)
            json_skip(json);
    else if (c == '[')
        for (json_open_array(json); json_element(json);)
            json_skip(json);
    else
        return skip_word(json);
    return !json->wanted;
}

bool json_string_is(struct json_string string, const char *text)
{
    return string.n == strlen(text) && memcmp(string.bytes, text, string.n) == 0;
}
