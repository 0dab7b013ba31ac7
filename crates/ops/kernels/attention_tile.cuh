// Tiles of TILE rows for causal attention with grouped heads, a window and documents. A block has TILE * TILE threads: thread
// (row, lane) owns the score of one query and one key, and the elements lane, lane + TILE, .. of one row of the result.
#pragma once

#include "half_precision.cuh"
#include "reduce.cuh"

constexpr int TILE = 16;
constexpr int MAX_HEAD_DIM = 256;
// Elements of a row of the result that a thread owns.
constexpr int OWNED = MAX_HEAD_DIM / TILE;
// Row length of a tile of scores; one more than TILE, so that a column's elements lie in different banks.
constexpr int SCORES_STRIDE = TILE + 1;

// Sizes of q (b, t, heads, d) and k, v (b, t, kv_heads, d): query head h reads head (group_offset + h) / group_size, query i
// the keys j with i - window < j <= i, from the start of its document on: `starts` (b, t) has these, null where each sequence is one.
struct Attention {
    const u32* starts;
    int t, heads, kv_heads, d, group_size, group_offset, window;
    float scale;

    __device__ bool sees(int query, int key) const {
        return key <= query && query - key < window && key >= document_start(query);
    }

    // Rows of a tile that are beyond the sequence count to its last document.
    __device__ int document_start(int query) const {
        return starts ? (int)starts[(i64)blockIdx.z * t + (query < t ? query : t - 1)] : 0;
    }

    // Where the first tile of keys starts that a query of the tile from `first` on sees.
    __device__ int first_key(int first) const {
        int seen = first < window ? 0 : first - window + 1;
        int start = document_start(first);
        return (seen > start ? seen : start) / TILE * TILE;
    }

    // Whether a query of the tile from `query` on sees a key of the tile from `key` on, which is not after it.
    __device__ bool tile_sees(int query, int key) const {
        int last = key + TILE - 1;
        return query < t && query - last < window && document_start(query) <= last;
    }

    __device__ int kv_head(int head) const {
        return (group_offset + head) / group_size;
    }

    // The first query head that reads a key/value head; those of the head after it begin where its own end.
    __device__ int first_head(int kv_head) const {
        int head = kv_head * group_size - group_offset;
        return head < 0 ? 0 : head > heads ? heads : head;
    }

    // Row length of a tile in shared memory; odd, so that a column's elements lie in different banks.
    __device__ int stride() const {
        return d | 1;
    }

    // Where the head's row at position 0 of sequence blockIdx.z starts.
    __device__ i64 start(int head, int num_heads) const {
        return ((i64)blockIdx.z * t * num_heads + head) * d;
    }

    // Index of a position's number in (b, heads, t).
    __device__ i64 row_index(int head, int position) const {
        return ((i64)blockIdx.z * heads + head) * t + position;
    }
};

__device__ inline int row_in_tile() {
    return (int)threadIdx.x / TILE;
}

__device__ inline int lane_in_row() {
    return (int)threadIdx.x % TILE;
}

// Copies the rows first .. first + TILE of one head to shared memory; zeros beyond the sequence.
template <typename T>
__device__ inline void load_tile(float* tile, const T* src, int first, int head, int num_heads, const Attention& a) {
    int position = first + row_in_tile();
    const T* from = src + a.start(head, num_heads) + (i64)position * num_heads * a.d;
    float* to = tile + row_in_tile() * a.stride();
    for (int c = lane_in_row(); c < a.d; c += TILE) {
        to[c] = position < a.t ? to_f32(from[c]) : 0.0f;
    }
}

// Writes each thread's elements of its row, times `factor`; nothing beyond the sequence.
template <typename T>
__device__ inline void store_rows(T* dst, const float (&owned)[OWNED], float factor, int first, int head,
                                  int num_heads, const Attention& a) {
    int position = first + row_in_tile();
    if (position >= a.t) {
        return;
    }
    T* to = dst + a.start(head, num_heads) + (i64)position * num_heads * a.d;
#pragma unroll
    for (int n = 0; n < OWNED; ++n) {
        int c = lane_in_row() + n * TILE;
        if (c < a.d) {
            to[c] = from_f32(owned[n] * factor, T());
        }
    }
}

// The product of row `i` of one tile and row `j` of another.
__device__ inline float dot(const float* x, int i, const float* y, int j, const Attention& a) {
    const float* from_x = x + i * a.stride();
    const float* from_y = y + j * a.stride();
    float sum = 0.0f;
#pragma unroll 8
    for (int c = 0; c < a.d; ++c) {
        sum += from_x[c] * from_y[c];
    }
    return sum;
}

// owned += sum over the tile's rows n of weights[n * step] * tile[n].
__device__ inline void add_weighted_rows(float (&owned)[OWNED], const float* weights, int step, const float* tile,
                                         const Attention& a) {
    for (int n = 0; n < TILE; ++n) {
        float weight = weights[n * step];
        const float* row = tile + n * a.stride();
#pragma unroll
        for (int m = 0; m < OWNED; ++m) {
            int c = lane_in_row() + m * TILE;
            if (c < a.d) {
                owned[m] += weight * row[c];
            }
        }
    }
}
