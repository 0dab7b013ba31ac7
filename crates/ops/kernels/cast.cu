// dst[i] = src[i] in another type.
#include "pack.cuh"

template <typename To, typename From>
__device__ void cast(To* dst, const From* src, i64 len) {
    constexpr int WIDTH = sizeof(To) < sizeof(From) ? PACK<To> : PACK<From>;
    for_each_pack_of_grid<WIDTH>(len, aligned(dst, src), [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        store(dst + i, load<N>(src + i));
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void round##SUFFIX(T* dst, const float* src, i64 len) {                                     \
        cast(dst, src, len);                                                                                          \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void widen##SUFFIX(float* dst, const T* src, i64 len) {                                     \
        cast(dst, src, len);                                                                                          \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
