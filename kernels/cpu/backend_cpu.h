/* backend_cpu.h: the CPU's backend, which is linked into the core. Any thread. */
#ifndef LLMPY_CPU_BACKEND_CPU_H
#define LLMPY_CPU_BACKEND_CPU_H

#include "../backend.h"

const struct backend *backend_cpu(void);
/* True if isa ("avx2", "avx512" or, on aarch64, "neon") has kernels here and this processor supports it. */
bool cpu_has_isa(const char *isa);
/* Threads of a context that asks for none: the physical cores that this process may use, at most the container's quota. */
uint32_t backend_cpu_threads(void);

#endif
