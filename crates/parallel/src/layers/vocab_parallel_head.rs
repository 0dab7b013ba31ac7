//! A projection to a vocabulary that is divided over tensor-parallel ranks, with its cross-entropy.

use candle_core::{Result, Tensor};

use super::column_parallel_linear::ColumnParallelLinear;
use super::head::Head;
use super::layer::Layer;
use super::regions::gather_parts;
use super::vocab_parallel_cross_entropy::{linear_cross_entropy, linear_predictions};
use crate::params::{ParamBuilder, TiledWeight, WEIGHT_INIT};
use crate::pass::{GradientSink, Loss, Pass, Region, Tape};
use crate::placement::Shard;

/// Holds the rows of a part of the vocabulary of a weight (vocab, hidden).
pub struct VocabParallelHead {
    weight: TiledWeight,
    shard: Shard,
    region: Region,
}

/// A head for `vocab_size` tokens, from (b, t, hidden), without a bias: the last block by [`head_block`](crate::head_block), or a part of it. A model with tied weights gives the
/// builder of its embedding, [`tied`](ParamBuilder::tied).
///
/// # Errors
/// A parameter that is missing or does not fit.
pub fn vocab_parallel_head(
    vocab_size: usize,
    hidden_size: usize,
    region: impl Into<Region>,
    vb: ParamBuilder,
) -> Result<VocabParallelHead> {
    let region = region.into();
    let shard = Shard::even(0, vocab_size, region.tp())?;
    let shape = (vocab_size, hidden_size);
    Ok(VocabParallelHead {
        weight: vb.get_linear(shape, "weight", shard.clone(), WEIGHT_INIT)?,
        shard,
        region,
    })
}

impl Head for VocabParallelHead {
    fn loss(
        &self,
        xs: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Loss, Option<Tensor>)> {
        let xs = self.region.enter(xs, pass)?;
        let (sum, dx) = linear_cross_entropy(
            &xs.flatten_to(1)?,
            &self.weight,
            &pass.targets()?.flatten_all()?,
            &self.shard,
            self.region.clone(),
            pass.loss_scale(),
            gradients,
        )?;
        let loss = Loss::new(sum, pass.num_targets()? as f64);
        let dx = match self.region.divides_rows() {
            true => dx,
            false => dx.reshape(xs.dims())?,
        };
        Ok((loss, Some(dx)))
    }

    fn evaluate(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let xs = self.region.enter(xs, pass)?;
        let [sum, num_right] = linear_predictions(
            &xs.flatten_to(1)?,
            &self.weight,
            &pass.targets()?.flatten_all()?,
            &self.shard,
            self.region.tp(),
        )?;
        Ok(Loss {
            num_right: Some(num_right),
            ..Loss::new(sum, pass.num_targets()? as f64)
        })
    }

    fn logits(&self, xs: &Tensor, rows: &[usize], pass: &Pass) -> Result<Tensor> {
        let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let rows = Tensor::new(rows, xs.device())?;
        let xs = self.region.enter(xs, pass)?;
        let xs = xs.flatten_to(1)?.index_select(&rows, 0)?;
        let linear = ColumnParallelLinear::new(self.weight.clone(), None, self.region.clone());
        let (logits, _) = linear.inside_region().forward(&xs, pass)?; // (rows, local_vocab)
        gather_parts(&logits, self.shard.global(), self.region.tp())
    }

    /// What the weight's gradient reads are the input and the log-sum-exp, with which it computes the logits again; without the weight, the gradients
    /// of the logits.
    fn tape(&self) -> Option<Tape> {
        let (width, logits) = self.weight.row_bytes();
        let input = self.region.bytes_outside(width);
        let tape = Tape {
            input,
            saved: input,
            ..Tape::default()
        };
        let log_sum_exp = size_of::<f32>();
        Some(match self.weight.tensor().track_op() {
            true => Tape {
                waiting: width + log_sum_exp,
                waiting_without_weights: logits.saturating_sub(log_sum_exp),
                ..tape
            },
            false => tape,
        })
    }
}
