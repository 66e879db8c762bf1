/* gguf.h: reads the header, key-values and tensor infos of a GGUF file, version 2 or 3 (little-endian files of both have the
 * same layout). A model may be split into several files; the first has all key-values of the model. Every length is checked
 * against the size of the file before it is used, so callers may walk the values without checks. Called by checkpoint.c and
 * the fuzzer; py_checkpoint.c turns the key-values into Python objects. */
#ifndef LLMPY_GGUF_H
#define LLMPY_GGUF_H

#include "tensor_list.h"

enum gguf_type {
    GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL,
    GGUF_STRING, /* u64 length, then bytes, which need not be UTF-8 */
    GGUF_ARRAY,  /* u32 type, u64 count, values */
    GGUF_U64, GGUF_I64, GGUF_F64,
    GGUF_TYPE_COUNT
};

/* A validated value. `at` points into the header in memory and may be unaligned. Bools are 0 or 1. */
struct gguf_value {
    uint32_t type;
    const uint8_t *at;
};

struct gguf;

/* Appends the file's tensors to the list. The file is part file->index of n_parts. The values of the result point into
 * file->bytes, so the view must outlive the result. After a failure the list is incomplete and may only be destroyed. */
enum rc gguf_read(struct tensor_list *list, struct file_view *file, uint32_t n_parts, struct gguf **gguf, struct err *err);
/* Checks that all parts together have as many tensors as the first part says. */
enum rc gguf_check_total(const struct gguf *gguf, const struct tensor_list *list, struct err *err);
void gguf_destroy(struct gguf *gguf);
uint32_t gguf_n_keys(const struct gguf *gguf);
const char *gguf_key(const struct gguf *gguf, uint32_t index); /* valid UTF-8 and unique */
struct gguf_value gguf_value(const struct gguf *gguf, uint32_t index);
bool gguf_find(const struct gguf *gguf, const char *key, struct gguf_value *value);

uint32_t gguf_type_bytes(uint32_t type); /* bytes of one value; 0 for strings, arrays and unknown types */
uint32_t gguf_load_u32(const uint8_t *at);
uint64_t gguf_load_u64(const uint8_t *at);

#endif
