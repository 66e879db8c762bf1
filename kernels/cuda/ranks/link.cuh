/* link.cuh: the meetings of a process's ranks with those of other processes (link.cu), for comm.cu, gather.cu and for waits of
 * the host. A team without other processes has no link: with NULL these functions do nothing and return RC_OK. */
#ifndef LLMPY_CUDA_LINK_CUH
#define LLMPY_CUDA_LINK_CUH

#include "meeting.cuh"

/* Sets the team's link. Returns once all processes have connected. */
enum rc link_open(struct cuda_team *team, const struct comm_options *options, struct err *err);
enum rc link_share(struct link *link, size_t size_bytes, struct err *err);
enum rc link_gather(struct cuda *cuda, const struct gather_args *args, struct err *err); /* checked; the team has a link */
enum rc link_check(const struct link *link, struct err *err);
void link_abort(struct link *link);
void link_close(struct link *link);

/* Waits for an event, or for all work of the stream if it is NULL. With a link the wait ends when another process is lost, and
 * after the longest wait for a rank. */
enum rc cuda_await(struct cuda *cuda, cudaEvent_t event, const char *operation, struct err *err);

#endif
