// Cross-entropy over logits (rows, cols) of which each rank holds some columns of the vocabulary, in the pieces between
// which ranks communicate (arXiv:1909.08053): row_max, all-reduce, sum_exp_and_target_logit, all-reduce,
// log_sum_exp = max + ln(sum), loss = ln(sum) - target, gradient. A block per row, in turns.
#include "pack.cuh"
#include "reduce.cuh"

constexpr u32 IGNORE_INDEX = 0xffffffffu;

// Column of the target among the local ones, -1 if it is not there.
__device__ inline i64 local_column(u32 target, i64 vocab_start, i64 cols) {
    i64 column = (i64)target - vocab_start;
    return target != IGNORE_INDEX && column >= 0 && column < cols ? column : -1;
}

// max (rows): minus infinity where a row is empty, NaN where it has a NaN.
template <typename T>
__device__ void row_max(float* max, const T* logits, i64 rows, i64 cols) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float largest = __uint_as_float(0xff800000u);
        for_each_pack_of_block<PACK<T>>(cols, rows_packed<T>(cols, aligned(logits)), [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> x = load<N>(logits + row * cols + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                largest = Max()(largest, x.at[j]);
            }
        });
        largest = reduce_block<Max>(largest, shared);
        if (threadIdx.x == 0) {
            max[row] = largest;
        }
    }
}

// out (2, rows): the sums of exp(logit - max), and logit - max of the target where it is local, else 0.
template <typename T>
__device__ void sum_exp_and_target_logit(float* out, const T* logits, const float* max, const u32* targets, i64 rows,
                                         i64 cols, i64 vocab_start) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        float largest = max[row];
        float sum = 0.0f;
        for_each_pack_of_block<PACK<T>>(cols, rows_packed<T>(cols, aligned(logits)), [&](auto width, i64 i) {
            constexpr int N = decltype(width)::value;
            Floats<N> x = load<N>(logits + row * cols + i);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                sum += expf(x.at[j] - largest);
            }
        });
        sum = reduce_block<Sum>(sum, shared);
        if (threadIdx.x == 0) {
            i64 column = local_column(targets[row], vocab_start, cols);
            out[row] = sum;
            out[rows + row] = column >= 0 ? to_f32(logits[row * cols + column]) - largest : 0.0f;
        }
    }
}

// loss (rows) and log_sum_exp (rows) from what all shards of the vocabulary have: max (rows) and sums (2, rows), as
// sum_exp_and_target_logit gives them. The loss is 0 without a target, NaN for one beyond the vocabulary.
extern "C" __global__ void cross_entropy_loss(float* loss, float* log_sum_exp, const float* max, const float* sums,
                                              const u32* targets, i64 rows, i64 vocab) {
    for (i64 row = thread_index(); row < rows; row += thread_count()) {
        u32 target = targets[row];
        float log_sum = logf(sums[row]);
        log_sum_exp[row] = max[row] + log_sum;
        float of_target = (i64)target < vocab ? log_sum - sums[rows + row] : __uint_as_float(0x7fc00000u);
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

extern "C" __global__ void row_max_f32(float* max, const float* logits, i64 rows, i64 cols) {
    row_max(max, logits, rows, cols);
}

extern "C" __global__ void row_max_bf16(float* max, const bf16* logits, i64 rows, i64 cols) {
    row_max(max, logits, rows, cols);
}

extern "C" __global__ void sum_exp_and_target_logit_f32(float* out, const float* logits, const float* max,
                                                        const u32* targets, i64 rows, i64 cols, i64 vocab_start) {
    sum_exp_and_target_logit(out, logits, max, targets, rows, cols, vocab_start);
}

extern "C" __global__ void sum_exp_and_target_logit_bf16(float* out, const bf16* logits, const float* max,
                                                         const u32* targets, i64 rows, i64 cols, i64 vocab_start) {
    sum_exp_and_target_logit(out, logits, max, targets, rows, cols, vocab_start);
}

extern "C" __global__ void cross_entropy_backward_f32(float* dlogits, const float* logits, const float* log_sum_exp,
                                                      const u32* targets, const float* row_grads, float grad, i64 rows,
                                                      i64 cols, i64 vocab_start) {
    cross_entropy_backward(dlogits, logits, log_sum_exp, targets, row_grads, grad, rows, cols, vocab_start);
}

extern "C" __global__ void cross_entropy_backward_bf16(bf16* dlogits, const bf16* logits, const float* log_sum_exp,
                                                       const u32* targets, const float* row_grads, float grad,
                                                       i64 rows, i64 cols, i64 vocab_start) {
    cross_entropy_backward(dlogits, logits, log_sum_exp, targets, row_grads, grad, rows, cols, vocab_start);
}
