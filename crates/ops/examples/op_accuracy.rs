//! Random inputs and this crate's results for each operation, one safetensors file per seed, so that
//! `scripts/reference/op_accuracy.py` can compare them, and PyTorch's f32, with f64.
//!
//! ```text
//! cargo run --release -p candle-ops --example op_accuracy -- --output FOLDER [--seeds N]
//! ```
//!
//! Keys are `number/operation shape/in/name` and `number/operation shape/out/name`, in the order of the calls.

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_ops::{
    AttentionGrad, AttentionSpec, HeadGroups, attention_backward, attention_forward,
    cross_entropy_grad, cross_entropy_loss, embedding_forward, embedding_grad_into,
    layer_norm_backward, layer_norm_forward, linear_bias_grad, linear_forward, linear_forward_add,
    linear_input_grad, linear_input_grad_sum, linear_weight_grad, linear_weight_grad_into,
    rms_norm_backward, rms_norm_forward, rope, rope_in_place, softmax_stats, swiglu_backward,
    swiglu_forward,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::path::PathBuf;

/// That of the script.
const NORM_EPS: f64 = 1e-5;

fn main() -> Result<()> {
    let (folder, num_seeds) = arguments()?;
    std::fs::create_dir_all(&folder)?;
    for seed in 0..num_seeds {
        let mut run = Run::new(seed);
        run.all()?;
        candle_core::safetensors::save(&run.tensors, folder.join(format!("{seed}.safetensors")))?;
    }
    Ok(())
}

fn arguments() -> Result<(PathBuf, u64)> {
    let (mut folder, mut num_seeds) = (None, 4);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        match (flag.as_str(), args.next()) {
            ("--output", Some(value)) => folder = Some(PathBuf::from(value)),
            ("--seeds", Some(value)) => {
                num_seeds = value.parse().map_err(candle_core::Error::wrap)?
            }
            (flag, _) => bail!("expected --output FOLDER [--seeds N], got {flag}"),
        }
    }
    match folder {
        Some(folder) => Ok((folder, num_seeds)),
        None => bail!("expected --output FOLDER"),
    }
}

/// Inputs and results of one seed.
struct Run {
    rng: ChaCha8Rng,
    tensors: HashMap<String, Tensor>,
    num_calls: usize,
    /// Of the inputs.
    dtype: DType,
}

impl Run {
    fn new(seed: u64) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            tensors: HashMap::new(),
            num_calls: 0,
            dtype: DType::F32,
        }
    }

    /// Each operation in a shape of a Llama and in an odd one, and the heavy ones in bf16.
    fn all(&mut self) -> Result<()> {
        self.rms_norm(1024, 512)?;
        self.rms_norm(127, 515)?;
        self.rms_norm(8192, 64)?;
        self.rope(4, 256, 8, 64)?;
        self.rope(1, 127, 3, 48)?;
        self.swiglu(1024, 1376)?;
        self.swiglu(127, 97)?;
        self.attention((4, 256, 8, 4, 64), None)?;
        self.attention((1, 1000, 3, 1, 48), None)?;
        self.linear(1024, 512, 1376)?;
        self.linear(1024, 1376, 512)?;
        self.linear(127, 97, 515)?;
        self.linear(8192, 64, 96)?;
        self.embedding(8192, 512, 1024)?;
        self.embedding(97, 48, 1000)?;
        self.cross_entropy(1024, 8192)?;
        self.cross_entropy(127, 32001)?;
        self.layer_norm(1024, 512, 0.0)?;
        self.layer_norm(127, 515, 0.0)?;
        self.layer_norm(8192, 64, 0.0)?;
        self.layer_norm(127, 515, 100.0)?;
        self.attention((1, 1000, 3, 1, 48), Some(100))?;
        self.dtype = DType::BF16;
        self.rms_norm(1024, 512)?;
        self.swiglu(1024, 1376)?;
        self.attention((4, 256, 8, 4, 64), None)?;
        self.attention((1, 1000, 3, 1, 48), None)?;
        self.linear(1024, 512, 1376)?;
        self.linear(1024, 1376, 512)?;
        self.linear(127, 97, 515)?;
        self.cross_entropy(1024, 8192)
    }

    /// Normally distributed values of the run's type.
    fn normal(&mut self, mean: f64, deviation: f64, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        let mut one = || {
            let (a, b): (f64, f64) = (self.rng.random(), self.rng.random());
            let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
            (mean + deviation * normal) as f32
        };
        let values: Vec<f32> = (0..shape.elem_count()).map(|_| one()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(self.dtype)
    }

    /// Ids of a vocabulary, the small ones more often than the large ones, as in text.
    fn ids(&mut self, count: usize, vocab_size: usize) -> Result<Tensor> {
        let mut one = || (self.rng.random::<f64>().powi(3) * vocab_size as f64) as u32;
        let values: Vec<u32> = (0..count).map(|_| one()).collect();
        Tensor::from_vec(values, count, &Device::Cpu)
    }

    fn keep(&mut self, op: &str, inputs: &[(&str, &Tensor)], outputs: &[(&str, &Tensor)]) {
        let dtype = match self.dtype {
            DType::F32 => String::new(),
            dtype => format!(" {}", dtype.as_str()),
        };
        for (side, tensors) in [("in", inputs), ("out", outputs)] {
            for (name, tensor) in tensors {
                let key = format!("{:02}/{op}{dtype}/{side}/{name}", self.num_calls);
                self.tensors.insert(key, (*tensor).clone());
            }
        }
        self.num_calls += 1;
    }

    fn rms_norm(&mut self, rows: usize, h: usize) -> Result<()> {
        let (xs, weight) = (self.normal(0.0, 1.0, (rows, h))?, self.normal(1.0, 0.3, h)?);
        let dy = self.normal(0.0, 1.0, (rows, h))?;
        let residual = self.normal(0.0, 1.0, (rows, h))?;
        let y = rms_norm_forward(&xs, &weight, NORM_EPS)?;
        let back = |residual, weight_grad| {
            rms_norm_backward(&xs, &weight, &dy, NORM_EPS, residual, weight_grad)
        };
        let ((dx, dweight), (dx_residual, _)) = (back(None, true)?, back(Some(&residual), false)?);
        let Some(dweight) = dweight else {
            bail!("rms_norm_backward: expected a gradient of the weight, got none")
        };
        self.keep(
            &format!("rms_norm {rows} x {h}"),
            &[
                ("xs", &xs),
                ("weight", &weight),
                ("dy", &dy),
                ("residual", &residual),
            ],
            &[
                ("y", &y),
                ("dx", &dx),
                ("dx + residual", &dx_residual),
                ("dweight", &dweight),
            ],
        );
        Ok(())
    }

    /// Of values around `mean`, with a deviation of 1.
    fn layer_norm(&mut self, rows: usize, h: usize, mean: f64) -> Result<()> {
        let (xs, weight) = (
            self.normal(mean, 1.0, (rows, h))?,
            self.normal(1.0, 0.3, h)?,
        );
        let (bias, dy) = (self.normal(0.0, 1.0, h)?, self.normal(0.0, 1.0, (rows, h))?);
        let y = layer_norm_forward(&xs, &weight, Some(&bias), NORM_EPS)?;
        let (dx, sums) = layer_norm_backward(&xs, &weight, &dy, NORM_EPS, None, [true; 2])?;
        let [Some(dweight), Some(dbias)] = sums else {
            bail!("layer_norm_backward: expected gradients of the weight and the bias, got none")
        };
        self.keep(
            &format!("layer_norm {rows} x {h}, mean {mean}"),
            &[
                ("xs", &xs),
                ("weight", &weight),
                ("bias", &bias),
                ("dy", &dy),
            ],
            &[
                ("y", &y),
                ("dx", &dx),
                ("dweight", &dweight),
                ("dbias", &dbias),
            ],
        );
        Ok(())
    }

    fn rope(&mut self, b: usize, t: usize, h: usize, d: usize) -> Result<()> {
        let (xs, dy) = (
            self.normal(0.0, 1.0, (b, t, h, d))?,
            self.normal(0.0, 1.0, (b, t, h, d))?,
        );
        let angle =
            |i: usize| (i / (d / 2)) as f64 * 1e4f64.powf(-2.0 * (i % (d / 2)) as f64 / d as f64);
        let angles: Vec<f64> = (0..t * d / 2).map(angle).collect();
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|angle| f(*angle) as f32).collect();
            Tensor::from_vec(values, (t, d / 2), &Device::Cpu)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        let y = rope(&xs, &cos, &sin)?;
        let dx = rope_in_place(dy.copy()?, &cos, &sin, candle_ops::RopeDirection::Backward)?;
        self.keep(
            &format!("rope {b} x {t} x {h} x {d}"),
            &[("xs", &xs), ("cos", &cos), ("sin", &sin), ("dy", &dy)],
            &[("y", &y), ("dx", &dx)],
        );
        Ok(())
    }

    fn swiglu(&mut self, rows: usize, h: usize) -> Result<()> {
        let (gate, up) = (
            self.normal(0.0, 2.0, (rows, h))?,
            self.normal(0.0, 1.0, (rows, h))?,
        );
        let dy = self.normal(0.0, 1.0, (rows, h))?;
        let y = swiglu_forward(&gate, &up)?;
        let (dgate, dup) = swiglu_backward(&gate, &up, &dy)?;
        self.keep(
            &format!("swiglu {rows} x {h}"),
            &[("gate", &gate), ("up", &up), ("dy", &dy)],
            &[("y", &y), ("dgate", &dgate), ("dup", &dup)],
        );
        Ok(())
    }

    fn attention(
        &mut self,
        (b, t, hq, hkv, d): (usize, usize, usize, usize, usize),
        window: Option<usize>,
    ) -> Result<()> {
        // Scaled scores with a deviation of 2: far from uniform.
        let (q, k) = (
            self.normal(0.0, 2.0, (b, t, hq, d))?,
            self.normal(0.0, 1.0, (b, t, hkv, d))?,
        );
        let (v, dy) = (
            self.normal(0.0, 1.0, (b, t, hkv, d))?,
            self.normal(0.0, 1.0, (b, t, hq, d))?,
        );
        let scale = 1.0 / (d as f32).sqrt();
        let spec = AttentionSpec {
            window,
            ..AttentionSpec::new(scale, HeadGroups::new(hq / hkv))
        };
        let (y, lse) = attention_forward(&q, &k, &v, &spec)?;
        let pass = AttentionGrad {
            q: &q,
            k: &k,
            v: &v,
            out: Some(&y),
            log_sum_exp: &lse,
            grad: &dy,
        };
        let (dq, dk, dv) = attention_backward(&pass, &spec)?;
        let said = window.map_or(String::new(), |window| format!(", window {window}"));
        self.keep(
            &format!("causal_attention {b} x {t} x {hq} ({hkv} kv) x {d}{said}"),
            &[
                ("q", &q),
                ("k", &k),
                ("v", &v),
                ("dy", &dy),
                ("scale", &Tensor::new(spec.scale, &Device::Cpu)?),
                (
                    "window",
                    &Tensor::new(window.unwrap_or(t) as u32, &Device::Cpu)?,
                ),
            ],
            &[
                ("y", &y),
                ("log-sum-exp", &lse),
                ("dq", &dq),
                ("dk", &dk),
                ("dv", &dv),
            ],
        );
        Ok(())
    }

    fn linear(&mut self, rows: usize, num_in: usize, num_out: usize) -> Result<()> {
        let deviation = 1.0 / (num_in as f64).sqrt();
        let (xs, dy) = (
            self.normal(0.0, 1.0, (rows, num_in))?,
            self.normal(0.0, 1.0, (rows, num_out))?,
        );
        let [weight, weight2, start] =
            [deviation, deviation, 1.0].map(|d| self.normal(0.0, d, (num_out, num_in)));
        let (weight, weight2, start) = (weight?, weight2?, start?);
        let (bias, residual) = (
            self.normal(0.0, 1.0, num_out)?,
            self.normal(0.0, 1.0, (rows, num_out))?,
        );
        let dy2 = self.normal(0.0, 1.0, (rows, num_out))?;
        let start = start.to_dtype(DType::F32)?;
        let sum = start.copy()?;
        linear_weight_grad_into(&sum, true, &dy, &xs)?;
        self.keep(
            &format!("linear {rows} x {num_in} -> {num_out}"),
            &[
                ("xs", &xs),
                ("weight", &weight),
                ("bias", &bias),
                ("residual", &residual),
                ("weight2", &weight2),
                ("start", &start),
                ("dy", &dy),
                ("dy2", &dy2),
            ],
            &[
                ("y", &linear_forward(&xs, &weight, None)?),
                ("y + bias", &linear_forward(&xs, &weight, Some(&bias))?),
                (
                    "y + residual",
                    &linear_forward_add(&residual, &xs, &weight)?,
                ),
                ("dx", &linear_input_grad(&dy, &weight)?),
                (
                    "dx of two",
                    &linear_input_grad_sum(&[(&dy, &weight), (&dy2, &weight2)])?,
                ),
                ("dweight", &linear_weight_grad(&dy, &xs)?),
                ("dweight added", &sum),
                ("dbias", &linear_bias_grad(&dy)?),
            ],
        );
        Ok(())
    }

    fn embedding(&mut self, vocab_size: usize, h: usize, count: usize) -> Result<()> {
        let (weight, ids) = (
            self.normal(0.0, 1.0, (vocab_size, h))?,
            self.ids(count, vocab_size)?,
        );
        let dy = self.normal(0.0, 1.0, (count, h))?;
        let dweight = weight.zeros_like()?;
        embedding_grad_into(&dweight, false, &ids, &dy)?;
        self.keep(
            &format!("embedding {count} of {vocab_size} x {h}"),
            &[
                ("weight", &weight),
                ("ids", &ids.to_dtype(DType::I64)?),
                ("dy", &dy),
            ],
            &[
                ("y", &embedding_forward(&weight, &ids)?),
                ("dweight", &dweight),
            ],
        );
        Ok(())
    }

    fn cross_entropy(&mut self, rows: usize, vocab_size: usize) -> Result<()> {
        let (logits, targets) = (
            self.normal(0.0, 3.0, (rows, vocab_size))?,
            self.ids(rows, vocab_size)?,
        );
        let grad = self.normal(0.0, 1.0, rows)?.to_dtype(DType::F32)?;
        let loss = candle_ops::cross_entropy(&logits, &targets)?;
        let stats = softmax_stats(&logits, &targets, 0)?;
        let (_, log_sum_exp) = cross_entropy_loss(&stats, &targets, vocab_size)?;
        let dlogits = cross_entropy_grad(&logits, &log_sum_exp, &targets, 0, &grad)?;
        self.keep(
            &format!("cross_entropy {rows} x {vocab_size}"),
            &[
                ("logits", &logits),
                ("targets", &targets.to_dtype(DType::I64)?),
                ("grad", &grad),
            ],
            &[
                ("maximum", &stats.narrow(1, 0, 1)?.squeeze(1)?),
                ("sum_exp", &stats.narrow(1, 1, 1)?.squeeze(1)?),
                ("loss", &loss),
                ("dlogits", &dlogits),
            ],
        );
        Ok(())
    }
}
