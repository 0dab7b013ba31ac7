// Kernels with one mistake each: the tests prove that the shim notices.
#include "../../../crates/ops/kernels/reduce.cuh"

// No barrier between writing and reading what another thread wrote.
extern "C" __global__ void broken_without_barrier(float* reversed, const float* src) {
    shared[threadIdx.x] = src[threadIdx.x];
    reversed[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
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
extern "C" __global__ void broken_divergent_barrier(float* dst) {
    if (threadIdx.x < 40) {
        __syncthreads();
    }
    dst[threadIdx.x] = 1.0f;
}

// A shuffle without one lane.
extern "C" __global__ void broken_shuffle(float* dst) {
    if (threadIdx.x != 7) {
        dst[threadIdx.x] = reduce_lanes<Sum>(1.0f, WARP_SIZE);
    }
}

// One element beyond the end.
extern "C" __global__ void broken_bound(float* dst, i64 len) {
    if (thread_index() <= len) {
        dst[thread_index()] = 1.0f;
    }
}

// Shared memory that the launch did not ask for.
extern "C" __global__ void broken_shared_size() {
    shared[threadIdx.x] = 1.0f;
}

// Shared memory that nothing was written to.
extern "C" __global__ void broken_uninitialised(float* dst) {
    dst[threadIdx.x] = shared[threadIdx.x];
}

// The same with the barriers in place.
extern "C" __global__ void sound_reuse(float* first, float* second, const float* src) {
    shared[threadIdx.x] = src[threadIdx.x];
    __syncthreads();
    first[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
    shared[threadIdx.x] = 2.0f * src[threadIdx.x];
    __syncthreads();
    second[threadIdx.x] = shared[blockDim.x - 1 - threadIdx.x];
}
