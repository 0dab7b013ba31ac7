// AdamW (arXiv:1711.05101) over flat fp32 buffers, one pass, with weight decay apart from the gradient:
// m <- m + (g - m)(1 - b1), v <- v b2 + g^2 (1 - b2), x <- x decay_factor - step_size m / (sqrt(v) correction + eps).
//
// The constants come from the host, computed in f64 and rounded: step_size = lr / (1 - b1^t),
// correction = 1 / sqrt(1 - b2^t), decay_factor = 1 - lr * weight_decay, one_minus_beta1 = 1 - b1, one_minus_beta2 = 1 - b2.
// Each operation is rounded by itself (the .._rn intrinsics are never fused), in the order of the CPU's update: same bits.
#include "pack.cuh"

struct AdamW {
    float step_size, correction, decay_factor, one_minus_beta1, beta2, one_minus_beta2, eps;
};

__device__ inline void update(float& x, float& m, float& v, float g, const AdamW& c) {
    m = __fadd_rn(m, __fmul_rn(__fsub_rn(g, m), c.one_minus_beta1));
    v = __fadd_rn(__fmul_rn(v, c.beta2), __fmul_rn(__fmul_rn(g, g), c.one_minus_beta2));
    float root = __fadd_rn(__fmul_rn(__fsqrt_rn(v), c.correction), c.eps);
    x = __fsub_rn(__fmul_rn(x, c.decay_factor), __fdiv_rn(__fmul_rn(c.step_size, m), root));
}

// At most as many tensors in one launch; `src/cuda/adamw_slots.rs` says the same.
#define ADAMW_SLOTS 16

// A tensor of weights and its values' place in the flat buffers. `decay_factor` is 1 where there is no weight decay.
struct AdamWSlot {
    void* weights;
    i64 start, len;
    float decay_factor;
    int unused;
};

struct AdamWSlots {
    AdamWSlot slots[ADAMW_SLOTS];
};

// A master of bf16 weights is a weight and a remainder, the difference of their bits; `src/master_remainder.rs` says the same.
template <int N>
__device__ inline Floats<N> join_masters(const bf16* weights, const short* remainders) {
    Pack<bf16, N> upper = *reinterpret_cast<const Pack<bf16, N>*>(weights);
    Pack<short, N> lower = *reinterpret_cast<const Pack<short, N>*>(remainders);
    Floats<N> masters;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        unsigned int bits = (unsigned int)upper.at[j].bits << 16;
        // Below zero's bits there is nothing.
        int remainder = bits << 1 == 0 && lower.at[j] < 0 ? 0 : lower.at[j];
        masters.at[j] = __uint_as_float(bits + (unsigned int)remainder);
    }
    return masters;
}

template <int N>
__device__ inline void split_masters(const Floats<N>& masters, bf16* weights, short* remainders) {
    Pack<bf16, N> upper;
    Pack<short, N> lower;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        upper.at[j] = from_f32(masters.at[j], bf16());
        int remainder = (int)(__float_as_uint(masters.at[j]) - ((unsigned int)upper.at[j].bits << 16));
        lower.at[j] = (short)(remainder < 0x7fff ? remainder : 0x7fff);
    }
    *reinterpret_cast<Pack<bf16, N>*>(weights) = upper;
    *reinterpret_cast<Pack<short, N>*>(remainders) = lower;
}

// Blocks in x share the values of slot blockIdx.y; `scale` multiplies the gradients. `load_x` and `store_x` are of the values that are
// trained, at places of the slot.
template <typename LoadX, typename StoreX>
__device__ void adamw(float* exp_avg, float* exp_avg_sq, const float* grad, const AdamWSlot& slot, const AdamW& constants, float scale,
                      bool x_aligned, LoadX load_x, StoreX store_x) {
    exp_avg += slot.start;
    exp_avg_sq += slot.start;
    grad += slot.start;
    bool packed = x_aligned && aligned(exp_avg, exp_avg_sq, grad);
    for_each_pack_of_grid<PACK<float>>(slot.len, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> x = load_x(width, i);
        Floats<N> m = load<N>(exp_avg + i);
        Floats<N> v = load<N>(exp_avg_sq + i);
        Floats<N> g = load<N>(grad + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            update(x.at[j], m.at[j], v.at[j], __fmul_rn(g.at[j], scale), constants);
        }
        store_x(width, i, x);
        store(exp_avg + i, m);
        store(exp_avg_sq + i, v);
    });
}

// `master` is flat as the other buffers are, and the weights get its values rounded to T; without it the weights are the fp32 values
// themselves.
template <typename T>
__device__ void adamw(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, const AdamWSlot& slot,
                      const AdamW& constants, float scale) {
    float* x_at = master ? master + slot.start : static_cast<float*>(slot.weights);
    T* rounded = master ? static_cast<T*>(slot.weights) : nullptr;
    auto load_x = [&](auto width, i64 i) { return load<decltype(width)::value>(x_at + i); };
    auto store_x = [&](auto, i64 i, const auto& x) {
        store(x_at + i, x);
        if (rounded) {
            store(rounded + i, x);
        }
    };
    adamw(exp_avg, exp_avg_sq, grad, slot, constants, scale, aligned(x_at, rounded), load_x, store_x);
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void adamw##SUFFIX(                                                                         \
        float* master, float* exp_avg, float* exp_avg_sq, const float* grad, AdamWSlots slots, float step_size,       \
        float correction, float one_minus_beta1, float beta2, float one_minus_beta2, float eps, float scale) {        \
        const AdamWSlot& slot = slots.slots[blockIdx.y];                                                              \
        AdamW constants = {step_size, correction, slot.decay_factor, one_minus_beta1, beta2, one_minus_beta2, eps};   \
        adamw<T>(master, exp_avg, exp_avg_sq, grad, slot, constants, scale);                                          \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

extern "C" __global__ void adamw_split(short* remainder, float* exp_avg, float* exp_avg_sq, const float* grad, AdamWSlots slots,
                                       float step_size, float correction, float one_minus_beta1, float beta2, float one_minus_beta2,
                                       float eps, float scale) {
    const AdamWSlot& slot = slots.slots[blockIdx.y];
    AdamW constants = {step_size, correction, slot.decay_factor, one_minus_beta1, beta2, one_minus_beta2, eps};
    bf16* weights = static_cast<bf16*>(slot.weights);
    remainder += slot.start;
    auto load_x = [&](auto width, i64 i) { return join_masters<decltype(width)::value>(weights + i, remainder + i); };
    auto store_x = [&](auto, i64 i, const auto& x) { split_masters(x, weights + i, remainder + i); };
    adamw(exp_avg, exp_avg_sq, grad, slot, constants, scale, aligned(weights, remainder), load_x, store_x);
}
