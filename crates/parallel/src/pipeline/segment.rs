//! One block of a stage with its parameters, and its segment of the tape.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor, Var, bail};
use candle_ops::with_backward1;

use super::block::{Backward, Block, Pass};
use super::graph::{KeptNodes, params_in};
use super::micro_batch::MicroBatch;
use super::recompute::{Discard, Recompute, check_repeats, fingerprint};
use crate::gradients::Gradients;
use crate::layers::GradientSink;
use crate::lora::SequenceKeys;
use crate::params::Parameters;

/// What users run into.
const CUTTING: &str = "candle_nn's RmsNorm, LayerNorm, rope and softmax_last_dim cut the graph; candle_ops has rms_norm, layer_norm and rope \
    that do not";

/// A block of a stage.
pub(super) struct StageBlock {
    pub index: usize,
    pub block: Box<dyn Block>,
    /// Indices of its parameters among those of the stage.
    pub params: Vec<usize>,
    pub recompute: Recompute,
    /// Whether the block was seen to give the same output when it ran again.
    is_checked: AtomicBool,
    kept: KeptNodes,
    /// Whether the graph of the block, which no gradient reaches, was looked at.
    is_known: AtomicBool,
}

/// What all passes of a micro-batch share.
#[derive(Clone)]
pub(super) struct BatchPass {
    pub batch: MicroBatch,
    pub loss_scale: f64,
    /// What dropout depends on.
    pub dropout: Option<Arc<SequenceKeys>>,
}

/// What the backward pass of a block needs.
pub(super) enum Segment {
    /// Nothing at or before this block is trained; the backward pass ends after it.
    Frozen,
    Kept(Kept),
    /// The forward pass runs again.
    Recomputed {
        input: Tensor,
        /// Of the output, until it was seen to be the same again.
        fingerprint: Option<u64>,
    },
}

/// What a block's forward pass gave for the backward pass.
pub(super) struct Kept {
    backward: Backward,
    /// How often the forward pass wrote each of the block's parameters' gradients.
    num_writes: Vec<usize>,
}

impl StageBlock {
    pub fn new(index: usize, block: Box<dyn Block>, params: &Parameters) -> Self {
        let is_of_block = |&param: &usize| params.get(param).blocks.contains(&index);
        Self {
            index,
            block,
            params: (0..params.len()).filter(is_of_block).collect(),
            recompute: Recompute::None,
            is_checked: AtomicBool::new(false),
            kept: KeptNodes::default(),
            is_known: AtomicBool::new(false),
        }
    }

    /// The output of a block that no gradient reaches.
    pub fn forward_frozen(
        &self,
        xs: &Tensor,
        pass: &BatchPass,
        gradients: &Gradients,
    ) -> Result<(Tensor, Segment)> {
        if !self.is_known.swap(true, Ordering::Relaxed) {
            let (_, backward) = self.run(xs, pass, &mut Discard)?;
            if let Backward::Graph { input, output } = backward {
                params_in(&output, input.as_ref(), gradients)?;
            }
        }
        Ok((self.block.infer(xs, &pass.batch)?, Segment::Frozen))
    }

    /// The output, and what the tape keeps.
    pub fn forward(
        &self,
        xs: &Tensor,
        pass: &BatchPass,
        gradients: &mut Gradients,
    ) -> Result<(Tensor, Segment)> {
        if self.recompute != Recompute::Full {
            let (output, kept) = self.forward_keeping(xs, pass, gradients)?;
            return Ok((output, Segment::Kept(kept)));
        }
        let (output, _) = self.run(xs, pass, &mut Discard)?;
        // On a GPU, where it would wait, only until it was equal once.
        let is_checked = self.is_checked.load(Ordering::Relaxed) && !output.device().is_cpu();
        let segment = Segment::Recomputed {
            input: xs.clone(),
            fingerprint: (!is_checked).then(|| fingerprint(&output)).transpose()?,
        };
        Ok((output, segment))
    }

    fn forward_keeping(
        &self,
        xs: &Tensor,
        pass: &BatchPass,
        gradients: &mut Gradients,
    ) -> Result<(Tensor, Kept)> {
        let before = gradients.num_writes(&self.params);
        let (output, backward) = self.run(xs, pass, gradients)?;
        let after = gradients.num_writes(&self.params).into_iter();
        let num_writes = after.zip(before).map(|(after, before)| after - before);
        let kept = Kept {
            backward,
            num_writes: num_writes.collect(),
        };
        Ok((output, kept))
    }

    fn run(
        &self,
        xs: &Tensor,
        pass: &BatchPass,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Tensor, Backward)> {
        let mut pass = Pass {
            batch: &pass.batch,
            gradients,
            loss_scale: pass.loss_scale,
            recompute: self.recompute,
        };
        self.block.forward(xs, &mut pass)
    }

    /// The gradient of the block's input from that of its output, which the model's last block does not have. The gradients of
    /// `params`, those of the stage, go to `gradients`.
    pub fn backward(
        &self,
        segment: Segment,
        pass: &BatchPass,
        upstream: Option<Tensor>,
        params: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let Kept {
            backward,
            num_writes,
        } = match segment {
            Segment::Frozen => return Ok(None),
            Segment::Kept(kept) => kept,
            Segment::Recomputed { input, fingerprint } => {
                let (output, kept) = self.forward_keeping(&input, pass, gradients)?;
                if let Some(fingerprint) = fingerprint {
                    check_repeats(fingerprint, &output)?;
                    self.is_checked.store(true, Ordering::Relaxed);
                }
                kept
            }
        };
        let before = gradients.num_writes(&self.params);
        let grad = match backward {
            Backward::Graph { input, output } => {
                let upstream = upstream.map_or_else(
                    || {
                        let of_loss = Tensor::full(pass.loss_scale, (), output.device())?;
                        of_loss.to_dtype(output.dtype())
                    },
                    Ok,
                )?;
                return self.graph_backward(input, &output, upstream, params, gradients);
            }
            Backward::Loss(backward) => backward(gradients)?,
            Backward::Explicit(backward) => match upstream {
                Some(upstream) => backward(upstream, gradients)?,
                None => bail!(
                    "the last block has an explicit backward pass that waits for the gradient of the loss\nhint: return \
                     Backward::Loss, whose gradients have the factor Pass::loss_scale"
                ),
            },
        };
        let after = gradients.num_writes(&self.params);
        for (slot, &index) in self.params.iter().enumerate() {
            let param = params.get(index);
            let is_missing = num_writes[slot] + after[slot] == before[slot];
            if param.trainable && param.is_of_blocks() && is_missing {
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
        input: Option<Var>,
        output: &Tensor,
        upstream: Tensor,
        params: &Parameters,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let used = params_in(output, input.as_ref(), gradients)?;
        self.kept.check(output, params)?;
        let mut grads = if output.track_op() {
            seed(output, upstream)?.backward()?
        } else {
            Default::default()
        };
        let mut has_gradient = HashSet::new();
        // In the order of the parameters, which is the same on every rank.
        for index in used.into_iter().collect::<BTreeSet<_>>() {
            if let Some(grad) = grads.remove(params.get(index).var()) {
                gradients.accumulate(index, &grad)?;
                has_gradient.insert(index);
            }
        }
        let own = self.params.iter().map(|&index| (index, params.get(index)));
        let missing = own.filter(|(index, param)| {
            param.trainable && param.is_of_blocks() && !has_gradient.contains(index)
        });
        let missing: Vec<&str> = missing.map(|(_, param)| param.name.as_str()).collect();
        if let Some(first) = missing.first() {
            bail!(
                "{} trainable parameters got no gradient, the first is {first}\nhint: an operation of the block has no \
                 backward ({CUTTING}), the parameter is not used, or it should be frozen",
                missing.len()
            );
        }
        let Some(input) = input else { return Ok(None) };
        match grads.remove(&input) {
            Some(grad) => Ok(Some(grad)),
            None => bail!(
                "the block's input got no gradient\nhint: an operation between the block's input and its output has \
                 no backward ({CUTTING})"
            ),
        }
    }
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
