// Causal attention, o_i = sum over i - window < j <= i of softmax_j(scale q_i . k_j) v_j, one tile of scores at a time
// with the running maximum and sum of each row (FlashAttention, arXiv:2205.14135). In fp32 without tensor cores: the
// reference for cuDNN, and what runs where cuDNN cannot.
#include "attention_tile.cuh"

// o as q; log_sum_exp (b, heads, t) of the scaled scores. Grid (tiles of queries, heads, b).
template <typename T>
__device__ void attention_forward(T* o, float* log_sum_exp, const T* q, const T* k, const T* v, const Attention& a) {
    float* queries = shared;
    float* keys = queries + TILE * a.stride(); // then the values
    float* weights = keys + TILE * a.stride();
    int row = row_in_tile();
    int lane = lane_in_row();
    int head = (int)blockIdx.y;
    int kv_head = a.kv_head(head);
    // The last tiles have most keys, up to the window: they start first.
    int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * TILE;
    load_tile(queries, q, first, head, a.heads, a);

    float max = __uint_as_float(0xff800000u);
    float sum = 0.0f;
    float owned[OWNED] = {};
    // From the last keys to the first: each query sees itself, so the maximum is finite from the first tile on, unless a
    // score is not.
    for (int key = first; key >= a.first_key(first); key -= TILE) {
        __syncthreads(); // the values of the tile before are used up
        load_tile(keys, k, key, kv_head, a.kv_heads, a);
        __syncthreads();
        bool is_seen = a.sees(first + row, key + lane);
        float score = is_seen ? a.scale * dot(queries, row, keys, lane, a) : __uint_as_float(0xff800000u);
        float new_max = Max()(max, reduce_lanes<Max>(score, TILE));
        float weight = expf(score - new_max);
        float correction = expf(max - new_max);
        sum = sum * correction + reduce_lanes<Sum>(weight, TILE);
        max = new_max;
        weights[row * SCORES_STRIDE + lane] = weight;
        __syncthreads(); // the keys are used up, the weights are there
        load_tile(keys, v, key, kv_head, a.kv_heads, a);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < OWNED; ++n) {
            owned[n] *= correction;
        }
        add_weighted_rows(owned, weights + row * SCORES_STRIDE, 1, keys, a);
    }
    store_rows(o, owned, 1.0f / sum, first, head, a.heads, a);
    if (lane == 0 && first + row < a.t) {
        log_sum_exp[a.row_index(head, first + row)] = max + logf(sum);
    }
}

extern "C" __global__ void attention_forward_f32(float* o, float* log_sum_exp, const float* q, const float* k,
                                                 const float* v, const u32* starts, int t, int heads, int kv_heads,
                                                 int d, int group_size, int group_offset, int window, float scale) {
    attention_forward(o, log_sum_exp, q, k, v, {starts, t, heads, kv_heads, d, group_size, group_offset, window, scale});
}

extern "C" __global__ void attention_forward_bf16(bf16* o, float* log_sum_exp, const bf16* q, const bf16* k,
                                                  const bf16* v, const u32* starts, int t, int heads, int kv_heads,
                                                  int d, int group_size, int group_offset, int window, float scale) {
    attention_forward(o, log_sum_exp, q, k, v, {starts, t, heads, kv_heads, d, group_size, group_offset, window, scale});
}

extern "C" __global__ void attention_forward_f16(f16* o, float* log_sum_exp, const f16* q, const f16* k, const f16* v,
                                                 const u32* starts, int t, int heads, int kv_heads, int d,
                                                 int group_size, int group_offset, int window, float scale) {
    attention_forward(o, log_sum_exp, q, k, v, {starts, t, heads, kv_heads, d, group_size, group_offset, window, scale});
}
