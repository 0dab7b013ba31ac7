// Layer normalisation: y = c r w + b, c = x - mean(x), r = 1 / sqrt(mean(c^2) + eps) (arXiv:1607.06450).
#include "pack.cuh"
#include "reduce.cuh"

// What is taken from a value of a row, in two steps: the second is what the rounding of a large mean left. And what it
// is then multiplied by.
struct Moments {
    float mean;
    float rest;
    float r;

    __device__ float centred(float x) const {
        return x - mean - rest;
    }
};

// Of the row at x; the same in all threads.
template <typename T>
__device__ Moments moments(const T* x, int cols, bool packed, float eps) {
    float sum = 0.0f;
    for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> a = load<N>(x + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            sum += a.at[j];
        }
    });
    float mean = reduce_block<Sum>(sum, shared) / (float)cols;
    float rest = 0.0f;
    float squares = 0.0f;
    for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> a = load<N>(x + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            float c = a.at[j] - mean;
            rest += c;
            squares += c * c;
        }
    });
    rest = reduce_block<Sum>(rest, shared) / (float)cols;
    float variance = reduce_block<Sum>(squares, shared) / (float)cols - rest * rest;
    // In a row of equal values the difference is rounding alone, of either sign.
    return {mean, rest, 1.0f / sqrtf((variance < 0.0f ? 0.0f : variance) + eps)};
}

// A block per row, in turns. b may be null.
template <typename T>
__device__ void layer_norm_forward(T* y, const T* x, const T* w, const T* b, i64 rows, int cols, float eps) {
    bool packed = rows_packed<T>(cols, aligned(y, x, w, b));
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 start = row * cols;
        Moments of_row = moments(x + start, cols, packed, eps);
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> a = load<N>(x + start + i);
            Floats<N> scale = load<N>(w + i);
            Floats<N> shift = {};
            if (b) {
                shift = load<N>(b + i);
            }
#pragma unroll
            for (int j = 0; j < N; ++j) {
                a.at[j] = of_row.centred(a.at[j]) * of_row.r * scale.at[j] + shift.at[j];
            }
            store(y + start + i, a);
        });
    }
}

// Sums over the rows of a block, in shared memory, and where they go in the end; nothing if that is null. A thread keeps
// the sums of its own columns, so they need no barrier.
struct ColumnSums {
    float* sums;
    float* partials;

    template <int N>
    __device__ void clear(i64 i) const {
        if (partials) {
            store(sums + i, Floats<N>{});
        }
    }

    template <int N>
    __device__ void add(i64 i, const Floats<N>& terms) const {
        if (partials) {
            Floats<N> s = load<N>(sums + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                s.at[j] += terms.at[j];
            }
            store(sums + i, s);
        }
    }

    template <int N>
    __device__ void write(i64 i, int cols) const {
        if (partials) {
            store(partials + (i64)blockIdx.x * cols + i, load<N>(sums + i));
        }
    }
};

// With n = c r and g = dy w: dx = r (g - mean(g) - n mean(g n)), plus `residual` (the gradient that reaches x around the
// norm) if it is not null. dx may be dy or residual.
//
// If `dw` or `db` (gridDim.x, cols) is not null, its row b gets the sum of dy n or of dy over the rows of block b, which
// column_sum_f32 then adds up: the gradients of w and of the bias.
template <typename T>
__device__ void layer_norm_backward(T* dx, float* dw, float* db, const T* x, const T* w, const T* dy, const T* residual,
                                    i64 rows, int cols, float eps) {
    ColumnSums dw_sums = {shared + MAX_WARPS, dw};
    ColumnSums db_sums = {dw_sums.sums + (dw ? cols : 0), db};
    bool packed = rows_packed<T>(cols, aligned(dx, dw, db, x, w, dy, residual));
    for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        dw_sums.clear<N>(i);
        db_sums.clear<N>(i);
    });
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 start = row * cols;
        Moments of_row = moments(x + start, cols, packed, eps);
        float r = of_row.r;
        float grads = 0.0f;
        float products = 0.0f;
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> a = load<N>(x + start + i);
            Floats<N> scale = load<N>(w + i);
            Floats<N> d = load<N>(dy + start + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                float g = __fmul_rn(d.at[j], scale.at[j]);
                grads += g;
                products += g * of_row.centred(a.at[j]);
            }
        });
        float along_ones = reduce_block<Sum>(grads, shared) / (float)cols;
        float along_x = r * r * reduce_block<Sum>(products, shared) / (float)cols;
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> a = load<N>(x + start + i);
            Floats<N> scale = load<N>(w + i);
            Floats<N> d = load<N>(dy + start + i);
            Floats<N> around = {};
            if (residual) {
                around = load<N>(residual + start + i);
            }
            Floats<N> terms;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                float c = of_row.centred(a.at[j]);
                terms.at[j] = d.at[j] * c * r;
                // Not fused: the mean is that of the rounded products, and of a row of one value the difference is zero.
                float g = __fmul_rn(d.at[j], scale.at[j]);
                a.at[j] = around.at[j] + r * (g - along_ones - c * along_x);
            }
            dw_sums.add(i, terms);
            db_sums.add(i, d);
            store(dx + start + i, a);
        });
    }
    for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        dw_sums.write<N>(i, cols);
        db_sums.write<N>(i, cols);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void layer_norm_forward##SUFFIX(                                                            \
        T* y, const T* x, const T* w, const T* b, i64 rows, int cols, float eps) {                                    \
        layer_norm_forward(y, x, w, b, rows, cols, eps);                                                              \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void layer_norm_backward##SUFFIX(                                                           \
        T* dx, float* dw, float* db, const T* x, const T* w, const T* dy, const T* residual, i64 rows, int cols,      \
        float eps) {                                                                                                  \
        layer_norm_backward(dx, dw, db, x, w, dy, residual, rows, cols, eps);                                         \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
