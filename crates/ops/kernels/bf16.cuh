// bfloat16 as the upper half of a float, by bit operations: no header of the CUDA toolkit is needed, and the bits are
// those of the CPU.
#pragma once

struct bf16 {
    unsigned short bits;
};

__device__ inline float to_f32(float x) {
    return x;
}

__device__ inline float to_f32(bf16 x) {
    return __uint_as_float((unsigned int)x.bits << 16);
}

// The second argument only names the type to convert to.
__device__ inline float from_f32(float x, float) {
    return x;
}

// Rounds to nearest, ties to even. A NaN keeps its sign and upper bits and becomes quiet: the rounding increment could
// turn it into infinity.
__device__ inline bf16 from_f32(float x, bf16) {
    unsigned int bits = __float_as_uint(x);
    bf16 y;
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        y.bits = (unsigned short)((bits >> 16) | 0x40u);
    } else {
        y.bits = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
    return y;
}

// What is left of `x` after it was stored as a T.
template <typename T>
__device__ inline float rounded_to(float x) {
    return to_f32(from_f32(x, T()));
}
