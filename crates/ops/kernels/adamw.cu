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

// Blocks in x share the values of slot blockIdx.y; `scale` multiplies the gradients. `master` is flat as the other buffers are,
// and the weights get its values rounded to T; without it the weights are the fp32 values themselves.
template <typename T>
__device__ void adamw(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, const AdamWSlot& slot,
                      const AdamW& constants, float scale) {
    float* x_at = master ? master + slot.start : static_cast<float*>(slot.weights);
    T* rounded = master ? static_cast<T*>(slot.weights) : nullptr;
    exp_avg += slot.start;
    exp_avg_sq += slot.start;
    grad += slot.start;
    bool packed = aligned(x_at, exp_avg, exp_avg_sq, rounded, grad);
    for_each_pack_of_grid<PACK<float>>(slot.len, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> x = load<N>(x_at + i);
        Floats<N> m = load<N>(exp_avg + i);
        Floats<N> v = load<N>(exp_avg_sq + i);
        Floats<N> g = load<N>(grad + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            update(x.at[j], m.at[j], v.at[j], __fmul_rn(g.at[j], scale), constants);
        }
        store(x_at + i, x);
        store(exp_avg + i, m);
        store(exp_avg_sq + i, v);
        if (rounded) {
            store(rounded + i, x);
        }
    });
}

extern "C" __global__ void adamw_f32(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, AdamWSlots slots,
                                     float step_size, float correction, float one_minus_beta1, float beta2, float one_minus_beta2,
                                     float eps, float scale) {
    const AdamWSlot& slot = slots.slots[blockIdx.y];
    AdamW constants = {step_size, correction, slot.decay_factor, one_minus_beta1, beta2, one_minus_beta2, eps};
    adamw<float>(master, exp_avg, exp_avg_sq, grad, slot, constants, scale);
}

extern "C" __global__ void adamw_bf16(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, AdamWSlots slots,
                                      float step_size, float correction, float one_minus_beta1, float beta2, float one_minus_beta2,
                                      float eps, float scale) {
    const AdamWSlot& slot = slots.slots[blockIdx.y];
    AdamW constants = {step_size, correction, slot.decay_factor, one_minus_beta1, beta2, one_minus_beta2, eps};
    adamw<bf16>(master, exp_avg, exp_avg_sq, grad, slot, constants, scale);
}

extern "C" __global__ void adamw_f16(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, AdamWSlots slots,
                                     float step_size, float correction, float one_minus_beta1, float beta2, float one_minus_beta2,
                                     float eps, float scale) {
    const AdamWSlot& slot = slots.slots[blockIdx.y];
    AdamW constants = {step_size, correction, slot.decay_factor, one_minus_beta1, beta2, one_minus_beta2, eps};
    adamw<f16>(master, exp_avg, exp_avg_sq, grad, slot, constants, scale);
}
