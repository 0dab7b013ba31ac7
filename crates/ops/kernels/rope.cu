// Rotary position embedding in place, Hugging Face's layout (arXiv:2104.09864): element i of a head is paired with
// element i + d/2, and position t turns the pair by the angle whose cosine and sine are in row t of the tables.
// sign = 1 is the forward pass, sign = -1 turns gradients back.
#include "pack.cuh"

// x (b, t, heads, d) of `rows` = b * t * heads rows; cos and sin (t, half), or (b, t, half), with half = d / 2: `t` is their number of rows.
template <typename T>
__device__ void rope(T* x, const float* cos, const float* sin, i64 rows, int t, int heads, int half, float sign) {
    // Packs lie within a row, because the number of pairs in a row is a multiple of theirs.
    bool packed = half % PACK<T> == 0 && aligned(x, cos, sin);
    for_each_pack_of_grid<PACK<T>>(rows * half, packed, [&](auto width, i64 pair) {
        constexpr int N = decltype(width)::value;
        i64 row = pair / half;
        int i = (int)(pair % half);
        i64 angle = row / heads % t * half + i;
        T* first = x + row * 2 * half + i;
        Floats<N> x1 = load<N>(first);
        Floats<N> x2 = load<N>(first + half);
        Floats<N> c = load<N>(cos + angle);
        Floats<N> s = load<N>(sin + angle);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            float turned = sign * s.at[j];
            float y1 = x1.at[j] * c.at[j] - x2.at[j] * turned;
            x2.at[j] = x2.at[j] * c.at[j] + x1.at[j] * turned;
            x1.at[j] = y1;
        }
        store(first, x1);
        store(first + half, x2);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void rope##SUFFIX(                                                                          \
        T* x, const float* cos, const float* sin, i64 rows, int t, int heads, int half, float sign) {                 \
        rope(x, cos, sin, rows, t, heads, half, sign);                                                                \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
