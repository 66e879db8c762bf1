#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* Walks a value like py_checkpoint.c, without checks. */
static const uint8_t *walk(uint32_t type, const uint8_t *at)
{
    if (type == GGUF_STRING) {
        uint64_t n = gguf_load_u64(at);
        touch(at + 8, n);
        return at + 8 + n;
    }
    if (type != GGUF_ARRAY) {
        touch(at, gguf_type_bytes(type));
        PROMISED(type != GGUF_BOOL || *at <= 1);
        return at + gguf_type_bytes(type);
    }
    uint32_t inner = gguf_load_u32(at);
    uint64_t n = gguf_load_u64(at + 4);
    at += 12;
    for (uint64_t i = 0; i < n; i++)
        at = walk(inner, at);
    return at;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct tensor_list list = {0};
    struct gguf *gguf = NULL;
    struct err err = {0};
    struct file_view file = {.path = "model.gguf", .bytes = (uint8_t *)(uintptr_t)data, .n_bytes = n, .size_bytes = n};
    enum rc rc = gguf_read(&list, &file, 1, &gguf, &err);
    PROMISED((rc == RC_OK) == (gguf != NULL));
    if (rc == RC_OK) {
        check_list(&list, &file);
        for (uint32_t i = 0; i < gguf_n_keys(gguf); i++) {
            struct gguf_value value = gguf_value(gguf, i);
            PROMISED(walk(value.type, value.at) <= data + n);
        }
    } else {
        check_error(rc, &err, &file);
    }
    gguf_destroy(gguf);
    tensor_list_destroy(&list);
    return 0;
}
