//! Kernels that memory limits, against a copy.
//!
//! Bytes are those that must be read and written once; what a kernel reads again counts as time, not as bytes.

use crate::random;
use crate::timer::secs_of_call;
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{
    AdamWBuffers, AdamWConstants, AdamWSlot, QuantizedType, RopeDirection, adamw, add_into,
    cross_entropy, cross_entropy_grad_in_place, dequantize_rows_into, embedding_forward,
    embedding_grad_into, linear_bias_grad_into, quantize_rows, rms_norm_backward, rms_norm_forward,
    rope_in_place, round_into, sum_of_squares, swiglu_backward, swiglu_forward, upload,
};

/// Rows of logits that the head works on at once in training on a GPU, at least.
const LOGIT_ROWS: usize = 4096;
const EPS: f64 = 1e-5;

struct Kernels<'a> {
    device: &'a Device,
    copied_bytes_per_sec: f64,
}

impl Kernels<'_> {
    /// Prints a line about a call that must move so many bytes.
    fn print(&self, op: &str, bytes: usize, call: impl FnMut() -> Result<()>) -> Result<()> {
        let secs = secs_of_call(self.device, call)?;
        let speed = bytes as f64 / secs;
        println!(
            "{{\"op\": \"{op}\", \"secs\": {secs}, \"gb_per_sec\": {}, \"of_copy\": {}}}",
            speed / 1e9,
            speed / self.copied_bytes_per_sec
        );
        Ok(())
    }

    fn random(&self, dims: (usize, usize)) -> Result<Tensor> {
        random(dims, self.device)
    }
}

pub fn measure(
    device: &Device,
    [rows, hidden, intermediate, vocab, heads]: [usize; 5],
) -> Result<()> {
    let copied = random((rows, intermediate), device)?;
    let bytes = 2 * bytes_of(&copied);
    let secs = secs_of_call(device, || copied.copy().map(drop))?;
    let kernels = Kernels {
        device,
        copied_bytes_per_sec: bytes as f64 / secs,
    };
    kernels.print("copy", bytes, || copied.copy().map(drop))?;
    activations(&kernels, rows, hidden, intermediate)?;
    positions(&kernels, rows, hidden, heads)?;
    vocabulary(&kernels, rows, hidden, vocab)?;
    parameters(&kernels, intermediate * hidden)
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// Norm and MLP.
fn activations(kernels: &Kernels, rows: usize, hidden: usize, intermediate: usize) -> Result<()> {
    let (x, dy) = (
        kernels.random((rows, hidden))?,
        kernels.random((rows, hidden))?,
    );
    let weight = random(hidden, kernels.device)?;
    let bytes = bytes_of(&x);
    kernels.print("rms_norm_forward", 2 * bytes, || {
        rms_norm_forward(&x, &weight, EPS).map(drop)
    })?;
    kernels.print("rms_norm_backward", 4 * bytes, || {
        rms_norm_backward(&x, &weight, &dy, EPS, Some(&x), true).map(drop)
    })?;
    let sums = Tensor::zeros(hidden, DType::F32, kernels.device)?;
    kernels.print("column_sum", bytes, || {
        linear_bias_grad_into(&sums, false, &dy)
    })?;
    let (gate, up) = (
        kernels.random((rows, intermediate))?,
        kernels.random((rows, intermediate))?,
    );
    let bytes = bytes_of(&gate);
    kernels.print("swiglu_forward", 3 * bytes, || {
        swiglu_forward(&gate, &up).map(drop)
    })?;
    kernels.print("swiglu_backward", 5 * bytes, || {
        swiglu_backward(&gate, &up, &gate).map(drop)
    })
}

/// Rotary embeddings, on sequences of up to 4096 tokens.
fn positions(kernels: &Kernels, rows: usize, hidden: usize, heads: usize) -> Result<()> {
    let (t, d) = (rows.min(4096), hidden / heads);
    let b = rows / t;
    let mut xs = Some(random((b, t, heads, d), kernels.device)?);
    let angles = || Tensor::randn(0f32, 1.0, (t, d / 2), kernels.device);
    let (cos, sin) = (angles()?, angles()?);
    kernels.print("rope", 2 * 2 * b * t * heads * d, || {
        if let Some(turned) = xs.take() {
            xs = Some(rope_in_place(turned, &cos, &sin, RopeDirection::Forward)?);
        }
        Ok(())
    })
}

/// Embedding and loss.
fn vocabulary(kernels: &Kernels, rows: usize, hidden: usize, vocab: usize) -> Result<()> {
    let ids = |count: usize| {
        let ids = (0..count).map(|i| (i * 48271 % vocab) as u32).collect();
        upload(ids, count, kernels.device)
    };
    let (table, dy) = (
        kernels.random((vocab, hidden))?,
        kernels.random((rows, hidden))?,
    );
    let tokens = ids(rows)?;
    let bytes = bytes_of(&dy);
    kernels.print("embedding_forward", 2 * bytes, || {
        embedding_forward(&table, &tokens).map(drop)
    })?;
    let grad = Tensor::zeros(vocab * hidden, DType::F32, kernels.device)?;
    // Each row of the gradient is read and written once for the tokens that name it.
    let touched = 2 * 4 * hidden * rows.min(vocab);
    kernels.print("embedding_backward", bytes + touched, || {
        embedding_grad_into(&grad, true, &tokens, &dy)
    })?;
    let rows = rows.min(LOGIT_ROWS);
    let logits = kernels.random((rows, vocab))?;
    let targets = ids(rows)?;
    let bytes = bytes_of(&logits);
    kernels.print("cross_entropy_forward", bytes, || {
        cross_entropy(&logits, &targets).map(drop)
    })?;
    let log_sum_exp = Tensor::full(10f32, rows, kernels.device)?;
    let mut logits = Some(logits);
    kernels.print("cross_entropy_backward", 2 * bytes, || {
        if let Some(z) = logits.take() {
            let dz = cross_entropy_grad_in_place(z, &log_sum_exp, &targets, 0, 1.0)?;
            logits = Some(dz);
        }
        Ok(())
    })
}

/// Gradients and optimizer, of as many values as one matrix of an MLP.
fn parameters(kernels: &Kernels, len: usize) -> Result<()> {
    let floats = || Tensor::zeros(len, DType::F32, kernels.device);
    let (grad, master, exp_avg, exp_avg_sq) = (floats()?, floats()?, floats()?, floats()?);
    let weights = random(len, kernels.device)?;
    kernels.print("add_into", 10 * len, || add_into(&grad, true, &weights))?;
    kernels.print("round_into", 6 * len, || round_into(&weights, &master))?;
    let packed = quantize_rows(&grad, QuantizedType::Int8)?;
    let moved = 4 * len + bytes_of(&packed);
    kernels.print("quantize_int8", moved, || {
        quantize_rows(&grad, QuantizedType::Int8).map(drop)
    })?;
    kernels.print("dequantize_int8", moved, || {
        dequantize_rows_into(&grad, false, &packed, QuantizedType::Int8)
    })?;
    kernels.print("sum_of_squares", 4 * len, || {
        sum_of_squares(&grad).map(drop)
    })?;
    let remainders = Tensor::zeros(len, DType::I16, kernels.device)?;
    let buffers = AdamWBuffers {
        master: Some(&remainders),
        exp_avg: &exp_avg,
        exp_avg_sq: &exp_avg_sq,
        grad: &grad,
    };
    let slot = AdamWSlot {
        weights: &weights,
        start: 0,
        decays: true,
    };
    let constants = AdamWConstants {
        step_size: 1e-4,
        correction: 1.0,
        decay_factor: 1.0,
        one_minus_beta1: 0.1,
        beta2: 0.95,
        one_minus_beta2: 0.05,
        eps: 1e-8,
        scale: 1.0,
    };
    // Both moments, weights and remainders read and written, the gradient read.
    kernels.print("adamw", (2 * 8 + 2 * 4 + 4) * len, || {
        adamw(&buffers, &[slot], &constants)
    })
}
