/* attention_bytes.cuh: attention over pages of bytes (kv.cuh), by the kernels of attention_decode.cuh and
 * attention_prefill.cuh. They widen the values to 16 bits, which is exact, and then compute in the canonical order of
 * attention.cuh. Beside int8 the order has two products more: s is multiplied by its key's scale, and p by its value's before
 * it is rounded, which is to bfloat16. Kernels with slopes and sinks serve calls without them, too: half of the code, for a few
 * registers. The types of pages have a file each, so that these compile at the same time. */
#ifndef LLMPY_CUDA_ATTENTION_BYTES_CUH
#define LLMPY_CUDA_ATTENTION_BYTES_CUH

#include "attention_decode.cuh"
#include "attention_widen.cuh"

/* The sequences with several rows. */
void attend_prefill_e4m3(const struct cuda *cuda, const struct attention_args *args);
void attend_prefill_int8(const struct cuda *cuda, const struct attention_args *args);
/* The n_single sequences with one row. */
enum rc attend_decode_e4m3(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err);
enum rc attend_decode_int8(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err);

template <class C> static void attend_prefill_bytes(const struct cuda *cuda, const struct attention_args *args)
{
    visit_heads(cuda, args, [&](auto value, auto size) {
        using T = decltype(value);
        launch_prefill<T, C, size.value, true>(cuda, args, [&](auto &x, auto &list, uint32_t head) {
            return launch_widen<T, C, size.value>(cuda, args->batch, x, list, head);
        });
        return RC_OK;
    });
}

template <class C>
static enum rc attend_decode_bytes(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single,
                                   struct err *err)
{
    const bool is_wide = args->n_heads / args->kv.n_kv_heads > 8;
    return visit_heads(cuda, args, [&](auto value, auto size) {
        using T = decltype(value);
        if constexpr (size.value <= 128)
            if (!is_wide && n_single > FEW_SEQS)
                return launch_decode<T, C, size.value, 1, true, 2>(cuda, args, n_single, err);
        return is_wide ? launch_decode<T, C, size.value, 2, true>(cuda, args, n_single, err)
                       : launch_decode<T, C, size.value, 1, true>(cuda, args, n_single, err);
    });
}

#endif
