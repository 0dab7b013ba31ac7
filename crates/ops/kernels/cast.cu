// dst[i] = src[i] in another type.
#include "pack.cuh"

template <typename To, typename From>
__device__ void cast(To* dst, const From* src, i64 len) {
    for_each_pack_of_grid<PACK<bf16>>(len, aligned(dst, src), [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        store(dst + i, load<N>(src + i));
    });
}

extern "C" __global__ void cast_f32_to_bf16(bf16* dst, const float* src, i64 len) {
    cast(dst, src, len);
}

extern "C" __global__ void cast_bf16_to_f32(float* dst, const bf16* src, i64 len) {
    cast(dst, src, len);
}
