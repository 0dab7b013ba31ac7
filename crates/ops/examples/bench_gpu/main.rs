//! What a device does by itself, operation by operation, on random numbers in bf16: one JSON line each, with the median time.
//!
//! ```text
//! cargo run --release -p candle-ops --features cuda,cudnn --example bench_gpu -- DEVICE PART SIZES...
//! ```
//!
//! | part | sizes | what a line tells |
//! |---|---|---|
//! | `attention` | `SEQUENCES TOKENS HEADS KV_HEADS HEAD_DIM [WINDOW [LONGEST]]` | forward and backward apart, in TFLOP/s; of sequences that are documents of up to LONGEST tokens |
//! | `products` | `ROWSxINxOUT`, one or more | a linear layer's forward pass, gradient of the input and of the weight, in TFLOP/s |
//! | `kernels` | `ROWS HIDDEN INTERMEDIATE VOCAB HEADS` | bytes that each kernel must read and write, a second, and their share of what a copy reaches |
//! | `check` | `FILE [WINDOW [LONGEST]]` | nothing measured: a product and an attention, forward and backward, with what went in, as safetensors |
//!
//! On a GPU a time is the GPU's own, by events around several calls.

mod attention;
mod check;
mod kernels;
mod products;
mod timer;

use attention::Seen;
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
            let (sizes, last) = sizes.split_at(sizes.len().min(5));
            attention::measure(&device, numbers(part, sizes)?, seen(part, last)?)?;
        }
        "products" => products::measure(&device, sizes)?,
        "kernels" => kernels::measure(&device, numbers(part, sizes)?)?,
        "check" => {
            let (file, last) = sizes.split_at(sizes.len().min(1));
            check::save(&device, file, seen(part, last)?)?;
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

/// The last sizes, which may be left out.
fn seen(part: &str, sizes: &[String]) -> Result<Seen> {
    if let [_, _, more, ..] = sizes {
        bail!("{part}: expected nothing after WINDOW and LONGEST, got {more}")
    }
    let size = |index: usize| sizes.get(index).map(number).transpose();
    Ok(Seen {
        window: size(0)?,
        longest: size(1)?,
    })
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
