// Memory with a start value: the same number everywhere, or the same row in all rows (a bias, to which a product is added).
#include "pack.cuh"

template <typename T>
__device__ void fill(T* dst, float value, i64 len) {
    for_each_pack_of_grid<PACK<T>>(len, aligned(dst), [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> x;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            x.at[j] = value;
        }
        store(dst + i, x);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void fill##SUFFIX(T* dst, float value, i64 len) {                                           \
        fill(dst, value, len);                                                                                        \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

// dst (rows, cols): each row = row (cols). A block per row, in turns.
template <typename T>
__device__ void fill_rows(T* dst, const T* row, i64 rows, i64 cols) {
    bool packed = cols % PACK<T> == 0 && aligned(dst, row);
    for (i64 i = blockIdx.x; i < rows; i += gridDim.x) {
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 col) {
            constexpr int N = decltype(width)::value;
            store(dst + i * cols + col, load<N>(row + col));
        });
    }
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void fill_rows##SUFFIX(T* dst, const T* row, i64 rows, i64 cols) {                          \
        fill_rows(dst, row, rows, cols);                                                                              \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
