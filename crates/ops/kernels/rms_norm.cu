// Root-mean-square normalisation: y = x r w, r = 1 / sqrt(mean(x^2) + eps) (arXiv:1910.07467). The sum with a residual
// that it is taken of in a model is made by the product before it.
#include "pack.cuh"
#include "reduce.cuh"

// A block per row, in turns.
template <typename T>
__device__ void rms_norm_forward(T* y, const T* x, const T* w, i64 rows, int cols, float eps) {
    bool packed = rows_packed<T>(cols, aligned(y, x, w));
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 start = row * cols;
        float squares = 0.0f;
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> a = load<N>(x + start + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                squares += a.at[j] * a.at[j];
            }
        });
        float r = 1.0f / sqrtf(reduce_block<Sum>(squares, shared) / (float)cols + eps);
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> a = load<N>(x + start + i);
            Floats<N> b = load<N>(w + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                a.at[j] = a.at[j] * r * b.at[j];
            }
            store(y + start + i, a);
        });
    }
}

// With n = x r and g = dy w: dx = r (g - n mean(g n)), plus `residual` (the gradient that reaches x around the norm) if
// it is not null. dx may be dy or residual.
//
// If `partials` (gridDim.x, cols) is not null, row b gets the sum of dy n over the rows of block b, which column_sum_f32
// then adds up: the gradient of w. A thread keeps the sums of its own columns in shared memory, so they need no barrier.
template <typename T>
__device__ void rms_norm_backward(T* dx, float* partials, const T* x, const T* w, const T* dy, const T* residual,
                                  i64 rows, int cols, float eps) {
    float* dw = shared + MAX_WARPS;
    bool packed = rows_packed<T>(cols, aligned(dx, partials, x, w, dy, residual));
    if (partials) {
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            store(dw + i, Floats<N>{});
        });
    }
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 start = row * cols;
        float squares = 0.0f;
        float products = 0.0f;
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> a = load<N>(x + start + i);
            Floats<N> b = load<N>(w + i);
            Floats<N> d = load<N>(dy + start + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                squares += a.at[j] * a.at[j];
                products += d.at[j] * b.at[j] * a.at[j];
            }
        });
        float r = 1.0f / sqrtf(reduce_block<Sum>(squares, shared) / (float)cols + eps);
        float along_x = r * r * reduce_block<Sum>(products, shared) / (float)cols;
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> a = load<N>(x + start + i);
            Floats<N> b = load<N>(w + i);
            Floats<N> d = load<N>(dy + start + i);
            Floats<N> sums = {};
            if (partials) {
                sums = load<N>(dw + i);
            }
            Floats<N> around = {};
            if (residual) {
                around = load<N>(residual + start + i);
            }
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sums.at[j] += d.at[j] * a.at[j] * r;
                a.at[j] = around.at[j] + r * (d.at[j] * b.at[j] - a.at[j] * along_x);
            }
            if (partials) {
                store(dw + i, sums);
            }
            store(dx + start + i, a);
        });
    }
    if (partials) {
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            store(partials + (i64)blockIdx.x * cols + i, load<N>(dw + i));
        });
    }
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void rms_norm_forward##SUFFIX(                                                              \
        T* y, const T* x, const T* w, i64 rows, int cols, float eps) {                                                \
        rms_norm_forward(y, x, w, rows, cols, eps);                                                                   \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void rms_norm_backward##SUFFIX(                                                             \
        T* dx, float* partials, const T* x, const T* w, const T* dy, const T* residual, i64 rows, int cols,           \
        float eps) {                                                                                                  \
        rms_norm_backward(dx, partials, x, w, dy, residual, rows, cols, eps);                                         \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
