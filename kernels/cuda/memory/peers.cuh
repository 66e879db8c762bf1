/* peers.cuh: shared by ipc.cu and comm_nccl.cu. Both may run in a process without an engine, for example a trainer: they
 * retain the device's primary context themselves and load none of the backend's kernels. */
#ifndef LLMPY_CUDA_PEERS_CUH
#define LLMPY_CUDA_PEERS_CUH

#include "../core/driver.cuh"

/* The device's primary context, held until drop. */
struct primary {
    int device;
    CUcontext context; /* NULL: not held */
    enum rc take(const char *name, struct err *err);
    void drop();
};

/* Makes a held context current for one call and gives the caller's back. */
struct primary_scope {
    bool is_pushed;
    explicit primary_scope(const struct primary &primary);
    ~primary_scope();
};

enum rc nccl_group_id(const char *nccl, uint8_t *id, struct err *err);
enum rc nccl_group_open(const struct group_options *options, struct process_group **group, struct err *err);
enum rc nccl_group_settle(struct process_group *group, double seconds, bool *is_done, struct err *err);
enum rc nccl_group_buffer(struct process_group *group, uint32_t slot, size_t size_bytes, void **memory, struct err *err);
enum rc nccl_group_greet(struct process_group *group, struct err *err);
enum rc nccl_group_broadcast(struct process_group *group, uint32_t slot, void *memory, size_t size_bytes, struct err *err);
enum rc nccl_group_wait(struct process_group *group, uint32_t slot, double seconds, bool *is_done, struct err *err);
enum rc nccl_group_copy(struct process_group *group, uint32_t slot, const void *memory, size_t size_bytes, void **copy,
                        struct err *err);
/* Adds [n] words of all ranks as unsigned integers of 32 bits, on a stream of the caller. group_settle waits until the call is
 * enqueued. */
enum rc nccl_group_sum(struct process_group *group, void *words, size_t n, cudaStream_t stream, struct err *err);
/* Ends all calls in this process; kernels that wait for other processes end. */
void nccl_group_end(struct process_group *group);
void nccl_group_close(struct process_group *group);

#endif
