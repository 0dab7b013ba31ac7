//! Forward passes without backward passes.

use std::sync::atomic::Ordering;

use candle_comm::{P2p, ProcessGroup};
use candle_core::{Result, Shape, Tensor, bail};

use super::eval_sums::EvalSums;
use super::micro_batch::MicroBatch;
use super::pipeline::{Pipeline, recv};
use super::stage::Stage;
use crate::checksums::checksum;

impl Pipeline {
    /// Forward pass of one micro-batch over the stages of `pp` without a backward pass; the last stage applies `pick` to what the last block gives
    /// and all stages return the result.
    ///
    /// `shape` is that of the result, which the other stages need to receive it.
    ///
    /// # Errors
    /// What blocks return, and failures of ranks.
    pub fn infer(
        pp: &ProcessGroup,
        stage: &Stage,
        batch: &MicroBatch,
        shape: impl Into<Shape>,
        pick: impl Fn(Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        stage.begin();
        let result = match infer_stage(pp, stage, batch, &mut |_, _| Ok(()))? {
            Some(output) => pick(output)?.contiguous()?,
            None => Tensor::zeros(shape, stage.dtype(), stage.device())?,
        };
        pp.broadcast(&result, pp.world_size() - 1)
    }

    /// Forward passes of micro-batches with targets, without backward passes: what the last block gives, added up on the ranks of the last
    /// stage; zeros on the others. Every rank of a replica must be given the same micro-batches; with ZeRO-3 all replicas must be
    /// given as many. The first batch of all is evaluated twice.
    ///
    /// # Errors
    /// A block that gives other bits for the same batch the second time, as one does that still drops values at random; what `batches`
    /// and blocks return, and failures of ranks.
    pub fn evaluate(
        &self,
        stage: &Stage,
        batches: impl IntoIterator<Item = Result<MicroBatch>>,
    ) -> Result<EvalSums> {
        let mut sums = EvalSums::default();
        stage.begin();
        for batch in batches {
            let batch = batch?;
            let output = match self.evaluates_alike.swap(true, Ordering::Relaxed) {
                true => infer_stage(&self.pp, stage, &batch, &mut |_, _| Ok(()))?,
                false => self.infer_twice(stage, &batch)?,
            };
            if let Some(output) = output {
                sums = sums + EvalSums::of(&output, batch.num_targets()?)?;
            }
        }
        Ok(sums)
    }

    /// What a batch gives, or an error that names a block of this stage which gives other bits when it runs again.
    fn infer_twice(&self, stage: &Stage, batch: &MicroBatch) -> Result<Option<Tensor>> {
        let mut first = Vec::new();
        let output = infer_stage(&self.pp, stage, batch, &mut |_, xs| {
            first.push(checksum(xs)?);
            Ok(())
        })?;
        let mut first = first.into_iter();
        infer_stage(&self.pp, stage, batch, &mut |block, xs| {
            if first.next() == Some(checksum(xs)?) {
                return Ok(());
            }
            bail!(
                "block {block} gives other values when the same batch is evaluated again: its loss would be one of many\nhint: a block \
                 that draws random numbers, as for dropout, must not do so while the model is evaluated; PlainBlock::infer is for \
                 that"
            )
        })?;
        Ok(output)
    }
}

/// This stage's part of a forward pass, whose blocks `observe` sees; the output of the last one.
fn infer_stage(
    pp: &ProcessGroup,
    stage: &Stage,
    batch: &MicroBatch,
    observe: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
) -> Result<Option<Tensor>> {
    let (rank, num_stages) = (pp.rank(), pp.world_size());
    let input = match rank {
        0 => None,
        _ => {
            let ops = [recv(stage, batch, rank - 1)?];
            pp.batch_send_recv(&ops)?.pop()
        }
    };
    let output = stage.infer_observed(input, batch, observe)?.contiguous()?;
    if rank + 1 == num_stages {
        return Ok(Some(output));
    }
    let (xs, dst) = (&output, rank + 1);
    pp.batch_send_recv(&[P2p::Send { xs, dst }])?;
    Ok(None)
}
