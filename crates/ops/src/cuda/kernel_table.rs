//! The kernels of `kernels/`, file by file, with the arguments of each.
//!
//! The launch functions are made from this table and nothing else, and a test that needs no compiler for GPUs compares it
//! with the sources, so an argument of another type or in another place is an error before anything runs on a GPU.
//! `name[T]` stands for `name_f32`, `name_bf16` and `name_f16`; an `Opt` pointer may be null.

macro_rules! for_each_kernel {
    ($expand:ident) => {
        $expand! {
            "adamw" {
                adamw[T](master: OptOut<f32>, exp_avg: Out<f32>, exp_avg_sq: Out<f32>, grad: In<f32>, slots: AdamWSlots,
                    step_size: f32, correction: f32, one_minus_beta1: f32, beta2: f32, one_minus_beta2: f32, eps: f32, scale: f32);
                adamw_split(remainder: Out<i16>, exp_avg: Out<f32>, exp_avg_sq: Out<f32>, grad: In<f32>, slots: AdamWSlots,
                    step_size: f32, correction: f32, one_minus_beta1: f32, beta2: f32, one_minus_beta2: f32, eps: f32, scale: f32);
            }
            "add_into" {
                add_into[T](dst: Out<f32>, src: In<T>, len: i64);
            }
            "attention_backward" {
                attention_delta[T](delta: Out<f32>, o: In<T>, grad: In<T>, rows: i64, t: i32, heads: i32, d: i32);
                attention_backward_q[T](dq: OptOut<T>, sums: OptOut<f32>, q: In<T>, k: In<T>, v: In<T>, grad: In<T>, log_sum_exp: In<f32>,
                    delta: In<f32>, ranges: OptIn<u32>, t: i32, keys: i32, heads: i32, kv_heads: i32, d: i32, group_size: i32,
                    group_offset: i32, window: i32, scale: f32);
                attention_backward_kv[T](dk: OptOut<T>, dv: OptOut<T>, k_sums: OptOut<f32>, v_sums: OptOut<f32>, q: In<T>, k: In<T>, v: In<T>,
                    grad: In<T>, log_sum_exp: In<f32>, delta: In<f32>, ranges: OptIn<u32>, t: i32, keys: i32, heads: i32, kv_heads: i32,
                    d: i32, group_size: i32, group_offset: i32, window: i32, scale: f32);
            }
            "attention_forward" {
                attention_forward[T](o: OptOut<T>, sums: OptOut<f32>, log_sum_exp: Out<f32>, q: In<T>, k: In<T>, v: In<T>, ranges: OptIn<u32>,
                    t: i32, keys: i32, heads: i32, kv_heads: i32, d: i32, group_size: i32, group_offset: i32, window: i32, scale: f32);
            }
            "cast" {
                round[T](dst: Out<T>, src: In<f32>, len: i64);
                widen[T](dst: Out<f32>, src: In<T>, len: i64);
            }
            "column_sum" {
                column_sum[T](dst: Out<f32>, src: In<T>, rows: i64, cols: i64, add: i32);
            }
            "cross_entropy" {
                softmax_stats[T](stats: Out<f32>, logits: In<T>, targets: In<u32>, rows: i64, cols: i64,
                    vocab_start: i64);
                cross_entropy_loss(loss: Out<f32>, log_sum_exp: Out<f32>, stats: In<f32>, targets: In<u32>, rows: i64,
                    shards: i64, vocab: i64);
                cross_entropy_backward[T](dlogits: Out<T>, logits: In<T>, log_sum_exp: In<f32>, targets: In<u32>,
                    row_grads: OptIn<f32>, grad: f32, rows: i64, cols: i64, vocab_start: i64);
            }
            "embedding" {
                embedding_forward[T](y: Out<T>, table: In<T>, ids: In<u32>, num_ids: i64, hidden: i64, vocab_start: u32,
                    local_vocab: u32);
                embedding_backward[T](grad: Out<f32>, dy: In<T>, sorted_rows: In<u32>, order: In<u32>, num_ids: u32,
                    hidden: i64, local_vocab: u32);
            }
            "embedding_order" {
                order_start(rows: Out<u32>, order: Out<u32>, ids: In<u32>, num_ids: u32, vocab_start: u32,
                    local_vocab: u32);
                order_count(counts: Out<u32>, rows: In<u32>, num_ids: u32, shift: u32);
                order_sum(counts: Out<u32>, len: u32);
                order_move(rows_to: Out<u32>, order_to: Out<u32>, rows: In<u32>, order: In<u32>, starts: In<u32>,
                    num_ids: u32, shift: u32);
            }
            "fill" {
                fill[T](dst: Out<T>, value: f32, len: i64);
                fill_rows[T](dst: Out<T>, row: In<T>, rows: i64, cols: i64);
            }
            "layer_norm" {
                layer_norm_forward[T](y: Out<T>, x: In<T>, w: In<T>, b: OptIn<T>, rows: i64, cols: i32, eps: f32);
                layer_norm_backward[T](dx: Out<T>, dw: OptOut<f32>, db: OptOut<f32>, x: In<T>, w: In<T>, dy: In<T>,
                    residual: OptIn<T>, rows: i64, cols: i32, eps: f32);
            }
            "quantized" {
                quantize_int8[T](packed: Out<u8>, src: In<T>, a: i64, b: i64, len: i64);
                quantize_int4[T](packed: Out<u8>, src: In<T>, a: i64, b: i64, len: i64);
                dequantize_int8[T](dst: Out<T>, packed: In<u8>, rows: i64, num_summed: i64, len: i64, add: i32);
                dequantize_int4[T](dst: Out<T>, packed: In<u8>, rows: i64, num_summed: i64, len: i64, add: i32);
            }
            "rms_norm" {
                rms_norm_forward[T](y: Out<T>, x: In<T>, w: In<T>, rows: i64, cols: i32, eps: f32);
                rms_norm_backward[T](dx: Out<T>, partials: OptOut<f32>, x: In<T>, w: In<T>, dy: In<T>,
                    residual: OptIn<T>, rows: i64, cols: i32, eps: f32);
            }
            "rope" {
                rope[T](x: Out<T>, cos: In<f32>, sin: In<f32>, rows: i64, t: i32, heads: i32, half: i32, sign: f32);
            }
            "sum_of_squares" {
                sum_of_squares[T](partials: Out<f64>, src: In<T>, len: i64);
                sum_partials_f64(dst: Out<f64>, partials: In<f64>, num_partials: i32, add: i32);
            }
            "swiglu" {
                swiglu_forward[T](y: Out<T>, gate: In<T>, up: In<T>, len: i64);
                swiglu_backward[T](dgate: Out<T>, dup: Out<T>, gate: In<T>, up: In<T>, dy: In<T>, len: i64);
            }
        }
    };
}
pub(crate) use for_each_kernel;
