/* The table of one instruction set. */
#include "ops.h"

const struct cpu_kernels *K(cpu_kernels)(void)
{
    static const struct cpu_kernels kernels = {
        .isa = ISA_NAME,
        .matrix_create = K(matrix_create),
        .matrix_write = K(matrix_write),
        .matrix_load = K(matrix_load),
        .matrix_read = K(matrix_read),
        .embed = K(embed),
        .linear = K(linear),
        .rms_norm = K(rms_norm),
        .gated = K(gated),
        .add = K(add),
        .select = K(select),
        .rope_table = K(rope_table),
        .rope = K(rope),
        .kv_write = K(kv_write),
        .attention = K(attention),
        .sample = K(sample),
        .qkv = K(qkv),
        .tensor_write = K(tensor_write),
        .tensor_sum = K(tensor_sum),
        .act = K(act),
        .layer_norm = K(layer_norm),
        .scale_logits = K(scale_logits),
        .row_attention = K(row_attention),
        .conv = K(conv),
        .ssm = K(ssm),
        .selective_scan = K(selective_scan),
        .delta = K(delta),
        .route = K(route),
        .experts = K(experts),
        .head_linear = K(head_linear),
        .latent_attention = K(latent_attention),
        .position_scale = K(position_scale),
    };
    return &kernels;
}
