/* mem.h: the only access to the host's heap for csrc and kernels/cpu. It counts allocations, so that tests can check that steps
 * allocate nothing, and can be told to fail one of them (fault-injection tests). All functions may be called from any thread.
 * Memory is 64-byte aligned; mem_free(NULL) is allowed. */
#ifndef LLMPY_MEM_H
#define LLMPY_MEM_H

#include <stddef.h>
#include <stdint.h>

void *mem_alloc(size_t size_bytes);                     /* uninitialised; NULL: out of memory; size 0 gives a valid block */
void *mem_calloc(size_t count, size_t size_bytes);      /* zeroed, overflow-checked */
void *mem_resize(void *block, size_t old_bytes, size_t new_bytes); /* keeps the contents; on NULL block stays valid */
void mem_free(void *block);
void *mem_map(size_t size_bytes); /* zeroed pages, 2 MiB aligned, huge pages if the system has them */
void mem_unmap(void *block, size_t size_bytes);
/* Gives the whole pages in a piece of a mem_map back to the system; they become zero. */
void mem_drop(void *piece, size_t size_bytes);
/* mem_hide makes the pages of a mem_map inaccessible until mem_show. Without `keeps` it returns them to the system and mem_show
 * gives zeroed pages; with `keeps` the contents stay. mem_show returns 0, or -1 if out of memory. */
void mem_hide(void *block, size_t size_bytes, int keeps);
int mem_show(void *block, size_t size_bytes);

uint64_t mem_count(void);                               /* allocations made so far by this process */
uint64_t mem_count_own(void);                           /* allocations made so far by the calling thread */
uint64_t mem_n_held(void);                              /* allocations not freed yet; exact until the system is out of memory */
void mem_fail_after(int64_t n_allocations);             /* the n-th next allocation (0 = the next one) fails; negative = none */

#endif
