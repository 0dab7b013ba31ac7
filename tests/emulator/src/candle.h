// What candle's own kernels use of CUDA, for a C++ compiler. Included before each of their files, after shim/cuda.h.
#pragma once

#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#pragma push_macro("__global__")
#undef __global__
#undef __device__
#undef __shared__
#undef __align__
#include <cuda/std/limits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#pragma pop_macro("__global__")
#define __device__
#define __forceinline__ inline

// Only now, so that the toolkit's headers take the paths that they have for the host.
#define __CUDA_ARCH__ 800

#include <cassert>
#include <cmath>
#include <type_traits>

using std::isnan;
using std::signbit;

extern __thread float shared[];

// Threads of a block take turns on one thread of the host, so a plain addition is atomic within a block, and so are the blocks.
template <typename T>
T atomicAdd(T* address, T value) {
    T old = *address;
    *address = old + value;
    return old;
}

template <typename T>
T atomicCAS(T* address, T expected, T value) {
    T old = *address;
    *address = old == expected ? value : old;
    return old;
}

template <typename T, typename V>
T atomicMin(T* address, V given) {
    T old = *address, value = (T)given;
    *address = value < old ? value : old;
    return old;
}

template <typename T, typename V>
T atomicMax(T* address, V given) {
    T old = *address, value = (T)given;
    *address = old < value ? value : old;
    return old;
}

template <typename To, typename From>
To shim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits as another type");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline int __float_as_int(float x) { return shim_bits<int>(x); }
inline float __int_as_float(int x) { return shim_bits<float>(x); }
inline long long __double_as_longlong(double x) { return shim_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return shim_bits<double>(x); }

template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
    return b < a ? b : a;
}

template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}

#define HALF_FUNCTION(name, function)                                               \
    inline __half name(__half x) { return __float2half(function(__half2float(x))); } \
    inline __nv_bfloat16 name(__nv_bfloat16 x) { return __float2bfloat16(function(__bfloat162float(x))); }
HALF_FUNCTION(hsqrt, sqrtf)
HALF_FUNCTION(hcos, cosf)
HALF_FUNCTION(hsin, sinf)
HALF_FUNCTION(hlog, logf)
HALF_FUNCTION(hexp, expf)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752); }

#undef __shfl_xor_sync
#define __shfl_xor_sync(mask, value, distance, ...) \
    shim_shuffle(mask, value, shim_lane() ^ (unsigned int)(distance), __FILE__, __LINE__)

// Its files define the same functions, some not inline; kernels.py closes this.
namespace {
