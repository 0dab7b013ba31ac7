//! Carries out instructions: what is in flight on a rank, and what passes between it and its neighbours.

use std::collections::{HashMap, VecDeque};

use candle_comm::Pending;
use candle_comm::trace::SpanKind;
use candle_core::{DType, Result, Tensor, bail};

use super::channels::{Channels, Kind, Sends};
use super::model_part::{ModelPart, StageJobs, Tape};
use super::pipeline::{BACKWARD, FORWARD, Pipeline};
use super::schedule::{Instruction, Unit};
use crate::gradients::Gradients;
use crate::pass::{ComputeTimer, Loss, Pass, PassReport};

/// Receives that are posted before what they are for is next.
const RECEIVES_AHEAD: usize = 1;

/// The units of a rank under way.
pub(super) struct Units<'a> {
    pipeline: &'a Pipeline,
    channels: &'a Channels,
    part: &'a ModelPart,
    passes: &'a [Pass],
    rank: usize,
    /// What is still to be received from other ranks, in the order in which it is needed.
    expected: VecDeque<(Unit, Kind)>,
    posted: VecDeque<Posted>,
    sends: Sends,
    /// What a stage of this rank gave to another one of this rank.
    given: HashMap<(Unit, Kind), Tensor>,
    tapes: HashMap<Unit, Tape>,
    jobs: HashMap<Unit, StageJobs>,
    /// Of the last stage, by micro-batch.
    losses: Vec<Option<Loss>>,
    report: PassReport,
}

/// A receive that was posted.
struct Posted {
    what: (Unit, Kind),
    received: Pending<Vec<Tensor>>,
}

impl<'a> Units<'a> {
    /// To carry out `instructions` for `passes`.
    pub fn new(
        pipeline: &'a Pipeline,
        part: &'a ModelPart,
        passes: &'a [Pass],
        instructions: &[Instruction],
    ) -> Result<Self> {
        let rank = pipeline.pp.rank();
        let channels = pipeline.channels(part.layout())?;
        channels.begin()?;
        let mut units = Self {
            pipeline,
            channels,
            part,
            passes,
            rank,
            expected: VecDeque::new(),
            posted: VecDeque::new(),
            sends: Sends::default(),
            given: HashMap::new(),
            tapes: HashMap::new(),
            jobs: HashMap::new(),
            losses: vec![None; passes.len()],
            report: PassReport::default(),
        };
        let expected = instructions.iter().filter_map(|instruction| {
            let unit = instruction.unit();
            let kind = match instruction {
                Instruction::Forward(_) => Kind::Activation,
                Instruction::Backward(_) | Instruction::InputGrad(_) => Kind::Gradient,
                Instruction::WeightGrad(_) => return None,
            };
            let source = units.source(unit, kind)?;
            (source != rank).then_some((unit, kind))
        });
        units.expected = expected.collect();
        Ok(units)
    }

    /// The rank that gives a unit its input, or the gradient of its output; `None` where there is nothing to give.
    fn source(&self, unit: Unit, kind: Kind) -> Option<usize> {
        let layout = self.part.layout();
        let stage = match kind {
            Kind::Activation => unit.stage.checked_sub(1)?,
            Kind::Gradient => Some(unit.stage + 1).filter(|&next| next < layout.num_stages())?,
        };
        Some(layout.rank_of(stage))
    }

    fn pass(&self, unit: Unit) -> Result<&'a Pass> {
        match self.passes.get(unit.micro_batch) {
            Some(pass) => Ok(pass),
            None => bail!("there is no micro-batch {}", unit.micro_batch),
        }
    }

    /// Posts receives until that of `wanted` is among them, and some more.
    fn post(&mut self, wanted: (Unit, Kind)) -> Result<()> {
        let is_posted = |posted: &VecDeque<Posted>| posted.iter().any(|of| of.what == wanted);
        while !is_posted(&self.posted) || self.posted.len() <= RECEIVES_AHEAD {
            let Some((unit, kind)) = self.expected.pop_front() else {
                break;
            };
            let Some(source) = self.source(unit, kind) else {
                continue;
            };
            let giving = match kind {
                Kind::Activation => unit.stage - 1,
                Kind::Gradient => unit.stage,
            };
            let (shape, dtype) = self.part.border_of_stage(giving, self.pass(unit)?)?;
            let received = self.channels.recv(source, kind, shape, dtype)?;
            let what = (unit, kind);
            self.posted.push_back(Posted { what, received });
        }
        Ok(())
    }

    /// What the unit gets, once it is here.
    fn take(&mut self, unit: Unit, kind: Kind) -> Result<Option<Tensor>> {
        let Some(source) = self.source(unit, kind) else {
            return Ok(None);
        };
        if source == self.rank {
            return match self.given.remove(&(unit, kind)) {
                Some(given) => Ok(Some(given)),
                None => bail!(
                    "the schedule asks for the {kind:?} of {unit:?} before the stage beside it, which is on the same rank, has given it"
                ),
            };
        }
        self.post((unit, kind))?;
        let place = self.posted.iter().position(|of| of.what == (unit, kind));
        let Some(posted) = place.and_then(|place| self.posted.remove(place)) else {
            bail!("the schedule asks for the {kind:?} of {unit:?}, which no receive was posted for")
        };
        Ok(posted.received.wait()?.pop())
    }

    /// Hands what a unit gave to the stage after or before it.
    fn give(&mut self, unit: Unit, kind: Kind, xs: Tensor) -> Result<()> {
        let stage = match kind {
            Kind::Activation => unit.stage + 1,
            Kind::Gradient => match unit.stage.checked_sub(1) {
                Some(stage) => stage,
                None => return Ok(()),
            },
        };
        let to = Unit { stage, ..unit };
        let rank = self.part.layout().rank_of(stage);
        if rank != self.rank {
            return self.channels.send(&xs, rank, kind, &mut self.sends);
        }
        self.given.insert((to, kind), xs);
        Ok(())
    }

    /// Carries out an instruction of a training step.
    pub fn train(&mut self, instruction: Instruction, gradients: &mut Gradients) -> Result<()> {
        match instruction {
            Instruction::Forward(unit) => self.forward(unit, gradients),
            Instruction::Backward(unit) => self.backward(unit, gradients, false),
            Instruction::InputGrad(unit) => self.backward(unit, gradients, true),
            Instruction::WeightGrad(unit) => self.weight_half(unit, gradients),
        }
    }

    fn forward(&mut self, unit: Unit, gradients: &mut Gradients) -> Result<()> {
        let input = self.take(unit, Kind::Activation)?;
        let timer = ComputeTimer::start();
        let (part, pass) = (self.part, self.pass(unit)?.clone());
        let kind = SpanKind::Forward {
            micro_batch: unit.micro_batch,
        };
        let (output, tape) = self.pipeline.timed(FORWARD, kind, || {
            part.forward(unit.stage, input, pass, gradients)
        })?;
        self.report.forward_secs += timer.secs();
        self.tapes.insert(unit, tape);
        match output {
            Some(output) => self.give(unit, Kind::Activation, output),
            None => Ok(()),
        }
    }

    fn backward(&mut self, unit: Unit, gradients: &mut Gradients, puts_off: bool) -> Result<()> {
        let upstream = self.take(unit, Kind::Gradient)?;
        let timer = ComputeTimer::start();
        let Some(tape) = self.tapes.remove(&unit) else {
            bail!("the schedule asks for the backward pass of {unit:?} before its forward pass")
        };
        let part = self.part;
        let grad = self.pipeline.timed(BACKWARD, of_backward(unit), || {
            part.backward(unit.stage, tape, upstream, gradients, puts_off)
        })?;
        self.report.backward_secs += timer.secs();
        if let Some(loss) = grad.loss {
            self.losses[unit.micro_batch] = Some(loss);
        }
        if puts_off {
            self.jobs.insert(unit, grad.jobs);
        }
        match grad.input {
            Some(input) => self.give(unit, Kind::Gradient, input),
            None => Ok(()),
        }
    }

    fn weight_half(&mut self, unit: Unit, gradients: &mut Gradients) -> Result<()> {
        let timer = ComputeTimer::start();
        let Some(jobs) = self.jobs.remove(&unit) else {
            bail!("the schedule asks for the weight half of {unit:?} before its input half")
        };
        let part = self.part;
        self.pipeline.timed(BACKWARD, of_backward(unit), || {
            part.weight_half(unit.stage, jobs, gradients)
        })?;
        self.report.backward_secs += timer.secs();
        Ok(())
    }

    /// Carries out a forward pass without a backward pass: what the head is to be given, if this is the last stage. `observe` gets what each
    /// block gives.
    pub fn infer(
        &mut self,
        unit: Unit,
        observe: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let input = self.take(unit, Kind::Activation)?;
        let output = self
            .part
            .infer(unit.stage, input, self.pass(unit)?, observe)?;
        if unit.stage + 1 == self.part.layout().num_stages() {
            return Ok(Some(output));
        }
        self.give(unit, Kind::Activation, output)?;
        Ok(None)
    }

    /// Waits for what is under way; what the passes gave.
    pub fn finish(self) -> Result<PassReport> {
        self.sends.finish()?;
        self.channels.end();
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

fn of_backward(unit: Unit) -> SpanKind {
    SpanKind::Backward {
        micro_batch: unit.micro_batch,
    }
}
