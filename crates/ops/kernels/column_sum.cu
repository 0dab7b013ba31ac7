// Sums over rows, in a fixed order: gradients of norms' weights from partial sums, gradients of biases.
#include "half_precision.cuh"
#include "reduce.cuh"

// Threads along the columns and along the rows of a block.
constexpr int COLUMNS = 32;
constexpr int STRIPES = 8;

// Block (x, y) sums the y-th of gridDim.y slices of the rows of src (rows, cols), for 32 columns, into row y of
// dst (gridDim.y, cols); added to what is there if `add`.
template <typename T>
__device__ void column_sum(float* dst, const T* src, i64 rows, i64 cols, int add) {
    int lane = (int)threadIdx.x % COLUMNS;
    int stripe = (int)threadIdx.x / COLUMNS;
    i64 col = (i64)blockIdx.x * COLUMNS + lane;
    i64 slice = (rows + gridDim.y - 1) / gridDim.y;
    i64 start = blockIdx.y * slice;
    i64 end = start + slice < rows ? start + slice : rows;
    float sum = 0.0f;
    if (col < cols) {
#pragma unroll 4
        for (i64 row = start + stripe; row < end; row += STRIPES) {
            sum += to_f32(src[row * cols + col]);
        }
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (stripe == 0 && col < cols) {
        for (int other = 1; other < STRIPES; ++other) {
            sum += shared[other * COLUMNS + lane];
        }
        float* to = dst + blockIdx.y * cols + col;
        *to = add ? *to + sum : sum;
    }
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void column_sum##SUFFIX(float* dst, const T* src, i64 rows, i64 cols, int add) {            \
        column_sum(dst, src, rows, cols, add);                                                                        \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
