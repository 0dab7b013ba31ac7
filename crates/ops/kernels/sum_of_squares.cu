// The sum of the squares of a buffer in f64, in two passes and a fixed order; infinities and NaN come through.
// In f64 neither large gradients overflow nor small ones vanish beside large ones.
#include "pack.cuh"
#include "reduce.cuh"

// partials[block] = the sum over the block's elements.
template <typename T>
__device__ void sum_of_squares(double* partials, const T* src, i64 len) {
    double sum = 0.0;
    for_each_pack_of_grid<PACK<T>>(len, aligned(src), [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> x = load<N>(src + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sum += (double)x.at[j] * (double)x.at[j];
        }
    });
    sum = reduce_block<Sum>(sum, reinterpret_cast<double*>(shared));
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void sum_of_squares##SUFFIX(double* partials, const T* src, i64 len) {                      \
        sum_of_squares(partials, src, len);                                                                           \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

// *dst = the sum of the partials, added to what is there if `add`. One block.
extern "C" __global__ void sum_partials_f64(double* dst, const double* partials, int num_partials, int add) {
    double sum = 0.0;
    for (int i = (int)threadIdx.x; i < num_partials; i += (int)blockDim.x) {
        sum += partials[i];
    }
    sum = reduce_block<Sum>(sum, reinterpret_cast<double*>(shared));
    if (threadIdx.x == 0) {
        *dst = add ? *dst + sum : sum;
    }
}
