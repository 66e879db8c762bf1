/* attention_int8.cu: attention over pages of int8; attention_bytes.cuh says how. */
#include "attention_bytes.cuh"

void attend_prefill_int8(const struct cuda *cuda, const struct attention_args *args)
{
    attend_prefill_bytes<int8_t>(cuda, args);
}

enum rc attend_decode_int8(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err)
{
    return attend_decode_bytes<int8_t>(cuda, args, n_single, err);
}
