/* attention_bytes.cu: attention over pages of e4m3; attention_bytes.cuh says how. Kernels with slopes and sinks serve calls
 * without them, too: half of the code, for a few registers. */
#include "attention_bytes.cuh"
#include "attention_decode.cuh"
#include "attention_prefill.cuh"

void attend_prefill_bytes(const struct cuda *cuda, const struct attention_args *args)
{
    visit_heads(cuda, args, [&](auto value, auto size) {
        launch_prefill<decltype(value), __nv_fp8_e4m3, size.value, true>(cuda, args);
        return RC_OK;
    });
}

enum rc attend_decode_bytes(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err)
{
    const bool is_wide = args->n_heads / args->kv.n_kv_heads > 8;
    return visit_heads(cuda, args, [&](auto value, auto size) {
        using T = decltype(value);
        return is_wide ? launch_decode<T, __nv_fp8_e4m3, size.value, 2, true>(cuda, args, n_single, err)
                       : launch_decode<T, __nv_fp8_e4m3, size.value, 1, true>(cuda, args, n_single, err);
    });
}
