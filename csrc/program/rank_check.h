/* rank_check.h: a check for tests and for the search of faults. With LLMPY_SYNC=2 each rank notes a sum of every value that has
 * to be equal on all ranks (struct op: is_equal), and a step fails if a rank of this process has noted another sum. The plan
 * has no fusions then, so that no value stays inside an operation. */
#ifndef LLMPY_RANK_CHECK_H
#define LLMPY_RANK_CHECK_H

#include "running.h"
#include "team.h"

bool rank_check_is_on(const struct model *model);
/* Notes what step `index` of the plan has given. */
enum rc rank_check_note(struct running *run, uint32_t index);
/* Compares what all ranks have noted; the error names the first operation and the rank. */
enum rc rank_check_compare(struct team *team, struct err *err);

#endif
