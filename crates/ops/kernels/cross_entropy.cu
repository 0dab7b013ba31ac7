// Cross-entropy over logits (rows, cols) of which each rank holds some columns of the vocabulary (arXiv:1909.08053):
// softmax_stats, all-gather, log_sum_exp = max + ln(sum), loss = ln(sum) - (target - max), gradient. A block per row, in turns.
#include "pack.cuh"
#include "reduce.cuh"

constexpr u32 IGNORE_INDEX = 0xffffffffu;

// Column of the target among the local ones, -1 if it is not there.
__device__ inline i64 local_column(u32 target, i64 vocab_start, i64 cols) {
    i64 column = (i64)target - vocab_start;
    return target != IGNORE_INDEX && column >= 0 && column < cols ? column : -1;
}

// What a row is started with: finite, so that minus infinity can be taken from it.
constexpr float LOWEST = -3.402823466e38f;

// stats (rows, 3): the largest local logit (LOWEST where a row is empty), the sum of exp(logit - largest) (NaN where a logit is),
// and the target's logit where it is local, else 0. One pass: a thread scales its sum down when it meets a larger logit
// (arXiv:1805.02867), and all do at the end.
template <typename T>
__device__ void softmax_stats(float* stats, const T* logits, const u32* targets, i64 rows, i64 cols, i64 vocab_start) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float max = LOWEST;
        float sum = 0.0f;
        for_each_pack_of_block<PACK<T>>(cols, rows_packed<T>(cols, aligned(logits)), [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> x = load<N>(logits + row * cols + i);
            float before = max;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                max = fmaxf(max, x.at[j]);
            }
            if (max != before) {
                sum *= expf(before - max);
            }
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sum += expf(x.at[j] - max);
            }
        });
        float largest = reduce_block<Max>(max, shared);
        sum = reduce_block<Sum>(sum * expf(max - largest), shared);
        if (threadIdx.x == 0) {
            i64 column = local_column(targets[row], vocab_start, cols);
            stats[3 * row] = largest;
            stats[3 * row + 1] = sum;
            stats[3 * row + 2] = column >= 0 ? to_f32(logits[row * cols + column]) : 0.0f;
        }
    }
}

// loss (rows) and log_sum_exp (rows) from the stats (shards, rows, 3) of all shards of the vocabulary. The loss is 0 without
// a target, NaN for one beyond the vocabulary.
extern "C" __global__ void cross_entropy_loss(float* loss, float* log_sum_exp, const float* stats, const u32* targets,
                                              i64 rows, i64 shards, i64 vocab) {
    for (i64 row = thread_index(); row < rows; row += thread_count()) {
        float max = LOWEST;
        for (i64 shard = 0; shard < shards; ++shard) {
            max = fmaxf(max, stats[3 * (shard * rows + row)]);
        }
        float sum = 0.0f;
        float target_logit = 0.0f;
        for (i64 shard = 0; shard < shards; ++shard) {
            const float* of_shard = stats + 3 * (shard * rows + row);
            sum += of_shard[1] * expf(of_shard[0] - max);
            target_logit += of_shard[2];
        }
        u32 target = targets[row];
        float log_sum = logf(sum);
        log_sum_exp[row] = max + log_sum;
        float of_target = (i64)target < vocab ? log_sum - (target_logit - max) : __uint_as_float(0x7fc00000u);
        loss[row] = target == IGNORE_INDEX ? 0.0f : of_target;
    }
}

// dlogits (rows, cols), which may be logits: (exp(logit - log_sum_exp) - onehot(target)) * grad, where grad is
// row_grads[row], or `grad` if row_grads is null; 0 in rows with IGNORE_INDEX.
template <typename T>
__device__ void cross_entropy_backward(T* dlogits, const T* logits, const float* log_sum_exp, const u32* targets,
                                       const float* row_grads, float grad, i64 rows, i64 cols, i64 vocab_start) {
    bool packed = rows_packed<T>(cols, aligned(dlogits, logits));
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        bool ignored = targets[row] == IGNORE_INDEX;
        i64 column = local_column(targets[row], vocab_start, cols);
        float shift = log_sum_exp[row];
        float scale = row_grads ? row_grads[row] : grad;
        for_each_pack_of_block<PACK<T>>(cols, packed, [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> x = load<N>(logits + row * cols + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                float p = expf(x.at[j] - shift);
                x.at[j] = ignored ? 0.0f : (i + j == column ? p - 1.0f : p) * scale;
            }
            store(dlogits + row * cols + i, x);
        });
    }
}

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void softmax_stats##SUFFIX(                                                                 \
        float* stats, const T* logits, const u32* targets, i64 rows, i64 cols, i64 vocab_start) {                     \
        softmax_stats(stats, logits, targets, rows, cols, vocab_start);                                               \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL

#define KERNEL(SUFFIX, T)                                                                                             \
    extern "C" __global__ void cross_entropy_backward##SUFFIX(                                                        \
        T* dlogits, const T* logits, const float* log_sum_exp, const u32* targets, const float* row_grads,            \
        float grad, i64 rows, i64 cols, i64 vocab_start) {                                                            \
        cross_entropy_backward(dlogits, logits, log_sum_exp, targets, row_grads, grad, rows, cols, vocab_start);      \
    }
FOR_EACH_TYPE(KERNEL)
#undef KERNEL
