//! The units of a rank under way: what is in flight of its micro-batches.

use std::collections::HashMap;

use candle_comm::trace::{PassKind, SpanKind};
use candle_core::{DType, Result, Tensor, bail};

use super::messages::Messages;
use super::pipeline::{BACKWARD, FORWARD, Pipeline};
use crate::gradients::Gradients;
use crate::layers::Head;
use crate::pass::{Early, Loss, Pass, PassReport};
use crate::pipeline::{BackwardRun, ForwardRun, ModelPart, StageJobs, StageTape};
use crate::program::Action;
use crate::schedule::{Instruction, Message, Unit};

/// The units of a rank under way.
pub(super) struct Units<'a> {
    pub pipeline: &'a Pipeline,
    part: &'a ModelPart,
    passes: &'a [Pass],
    /// Which gradients of weights an input half computes.
    early: Early,
    /// Forward passes that no backward passes follow.
    inference: Option<Inference<'a>>,
    messages: Messages<'a>,
    /// The unit that the instruction works on.
    running: Running,
    tapes: HashMap<Unit, StageTape>,
    jobs: HashMap<Unit, StageJobs>,
    /// Losses of the last stage, by micro-batch.
    losses: Vec<Option<Loss>>,
    report: PassReport,
}

/// The use that is made of forward passes without backward passes.
pub(super) struct Inference<'a> {
    /// Sees what each block gives, by its index.
    pub observe: &'a mut dyn FnMut(usize, &Tensor) -> Result<()>,
    /// Asks the head, and gives a tensor of what it says to be seen.
    pub head: &'a mut dyn FnMut(&dyn Head, &Tensor, &Pass) -> Result<Tensor>,
}

/// A unit that runs now.
enum Running {
    Nothing,
    Forward(ForwardRun),
    Backward(BackwardRun),
    WeightHalf(usize, StageJobs),
}

impl<'a> Units<'a> {
    /// For `passes`, each a micro-batch.
    pub fn new(
        pipeline: &'a Pipeline,
        part: &'a ModelPart,
        passes: &'a [Pass],
        early: Early,
        inference: Option<Inference<'a>>,
    ) -> Result<Self> {
        Ok(Self {
            pipeline,
            part,
            passes,
            early,
            inference,
            messages: Messages::new(pipeline.channels(part)?, part)?,
            running: Running::Nothing,
            tapes: HashMap::new(),
            jobs: HashMap::new(),
            losses: vec![None; passes.len()],
            report: PassReport::default(),
        })
    }

    pub fn trains(&self) -> bool {
        self.inference.is_none()
    }

    fn pass(&self, unit: Unit) -> Result<&'a Pass> {
        match self.passes.get(unit.micro_batch) {
            Some(pass) => Ok(pass),
            None => bail!("there is no micro-batch {}", unit.micro_batch),
        }
    }

    /// Begins an instruction: what it needs of other stages is here then.
    pub fn begin(&mut self, instruction: Instruction) -> Result<()> {
        match instruction {
            Instruction::Send(unit, what) => self.messages.send(unit, what)?,
            Instruction::Recv(unit, what) => {
                let pass = self.pass(unit)?;
                self.messages.post(unit, what, pass)?;
            }
            Instruction::Forward(unit) => {
                let input = self.messages.take(unit, Message::Activation)?;
                self.running = Running::Forward(ForwardRun::new(input, self.pass(unit)?.clone())?);
            }
            Instruction::Backward(unit) | Instruction::InputGrad(unit) => {
                let upstream = self.messages.take(unit, Message::Gradient)?;
                let upstream = upstream.map(|upstream| upstream.get()).transpose()?;
                let Some(tape) = self.tapes.remove(&unit) else {
                    bail!(
                        "the schedule asks for the backward pass of {unit} before its forward pass"
                    )
                };
                let run = BackwardRun::new(unit.stage, tape, upstream, self.early);
                self.running = Running::Backward(run);
            }
            Instruction::WeightGrad(unit) => {
                let Some(jobs) = self.jobs.remove(&unit) else {
                    bail!("the schedule asks for the weight half of {unit} before its input half")
                };
                self.running = Running::WeightHalf(unit.stage, jobs);
            }
        }
        Ok(())
    }

    /// As what the time of an instruction counts: the place of a stopwatch, and the span of a trace.
    pub fn timed(&self, instruction: Instruction) -> Option<(usize, SpanKind)> {
        let (place, pass) = match instruction {
            _ if !self.trains() => return None,
            Instruction::Forward(_) => (FORWARD, PassKind::Forward),
            Instruction::Backward(_) => (BACKWARD, PassKind::Backward),
            Instruction::InputGrad(_) => (BACKWARD, PassKind::InputGrad),
            Instruction::WeightGrad(_) => (BACKWARD, PassKind::WeightGrad),
            _ => return None,
        };
        let Unit { stage, micro_batch } = instruction.unit();
        let span = SpanKind::Pass {
            pass,
            stage,
            micro_batch,
        };
        Some((place, span))
    }

    /// Counts what the host computed.
    pub fn add_secs(&mut self, place: usize, secs: f64) {
        match place {
            FORWARD => self.report.forward_secs += secs,
            _ => self.report.backward_secs += secs,
        }
    }

    /// A pass of a block, or a half of one, within the instruction that has begun.
    pub fn pass_of_block(
        &mut self,
        action: Action,
        gradients: Option<&mut Gradients>,
    ) -> Result<()> {
        let part = self.part;
        match (action, &mut self.running, gradients) {
            (Action::Forward(block), Running::Forward(run), Some(gradients)) => {
                part.forward_block(run, block as usize, false, gradients)
            }
            (Action::Infer(block), Running::Forward(run), Some(gradients)) => {
                part.forward_block(run, block as usize, true, gradients)
            }
            (Action::Infer(block), Running::Forward(run), None) => match &mut self.inference {
                Some(Inference { observe, head }) => {
                    part.infer_block(run, block as usize, *observe, *head)
                }
                None => bail!("nothing is to be done with what block {block} gives"),
            },
            (Action::Backward(block), Running::Backward(run), Some(gradients)) => {
                part.backward_block(run, block as usize, true, gradients)
            }
            (Action::InputGrad(block), Running::Backward(run), Some(gradients)) => {
                part.backward_block(run, block as usize, false, gradients)
            }
            (Action::WeightGrad(block), Running::WeightHalf(stage, jobs), Some(gradients)) => {
                part.weight_half(*stage, jobs, block as usize, gradients)
            }
            _ => bail!("{action:?} is within an instruction that it does not belong to"),
        }
    }

    /// Ends an instruction: what it has given is for other stages, or for later passes.
    pub fn end(&mut self, instruction: Instruction) -> Result<()> {
        let unit = instruction.unit();
        match std::mem::replace(&mut self.running, Running::Nothing) {
            Running::Nothing | Running::WeightHalf(..) => Ok(()),
            Running::Forward(run) => {
                if self.trains() {
                    self.tapes.insert(unit, run.tape);
                }
                match run.xs {
                    Some(output) => self.messages.give(unit, Message::Activation, output),
                    None => Ok(()),
                }
            }
            Running::Backward(mut run) => {
                let input = run.input_grad();
                if let Some(loss) = run.loss {
                    self.losses[unit.micro_batch] = Some(loss);
                }
                if let Instruction::InputGrad(_) = instruction {
                    self.jobs.insert(unit, run.jobs);
                }
                match input {
                    Some(input) => self.messages.give(unit, Message::Gradient, input),
                    None => Ok(()),
                }
            }
        }
    }

    /// Waits for what is under way; what the passes gave.
    pub fn finish(self) -> Result<PassReport> {
        self.messages.finish()?;
        let mut report = self.report;
        for pass in self.passes {
            for (name, reported) in pass.reports()? {
                let known = report.reported.entry(name).or_default();
                *known = known.plus(reported);
            }
        }
        for loss in self.losses.into_iter().flatten() {
            report.num_targets += loss.count;
            let sum = loss.sum.detach().to_dtype(DType::F64)?;
            report.loss_sum = Some(match report.loss_sum {
                None => sum,
                Some(earlier) => (earlier + sum)?,
            });
        }
        Ok(report)
    }
}
