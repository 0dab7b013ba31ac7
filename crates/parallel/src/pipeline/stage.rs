//! The contiguous range of a model's blocks that one pipeline stage runs.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_comm::{Mesh, ProcessGroup, Scope};
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};

use super::block::Block;
use super::micro_batch::MicroBatch;
use super::recompute::Recompute;
use super::segment::{BatchPass, Segment, StageBlock};
use crate::agreement::Facts;
use crate::checksums::Shared;
use crate::gradients::Gradients;
use crate::params::{ParamBuilder, Parameters, is_about_released, part};

/// This rank's blocks, in order, and their parameters.
pub struct Stage {
    blocks: Vec<StageBlock>,
    num_blocks: usize,
    hidden_size: usize,
    dtype: DType,
    device: Device,
    tp: ProcessGroup,
    params: Parameters,
    /// Passes of blocks since those of a step, or of an evaluation, began.
    num_passes: AtomicU64,
}

/// What the backward pass of a micro-batch needs: one segment a block.
///
/// The tape carries gradients from one segment to the one before it and drops each when it is done.
pub struct Tape {
    segments: Vec<Segment>,
    pass: BatchPass,
}

const FORWARD: &str = "forward pass";

/// The blocks of stage `stage` when the first and the last of `num_blocks` blocks go with the first and the last stage
/// and those between are divided evenly.
pub fn stage_blocks(num_blocks: usize, stage: usize, num_stages: usize) -> Result<Range<usize>> {
    if num_blocks < 2 {
        bail!("a model of {num_blocks} blocks; expected at least a first and a last one");
    }
    let between = num_blocks - 2;
    if num_stages > 1 && between < num_stages {
        bail!(
            "pp({num_stages}) > number of layers({between}): each pipeline stage needs at least one layer\nhint: use \
             pp <= {between}"
        );
    }
    let middle = part(between, stage, num_stages);
    let start = if stage == 0 { 0 } else { 1 + middle.start };
    let end = if stage + 1 == num_stages {
        num_blocks
    } else {
        1 + middle.end
    };
    Ok(start..end)
}

/// The error of building a block; if it is that of values which are not in memory, why they are not.
fn about_released_while_building(err: Error) -> Error {
    match is_about_released(&err) {
        false => err,
        true => err.context(
            "the values of parameters are not in memory while blocks are built with ZeRO-3\nhint: compute with them in the forward pass; \
             even without ZeRO-3, what is computed from them while the block is built never sees an update",
        ),
    }
}

impl Stage {
    /// Builds this rank's blocks of a chain of `num_blocks`: `build` gets the index of a block and the builder of its
    /// parameters. Every rank of the mesh must call it.
    pub fn build(
        mesh: &Mesh,
        vb: &ParamBuilder,
        num_blocks: usize,
        hidden_size: usize,
        build: impl Fn(usize, ParamBuilder) -> Result<Box<dyn Block>>,
    ) -> Result<Self> {
        let range = stage_blocks(num_blocks, mesh.pp.rank(), mesh.pp.world_size())?;
        let building = vb.store().building();
        let blocks = range
            .map(|index| {
                let block = build(index, vb.block(index, num_blocks));
                let block = block.map_err(|err| {
                    let err = match vb.store().defers_values() {
                        true => about_released_while_building(err),
                        false => err,
                    };
                    err.context(format!("building block {index}"))
                });
                Ok((index, block?))
            })
            .collect::<Result<Vec<_>>>()?;
        drop(building);
        let mut facts = Facts::default();
        facts.add("the number of blocks", num_blocks);
        facts.add("the hidden size", hidden_size);
        facts.add("the type", vb.dtype().as_str());
        let params = vb.store().seal(mesh, facts)?;
        let blocks = blocks
            .into_iter()
            .map(|(index, block)| StageBlock::new(index, block, &params))
            .collect();
        Ok(Self {
            blocks,
            num_blocks,
            hidden_size,
            dtype: vb.dtype(),
            device: vb.device().clone(),
            tp: mesh.tp.clone(),
            params,
            num_passes: AtomicU64::new(0),
        })
    }

    /// Begins the passes of a step or of an evaluation, which all ranks that share a replica begin alike.
    pub(super) fn begin(&self) {
        self.num_passes.store(0, Ordering::Relaxed);
    }

    /// The stage with activations recomputed: `of_block` tells what to keep of the block with an index. Every rank of the mesh
    /// must be told the same.
    pub fn with_recompute(mut self, of_block: impl Fn(usize) -> Recompute) -> Self {
        let between = 1..self.num_blocks - 1;
        let blocks = self.blocks.iter_mut();
        for block in blocks.filter(|block| between.contains(&block.index)) {
            block.recompute = of_block(block.index);
        }
        self
    }

    /// The parameters of this stage.
    pub fn params(&self) -> &Parameters {
        &self.params
    }

    /// Whether this stage runs the first block of the model.
    pub fn is_first(&self) -> bool {
        self.blocks.first().is_some_and(|block| block.index == 0)
    }

    /// Whether this stage runs the last block of the model.
    pub fn is_last(&self) -> bool {
        let last = self.blocks.last().map(|block| block.index);
        last == Some(self.num_blocks - 1)
    }

    /// Indices of the blocks of this stage.
    pub fn block_indices(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().map(|block| block.index)
    }

    /// Shape of what passes between stages for a micro-batch: (b, t, hidden).
    pub fn boundary_shape(&self, batch: &MicroBatch) -> Result<(usize, usize, usize)> {
        let (b, t) = batch.dims()?;
        Ok((b, t, self.hidden_size))
    }

    /// Type of what passes between stages.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where this stage computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Runs the blocks on what the stage before sent (`None` for the first stage, which takes the tokens). With ZeRO-3 this and the
    /// other passes are collectives over replicas: all must make the same ones.
    ///
    /// # Errors
    /// What a block returns, and parameters whose values are not in memory.
    pub fn forward(
        &self,
        input: Option<Tensor>,
        batch: &MicroBatch,
        gradients: &mut Gradients,
    ) -> Result<(Tensor, Tape)> {
        let mut segments = Vec::with_capacity(self.blocks.len());
        let mut xs = input.unwrap_or_else(|| batch.tokens.clone());
        let num_frozen = self.num_frozen_blocks();
        let pass = BatchPass {
            batch: batch.clone(),
            loss_scale: gradients.loss_scale(),
            dropout: self.params.sequence_keys(batch)?,
        };
        self.params.set_dropout_pass(pass.dropout.clone());
        for (position, block) in self.blocks.iter().enumerate() {
            let next = self.blocks.get(position + 1);
            let (result, num_collectives) =
                self.run(FORWARD, block, next, || match position < num_frozen {
                    true => block.forward_frozen(&xs, &pass, gradients),
                    false => block.forward(&xs, &pass, gradients),
                });
            let (output, segment) =
                result.map_err(|err| self.about_released(err, block, (&xs, batch)))?;
            gradients.count_collectives(num_collectives);
            if self.is_shared(&output, batch)? {
                gradients.note_border(Shared::Output(block.index), &output)?;
            }
            xs = output;
            segments.push(segment);
            self.params.meter().count_activations(&self.device)?;
        }
        if segments.is_empty() {
            bail!("a pipeline stage without blocks");
        }
        Ok((xs, Tape { segments, pass }))
    }

    /// Whether what leaves a block in a pass of `batch` is what all tensor-parallel ranks share: (b, t, hidden), or the loss. A model
    /// that divides the sequence between its blocks has something else.
    fn is_shared(&self, values: &Tensor, batch: &MicroBatch) -> Result<bool> {
        let shape = Shape::from(self.boundary_shape(batch)?);
        Ok(values.rank() == 0 || values.shape() == &shape)
    }

    /// The error of a block's forward pass; if it is that of values which are not in memory, whose they are.
    fn about_released(
        &self,
        err: Error,
        block: &StageBlock,
        (xs, batch): (&Tensor, &MicroBatch),
    ) -> Error {
        if !is_about_released(&err) {
            return err;
        }
        let fails = || {
            let again = block.block.infer(xs, batch);
            again.is_err_and(|err| is_about_released(&err))
        };
        match self.params.missed(&block.params, fails) {
            None => err,
            Some(param) => err.context(format!(
                "block {} uses the values of parameter {}, for which another block asked: as replicas divide the weights (ZeRO-3), they \
                 are in memory for blocks that asked for them only\nhint: each block that uses a shared weight asks for it, by \
                 vb.tied(), instead of keeping another block's tensor",
                block.index, param.name
            )),
        }
    }

    /// Does `pass`, which is called `name`, with the parameters of a block in place; meanwhile those of the block `next` come. The result,
    /// and how many collectives of tensor-parallel ranks the pass made.
    fn run<T>(
        &self,
        name: &'static str,
        block: &StageBlock,
        next: Option<&StageBlock>,
        pass: impl FnOnce() -> Result<T>,
    ) -> (Result<T>, u64) {
        let next = next.map(|next| next.index);
        let scope = Scope {
            what: name,
            block: block.index,
            number: self.num_passes.fetch_add(1, Ordering::Relaxed),
        };
        let mut num_collectives = 0;
        let result = self.params.acquire(block.index).and_then(|()| {
            if let Some(next) = next {
                self.params.prefetch(next)?;
            }
            self.params.check_present(&block.params)?;
            let (result, number) = scope.run(&self.tp, pass);
            num_collectives = number;
            let result = result?;
            self.params.free(block.index, next)?;
            Ok(result)
        });
        let result = result.map_err(|err| err.context(format!("{name} of block {}", block.index)));
        (result, num_collectives)
    }

    /// Number of blocks, from the first of the model on, before the first one with a trainable parameter: no gradient needs
    /// to reach them, and the tape has nothing of them. A later stage passes gradients on, as it does not know what the stages before it train.
    pub fn num_frozen_blocks(&self) -> usize {
        let is_trained = |block: &StageBlock| {
            let mut params = block.params.iter();
            params.any(|&index| self.params.get(index).trainable)
        };
        match self.is_first() {
            true => self
                .blocks
                .iter()
                .take_while(|block| !is_trained(block))
                .count(),
            false => 0,
        }
    }

    /// Runs the blocks without keeping anything for a backward pass. With ZeRO-3 all replicas must call it.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn infer(&self, input: Option<Tensor>, batch: &MicroBatch) -> Result<Tensor> {
        self.infer_observed(input, batch, &mut |_, _| Ok(()))
    }

    /// As [`Self::infer`]; `observe` gets what each block, by its index, gives.
    pub(super) fn infer_observed(
        &self,
        input: Option<Tensor>,
        batch: &MicroBatch,
        observe: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        self.params.set_dropout_pass(None);
        let mut xs = input.unwrap_or_else(|| batch.tokens.clone());
        for (position, block) in self.blocks.iter().enumerate() {
            let next = self.blocks.get(position + 1);
            let (output, _) = self.run(FORWARD, block, next, || block.block.infer(&xs, batch));
            xs = output.map_err(|err| self.about_released(err, block, (&xs, batch)))?;
            observe(block.index, &xs)?;
        }
        Ok(xs)
    }

    /// Runs the backward pass of a micro-batch, adds the gradients of the parameters to `gradients` and returns the gradient of
    /// the stage's input (`None` for the first stage).
    ///
    /// `upstream` is the gradient of the stage's output; the last stage, whose output is the loss, has none. With
    /// `is_last_micro_batch` each block's gradients are complete when its backward pass is, and their reduction begins; from ZeRO-2 on
    /// each micro-batch's are reduced.
    ///
    /// # Errors
    /// What a block returns, and trainable parameters that get no gradient.
    pub fn backward(
        &self,
        tape: Tape,
        upstream: Option<Tensor>,
        gradients: &mut Gradients,
        is_last_micro_batch: bool,
    ) -> Result<Option<Tensor>> {
        self.params.set_dropout_pass(tape.pass.dropout.clone());
        let mut upstream = upstream;
        let mut is_output = true;
        let num_frozen = self.num_frozen_blocks();
        for (position, segment) in tape.segments.into_iter().enumerate().rev() {
            let block = &self.blocks[position];
            if let Segment::Frozen = segment {
                return Ok(None);
            }
            let grad = match upstream.take() {
                Some(grad) => Some(grad),
                None if is_output && self.is_last() => None,
                None => bail!(
                    "block {} got no gradient from the block after it",
                    block.index
                ),
            };
            is_output = false;
            let next = position.checked_sub(1).filter(|&next| next >= num_frozen);
            let next = next.map(|next| &self.blocks[next]);
            let (input_grad, num_collectives) = self.run("backward pass", block, next, || {
                block.backward(segment, &tape.pass, grad, &self.params, gradients)
            });
            upstream = input_grad?;
            gradients.count_collectives(num_collectives);
            if let Some(grad) = &upstream
                && self.is_shared(grad, &tape.pass.batch)?
            {
                gradients.note_border(Shared::InputGrad(block.index), grad)?;
            }
            gradients.block_done(block.index, is_last_micro_batch)?;
            self.params.meter().count_activations(&self.device)?;
        }
        Ok(upstream)
    }
}
