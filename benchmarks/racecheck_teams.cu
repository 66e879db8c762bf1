/* racecheck_teams.cu: compute-sanitizer's racecheck reports a hazard where a barrier orders the write and the read.
 *
 * The second of two teams of 256 threads writes one value a thread to shared memory. All threads meet at __syncthreads(). The
 * first team reads the values. PTX orders this: bar.sync makes the memory accesses of every participating thread visible to all
 * participating threads. Before the hand-over each team has met alone, at a named barrier, as often as the command line says.
 *
 *     nvcc -arch=sm_90a -o /tmp/racecheck_teams benchmarks/racecheck_teams.cu
 *     compute-sanitizer --tool racecheck /tmp/racecheck_teams 0 1
 *
 * Reports of version 2025.3.1 on an H200 (2026-11-23), by how often the first and the second team have met alone:
 *
 *     0 0  none    1 0  none    2 1  none
 *     0 1  RAW     1 2  RAW     0 2  RAW with 5 launches of 8 blocks, none with this one block
 *
 * So the tool compares how many barriers the two threads have passed, whichever those were. It reports a correct hand-over when
 * the writer has passed more of them. attention_few.cuh therefore lets both teams pass the same number. */
#include <cstdint>
#include <cstdio>
#include <cstdlib>

static __device__ __forceinline__ void meet(uint32_t number, uint32_t n_threads)
{
    asm volatile("bar.sync %0,%1;" ::"r"(number), "r"(n_threads) : "memory");
}

static __global__ void hand_over(float *out, uint32_t n_first, uint32_t n_second)
{
    __shared__ float values[256];
    const uint32_t team = threadIdx.x / 256, place = threadIdx.x % 256;
    for (uint32_t i = 0; i < (team ? n_second : n_first); i++)
        meet(1 + team, 256);
    if (team == 1)
        values[place] = (float)place;
    __syncthreads();
    if (team == 0)
        out[place] = values[place];
}

int main(int n_args, char **args)
{
    float *out, got[256];
    if (n_args != 3) {
        fprintf(stderr, "usage: racecheck_teams BARRIERS_OF_THE_FIRST_TEAM BARRIERS_OF_THE_SECOND\n");
        return 2;
    }
    cudaMalloc(&out, sizeof(got));
    hand_over<<<1, 512>>>(out, (uint32_t)atoi(args[1]), (uint32_t)atoi(args[2]));
    cudaMemcpy(got, out, sizeof(got), cudaMemcpyDeviceToHost);
    printf("%s, last value %.0f of 255\n", cudaGetErrorString(cudaGetLastError()), got[255]);
    return 0;
}
