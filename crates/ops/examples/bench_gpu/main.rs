//! What a device does by itself, operation by operation, on random numbers in bf16: one JSON line each, with the median time.
//!
//! ```text
//! cargo run --release -p candle-ops --features cuda,cudnn --example bench_gpu -- DEVICE PART SIZES...
//! ```
//!
//! | part | sizes | what a line tells |
//! |---|---|---|
//! | `attention` | `SEQUENCES TOKENS HEADS KV_HEADS HEAD_DIM [WINDOW]` | forward and backward apart, in TFLOP/s |
//! | `products` | `ROWSxINxOUT`, one or more | a linear layer's forward pass, gradient of the input and of the weight, in TFLOP/s |
//! | `kernels` | `ROWS HIDDEN INTERMEDIATE VOCAB HEADS` | bytes that each kernel must read and write, a second, and their share of what a copy reaches |
//! | `check` | `FILE [WINDOW]` | nothing measured: a product and an attention, forward and backward, with what went in, as safetensors |
//!
//! On a GPU a time is the GPU's own, by events around several calls.

mod attention;
mod check;
mod kernels;
mod products;
mod timer;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_ops::{AttentionCode, DeviceChoice, GpuState};
use std::time::Instant;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [device, part, sizes @ ..] = arguments.as_slice() else {
        bail!("expected arguments: DEVICE attention|products|kernels|check SIZES...")
    };
    let start = Instant::now();
    let device = device.parse::<DeviceChoice>()?.open()?;
    let open_secs = start.elapsed().as_secs_f64();
    match part.as_str() {
        "attention" => {
            let (sizes, window) = sizes.split_at(sizes.len().min(5));
            attention::measure(&device, numbers(part, sizes)?, last(part, window)?)?;
        }
        "products" => products::measure(&device, sizes)?,
        "kernels" => kernels::measure(&device, numbers(part, sizes)?)?,
        "check" => {
            let (file, window) = sizes.split_at(sizes.len().min(1));
            check::save(&device, file, last(part, window)?)?;
        }
        _ => bail!("expected attention, products, kernels or check, got {part}"),
    }
    let state = GpuState::of(&device)?;
    let name = state.as_ref().map_or("cpu", |state| &state.name);
    let libraries = state.as_ref().map_or("", |state| &state.libraries);
    let codes: Vec<String> = AttentionCode::used()
        .iter()
        .map(ToString::to_string)
        .collect();
    println!(
        "{{\"device\": \"{name}\", \"libraries\": \"{libraries}\", \"attention\": \"{}\", \"open_secs\": {open_secs}}}",
        codes.join("+")
    );
    Ok(())
}

fn numbers<const N: usize>(part: &str, sizes: &[String]) -> Result<[usize; N]> {
    let sizes: Vec<usize> = sizes.iter().map(number).collect::<Result<_>>()?;
    let count = sizes.len();
    sizes
        .try_into()
        .map_err(|_| Error::Msg(format!("{part}: expected {N} sizes, got {count}")))
}

/// A last size that may be left out.
fn last(part: &str, sizes: &[String]) -> Result<Option<usize>> {
    match sizes {
        [] => Ok(None),
        [size] => number(size).map(Some),
        [size, more @ ..] => bail!(
            "{part}: expected nothing after {size}, got {}",
            more.join(" ")
        ),
    }
}

fn number(size: impl AsRef<str>) -> Result<usize> {
    let size = size.as_ref();
    match size.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => bail!("expected a size above 0, got {size}"),
    }
}

/// bf16, standard normal. On a GPU they are drawn there.
fn random(shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(DType::BF16)
}
