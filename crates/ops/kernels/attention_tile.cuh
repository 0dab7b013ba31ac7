// Tiles of TILE rows for causal attention with grouped heads, a window, and queries and keys that are any rows. A block has TILE * TILE threads: thread
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

// Sizes of q (b, t, heads, d) and k, v (b, keys, kv_heads, d): query head h reads head (group_offset + h) / group_size. Where `ranges` is null
// there are as many keys as queries, and query i sees the keys j with i - window < j <= i. Else it has what a query sees, (b, t) first keys
// and then (b, t) ends; and for each tile of keys which queries may see some of it, (b, tiles) first queries and then (b, tiles) ends.
struct Attention {
    const u32* ranges;
    int t, keys, heads, kv_heads, d, group_size, group_offset, window;
    float scale;

    __device__ int first_seen(int query) const {
        return (int)ranges[(i64)blockIdx.z * t + query];
    }

    __device__ int seen_end(int query) const {
        return (int)ranges[((i64)gridDim.z + blockIdx.z) * t + query];
    }

    __device__ bool sees(int query, int key) const {
        if (ranges) {
            return query < t && key >= first_seen(query) && key < seen_end(query);
        }
        return key <= query && query - key < window;
    }

    // Where the first tile of keys starts that a query of the tile from `first` on sees.
    __device__ int first_key(int first) const {
        int seen = keys;
        for (int query = first; ranges && query < t && query < first + TILE; ++query) {
            bool is_first = first_seen(query) < seen_end(query) && first_seen(query) < seen;
            seen = is_first ? first_seen(query) : seen;
        }
        if (!ranges) {
            seen = first < window ? 0 : first - window + 1;
        }
        return seen / TILE * TILE;
    }

    // Where the last tile of keys starts that a query of the tile from `first` on sees; before the first one if there is none.
    __device__ int last_key(int first) const {
        int end = 0;
        for (int query = first; ranges && query < t && query < first + TILE; ++query) {
            bool is_last = first_seen(query) < seen_end(query) && seen_end(query) > end;
            end = is_last ? seen_end(query) : end;
        }
        return ranges ? (end + TILE - 1) / TILE * TILE - TILE : first;
    }

    __device__ int query_bound(int table, int key) const {
        int tiles = (keys + TILE - 1) / TILE;
        i64 tables = 2 * (i64)gridDim.z * t;
        return (int)ranges[tables + ((i64)table * gridDim.z + blockIdx.z) * tiles + key / TILE];
    }

    // Where the first tile of queries starts that may see a key of the tile from `key` on.
    __device__ int first_query(int key) const {
        return ranges ? query_bound(0, key) / TILE * TILE : key;
    }

    // Where the queries end that may.
    __device__ int query_end(int key) const {
        if (ranges) {
            return query_bound(1, key);
        }
        i64 end = (i64)key + TILE - 1 + window;
        return end < t ? (int)end : t;
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

    // Where the head's row at position 0 of sequence blockIdx.z starts, of sequences of `len`.
    __device__ i64 start(int head, int num_heads, int len) const {
        return ((i64)blockIdx.z * len * num_heads + head) * d;
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
__device__ inline void load_tile(float* tile, const T* src, int first, int head, int num_heads, int len,
                                 const Attention& a) {
    int position = first + row_in_tile();
    const T* from = src + a.start(head, num_heads, len) + (i64)position * num_heads * a.d;
    float* to = tile + row_in_tile() * a.stride();
    for (int c = lane_in_row(); c < a.d; c += TILE) {
        to[c] = position < len ? to_f32(from[c]) : 0.0f;
    }
}

// Writes each thread's elements of its row, times `factor`: to `sums`, or adds them there, if that is not null. Nothing beyond the sequence.
template <typename T>
__device__ inline void store_rows(T* dst, float* sums, bool add, const float (&owned)[OWNED], float factor, int first,
                                  int head, int num_heads, int len, const Attention& a) {
    int position = first + row_in_tile();
    if (position >= len) {
        return;
    }
    i64 start = a.start(head, num_heads, len) + (i64)position * num_heads * a.d;
#pragma unroll
    for (int n = 0; n < OWNED; ++n) {
        int c = lane_in_row() + n * TILE;
        if (c >= a.d) {
            continue;
        }
        float value = owned[n] * factor;
        if (sums) {
            sums[start + c] = add ? sums[start + c] + value : value;
        } else {
            dst[start + c] = from_f32(value, T());
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
