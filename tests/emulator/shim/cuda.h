// What the kernels use of CUDA, for a C++ compiler: launch.cpp runs them. Included before each .cu file by the build.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef __global__
#define __global__
#endif
#define __device__
// All shared memory of the kernels is the one dynamic array, which launch.cpp defines: a block at a time runs on a thread.
#define __shared__ __thread
#define __align__(n) __attribute__((aligned(n)))

struct ShimIndex {
    unsigned int x, y, z;
};

extern __thread ShimIndex threadIdx, blockIdx, blockDim, gridDim;

// Waits until every thread of the block waits at the same line.
void shim_barrier(const char* file, int line);
// Waits until every lane of the warp has given its value, and returns that of `source_lane`.
uint64_t shim_exchange(unsigned int mask, uint64_t value, unsigned int source_lane, const char* file, int line);

// Number of the running thread in its warp.
unsigned int shim_lane();

#define __syncthreads() shim_barrier(__FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, distance) \
    shim_shuffle(mask, value, shim_lane() ^ (unsigned int)(distance), __FILE__, __LINE__)

template <typename V>
V shim_shuffle(unsigned int mask, V value, unsigned int source_lane, const char* file, int line) {
    uint64_t bits = 0;
    static_assert(sizeof value <= sizeof bits, "a shuffle moves at most 8 bytes");
    std::memcpy(&bits, &value, sizeof value);
    bits = shim_exchange(mask, bits, source_lane, file, line);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned int __float_as_uint(float x) {
    unsigned int bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned int bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdividef(float a, float b) { return a / b; }
using std::isfinite;
