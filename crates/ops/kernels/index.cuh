// 64-bit indices: rows * columns of activations and logits pass 2^31.
#pragma once

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

// Number of this thread among all threads of a one-dimensional grid.
__device__ inline i64 thread_index() {
    return (i64)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ inline i64 thread_count() {
    return (i64)gridDim.x * blockDim.x;
}
