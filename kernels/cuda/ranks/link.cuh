/* link.cuh: the meetings of a rank with ranks of other processes (link.cu), for comm.cu and for waits of the host. */
#ifndef LLMPY_CUDA_LINK_CUH
#define LLMPY_CUDA_LINK_CUH

#include "../core/launch.cuh"

struct link;

/* Sets cuda->link. Returns once all processes have connected. */
enum rc cuda_link_open(struct cuda *cuda, const struct comm_options *options, struct err *err);
enum rc cuda_link_share(struct cuda *cuda, size_t size_bytes, struct err *err);
enum rc cuda_link_gather(struct cuda *cuda, const struct gather_args *args, struct err *err);
enum rc cuda_link_check(const struct cuda *cuda, struct err *err);
void cuda_link_abort(struct cuda *cuda);
void cuda_link_close(struct cuda *cuda);

/* Waits for an event, or for all work of the stream if it is NULL. With a link the wait ends when another process is lost, and
 * after the longest wait for a rank. */
enum rc cuda_await(struct cuda *cuda, cudaEvent_t event, const char *operation, struct err *err);

#endif
