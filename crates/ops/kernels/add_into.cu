// dst[i] += src[i], into an fp32 gradient buffer.
#include "pack.cuh"

template <typename T>
__device__ void add_into(float* dst, const T* src, i64 len) {
    for_each_pack_of_grid<PACK<T>>(len, aligned(dst, src), [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> sum = load<N>(dst + i);
        Floats<N> x = load<N>(src + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sum.at[j] += x.at[j];
        }
        store(dst + i, sum);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void add_into##SUFFIX(float* dst, const T* src, i64 len) {                                  \
        add_into(dst, src, len);                                                                                      \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
