// Types of 16 bits, by bit operations: no header of the CUDA toolkit is needed, and the bits are those of the CPU. All round to
// nearest, ties to even; a NaN keeps its sign and upper bits and becomes quiet.
#pragma once

// The upper half of a float.
struct bf16 {
    unsigned short bits;
};

// 5 bits of exponent, 10 of mantissa.
struct f16 {
    unsigned short bits;
};

// A kernel for each type: KERNEL has the end of its name, and the type of what it reads and writes.
#define FOR_EACH_TYPE(KERNEL) KERNEL(_f32, float) KERNEL(_bf16, bf16) KERNEL(_f16, f16)

__device__ inline float to_f32(float x) {
    return x;
}

__device__ inline float to_f32(bf16 x) {
    return __uint_as_float((unsigned int)x.bits << 16);
}

// With the bits at the places that a float has for them, the exponent lacks 112: a product by 2^112, exact, also of what is
// subnormal. Infinity and NaN, which it would make finite, get the largest exponent of a float.
__device__ inline float to_f32(f16 x) {
    unsigned int shifted = (x.bits & 0x7fffu) << 13;
    unsigned int finite = __float_as_uint(__uint_as_float(shifted) * __uint_as_float((127u + 112u) << 23));
    unsigned int magnitude = (x.bits & 0x7c00u) == 0x7c00u ? shifted | 0x7f800000u : finite;
    return __uint_as_float(magnitude | (x.bits & 0x8000u) << 16);
}

// The second argument only names the type to convert to.
__device__ inline float from_f32(float x, float) {
    return x;
}

// The rounding increment could turn a NaN into infinity.
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

// What is subnormal is rounded by a sum with 1/2, whose last place is that of subnormal f16. A carry out of the largest number makes
// infinity, as does anything larger.
__device__ inline f16 from_f32(float x, f16) {
    unsigned int bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, rounded;
    if (magnitude > 0x7f800000u) {
        rounded = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= (127u + 16u) << 23) {
        rounded = 0x7c00u;
    } else if (magnitude < (127u - 14u) << 23) {
        rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
    } else {
        rounded = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    }
    f16 y;
    y.bits = (unsigned short)(rounded | ((bits >> 16) & 0x8000u));
    return y;
}

// What is left of `x` after it was stored as a T.
template <typename T>
__device__ inline float rounded_to(float x) {
    return to_f32(from_f32(x, T()));
}
