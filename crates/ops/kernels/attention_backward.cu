// Gradients of causal attention (FlashAttention-2, arXiv:2307.08691). With p_ij = exp(scale q_i . k_j - lse_i) and
// delta_i = do_i . o_i: ds_ij = scale p_ij (do_i . v_j - delta_i); dq_i = sum_j ds_ij k_j, dk_j = sum_i ds_ij q_i,
// dv_j = sum_i p_ij do_i. Scores are computed again, once for dq and once for dk and dv, so that each gradient is
// summed by one block in a fixed order.
#include "attention_tile.cuh"

// delta (b, heads, t). A warp per row of o and grad (b, t, heads, d).
template <typename T>
__device__ void attention_delta(float* delta, const T* o, const T* grad, i64 rows, int t, int heads, int d) {
    int lane = (int)threadIdx.x % WARP_SIZE;
    for (i64 row = thread_index() / WARP_SIZE; row < rows; row += thread_count() / WARP_SIZE) {
        float sum = 0.0f;
        for (int c = lane; c < d; c += WARP_SIZE) {
            sum += to_f32(o[row * d + c]) * to_f32(grad[row * d + c]);
        }
        sum = reduce_lanes<Sum>(sum, WARP_SIZE);
        if (lane == 0) {
            i64 sequence = row / heads / t;
            delta[(sequence * heads + row % heads) * t + row / heads % t] = sum;
        }
    }
}

struct Scores {
    float p, ds;
};

// Of query `query` (row i of the tiles of queries and output gradients) and key `key` (row j of keys and values); 0 for
// pairs that attention does not see.
__device__ inline Scores scores(const float* queries, const float* grads, int i, int query, const float* keys,
                                const float* values, int j, int key, int head, const float* log_sum_exp,
                                const float* delta, const Attention& a) {
    if (query >= a.t || !a.sees(query, key)) {
        return {0.0f, 0.0f};
    }
    i64 row = a.row_index(head, query);
    float p = expf(a.scale * dot(queries, i, keys, j, a) - log_sum_exp[row]);
    return {p, p * (dot(grads, i, values, j, a) - delta[row])};
}

// dq as q; where `sums` is not null, it is added there in f32. Grid (tiles of queries, heads, b).
template <typename T>
__device__ void attention_backward_q(T* dq, float* sums, const T* q, const T* k, const T* v, const T* grad,
                                     const float* log_sum_exp, const float* delta, const Attention& a) {
    float* queries = shared;
    float* grads = queries + TILE * a.stride();
    float* keys = grads + TILE * a.stride();
    float* values = keys + TILE * a.stride();
    float* ds = values + TILE * a.stride();
    int row = row_in_tile();
    int lane = lane_in_row();
    int head = (int)blockIdx.y;
    int kv_head = a.kv_head(head);
    int first = ((int)gridDim.x - 1 - (int)blockIdx.x) * TILE;
    load_tile(queries, q, first, head, a.heads, a.t, a);
    load_tile(grads, grad, first, head, a.heads, a.t, a);

    float owned[OWNED] = {};
    int last_key = a.last_key(first);
    for (int key = a.first_key(first); key <= last_key; key += TILE) {
        __syncthreads(); // the tile before is used up
        load_tile(keys, k, key, kv_head, a.kv_heads, a.keys, a);
        load_tile(values, v, key, kv_head, a.kv_heads, a.keys, a);
        __syncthreads();
        Scores s = scores(queries, grads, row, first + row, keys, values, lane, key + lane, head, log_sum_exp, delta, a);
        ds[row * SCORES_STRIDE + lane] = s.ds;
        __syncthreads();
        add_weighted_rows(owned, ds + row * SCORES_STRIDE, 1, keys, a);
    }
    store_rows(dq, sums, true, owned, a.scale, first, head, a.heads, a.t, a);
}

// dk as k, dv as v: zeros for heads that no query head reads; where `k_sums` and `v_sums` are not null, they are added there in f32. Grid (tiles of keys, kv_heads, b).
template <typename T>
__device__ void attention_backward_kv(T* dk, T* dv, float* k_sums, float* v_sums, const T* q, const T* k, const T* v, const T* grad,
                                      const float* log_sum_exp, const float* delta, const Attention& a) {
    float* queries = shared;
    float* grads = queries + TILE * a.stride();
    float* keys = grads + TILE * a.stride();
    float* values = keys + TILE * a.stride();
    float* p = values + TILE * a.stride();
    float* ds = p + TILE * SCORES_STRIDE;
    int row = row_in_tile();
    int lane = lane_in_row();
    int kv_head = (int)blockIdx.y;
    // The first tiles are seen by most queries, up to the window, and blocks start in this order.
    int first = (int)blockIdx.x * TILE;
    load_tile(keys, k, first, kv_head, a.kv_heads, a.keys, a);
    load_tile(values, v, first, kv_head, a.kv_heads, a.keys, a);

    int query_end = a.query_end(first);
    float owned_k[OWNED] = {};
    float owned_v[OWNED] = {};
    for (int head = a.first_head(kv_head); head < a.first_head(kv_head + 1); ++head) {
        for (int query = a.first_query(first); query < query_end; query += TILE) {
            __syncthreads(); // the tile before is used up
            load_tile(queries, q, query, head, a.heads, a.t, a);
            load_tile(grads, grad, query, head, a.heads, a.t, a);
            __syncthreads();
            Scores s =
                scores(queries, grads, row, query + row, keys, values, lane, first + lane, head, log_sum_exp, delta, a);
            p[row * SCORES_STRIDE + lane] = s.p;
            ds[row * SCORES_STRIDE + lane] = s.ds;
            __syncthreads();
            // This thread's row of the results is a key: column `row` of the scores.
            add_weighted_rows(owned_v, p + row, SCORES_STRIDE, grads, a);
            add_weighted_rows(owned_k, ds + row, SCORES_STRIDE, queries, a);
        }
    }
    store_rows(dk, k_sums, true, owned_k, a.scale, first, kv_head, a.kv_heads, a.keys, a);
    store_rows(dv, v_sums, true, owned_v, 1.0f, first, kv_head, a.kv_heads, a.keys, a);
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void attention_delta##SUFFIX(                                                               \
        float* delta, const T* o, const T* grad, i64 rows, int t, int heads, int d) {                                 \
        attention_delta(delta, o, grad, rows, t, heads, d);                                                           \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void attention_backward_q##SUFFIX(                                                          \
        T* dq, float* sums, const T* q, const T* k, const T* v, const T* grad, const float* log_sum_exp,              \
        const float* delta, const u32* ranges, int t, int keys, int heads, int kv_heads, int d, int group_size,       \
        int group_offset, int window, float scale) {                                                                  \
        attention_backward_q(dq, sums, q, k, v, grad, log_sum_exp, delta,                                             \
                             {ranges, t, keys, heads, kv_heads, d, group_size, group_offset, window, scale});         \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void attention_backward_kv##SUFFIX(                                                         \
        T* dk, T* dv, float* k_sums, float* v_sums, const T* q, const T* k, const T* v, const T* grad,                \
        const float* log_sum_exp, const float* delta, const u32* ranges, int t, int keys, int heads, int kv_heads,    \
        int d, int group_size, int group_offset, int window, float scale) {                                           \
        attention_backward_kv(dk, dv, k_sums, v_sums, q, k, v, grad, log_sum_exp, delta,                              \
                              {ranges, t, keys, heads, kv_heads, d, group_size, group_offset, window, scale});        \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
