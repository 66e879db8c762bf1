/* dyn_nccl.h: the part of NCCL that the CUDA backend uses, opened at run time. Own declarations: handles are void pointers,
 * constants stand by value, the configuration is that of version 2.14, which every later one reads. */
#ifndef LLMPY_CUDA_DYN_NCCL_H
#define LLMPY_CUDA_DYN_NCCL_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

enum {
    NCCL_OK = 0, NCCL_IN_PROGRESS = 7,    /* ncclResult_t */
    NCCL_UINT8 = 1, NCCL_UINT32 = 3, NCCL_FLOAT32 = 7, /* ncclDataType_t */
    NCCL_SUM = 0,                         /* ncclRedOp_t */
    NCCL_OLDEST = 21400,                  /* 2.14.0, which introduced communicators that do not block */
};
#define NCCL_MAGIC 0xcafebeefu
#define NCCL_UNDEFINED INT_MIN

struct nccl_id {
    char bytes[128];
};
struct nccl_config {
    size_t size_bytes;
    unsigned int magic, version;
    int is_blocking;
    int cluster_size; /* of version 2.17; fills the structure up */
};

struct nccl_functions {
    int (*version)(int *version);
    int (*unique_id)(struct nccl_id *id);
    int (*init)(void **comm, int n_ranks, struct nccl_id id, int rank, struct nccl_config *config);
    int (*abort_all)(void *comm);
    int (*async_error)(void *comm, int *result);
    const char *(*error_text)(int result);
    const char *(*last_error)(void *comm);
    int (*broadcast)(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream);
    int (*all_reduce)(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream);
};

/* Where the functions go, in the order above. */
static const char *const NCCL_NAMES[] = {
    "ncclGetVersion",     "ncclGetUniqueId",  "ncclCommInitRankConfig", "ncclCommAbort", "ncclCommGetAsyncError",
    "ncclGetErrorString", "ncclGetLastError", "ncclBroadcast",          "ncclAllReduce",
};

#endif
