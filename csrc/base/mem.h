/* mem.h: the one door to the host's heap for csrc and kernels/cpu.
 * It counts allocations (law 4 is a test on that counter) and can be told to fail one of them (fault-injection tests).
 * All functions may be called from any thread. Memory is 64-byte aligned; mem_free(NULL) is fine. */
#ifndef LLMPY_MEM_H
#define LLMPY_MEM_H

#include <stddef.h>
#include <stdint.h>

void *mem_alloc(size_t size_bytes);                     /* uninitialised; NULL when memory is out; size 0 gives a valid block */
void *mem_calloc(size_t count, size_t size_bytes);      /* zeroed, overflow-checked */
void *mem_resize(void *block, size_t old_bytes, size_t new_bytes); /* keeps the contents; NULL leaves block as it was */
void mem_free(void *block);
void *mem_map(size_t size_bytes); /* zeroed pages, 2 MiB aligned, huge pages where the system gives them */
void mem_unmap(void *block, size_t size_bytes);
/* Takes a mem_map's pages away, to the system with what they hold or (keeps) only out of reach; touching them is a fault until
 * mem_show has brought them, or zeroed ones, back. mem_show is 0, or -1 when memory is out. */
void mem_hide(void *block, size_t size_bytes, int keeps);
int mem_show(void *block, size_t size_bytes);

uint64_t mem_count(void);                               /* allocations made so far by this process */
uint64_t mem_count_own(void);                           /* those of the calling thread */
uint64_t mem_n_held(void);                              /* allocations that have not been freed; exact while memory lasts */
void mem_fail_after(int64_t n_allocations);             /* the n-th next allocation (0 = the next one) fails; negative = none */

#endif
