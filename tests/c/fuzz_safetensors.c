#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct tensor_list list = {0};
    struct err err = {0};
    struct file_view file = {.path = "model.safetensors", .bytes = (uint8_t *)(uintptr_t)data, .n_bytes = n, .size_bytes = n};
    enum rc rc = safetensors_read(&list, &file, &err);
    if (rc == RC_OK)
        check_list(&list, &file);
    else
        check_error(rc, &err, &file);
    tensor_list_destroy(&list);
    return 0;
}
