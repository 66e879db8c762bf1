/* attention_e4m3.cu: attention over pages of e4m3; attention_bytes.cuh says how. */
#include "attention_bytes.cuh"

void attend_prefill_e4m3(const struct cuda *cuda, const struct attention_args *args)
{
    attend_prefill_bytes<__nv_fp8_e4m3>(cuda, args);
}

enum rc attend_decode_e4m3(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err)
{
    return attend_decode_bytes<__nv_fp8_e4m3>(cuda, args, n_single, err);
}
