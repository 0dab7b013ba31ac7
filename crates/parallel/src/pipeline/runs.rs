//! Units on their way through the blocks of a stage.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use candle_comm::Scope;
use candle_core::{Result, Tensor, bail};

use super::block::Link;
use super::model_part::ModelPart;
use super::stage_block::{SavedBlock, StageBlock};
use crate::checksums::Shared;
use crate::gradients::Gradients;
use crate::layers::Head;
use crate::offload::Stored;
use crate::pass::{Early, InputHalf, Loss, Pass, SeenRegions, WeightJobs, watched};

/// A forward pass under way.
pub(crate) struct ForwardRun {
    /// The input of the next block; none after a head.
    pub xs: Option<Tensor>,
    /// Where the input of the stage waits, if it is kept away, until its first block has run.
    stored: Option<Stored>,
    pub tape: StageTape,
}

/// The tape of a unit: what each block of the stage has kept for its backward pass.
///
/// The tape carries gradients from one block to the one before it and drops what a block has kept when it is done.
pub(crate) struct StageTape {
    saved: Vec<SavedBlock>,
    pass: Pass,
}

/// A backward pass under way.
pub(crate) struct BackwardRun {
    stage: usize,
    tape: StageTape,
    /// The gradient of what the last block was given.
    upstream: Option<Tensor>,
    /// Which gradients of weights an input half computes.
    early: Early,
    /// The loss of the last stage.
    pub loss: Option<Loss>,
    /// The weight halves that were put off: in the order of the backward pass.
    pub jobs: StageJobs,
}

/// The weight half of a unit: of each block by its index.
pub(crate) type StageJobs = VecDeque<(usize, WeightJobs)>;

/// The result of a block's pass, and what was watched in it.
struct SeenInPass {
    /// Collectives of tensor-parallel ranks.
    num_collectives: u64,
    /// Its regions, if they were watched.
    regions: SeenRegions,
}

const FORWARD: &str = "forward pass";
const BACKWARD: &str = "backward pass";

impl ForwardRun {
    /// A pass of a stage on what the stage before gave; `None` for the first one, which takes the inputs.
    pub fn new(input: Option<Stored>, pass: Pass) -> Result<Self> {
        Ok(Self {
            xs: Some(match &input {
                Some(input) => input.get()?,
                None => pass.inputs().clone(),
            }),
            stored: input,
            tape: StageTape {
                saved: Vec::new(),
                pass,
            },
        })
    }

    fn take(&mut self) -> Result<(Option<Stored>, Tensor)> {
        match self.xs.take() {
            Some(xs) => Ok((self.stored.take(), xs)),
            None => bail!("a head is followed by another block"),
        }
    }
}

impl BackwardRun {
    /// A pass of a stage from the gradient of its output, which the last one has none of.
    pub fn new(stage: usize, tape: StageTape, upstream: Option<Tensor>, early: Early) -> Self {
        Self {
            stage,
            tape,
            upstream,
            early,
            loss: None,
            jobs: StageJobs::new(),
        }
    }

    /// The gradient of the stage's input; the first stage has none, and one whose first blocks are frozen.
    pub fn input_grad(&mut self) -> Option<Tensor> {
        let has_frozen = !self.tape.saved.is_empty();
        self.upstream.take().filter(|_| !has_frozen)
    }
}

impl ModelPart {
    /// Does `pass`, which is called `name`, of a block whose weights are in place. The result, and what was seen of the pass, of its regions if they
    /// are to be watched.
    fn run<T>(
        &self,
        name: &'static str,
        block: &StageBlock,
        watches_regions: bool,
        pass: impl FnOnce() -> Result<T>,
    ) -> (Result<T>, SeenInPass) {
        let scope = Scope {
            what: name,
            block: block.index,
            number: self.num_passes.fetch_add(1, Ordering::Relaxed),
        };
        let ((result, regions), num_collectives) = scope.run(&self.tp, || {
            watched(watches_regions, || {
                self.params().check_present(&block.params)?;
                pass()
            })
        });
        let result = result.map_err(|err| err.context(format!("{name} of block {}", block.index)));
        let seen = SeenInPass {
            num_collectives,
            regions,
        };
        (result, seen)
    }

    /// The forward pass of a block, whose tape is kept; no gradient reaches one that `is_frozen`.
    pub(crate) fn forward_block(
        &self,
        run: &mut ForwardRun,
        index: usize,
        is_frozen: bool,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let block = self.block(index)?;
        let (stored, input) = run.take()?;
        let pass = &run.tape.pass;
        if block.is_head() {
            // It computes in the backward pass.
            let kept = block.forward(&input, pass)?.1;
            run.tape.saved.push(kept.put_away(self.params(), stored)?);
            return Ok(());
        }
        let watch = gradients.watches_regions();
        let (result, seen) = self.run(FORWARD, block, watch, || {
            if is_frozen {
                block.forward_frozen(&input, pass, gradients)
            } else {
                block.forward(&input, pass)
            }
        });
        let (output, kept) = result.map_err(|err| self.about_released(err, block, &input, pass))?;
        gradients.count_collectives(seen.num_collectives);
        gradients.note_regions((FORWARD, index), seen.regions)?;
        if let Some(output) = &output {
            self.check_border(index, output, pass)?;
            if self.is_shared(output, pass) {
                gradients.note_border(Shared::Output(index), output)?;
            }
        }
        run.xs = output;
        drop(input);
        run.tape.saved.push(kept.put_away(self.params(), stored)?);
        Ok(())
    }

    /// The forward pass of a block of which nothing is kept. `observe` gets what it gives; of a head that is what `head` does.
    pub(crate) fn infer_block(
        &self,
        run: &mut ForwardRun,
        index: usize,
        observe: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
        head: &mut dyn FnMut(&dyn Head, &Tensor, &Pass) -> Result<Tensor>,
    ) -> Result<()> {
        let block = self.block(index)?;
        let (_, input) = run.take()?;
        let pass = &run.tape.pass;
        let (output, _) = self.run(FORWARD, block, false, || match &block.block.link {
            Link::Layer(layer) => layer.infer(&input, pass),
            Link::Head(of_model) => head(of_model.as_ref(), &input, pass),
        });
        let output = output.map_err(|err| self.about_released(err, block, &input, pass))?;
        if block.is_head() {
            return observe(index, &output);
        }
        self.check_border(index, &output, pass)?;
        observe(index, &output)?;
        run.xs = Some(output);
        Ok(())
    }

    /// The backward pass of a block: all of it, or its input half, which puts the weight half off.
    pub(crate) fn backward_block(
        &self,
        run: &mut BackwardRun,
        index: usize,
        is_whole: bool,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let block = self.block(index)?;
        let Some(saved) = run.tape.saved.pop() else {
            bail!("the backward pass of block {index} is asked for before its forward pass")
        };
        let saved = saved.get()?;
        let of_head = match (&saved, block.is_head()) {
            (SavedBlock::Input { xs, .. }, true) => Some(xs.get()?),
            _ => None,
        };
        let upstream = run.upstream.take();
        let mut jobs = WeightJobs::new(self.params().sharded().is_none());
        let watch = gradients.watches_regions();
        let pass = &run.tape.pass;
        let (result, seen) = self.run(BACKWARD, block, watch, || {
            let mut now = gradients.of_stage(run.stage);
            if is_whole {
                return block.backward(saved, upstream, pass, self.params(), &mut now);
            }
            let mut sink = InputHalf {
                waiting: &mut jobs,
                now: &mut now,
                early: run.early,
                none_waits: self.writes_early(index, run.early),
            };
            block.backward(saved, upstream, pass, self.params(), &mut sink)
        });
        let (input, loss) = match (result, of_head) {
            (Err(err), Some(xs)) => return Err(self.about_released(err, block, &xs, pass)),
            (result, _) => result?,
        };
        gradients.count_collectives(seen.num_collectives);
        gradients.note_regions((BACKWARD, index), seen.regions)?;
        if let Some(loss) = loss {
            gradients.note_border(Shared::Output(index), &loss.sum)?;
            run.loss = Some(loss);
        }
        if let Some(input) = &input
            && self.is_shared(input, pass)
        {
            gradients.note_border(Shared::InputGrad(index), input)?;
        }
        run.upstream = input;
        if !is_whole {
            run.jobs.push_back((index, jobs));
        }
        Ok(())
    }

    /// The weight half of a block of a stage.
    pub(crate) fn weight_half(
        &self,
        stage: usize,
        jobs: &mut StageJobs,
        index: usize,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let Some((_, jobs)) = jobs.pop_front().filter(|(block, _)| *block == index) else {
            bail!("the weight half of block {index} is asked for before its input half")
        };
        let run = jobs.run(&mut gradients.of_stage(stage));
        run.map_err(|err| err.context(format!("gradients of the weights of block {index}")))
    }
}
