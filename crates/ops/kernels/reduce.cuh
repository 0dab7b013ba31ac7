// Reductions over a block in an order that depends on the block's size alone, so that the bits do not change.
#pragma once

#include "index.cuh"

// All shared memory is dynamic: its size is part of the launch configuration (README.md).
extern __shared__ __align__(16) float shared[];

constexpr u32 WHOLE_WARP = 0xffffffffu;
constexpr int WARP_SIZE = 32;
// Values of scratch memory that a reduction needs: one per warp of the largest block.
constexpr int MAX_WARPS = 32;

struct Sum {
    template <typename V>
    __device__ V operator()(V a, V b) const {
        return a + b;
    }
};

// The larger one, or NaN if one is: fmaxf would let a broken value hide behind the others.
struct Max {
    __device__ float operator()(float a, float b) const {
        return a > b || a != a ? a : b;
    }
};

// Every group of `width` neighbouring lanes gets its own result, in all its lanes.
template <typename Combine, typename V>
__device__ inline V reduce_lanes(V value, int width) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
        value = Combine()(value, __shfl_xor_sync(WHOLE_WARP, value, distance));
    }
    return value;
}

// The result is the same in all threads. `scratch` is MAX_WARPS values of shared memory; the block is one-dimensional
// and of whole warps.
template <typename Combine, typename V>
__device__ inline V reduce_block(V value, V* scratch) {
    value = reduce_lanes<Combine>(value, WARP_SIZE);
    // Another warp may still read the result of the reduction before this one.
    __syncthreads();
    if (threadIdx.x % WARP_SIZE == 0) {
        scratch[threadIdx.x / WARP_SIZE] = value;
    }
    __syncthreads();
    V total = scratch[0];
    for (u32 warp = 1; warp < blockDim.x / WARP_SIZE; ++warp) {
        total = Combine()(total, scratch[warp]);
    }
    return total;
}
