// Gated activation of Llama's feed-forward: y = silu(gate) * up, silu(g) = g * sigmoid(g) (arXiv:2002.05202).
// Outputs may be inputs: an element is written by the thread that has read it.
#include "pack.cuh"

// 1 / (1 + e^-x) to about 4 units in the last place; e^-x overflows to infinity below -88, which gives 0.
__device__ inline float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + expf(-x));
}

template <typename T>
__device__ void swiglu_forward(T* y, const T* gate, const T* up, i64 len) {
    for_each_pack_of_grid<PACK<T>>(len, aligned(y, gate, up), [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> g = load<N>(gate + i);
        Floats<N> u = load<N>(up + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            u.at[j] *= g.at[j] * sigmoid(g.at[j]);
        }
        store(y + i, u);
    });
}

// With s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s.
template <typename T>
__device__ void swiglu_backward(T* dgate, T* dup, const T* gate, const T* up, const T* dy, i64 len) {
    bool packed = aligned(dgate, dup, gate, up, dy);
    for_each_pack_of_grid<PACK<T>>(len, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> g = load<N>(gate + i);
        Floats<N> u = load<N>(up + i);
        Floats<N> d = load<N>(dy + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            float s = sigmoid(g.at[j]);
            float dg = d.at[j] * u.at[j] * s * (1.0f + g.at[j] * (1.0f - s));
            u.at[j] = d.at[j] * g.at[j] * s;
            g.at[j] = dg;
        }
        store(dgate + i, g);
        store(dup + i, u);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void swiglu_forward##SUFFIX(T* y, const T* gate, const T* up, i64 len) {                    \
        swiglu_forward(y, gate, up, len);                                                                             \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void swiglu_backward##SUFFIX(                                                               \
        T* dgate, T* dup, const T* gate, const T* up, const T* dy, i64 len) {                                         \
        swiglu_backward(dgate, dup, gate, up, dy, len);                                                               \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
