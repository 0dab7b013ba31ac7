//! Forward passes without backward passes.

use candle_comm::{P2p, ProcessGroup};
use candle_core::{Result, Shape, Tensor};

use super::eval_sums::EvalSums;
use super::micro_batch::MicroBatch;
use super::pipeline::{Pipeline, recv};
use super::stage::Stage;

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
        let result = match infer_stage(pp, stage, batch)? {
            Some(output) => pick(output)?.contiguous()?,
            None => Tensor::zeros(shape, stage.dtype(), stage.device())?,
        };
        pp.broadcast(&result, pp.world_size() - 1)
    }

    /// Forward passes of micro-batches with targets, without backward passes: what the last block gives, added up on the ranks of the last
    /// stage; zeros on the others. Every rank of a replica must be given the same micro-batches; with ZeRO-3 all replicas must be
    /// given as many.
    ///
    /// # Errors
    /// What `batches` and blocks return, and failures of ranks.
    pub fn evaluate(
        &self,
        stage: &Stage,
        batches: impl IntoIterator<Item = Result<MicroBatch>>,
    ) -> Result<EvalSums> {
        let mut sums = EvalSums::default();
        for batch in batches {
            let batch = batch?;
            if let Some(output) = infer_stage(&self.pp, stage, &batch)? {
                sums = sums + EvalSums::of(&output, batch.num_targets()?)?;
            }
        }
        Ok(sums)
    }
}

/// This stage's part of a forward pass; the output of the last one.
fn infer_stage(pp: &ProcessGroup, stage: &Stage, batch: &MicroBatch) -> Result<Option<Tensor>> {
    let (rank, num_stages) = (pp.rank(), pp.world_size());
    let input = match rank {
        0 => None,
        _ => {
            let ops = [recv(stage, batch, rank - 1)?];
            pp.batch_send_recv(&ops)?.pop()
        }
    };
    let output = stage.infer(input, batch)?.contiguous()?;
    if rank + 1 == num_stages {
        return Ok(Some(output));
    }
    let (xs, dst) = (&output, rank + 1);
    pp.batch_send_recv(&[P2p::Send { xs, dst }])?;
    Ok(None)
}
