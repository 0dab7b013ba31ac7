// dst[i] = value.
#include "pack.cuh"

template <typename T>
__device__ void fill(T* dst, float value, i64 len) {
    for_each_pack_of_grid<PACK<T>>(len, aligned(dst), [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> x;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            x.at[j] = value;
        }
        store(dst + i, x);
    });
}

extern "C" __global__ void fill_f32(float* dst, float value, i64 len) {
    fill(dst, value, len);
}

extern "C" __global__ void fill_bf16(bf16* dst, float value, i64 len) {
    fill(dst, value, len);
}
