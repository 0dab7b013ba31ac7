// Memory access 16 bytes at a time where addresses and sizes permit, one element at a time elsewhere.
#pragma once

#include "half_precision.cuh"
#include "index.cuh"

// Elements of T in 16 bytes.
template <typename T>
constexpr int PACK = 16 / sizeof(T);

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T at[N];
};

template <int N>
struct Floats {
    float at[N];
};

template <int N, typename T>
__device__ inline Floats<N> load(const T* from) {
    Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
    Floats<N> x;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        x.at[j] = to_f32(pack.at[j]);
    }
    return x;
}

template <int N, typename T>
__device__ inline void store(T* to, const Floats<N>& x) {
    Pack<T, N> pack;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        pack.at[j] = from_f32(x.at[j], T());
    }
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Whether every address is a multiple of 16; a null pointer is.
template <typename... P>
__device__ inline bool aligned(const P*... addresses) {
    return ((... | reinterpret_cast<u64>(addresses)) & 15) == 0;
}

// Number of elements that a call of a body takes, as a type.
template <int N>
struct Width {
    static constexpr int value = N;
};

// Whether each row of `cols` values, one after the other from aligned addresses, begins at one.
template <typename T>
__device__ inline bool rows_packed(i64 cols, bool pointers_aligned) {
    return cols % PACK<T> == 0 && pointers_aligned;
}

// Calls `body(Width<w>(), i)` for the elements i .. i + w of 0 .. len that fall to this worker, the `worker`-th of
// `num_workers`: w = N as far as that goes if `packed`, then w = 1. Calls with the same arguments give a worker the same
// elements, so it may read back what it wrote.
template <int N, typename Body>
__device__ inline void for_each_pack(i64 len, bool packed, i64 worker, i64 num_workers, Body body) {
    i64 in_packs = packed ? len / N * N : 0;
    for (i64 i = worker * N; i < in_packs; i += num_workers * N) {
        body(Width<N>(), i);
    }
    for (i64 i = in_packs + worker; i < len; i += num_workers) {
        body(Width<1>(), i);
    }
}

// All threads of a one-dimensional grid share the elements.
template <int N, typename Body>
__device__ inline void for_each_pack_of_grid(i64 len, bool packed, Body body) {
    for_each_pack<N>(len, packed, thread_index(), thread_count(), body);
}

// The threads of one block share the elements, which are usually a row.
template <int N, typename Body>
__device__ inline void for_each_pack_of_block(i64 len, bool packed, Body body) {
    for_each_pack<N>(len, packed, threadIdx.x, blockDim.x, body);
}
