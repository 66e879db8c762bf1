#define _GNU_SOURCE
#include "mem.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ALIGNMENT 64
#define HUGE_PAGE ((size_t)2 << 20)
#define SMALL_PAGE ((size_t)4096)

static atomic_uint_least64_t allocations, releases;
static _Thread_local uint64_t own_allocations;
static atomic_int_least64_t fail_after = -1;

static int must_fail(void)
{
    atomic_fetch_add(&allocations, 1);
    own_allocations++;
    if (atomic_load(&fail_after) < 0 || atomic_fetch_sub(&fail_after, 1) != 0)
        return 0;
    atomic_fetch_add(&releases, 1);
    return 1;
}

void *mem_alloc(size_t size_bytes)
{
    void *block;
    if (must_fail() || posix_memalign(&block, ALIGNMENT, size_bytes ? size_bytes : 1))
        return NULL;
    return block;
}

void *mem_calloc(size_t count, size_t size_bytes)
{
    size_t total;
    if (__builtin_mul_overflow(count, size_bytes, &total))
        return NULL;
    void *block = mem_alloc(total);
    return block ? memset(block, 0, total) : NULL;
}

void *mem_resize(void *block, size_t old_bytes, size_t new_bytes)
{
    void *grown = mem_alloc(new_bytes);
    if (!grown)
        return NULL;
    if (block)
        memcpy(grown, block, old_bytes < new_bytes ? old_bytes : new_bytes);
    mem_free(block);
    return grown;
}

void mem_free(void *block)
{
    if (block)
        atomic_fetch_add(&releases, 1);
    free(block);
}

static size_t mapped_bytes(size_t size_bytes)
{
    return (size_bytes + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
}

void *mem_map(size_t size_bytes)
{
    size_t wanted = mapped_bytes(size_bytes);
    if (must_fail() || wanted < size_bytes)
        return NULL;
    char *raw = mmap(NULL, wanted + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    char *block = (char *)(((uintptr_t)raw + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    if (block > raw)
        munmap(raw, (size_t)(block - raw));
    if (raw + HUGE_PAGE > block)
        munmap(block + wanted, (size_t)(raw + HUGE_PAGE - block));
    madvise(block, wanted, MADV_HUGEPAGE);
    return block;
}

void mem_unmap(void *block, size_t size_bytes)
{
    if (!block)
        return;
    atomic_fetch_add(&releases, 1);
    munmap(block, mapped_bytes(size_bytes));
}

void mem_drop(void *piece, size_t size_bytes)
{
    uintptr_t first = ((uintptr_t)piece + SMALL_PAGE - 1) & ~(uintptr_t)(SMALL_PAGE - 1);
    uintptr_t end = ((uintptr_t)piece + size_bytes) & ~(uintptr_t)(SMALL_PAGE - 1);
    if (first < end)
        madvise((void *)first, end - first, MADV_DONTNEED);
}

void mem_hide(void *block, size_t size_bytes, int keeps)
{
    if (!keeps)
        madvise(block, mapped_bytes(size_bytes), MADV_DONTNEED);
    mprotect(block, mapped_bytes(size_bytes), PROT_NONE);
}

int mem_show(void *block, size_t size_bytes)
{
    if (must_fail())
        return -1;
    atomic_fetch_add(&releases, 1); /* must_fail counted it as a new block, but mem_map has counted it before */
    return mprotect(block, mapped_bytes(size_bytes), PROT_READ | PROT_WRITE);
}

uint64_t mem_count(void)
{
    return atomic_load(&allocations);
}

uint64_t mem_count_own(void)
{
    return own_allocations;
}

uint64_t mem_n_held(void)
{
    return atomic_load(&allocations) - atomic_load(&releases);
}

void mem_fail_after(int64_t n_allocations)
{
    atomic_store(&fail_after, n_allocations);
}
