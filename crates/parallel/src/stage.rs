//! The contiguous range of a model's blocks that one pipeline stage runs.

use std::ops::Range;

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_ops::with_backward1;

use crate::block::{Backward, Block, TrainPass};
use crate::gradients::Gradients;
use crate::micro_batch::MicroBatch;
use crate::param_builder::ParamBuilder;
use crate::parameters::Parameters;
use crate::shard::part;

/// This rank's blocks, in order, and their parameters.
pub struct Stage {
    blocks: Vec<StageBlock>,
    num_blocks: usize,
    hidden_size: usize,
    dtype: DType,
    device: Device,
    params: Parameters,
}

struct StageBlock {
    index: usize,
    block: Box<dyn Block>,
    params: Vec<usize>,
}

/// What the backward pass of a micro-batch needs: one segment a block.
///
/// The tape carries gradients from one segment to the one before it and drops each when it is done.
pub struct Tape {
    segments: Vec<Segment>,
}

enum Segment {
    /// candle differentiates, from `output` down to `input`.
    Graph { input: Option<Var>, output: Tensor },
    /// The block has a backward pass of its own. `num_writes` is how often its forward pass wrote each parameter's gradient.
    ByHand {
        backward: Backward,
        num_writes: Vec<usize>,
    },
    /// Nothing at or before this block is trained: the backward pass ends after it.
    Frozen,
}

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
        let blocks = range
            .map(|index| Ok((index, build(index, vb.block(index))?)))
            .collect::<Result<Vec<_>>>()?;
        let params = vb.store().seal(mesh)?;
        let blocks = blocks
            .into_iter()
            .map(|(index, block)| StageBlock {
                index,
                block,
                params: (0..params.len())
                    .filter(|&param| params.get(param).blocks.contains(&index))
                    .collect(),
            })
            .collect();
        Ok(Self {
            blocks,
            num_blocks,
            hidden_size,
            dtype: vb.dtype(),
            device: vb.device().clone(),
            params,
        })
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

    /// Runs the blocks on what the stage before sent (`None` for the first stage, which takes the tokens).
    pub fn forward(
        &self,
        input: Option<Tensor>,
        batch: &MicroBatch,
        pass: &mut TrainPass<'_>,
    ) -> Result<(Tensor, Tape)> {
        let mut segments = Vec::with_capacity(self.blocks.len());
        let mut xs = input;
        let num_frozen = self.num_frozen_blocks();
        for (position, block) in self.blocks.iter().enumerate() {
            let result = if position < num_frozen {
                let output = block
                    .block
                    .forward(xs.as_ref().unwrap_or(&batch.tokens), batch);
                output.map(|output| (output.detach(), Segment::Frozen))
            } else {
                segment_forward(block, xs, batch, pass)
            };
            let (output, segment) = result
                .map_err(|err| err.context(format!("forward pass of block {}", block.index)))?;
            xs = Some(output);
            segments.push(segment);
        }
        match xs {
            Some(xs) => Ok((xs, Tape { segments })),
            None => bail!("a pipeline stage without blocks"),
        }
    }

    /// Number of blocks, from the first of the model on, before the first one with a trainable parameter: no gradient needs
    /// to reach them. A later stage passes gradients on, as it does not know what the stages before it train.
    fn num_frozen_blocks(&self) -> usize {
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

    /// Runs the blocks without keeping anything for a backward pass.
    pub fn infer(&self, input: Option<Tensor>, batch: &MicroBatch) -> Result<Tensor> {
        let mut xs = input.unwrap_or_else(|| batch.tokens.clone());
        for StageBlock { index, block, .. } in &self.blocks {
            let output = block.forward(&xs, batch);
            xs = output
                .map_err(|err| err.context(format!("forward pass of block {index}")))?
                .detach();
        }
        Ok(xs)
    }

    /// Runs the backward pass of a micro-batch from the gradient of the stage's output, adds the gradients of the
    /// parameters to those of the pass and returns the gradient of the stage's input (`None` for the first stage).
    pub fn backward(
        &self,
        tape: Tape,
        upstream: Tensor,
        pass: &mut TrainPass<'_>,
    ) -> Result<Option<Tensor>> {
        let mut upstream = Some(upstream);
        for (block, segment) in self.blocks.iter().zip(tape.segments).rev() {
            let Some(grad) = upstream.take() else {
                bail!(
                    "block {} got no gradient from the block after it",
                    block.index
                );
            };
            upstream = match segment {
                Segment::Frozen => return Ok(None),
                Segment::ByHand {
                    backward,
                    num_writes,
                } => self.by_hand_backward(block, backward, &num_writes, grad, pass),
                Segment::Graph { input, output } => {
                    self.graph_backward(block, input, &output, grad, pass.gradients)
                }
            }
            .map_err(|err| err.context(format!("backward pass of block {}", block.index)))?;
        }
        Ok(upstream)
    }

    fn by_hand_backward(
        &self,
        block: &StageBlock,
        backward: Backward,
        num_writes: &[usize],
        upstream: Tensor,
        pass: &mut TrainPass<'_>,
    ) -> Result<Option<Tensor>> {
        let before = pass.gradients.num_writes(&block.params);
        let grad = backward(upstream, pass)?;
        let after = pass.gradients.num_writes(&block.params);
        for (slot, &index) in block.params.iter().enumerate() {
            let param = self.params.get(index);
            let is_missing = num_writes[slot] + after[slot] == before[slot];
            if param.trainable && is_missing {
                bail!(
                    "the trainable parameter {} got no gradient\nhint: the block's own backward pass must write one for \
                     each micro-batch, or the parameter should be frozen",
                    param.name
                );
            }
        }
        Ok(grad)
    }

    fn graph_backward(
        &self,
        block: &StageBlock,
        input: Option<Var>,
        output: &Tensor,
        upstream: Tensor,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let trainable = block.params.iter().copied();
        let trainable = trainable.filter(|&index| self.params.get(index).trainable);
        let mut grads = if output.track_op() {
            seed(output, upstream)?.backward()?
        } else {
            Default::default()
        };
        let mut missing = Vec::new();
        for index in trainable {
            let param = self.params.get(index);
            match grads.remove(&param.var) {
                Some(grad) => gradients.accumulate(index, &grad)?,
                None => missing.push(param.name.as_str()),
            }
        }
        if let Some(first) = missing.first() {
            bail!(
                "{} trainable parameters got no gradient, the first is {first}\nhint: an operation of the block has no \
                 backward (candle_nn's RmsNorm, rope and softmax_last_dim cut the graph), the parameter is not used, \
                 or it should be frozen",
                missing.len()
            );
        }
        let Some(input) = input else { return Ok(None) };
        match grads.remove(&input) {
            Some(grad) => Ok(Some(grad)),
            None => bail!(
                "the block's input got no gradient\nhint: an operation between the block's input and its output has \
                 no backward (candle_nn's RmsNorm, rope and softmax_last_dim cut the graph)"
            ),
        }
    }
}

fn segment_forward(
    stage_block: &StageBlock,
    xs: Option<Tensor>,
    batch: &MicroBatch,
    pass: &mut TrainPass<'_>,
) -> Result<(Tensor, Segment)> {
    let StageBlock { block, params, .. } = stage_block;
    let before = pass.gradients.num_writes(params);
    let by_hand = block.forward_train(xs.as_ref().unwrap_or(&batch.tokens), batch, pass)?;
    if let Some((output, backward)) = by_hand {
        let after = pass.gradients.num_writes(params);
        let num_writes = after
            .iter()
            .zip(before)
            .map(|(after, before)| after - before);
        let segment = Segment::ByHand {
            backward,
            num_writes: num_writes.collect(),
        };
        return Ok((output, segment));
    }
    let input = xs.map(|xs| Var::from_tensor(&xs)).transpose()?;
    let output = match &input {
        None => block.forward(&batch.tokens, batch)?,
        Some(leaf) => block.forward(leaf.as_tensor(), batch)?,
    };
    Ok((output.detach(), Segment::Graph { input, output }))
}

/// A scalar whose backward gives `output` the gradient `upstream`: candle's `backward` takes no gradient to start from.
fn seed(output: &Tensor, upstream: Tensor) -> Result<Tensor> {
    if output.dims() != upstream.dims() {
        bail!(
            "the gradient of the output has shape {:?}; expected that of the output, {:?}",
            upstream.shape(),
            output.shape()
        );
    }
    let root = Tensor::zeros((), output.dtype(), output.device())?;
    with_backward1(output, root, "seed", move |_| Ok(Some(upstream.clone())))
}
