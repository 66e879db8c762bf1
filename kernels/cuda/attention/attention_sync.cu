/* attention_sync.cu: attention that every device of compute capability 8.0 or later can run, apart from attention.cu because it
 * takes as long to compile. */
#include "attention_sync.h"
#include "attention_sync.cuh"
#include "attention_sync_prefill.cuh"

/* Calls f with a value of the type of activations, the size of heads, and whether there are slopes, sinks or spans. */
template <class F> static enum rc visit(const struct cuda *cuda, const struct attention_args *args, F f)
{
    return visit_heads(cuda, args, [&](auto value, auto size) {
        return args->slopes || args->sinks || args->visible_end ? f(value, size, std::true_type())
                                                                : f(value, size, std::false_type());
    });
}

void attend_sync_prefill(const struct cuda *cuda, const struct attention_args *args)
{
    visit(cuda, args, [&](auto value, auto size, auto has_extras) {
        launch_sync_prefill<decltype(value), size.value, has_extras.value>(cuda, args);
        return RC_OK;
    });
}

enum rc attend_sync_decode(const struct cuda *cuda, const struct attention_args *args, uint32_t n_single, struct err *err)
{
    return visit(cuda, args, [&](auto value, auto size, auto has_extras) {
        return launch_sync<decltype(value), size.value, has_extras.value>(cuda, args, n_single, err);
    });
}
