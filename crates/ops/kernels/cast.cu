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

extern "C" __global__ void round_f32(float* dst, const float* src, i64 len) {
    cast(dst, src, len);
}

extern "C" __global__ void round_bf16(bf16* dst, const float* src, i64 len) {
    cast(dst, src, len);
}

extern "C" __global__ void round_f16(f16* dst, const float* src, i64 len) {
    cast(dst, src, len);
}

extern "C" __global__ void widen_f32(float* dst, const float* src, i64 len) {
    cast(dst, src, len);
}

extern "C" __global__ void widen_bf16(float* dst, const bf16* src, i64 len) {
    cast(dst, src, len);
}

extern "C" __global__ void widen_f16(float* dst, const f16* src, i64 len) {
    cast(dst, src, len);
}
