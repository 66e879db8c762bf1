/* ops.h: the operations that are compiled for every instruction set, one file a family (embed.c, linear.c, norm.c, ...).
 * kernels.c puts them into the table of the instruction set. One thread at a time calls an operation, and the operation
 * divides its work over the pool. */
#ifndef LLMPY_CPU_OPS_H
#define LLMPY_CPU_OPS_H

#include "cpu.h"

#define ISA_QUOTE2(isa) #isa
#define ISA_QUOTE(isa) ISA_QUOTE2(isa)
#ifdef __aarch64__
#define ISA_NAME "neon" /* the kernels for AVX2, with the vectors of neon.h */
#else
#define ISA_NAME ISA_QUOTE(ISA)
#endif

enum rc K(matrix_create)(struct cpu *cpu, const struct matrix_desc *desc, struct matrix **matrix, struct err *err);
enum rc K(matrix_write)(struct cpu *cpu, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                        const void *rows, struct err *err);
enum rc K(matrix_load)(struct cpu *cpu, struct matrix *matrix, uint32_t part, uint32_t first_row, uint32_t n_rows,
                       const struct row_source *source, struct err *err);
enum rc K(matrix_read)(struct cpu *cpu, const struct matrix *matrix, uint32_t first_row, uint32_t n_rows, float *rows,
                       struct err *err);
/* y += scale * B (A x) for one row of x [n_cols]. t: room for the rank's values. */
void K(lora_row)(const struct lora_part *part, const char *slot, const float *x, uint32_t n_cols, float *t, float *y);
#define ENTRY(name) enum rc K(name)(struct cpu *cpu, const struct name##_args *args, struct err *err);
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#include "../entries.def"

#endif
