// Kernels with one mistake each: the tests prove that the shim notices. All have the same arguments, which some do not use.
#include "../../../crates/ops/kernels/reduce.cuh"

// No barrier between writing and reading what another thread wrote.
extern "C" __global__ void broken_without_barrier(float* first, float*, const float* src) {
    shared[threadIdx.x] = src[threadIdx.x];
    first[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// No barrier before shared memory is written again.
extern "C" __global__ void broken_reuse(float* first, float* second, const float* src) {
    shared[threadIdx.x] = src[threadIdx.x];
    __syncthreads();
    first[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
    shared[threadIdx.x] = 2.0f * src[threadIdx.x];
    __syncthreads();
    second[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}

// Two reductions through the same memory: a warp may write its second sum before another has read the first ones.
extern "C" __global__ void broken_second_reduction(float* first, float* second, const float* src) {
    for (int turn = 0; turn < 2; ++turn) {
        float value = reduce_lanes<Sum>(src[threadIdx.x] * (float)(1 + turn), WARP_SIZE);
        shared[threadIdx.x / WARP_SIZE] = value;
        __syncthreads();
        (turn ? second : first)[threadIdx.x] = shared[0] + shared[1];
    }
}

// A barrier that some threads never reach.
extern "C" __global__ void broken_divergent_barrier(float* first, float*, const float*) {
    if (threadIdx.x < 40) {
        __syncthreads();
    }
    first[threadIdx.x] = 1.0f;
}

// A shuffle without one lane.
extern "C" __global__ void broken_shuffle(float* first, float*, const float*) {
    if (threadIdx.x != 7) {
        first[threadIdx.x] = reduce_lanes<Sum>(1.0f, WARP_SIZE);
    }
}

// Shared memory that nothing was written to.
extern "C" __global__ void broken_uninitialised(float* first, float*, const float*) {
    first[threadIdx.x] = shared[threadIdx.x];
}

// 16 bytes at once from an address that is a multiple of 4.
extern "C" __global__ void broken_alignment(float* first, float*, const float* src) {
    struct alignas(16) Four {
        float at[4];
    };
    first[threadIdx.x] = reinterpret_cast<const Four*>(src + 1)->at[0];
}

// A sum that has no place in its type.
extern "C" __global__ void broken_overflow(float* first, float*, const float* src) {
    first[threadIdx.x] = (float)(0x7fffffff + (int)src[threadIdx.x]);
}

// As broken_reuse, with the barriers in place.
extern "C" __global__ void sound_reuse(float* first, float* second, const float* src) {
    shared[threadIdx.x] = src[threadIdx.x];
    __syncthreads();
    first[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
    shared[threadIdx.x] = 2.0f * src[threadIdx.x];
    __syncthreads();
    second[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}
