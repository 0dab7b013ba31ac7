//! Rotary position embeddings (arXiv:2104.09864): cosines and sines of each position's angles.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor, bail};
use candle_ops::{Runs, upload};

use crate::config::ModelConfig;
use crate::rope_kind::RopeKind;

/// Cosines and sines of all positions, made for the longest sequence seen so far, or for the last one where they depend on its
/// length.
pub struct RotaryTable {
    kind: RopeKind,
    theta: f64,
    head_dim: usize,
    max_positions: usize,
    device: Device,
    cached: Mutex<Option<Cached>>,
}

struct Cached {
    frequencies: Vec<f32>,
    cos: Tensor,
    sin: Tensor,
}

impl RotaryTable {
    /// The table of this configuration's angles, on `device`.
    pub fn new(config: &ModelConfig, device: &Device) -> Self {
        Self {
            kind: config.rope,
            theta: config.rope_theta,
            head_dim: config.head_dim,
            max_positions: config.max_position_embeddings,
            device: device.clone(),
            cached: Mutex::new(None),
        }
    }

    /// (cos, sin) of these rows, (b, t, head_dim / 2) each; (t, head_dim / 2) where all sequences have the same positions. Angles that depend on a
    /// sequence's length depend on that of the document, of which these rows may be a part.
    ///
    /// # Errors
    /// More positions than the configuration allows.
    pub fn of(&self, rows: &Runs) -> Result<(Tensor, Tensor)> {
        let (b, t) = rows.dims();
        let lens = || rows.runs().iter().zip(rows.document_lens());
        let first = rows.runs().first().copied();
        if let Some(first) = first.filter(|first| first.len == t)
            && lens().all(|(run, len)| (run.start, len) == (first.start, first.start + t))
        {
            let (cos, sin) = self.get(first.start + t)?;
            let own = |table: Tensor| table.narrow(0, first.start, t);
            return Ok((own(cos)?, own(sin)?));
        }
        if let RopeKind::Dynamic { .. } = self.kind {
            let tables = lens().map(|(run, len)| {
                let (cos, sin) = self.get(len)?;
                Ok((
                    cos.narrow(0, run.start, run.len)?,
                    sin.narrow(0, run.start, run.len)?,
                ))
            });
            let (mut cos, mut sin): (Vec<_>, Vec<_>) =
                tables.collect::<Result<Vec<_>>>()?.into_iter().unzip();
            if cos.is_empty() {
                let (no_cos, no_sin) = self.get(0)?;
                (cos, sin) = (vec![no_cos], vec![no_sin]);
            }
            let width = self.head_dim / 2;
            let rows = |tables: Vec<Tensor>| Tensor::cat(&tables, 0)?.reshape((b, t, width));
            return Ok((rows(cos)?, rows(sin)?));
        }
        let (cos, sin) = self.get(rows.document_lens().max().unwrap_or_default())?;
        let positions = rows.positions().map(|position| position as u32).collect();
        let positions = upload(positions, b * t, &self.device)?;
        let width = cos.dim(1)?;
        let rows = |table: Tensor| table.index_select(&positions, 0)?.reshape((b, t, width));
        Ok((rows(cos)?, rows(sin)?))
    }

    /// (cos, sin) of positions 0..t in a sequence of `t` tokens, each (t, head_dim / 2).
    ///
    /// # Errors
    /// More positions than the configuration allows.
    pub fn get(&self, t: usize) -> Result<(Tensor, Tensor)> {
        let longest = self.kind.max_seq_len(self.max_positions);
        if t > longest {
            bail!(
                "a sequence of {t} tokens is longer than the {longest} that max_position_embeddings and rope_type allow\nhint: use a shorter --seq-len"
            );
        }
        let (kind, max) = (self.kind, self.max_positions);
        let frequencies = kind.frequencies(self.theta, self.head_dim, t, max);
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Cached {
            frequencies: known,
            cos,
            sin,
        }) = &*cached
            && *known == frequencies
            && cos.dim(0)? >= t
        {
            return Ok((cos.narrow(0, 0, t)?, sin.narrow(0, 0, t)?));
        }
        // The product is rounded to f32 as transformers does, the functions are not.
        let angles =
            || (0..t).flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
        let table = |of: fn(f64) -> f64| -> Result<Tensor> {
            let factor = kind.attention_factor();
            let values: Vec<f32> = angles().map(|angle| of(angle) as f32 * factor).collect();
            let bytes = 4 * values.len();
            Tensor::from_vec(values, (t, frequencies.len()), &self.device)
                .map_err(|err| err.context(format!("a table of {t} positions of {bytes} bytes")))
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        *cached = Some(Cached {
            cos: cos.clone(),
            sin: sin.clone(),
            frequencies,
        });
        Ok((cos, sin))
    }
}
