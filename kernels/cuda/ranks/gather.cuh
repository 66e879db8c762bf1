/* gather.cuh: the meetings of gather.cu, for the table of comm.cu. */
#ifndef LLMPY_CUDA_GATHER_CUH
#define LLMPY_CUDA_GATHER_CUH

#include "meeting.cuh"

enum rc cuda_meet(void *ctx, const struct meet_args *args, struct err *err);
enum rc cuda_gather(void *ctx, const struct gather_args *args, struct err *err);

#endif
