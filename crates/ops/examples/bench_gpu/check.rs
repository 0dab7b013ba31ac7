//! A small product and attention with their inputs in a file, for another program to compare.

use crate::attention::{Inputs, Seen};
use crate::random;
use candle_core::{Device, Result, Tensor, bail};
use candle_ops::{linear_forward, linear_input_grad};
use std::collections::HashMap;

const PRODUCT: [usize; 3] = [192, 256, 320];
/// Sequences, tokens, heads, key/value heads, head_dim: cuDNN takes it, with a last block of queries that is not full.
const ATTENTION: [usize; 5] = [2, 200, 4, 2, 64];

pub fn save(device: &Device, file: &[String], seen: Seen) -> Result<()> {
    let [file] = file else {
        bail!("check: expected a FILE")
    };
    let [rows, num_in, num_out] = PRODUCT;
    let (x, weight) = (
        random((rows, num_in), device)?,
        random((num_out, num_in), device)?,
    );
    let y = linear_forward(&x, &weight, None)?;
    let dx = linear_input_grad(&y, &weight)?;
    let inputs = Inputs::new(device, ATTENTION, seen)?;
    let [b, t, ..] = ATTENTION;
    let window = seen.window.unwrap_or(t) as u32;
    // Of each token the first one of its document, in its sequence.
    let starts: Vec<u32> = match &inputs.spec.rows {
        Some(rows) => {
            let positions = rows.queries().positions().enumerate();
            positions
                .map(|(row, position)| (row % t - position) as u32)
                .collect()
        }
        None => vec![0; b * t],
    };
    let outputs = inputs.forward()?;
    let (dq, dk, dv) = inputs.backward(&outputs)?;
    let Inputs { q, k, v, grad, .. } = inputs;
    let tensors: HashMap<&str, Tensor> = [
        ("x", x),
        ("weight", weight),
        ("y", y),
        ("dx", dx),
        ("window", Tensor::new(window, &Device::Cpu)?),
        ("starts", Tensor::from_vec(starts, (b, t), &Device::Cpu)?),
        ("q", q),
        ("k", k),
        ("v", v),
        ("grad", grad),
        ("out", outputs.out),
        ("dq", dq),
        ("dk", dk),
        ("dv", dv),
    ]
    .into();
    candle_core::safetensors::save(&tensors, file)
}
