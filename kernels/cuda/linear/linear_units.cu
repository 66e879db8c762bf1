/* linear_units.cu: the kernels of linear_units.cuh, apart from linear.cu because they take as long to compile. */
#include "linear_units_few.cuh"
#include "linear_units_many.cuh"

cudaError_t units_open(void)
{
    const cudaError_t code = units_few_open();
    return code == cudaSuccess ? units_many_open() : code;
}
