/* ways.cuh: how an operation chooses among its kernels. An operation with several ways has one table with a row for each way:
 * its name, the devices that have its kernels, the problems that it takes, and run(). The first row that takes the problem
 * runs. Rows that take the same problem give equal bits, so their order is a matter of speed alone;
 * tests/kernels/test_ways_cuda.py puts each row first in turn and compares. The tables are LINEAR_WAYS, EXPERTS_WAYS,
 * EXPERTS_LINEAR_WAYS, ATTENTION_WAYS and GATHER_WAYS. */
#ifndef LLMPY_CUDA_WAYS_CUH
#define LLMPY_CUDA_WAYS_CUH

#include "common.cuh"

#define ANY_ROWS UINT32_MAX

/* Does the device have the row's kernels, and does the row take the problem? */
template <class WAY, class PROBLEM> static bool serves(const struct cuda *cuda, const WAY &way, const PROBLEM &problem)
{
    return way.devices & (cuda->is_portable ? PORTABLE : SM_90A) && takes(way, problem);
}

/* The first row of a table that takes the problem; NULL: none does. takes(row, problem) is the table's own. */
template <uint32_t TABLE, class WAY, size_t N, class PROBLEM>
static const WAY *find_way(struct cuda *cuda, const WAY (&ways)[N], const PROBLEM &problem)
{
    struct way_choice *choice = &cuda->ways[TABLE];
    uint32_t found = choice->first;
    if (!found || !serves(cuda, ways[found - 1], problem))
        for (found = 1; found <= N && !serves(cuda, ways[found - 1], problem);)
            found++;
    if (found > N)
        return NULL;
    choice->found |= 1u << (found - 1);
    return &ways[found - 1];
}

template <class WAY, size_t N> static struct way_name name_of_way(const WAY (&ways)[N], uint32_t row)
{
    return row < N ? way_name{ways[row].name, ways[row].devices} : way_name{};
}

#endif
