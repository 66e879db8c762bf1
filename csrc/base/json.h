/* json.h: a cursor over JSON text, for the headers of untrusted files. It builds no tree and follows the grammar strictly:
 * valid UTF-8, bounded depth, no bytes after the value. After the first error every function returns 0 or false, and
 * json_problem says what was wanted where. The text must outlive the cursor; one thread. */
#ifndef LLMPY_JSON_H
#define LLMPY_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define JSON_MAX_DEPTH 32

struct json {
    const char *begin, *at, *end;
    const char *wanted;       /* NULL until the first error */
    bool out_of_memory;
    uint32_t depth;
    uint8_t started[JSON_MAX_DEPTH]; /* the array or object at this depth has returned an element */
    char *scratch;            /* holds the last string that had escapes */
    size_t scratch_bytes;
};

/* A decoded string: UTF-8, not NUL-terminated; valid until the next string is read. */
struct json_string {
    const char *bytes;
    size_t n;
};

void json_begin(struct json *json, const char *text, size_t n_bytes);
/* True if the whole text was one value and there was no error. */
bool json_end(struct json *json);
void json_release(struct json *json);
/* "at byte N: wanted X", or "out of memory". */
void json_problem(const struct json *json, char *text, size_t n_bytes);

/* Call json_open_object(json), then read one value in each turn of while (json_key(json, &key)). json_key closes the object
 * when it returns false. */
bool json_open_object(struct json *json);
bool json_key(struct json *json, struct json_string *key);
/* Call json_open_array(json), then read one value in each turn of while (json_element(json)). */
bool json_open_array(struct json *json);
bool json_element(struct json *json);

bool json_text(struct json *json, struct json_string *value);
bool json_u64(struct json *json, uint64_t *value); /* a plain non-negative integer */
bool json_skip(struct json *json);                 /* any value */
bool json_string_is(struct json_string string, const char *text);

/* Length of the valid UTF-8 sequence at the start of n bytes; 0 if there is none or n is 0. */
size_t utf8_sequence(const char *bytes, size_t n);
bool utf8_valid(const char *bytes, size_t n);

#endif
