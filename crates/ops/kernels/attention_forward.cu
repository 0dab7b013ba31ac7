// Causal attention, o_i = sum over the keys j that i sees of softmax_j(scale q_i . k_j) v_j, one tile of scores at a time
// with the running maximum and sum of each row (FlashAttention, arXiv:2205.14135). In fp32 without tensor cores: the
// reference for cuDNN, and what runs where cuDNN cannot.
#include "attention_tile.cuh"

// o as q, or f32 in `sums` if that is not null; log_sum_exp (b, heads, t) of the scaled scores: zeros and minus infinity of a query that sees no key. Grid (tiles of queries, heads, b).
template <typename T>
__device__ void attention_forward(T* o, float* sums, float* log_sum_exp, const T* q, const T* k, const T* v,
                                  const Attention& a) {
    float* queries = shared;
    float* keys = queries + TILE * a.stride(); // then the values
    float* weights = keys + TILE * a.stride();
    int row = row_in_tile();
    int lane = lane_in_row();
    int head = (int)blockIdx.y;
    int kv_head = a.kv_head(head);
    // The last tiles have most keys, up to the window: they start first.
    int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * TILE;
    load_tile(queries, q, first, head, a.heads, a.t, a);

    float max = __uint_as_float(0xff800000u);
    float sum = 0.0f;
    float owned[OWNED] = {};
    int first_key = a.first_key(first);
    for (int key = a.last_key(first); key >= first_key; key -= TILE) {
        __syncthreads(); // the values of the tile before are used up
        load_tile(keys, k, key, kv_head, a.kv_heads, a.keys, a);
        __syncthreads();
        bool is_seen = a.sees(first + row, key + lane);
        float score = is_seen ? a.scale * dot(queries, row, keys, lane, a) : __uint_as_float(0xff800000u);
        float new_max = Max()(max, reduce_lanes<Max>(score, TILE));
        // A row that has seen no key yet keeps its zeros.
        float base = new_max == __uint_as_float(0xff800000u) ? 0.0f : new_max;
        float weight = expf(score - base);
        float correction = expf(max - base);
        sum = sum * correction + reduce_lanes<Sum>(weight, TILE);
        max = new_max;
        weights[row * SCORES_STRIDE + lane] = weight;
        __syncthreads(); // the keys are used up, the weights are there
        load_tile(keys, v, key, kv_head, a.kv_heads, a.keys, a);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < OWNED; ++n) {
            owned[n] *= correction;
        }
        add_weighted_rows(owned, weights + row * SCORES_STRIDE, 1, keys, a);
    }
    store_rows(o, sums, false, owned, sum > 0.0f ? 1.0f / sum : sum, first, head, a.heads, a.t, a);
    if (lane == 0 && first + row < a.t) {
        log_sum_exp[a.row_index(head, first + row)] = max + logf(sum);
    }
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void attention_forward##SUFFIX(                                                             \
        T* o, float* sums, float* log_sum_exp, const T* q, const T* k, const T* v, const u32* ranges, int t,          \
        int keys, int heads, int kv_heads, int d, int group_size, int group_offset, int window, float scale) {        \
        attention_forward(o, sums, log_sum_exp, q, k, v,                                                              \
                          {ranges, t, keys, heads, kv_heads, d, group_size, group_offset, window, scale});            \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
