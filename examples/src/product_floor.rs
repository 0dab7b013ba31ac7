//! The time that the matrix products of a training step need by themselves.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{linear_forward, linear_input_grad, linear_weight_grad_into};
use candle_train_models::ModelConfig;

/// Runs of each product; the fastest counts.
const RUNS: usize = 3;

/// Seconds that the linear layers of one training step on `num_tokens` tokens take alone: forward, gradient of the input and
/// gradient of the weight, each product timed on the threads of the current pool. Attention's products are not in it.
///
/// # Errors
/// No memory for them.
pub fn product_floor_secs(config: &ModelConfig, num_tokens: usize, dtype: DType) -> Result<f64> {
    let (hidden, mlp) = (config.hidden_size, config.intermediate_size);
    let heads = config.num_attention_heads * config.head_dim;
    let kv_heads = config.num_key_value_heads * config.head_dim;
    let layers = config.num_hidden_layers;
    let linears = [
        (layers, hidden, heads),
        (2 * layers, hidden, kv_heads),
        (layers, heads, hidden),
        (2 * layers, hidden, mlp),
        (layers, mlp, hidden),
        (1, hidden, config.vocab_size),
    ];
    let mut floor = 0.0;
    for (count, num_in, num_out) in linears {
        floor += count as f64 * linear_secs(num_tokens, num_in, num_out, dtype)?;
    }
    Ok(floor)
}

fn linear_secs(num_tokens: usize, num_in: usize, num_out: usize, dtype: DType) -> Result<f64> {
    let random = |rows: usize, cols: usize| {
        Tensor::randn(0f32, 1.0, (rows, cols), &Device::Cpu)?.to_dtype(dtype)
    };
    let x = random(num_tokens, num_in)?;
    let weight = random(num_out, num_in)?;
    let dy = random(num_tokens, num_out)?;
    let dw = Tensor::zeros(num_out * num_in, DType::F32, &Device::Cpu)?;
    let forward = fewest_secs(|| linear_forward(&x, &weight, None).map(drop))?;
    let input_grad = fewest_secs(|| linear_input_grad(&dy, &weight).map(drop))?;
    let weight_grad = fewest_secs(|| linear_weight_grad_into(&dw, false, &dy, &x))?;
    Ok(forward + input_grad + weight_grad)
}

fn fewest_secs(mut product: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut fewest = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        product()?;
        fewest = fewest.min(start.elapsed().as_secs_f64());
    }
    Ok(fewest)
}
