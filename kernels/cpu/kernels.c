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
#define ENTRY(name) .name = K(name),
#define RANK_ENTRY(name) ENTRY(name)
#define OPTION_ENTRY(name) ENTRY(name)
#include "../entries.def"
    };
    return &kernels;
}
