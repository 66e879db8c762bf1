/* make_file.h: writes small safetensors and GGUF files in memory, right or wrong, for the tests of the readers and as the seeds
 * of the fuzzers. */
#ifndef LLMPY_MAKE_FILE_H
#define LLMPY_MAKE_FILE_H

#include "../../csrc/program/gguf.h"
#include "../../csrc/program/safetensors.h"

#include <stdlib.h>
#include <string.h>

struct bytes {
    uint8_t *data;
    size_t n, capacity;
};

static inline void put(struct bytes *b, const void *data, size_t n)
{
    if (b->n + n > b->capacity) {
        b->capacity = 2 * (b->n + n) + 64;
        b->data = realloc(b->data, b->capacity);
    }
    if (n)
        memcpy(b->data + b->n, data, n);
    b->n += n;
}

static inline void put_u32(struct bytes *b, uint32_t value)
{
    put(b, &value, 4);
}

static inline void put_u64(struct bytes *b, uint64_t value)
{
    put(b, &value, 8);
}

static inline void put_string(struct bytes *b, const char *text)
{
    put_u64(b, strlen(text));
    put(b, text, strlen(text));
}

static inline void put_zeros(struct bytes *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        put(b, "", 1);
}

static inline void pad_to(struct bytes *b, size_t multiple)
{
    put_zeros(b, (multiple - b->n % multiple) % multiple);
}

static inline struct bytes safetensors_file(const char *header, size_t n_data_bytes)
{
    struct bytes b = {0};
    put_string(&b, header);
    put_zeros(&b, n_data_bytes);
    return b;
}

static inline struct bytes gguf_begin(uint64_t n_tensors, uint64_t n_keys)
{
    struct bytes b = {0};
    put(&b, "GGUF", 4);
    put_u32(&b, 3);
    put_u64(&b, n_tensors);
    put_u64(&b, n_keys);
    return b;
}

static inline void put_key(struct bytes *b, const char *key, uint32_t type)
{
    put_string(b, key);
    put_u32(b, type);
}

static inline void put_tensor(struct bytes *b, const char *name, uint64_t columns, uint64_t rows, uint32_t type,
                              uint64_t offset)
{
    put_string(b, name);
    put_u32(b, 2);
    put_u64(b, columns);
    put_u64(b, rows);
    put_u32(b, type);
    put_u64(b, offset);
}

/* One of every kind of value, two tensors. */
static inline struct bytes good_gguf(void)
{
    struct bytes b = gguf_begin(2, 8);
    put_key(&b, "general.architecture", GGUF_STRING);
    put_string(&b, "llama");
    put_key(&b, "general.alignment", GGUF_U32);
    put_u32(&b, 64);
    put_key(&b, "count", GGUF_U64);
    put_u64(&b, 7);
    put_key(&b, "yes", GGUF_BOOL);
    put(&b, "\1", 1);
    put_key(&b, "scale", GGUF_F32);
    put_u32(&b, 0x3f800000);
    put_key(&b, "tokens", GGUF_ARRAY);
    put_u32(&b, GGUF_STRING);
    put_u64(&b, 2);
    put_string(&b, "a");
    put_string(&b, "\xff");
    put_key(&b, "scores", GGUF_ARRAY);
    put_u32(&b, GGUF_I32);
    put_u64(&b, 2);
    put_u64(&b, 5);
    put_key(&b, "nested", GGUF_ARRAY);
    put_u32(&b, GGUF_ARRAY);
    put_u64(&b, 1);
    put_u32(&b, GGUF_BOOL);
    put_u64(&b, 2);
    put(&b, "\1\0", 2);
    put_tensor(&b, "a.weight", 32, 2, DTYPE_Q4_1, 0);
    put_tensor(&b, "b.weight", 3, 1, DTYPE_F32, 64);
    pad_to(&b, 64);
    put_zeros(&b, 64 + 12);
    return b;
}

static const char GOOD_HEADER[] =
    "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
    "\"empty\":{\"dtype\":\"I64\",\"shape\":[0,3],\"data_offsets\":[16,16]},"
    "\"\\u0062\\n\":{\"dtype\":\"F8_E4M3\",\"shape\":[],\"data_offsets\":[16,17]}}  ";

#endif
