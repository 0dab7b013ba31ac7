//! One block of a stage with its parameters, and what it keeps between its passes.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor, TensorId, bail};

use super::block::{Block, Link};
use super::plain::CUTTING;
use crate::gradients::Gradients;
use crate::offload::{Lane, Stored};
use crate::params::Parameters;
use crate::pass::{
    GradientSink, Loss, Pass, Recompute, WeightGrad, WeightHalf, check_repeats, fingerprint,
};

/// A block of a stage.
pub(super) struct StageBlock {
    pub index: usize,
    pub block: Block,
    /// Indices of its parameters among those of the rank.
    pub params: Vec<usize>,
    pub recompute: Recompute,
    /// Whether the block was seen to give the same output when it ran again.
    is_checked: AtomicBool,
    /// Whether the weights of the block, which no gradient reaches, were looked at.
    is_known: AtomicBool,
}

/// What a block keeps for its backward pass.
pub(super) enum SavedBlock {
    /// Nothing at or before this block is trained; the backward pass ends after it.
    Frozen,
    /// What its layer asked to keep.
    Kept(Box<dyn Any>),
    /// Its input: the forward pass runs again, or, of a head, for the first time.
    Input {
        xs: Stored,
        /// Of the output, until it was seen to be the same again.
        fingerprint: Option<u64>,
    },
}

impl SavedBlock {
    /// An input away until the backward pass, if activations are: `stored`, if that is it already.
    pub fn put_away(self, params: &Parameters, stored: Option<Stored>) -> Result<Self> {
        Ok(match (self, stored) {
            (
                Self::Input { fingerprint, .. },
                Some(xs @ (Stored::Away(_) | Stored::Kept { .. })),
            ) => Self::Input { xs, fingerprint },
            (Self::Input { xs, fingerprint }, _) => Self::Input {
                xs: match xs {
                    Stored::Here(xs) => params.put_away(Lane::Activations, xs)?,
                    away => away,
                },
                fingerprint,
            },
            (other, _) => other,
        })
    }

    /// An input that is on the device again.
    pub fn get(self) -> Result<Self> {
        Ok(match self {
            Self::Input { xs, fingerprint } => Self::Input {
                xs: Stored::Here(xs.get()?),
                fingerprint,
            },
            other => other,
        })
    }
}

impl StageBlock {
    pub fn new(index: usize, block: Block, params: &Parameters) -> Self {
        let is_of_block = |&param: &usize| params.get(param).blocks.contains(&index);
        Self {
            index,
            block,
            params: (0..params.len()).filter(is_of_block).collect(),
            recompute: Recompute::None,
            is_checked: AtomicBool::new(false),
            is_known: AtomicBool::new(false),
        }
    }

    pub fn is_head(&self) -> bool {
        matches!(self.block.link, Link::Head(_))
    }

    /// The output of a block that no gradient reaches.
    pub fn forward_frozen(
        &self,
        xs: &Tensor,
        pass: &Pass,
        gradients: &Gradients,
    ) -> Result<(Option<Tensor>, SavedBlock)> {
        let Link::Layer(layer) = &self.block.link else {
            return self.forward(xs, pass);
        };
        let pass = &pass.of_block(self.index);
        if !self.is_known.swap(true, Ordering::Relaxed) {
            let (output, saved) = layer.forward(xs, &pass.again())?;
            let mut seen = Stranger {
                gradients,
                found: None,
            };
            // Whether gradients flow is of no interest here.
            let _ = layer.backward(saved, &output.zeros_like()?, pass, &mut seen);
            if let Some(weight) = seen.found {
                gradients.index_of(&weight)?;
            }
        }
        Ok((Some(layer.infer(xs, pass)?), SavedBlock::Frozen))
    }

    /// The output, which a head has none of, and what the tape keeps.
    pub fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Option<Tensor>, SavedBlock)> {
        let input = |fingerprint| SavedBlock::Input {
            xs: Stored::Here(xs.clone()),
            fingerprint,
        };
        let layer = match &self.block.link {
            Link::Head(_) => return Ok((None, input(None))),
            Link::Layer(layer) => layer,
        };
        let (output, saved) = layer.forward(xs, &pass.of_block(self.index))?;
        if self.recompute != Recompute::Full {
            return Ok((Some(output), SavedBlock::Kept(saved)));
        }
        drop(saved);
        // On a GPU, where it would wait, only until it was equal once.
        let is_checked = self.is_checked.load(Ordering::Relaxed) && !output.device().is_cpu();
        let fingerprint = (!is_checked).then(|| fingerprint(&output)).transpose()?;
        Ok((Some(output), input(fingerprint)))
    }

    /// The gradient of the block's input from that of its output, which a head does not have, and a head's loss. The gradients of
    /// `params`, those of the rank, go to `gradients`.
    pub fn backward(
        &self,
        saved: SavedBlock,
        dy: Option<Tensor>,
        pass: &Pass,
        params: &Parameters,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Option<Tensor>, Option<Loss>)> {
        let pass = &pass.of_block(self.index);
        let mut gradients = Noting {
            gradients,
            put: Vec::new(),
        };
        let results = match (&self.block.link, saved) {
            (Link::Head(head), SavedBlock::Input { xs, .. }) => {
                let (loss, dx) = head.loss(&xs.get()?, pass, &mut gradients)?;
                (dx, Some(loss.checked()?))
            }
            (Link::Layer(layer), saved) => {
                let Some(dy) = dy else {
                    bail!("the block got no gradient from the block after it")
                };
                let saved = match saved {
                    SavedBlock::Frozen => return Ok((None, None)),
                    SavedBlock::Kept(saved) => saved,
                    SavedBlock::Input { xs, fingerprint } => {
                        let (output, saved) = layer.forward(&xs.get()?, &pass.again())?;
                        if let Some(fingerprint) = fingerprint {
                            check_repeats(fingerprint, &output)?;
                            self.is_checked.store(true, Ordering::Relaxed);
                        }
                        saved
                    }
                };
                let dx = layer.backward(saved, &dy, pass, &mut gradients)?;
                (dx, None)
            }
            (Link::Head(_), SavedBlock::Kept(_) | SavedBlock::Frozen) => {
                bail!("a head was given what a layer has kept")
            }
        };
        self.check_all_put(&gradients.put, params)?;
        if results.0.is_none() && self.index > 0 {
            bail!(
                "the block's input got no gradient\nhint: an operation between the block's input and its output has \
                 no backward ({CUTTING})"
            );
        }
        Ok(results)
    }

    /// What the block gives where nothing is trained; of a head the sum of the losses.
    pub fn infer(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        match &self.block.link {
            Link::Layer(layer) => layer.infer(xs, pass),
            Link::Head(head) => Ok(head.evaluate(xs, pass)?.sum),
        }
    }

    /// An error that names the trainable parameters of the block for which no gradient was put.
    fn check_all_put(&self, put: &[TensorId], params: &Parameters) -> Result<()> {
        let own = self.params.iter().map(|&index| params.get(index));
        let missing = own.filter(|param| param.needs_gradient() && !put.contains(&param.id()));
        let missing: Vec<&str> = missing.map(|param| param.name.as_str()).collect();
        let Some(first) = missing.first() else {
            return Ok(());
        };
        bail!(
            "{} trainable parameters got no gradient, the first is {first}\nhint: an operation of the block has no backward ({CUTTING}), its \
             own backward pass puts none, the parameter is not used in each micro-batch (ParamBuilder::used_at_times says so), or it should be \
             frozen",
            missing.len()
        )
    }
}

/// Notes of which weights gradients are put.
struct Noting<'a> {
    gradients: &'a mut dyn GradientSink,
    put: Vec<TensorId>,
}

impl GradientSink for Noting<'_> {
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.put.push(weight.id());
        self.gradients.put(weight, grad)
    }

    fn put_large(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.put.push(weight.id());
        self.gradients.put_large(weight, grad)
    }

    fn put_grad(&mut self, weight: &Tensor, grad: Tensor) -> Result<()> {
        self.put.push(weight.id());
        self.gradients.put_grad(weight, grad)
    }

    fn weight_half(&self) -> WeightHalf {
        self.gradients.weight_half()
    }

    fn name_of(&self, weight: &Tensor) -> Option<String> {
        self.gradients.name_of(weight)
    }
}

/// Looks for a trainable weight that is no parameter of the model.
struct Stranger<'a> {
    gradients: &'a Gradients,
    found: Option<Tensor>,
}

impl GradientSink for Stranger<'_> {
    fn put(&mut self, weight: &Tensor, _grad: WeightGrad) -> Result<()> {
        if weight.track_op() && self.gradients.index_of(weight).is_err() {
            self.found = Some(weight.clone());
        }
        Ok(())
    }

    fn weight_half(&self) -> WeightHalf {
        WeightHalf::LaterWithoutWeights
    }
}
