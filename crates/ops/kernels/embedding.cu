// Table look-up, y[i] = table[ids[i]], and its gradient: grad[v] += sum of dy[i] over ids[i] = v in the order of i.
//
// The gradient without atomics: embedding_order.cu sorts the positions by id, then one block for each run of equal ids
// adds that run's rows in order, as the CPU does and with its bits. (A block per vocabulary row would start 128256 blocks
// to find few ids; a chain of "next position with my id" makes each addition wait for the load before it.)
#include "embedding_row.cuh"
#include "pack.cuh"

// y (num_ids, hidden); table (local_vocab, hidden) holds the ids from vocab_start on. Other ids give zeros.
template <typename T>
__device__ void embedding_forward(T* y, const T* table, const u32* ids, i64 num_ids, i64 hidden, u32 vocab_start,
                                  u32 local_vocab) {
    bool packed = hidden % PACK<T> == 0 && aligned(y, table);
    for (i64 position = blockIdx.x; position < num_ids; position += gridDim.x) {
        u32 row = local_row(ids[position], vocab_start, local_vocab);
        for_each_pack_of_block<PACK<T>>(hidden, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> x = {};
            if (row < local_vocab) {
                x = load<N>(table + (i64)row * hidden + i);
            }
            store(y + position * hidden + i, x);
        });
    }
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void embedding_forward##SUFFIX(                                                             \
        T* y, const T* table, const u32* ids, i64 num_ids, i64 hidden, u32 vocab_start, u32 local_vocab) {            \
        embedding_forward(y, table, ids, num_ids, hidden, vocab_start, local_vocab);                                  \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

// Rows loaded before the first of them is added: additions are in order, loads need not be.
constexpr int IN_FLIGHT = 4;

// grad (local_vocab, hidden) += rows of dy (num_ids, hidden). sorted_rows (num_ids) are the local rows in ascending order,
// ids that are not here last, order (num_ids) the positions they come from; positions of one row ascend. Block (x, y) handles the run that starts at place x of the
// sorted rows, if one does, and the columns that fall to slice y of gridDim.y.
template <typename T>
__device__ void embedding_backward(float* grad, const T* dy, const u32* sorted_rows, const u32* order, u32 num_ids,
                                   i64 hidden, u32 local_vocab) {
    u32 first = blockIdx.x;
    u32 row = sorted_rows[first];
    if (row >= local_vocab || (first > 0 && sorted_rows[first - 1] == row)) {
        return;
    }
    float* to = grad + (i64)row * hidden;
    bool packed = hidden % PACK<T> == 0 && aligned(grad, dy);
    i64 worker = (i64)blockIdx.y * blockDim.x + threadIdx.x;
    for_each_pack<PACK<T>>(hidden, packed, worker, (i64)gridDim.y * blockDim.x, [&](auto width, i64 i) {
        constexpr int N = decltype(width)::value;
        Floats<N> sum = load<N>(to + i);
        bool more = true;
        for (u32 place = first; more; place += IN_FLIGHT) {
            Floats<N> x[IN_FLIGHT];
            bool same[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
                same[k] = num_ids - place > (u32)k && sorted_rows[place + k] == row;
                if (same[k]) {
                    x[k] = load<N>(dy + (i64)order[place + k] * hidden + i);
                }
            }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; ++k) {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    sum.at[j] = same[k] ? sum.at[j] + x[k].at[j] : sum.at[j];
                }
            }
            more = same[IN_FLIGHT - 1] && num_ids - place > (u32)IN_FLIGHT;
        }
        store(to + i, sum);
    });
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void embedding_backward##SUFFIX(                                                            \
        float* grad, const T* dy, const u32* sorted_rows, const u32* order, u32 num_ids, i64 hidden,                  \
        u32 local_vocab) {                                                                                            \
        embedding_backward(grad, dy, sorted_rows, order, num_ids, hidden, local_vocab);                               \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
