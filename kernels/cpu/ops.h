/* ops.h: the operations that every instruction set's objects define, one file a family (embed.c, linear.c, norm.c, ...);
 * kernels.c gathers them into the set's table. Called from one thread at a time; each divides its own work over the pool. */
#ifndef LLMPY_CPU_OPS_H
#define LLMPY_CPU_OPS_H

#include "cpu.h"

#define ISA_QUOTE2(isa) #isa
#define ISA_QUOTE(isa) ISA_QUOTE2(isa)
#define ISA_NAME ISA_QUOTE(ISA)

enum rc K(matrix_create)(struct cpu *cpu, const struct matrix_desc *desc, struct matrix **matrix, struct err *err);
enum rc K(matrix_write)(struct cpu *cpu, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                        const void *rows, struct err *err);
enum rc K(matrix_load)(struct cpu *cpu, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                       const struct row_source *source, struct err *err);
enum rc K(matrix_read)(struct cpu *cpu, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows,
                       struct err *err);
enum rc K(embed)(struct cpu *cpu, const struct embed_args *args, struct err *err);
enum rc K(linear)(struct cpu *cpu, const struct linear_args *args, struct err *err);
enum rc K(rms_norm)(struct cpu *cpu, const struct rms_norm_args *args, struct err *err);
enum rc K(gated)(struct cpu *cpu, const struct gated_args *args, struct err *err);
enum rc K(add)(struct cpu *cpu, const struct add_args *args, struct err *err);
enum rc K(select)(struct cpu *cpu, const struct select_args *args, struct err *err);
enum rc K(rope_table)(struct cpu *cpu, const struct rope_table_args *args, struct err *err);
enum rc K(rope)(struct cpu *cpu, const struct rope_args *args, struct err *err);
enum rc K(kv_write)(struct cpu *cpu, const struct kv_write_args *args, struct err *err);
enum rc K(attention)(struct cpu *cpu, const struct attention_args *args, struct err *err);
enum rc K(sample)(struct cpu *cpu, const struct sample_args *args, struct err *err);
enum rc K(qkv)(struct cpu *cpu, const struct qkv_args *args, struct err *err);
enum rc K(tensor_write)(struct cpu *cpu, const struct tensor_write_args *args, struct err *err);
enum rc K(tensor_sum)(struct cpu *cpu, const struct tensor_sum_args *args, struct err *err);
enum rc K(act)(struct cpu *cpu, const struct act_args *args, struct err *err);
enum rc K(layer_norm)(struct cpu *cpu, const struct layer_norm_args *args, struct err *err);
enum rc K(scale_logits)(struct cpu *cpu, const struct scale_logits_args *args, struct err *err);
enum rc K(row_attention)(struct cpu *cpu, const struct row_attention_args *args, struct err *err);
enum rc K(conv)(struct cpu *cpu, const struct conv_args *args, struct err *err);
enum rc K(ssm)(struct cpu *cpu, const struct ssm_args *args, struct err *err);
enum rc K(selective_scan)(struct cpu *cpu, const struct selective_scan_args *args, struct err *err);
enum rc K(delta)(struct cpu *cpu, const struct delta_args *args, struct err *err);
enum rc K(route)(struct cpu *cpu, const struct route_args *args, struct err *err);
enum rc K(experts)(struct cpu *cpu, const struct experts_args *args, struct err *err);
enum rc K(head_linear)(struct cpu *cpu, const struct head_linear_args *args, struct err *err);
enum rc K(latent_attention)(struct cpu *cpu, const struct latent_attention_args *args, struct err *err);
enum rc K(position_scale)(struct cpu *cpu, const struct position_scale_args *args, struct err *err);

#endif
