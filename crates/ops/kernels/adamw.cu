// AdamW (arXiv:1711.05101) over flat fp32 buffers, one pass, with weight decay apart from the gradient:
// m <- m + (g - m)(1 - b1), v <- v b2 + g^2 (1 - b2), x <- x shrink - step_size m / (sqrt(v) correction + eps).
//
// The constants come from the host, computed in f64 and rounded: step_size = lr / (1 - b1^t),
// correction = 1 / sqrt(1 - b2^t), shrink = 1 - lr * weight_decay, rest1 = 1 - b1, rest2 = 1 - b2.
// Each operation is rounded by itself (the .._rn intrinsics are never fused), in the order of the CPU's update: same bits.
#include "pack.cuh"

struct AdamW {
    float step_size, correction, shrink, rest1, beta2, rest2, eps;
};

__device__ inline void update(float& x, float& m, float& v, float g, const AdamW& c) {
    m = __fadd_rn(m, __fmul_rn(__fsub_rn(g, m), c.rest1));
    v = __fadd_rn(__fmul_rn(v, c.beta2), __fmul_rn(__fmul_rn(g, g), c.rest2));
    float root = __fadd_rn(__fmul_rn(__fsqrt_rn(v), c.correction), c.eps);
    x = __fsub_rn(__fmul_rn(x, c.shrink), __fdiv_rn(__fmul_rn(c.step_size, m), root));
}

// `scale` multiplies the gradients; if `device_scale` is not null, so does what it points to. A NaN there (clip_scale_f32
// writes one if the norm is not finite) leaves everything as it was, so the host may find out after the step. `weights`,
// if not null, gets the values rounded to bf16.
__device__ void adamw(float* master, float* exp_avg, float* exp_avg_sq, bf16* weights, const float* grad, i64 len,
                      const AdamW& constants, float scale, const float* device_scale) {
    if (device_scale) {
        scale = __fmul_rn(scale, *device_scale);
    }
    if (scale != scale) {
        return;
    }
    bool packed = aligned(master, exp_avg, exp_avg_sq, weights, grad);
    for_each_pack_of_grid<PACK<float>>(len, packed, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> x = load<N>(master + i);
        Floats<N> m = load<N>(exp_avg + i);
        Floats<N> v = load<N>(exp_avg_sq + i);
        Floats<N> g = load<N>(grad + i);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            update(x.at[j], m.at[j], v.at[j], __fmul_rn(g.at[j], scale), constants);
        }
        store(master + i, x);
        store(exp_avg + i, m);
        store(exp_avg_sq + i, v);
        if (weights) {
            store(weights + i, x);
        }
    });
}

// Weights are the fp32 values themselves.
extern "C" __global__ void adamw_f32(float* master, float* exp_avg, float* exp_avg_sq, const float* grad, i64 len,
                                     float step_size, float correction, float shrink, float rest1, float beta2,
                                     float rest2, float eps, float scale, const float* device_scale) {
    AdamW constants = {step_size, correction, shrink, rest1, beta2, rest2, eps};
    adamw(master, exp_avg, exp_avg_sq, nullptr, grad, len, constants, scale, device_scale);
}

extern "C" __global__ void adamw_bf16(float* master, float* exp_avg, float* exp_avg_sq, bf16* weights,
                                      const float* grad, i64 len, float step_size, float correction, float shrink,
                                      float rest1, float beta2, float rest2, float eps, float scale,
                                      const float* device_scale) {
    AdamW constants = {step_size, correction, shrink, rest1, beta2, rest2, eps};
    adamw(master, exp_avg, exp_avg_sq, weights, grad, len, constants, scale, device_scale);
}
