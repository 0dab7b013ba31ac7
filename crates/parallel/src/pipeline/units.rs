//! Carries out instructions: what is in flight on a rank, and what passes between it and its neighbours.

use std::collections::HashMap;

use candle_comm::Pending;
use candle_comm::trace::{PassKind, SpanKind};
use candle_core::{DType, Result, Tensor, bail};

use super::channels::{Channels, Sends};
use super::model_part::{BackwardHalf, ModelPart, StageJobs, StageTape};
use super::pipeline::{BACKWARD, FORWARD, Pipeline};
use crate::gradients::Gradients;
use crate::memory::{MemoryCategory, MemoryGuard};
use crate::offload::{Lane, Stored};
use crate::pass::{ComputeTimer, Loss, Pass, PassReport};
use crate::schedule::{Instruction, Message, Plan, Unit};

/// The units of a rank under way.
pub(super) struct Units<'a> {
    pipeline: &'a Pipeline,
    channels: &'a Channels,
    part: &'a ModelPart,
    passes: &'a [Pass],
    /// What an input half computes.
    input_half: BackwardHalf,
    /// Receives that were posted, by what they are for.
    posted: HashMap<(Unit, Message), Posted>,
    sends: Sends,
    /// What a stage of this rank gave: for another one of this rank, or until it is sent.
    given: HashMap<(Unit, Message), Stored>,
    tapes: HashMap<Unit, StageTape>,
    jobs: HashMap<Unit, StageJobs>,
    /// Of the last stage, by micro-batch.
    losses: Vec<Option<Loss>>,
    report: PassReport,
}

/// A receive under way.
struct Posted {
    received: Pending<Vec<Tensor>>,
    /// Of what was allocated for it.
    _memory: Option<MemoryGuard>,
}

impl<'a> Units<'a> {
    /// For `passes`, each a micro-batch.
    pub fn new(
        pipeline: &'a Pipeline,
        part: &'a ModelPart,
        passes: &'a [Pass],
        input_half: BackwardHalf,
    ) -> Result<Self> {
        let channels = pipeline.channels(part)?;
        channels.begin()?;
        Ok(Self {
            pipeline,
            channels,
            part,
            passes,
            input_half,
            posted: HashMap::new(),
            sends: Sends::default(),
            given: HashMap::new(),
            tapes: HashMap::new(),
            jobs: HashMap::new(),
            losses: vec![None; passes.len()],
            report: PassReport::default(),
        })
    }

    fn pass(&self, unit: Unit) -> Result<&'a Pass> {
        match self.passes.get(unit.micro_batch) {
            Some(pass) => Ok(pass),
            None => bail!("there is no micro-batch {}", unit.micro_batch),
        }
    }

    /// Posts the receive of what a unit needs.
    fn post(&mut self, unit: Unit, what: Message) -> Result<()> {
        let Some(source) = Plan::source(self.part.layout(), unit, what) else {
            bail!("nobody sends the {what:?} of {unit}")
        };
        let giving = match what {
            Message::Activation => unit.stage - 1,
            Message::Gradient => unit.stage,
        };
        let (shape, dtype) = self.part.border_of_stage(giving, self.pass(unit)?)?;
        // A GPU's memory is taken when the receive is posted, that of the host when something comes.
        let num_bytes = shape.elem_count() * dtype.size_in_bytes();
        let meter = self.part.params().meter();
        let on_gpu = !self.part.device().is_cpu();
        let posted = Posted {
            received: self.channels.recv(source, what, shape, dtype)?,
            _memory: on_gpu.then(|| meter.hold(MemoryCategory::Buffers, num_bytes)),
        };
        self.posted.insert((unit, what), posted);
        Ok(())
    }

    /// Sends what a unit has given.
    fn send(&mut self, unit: Unit, what: Message) -> Result<()> {
        let layout = self.part.layout();
        let to = Plan::receiver(layout, unit, what);
        let given = to.and_then(|to| Some((to, self.given.remove(&(to, what))?)));
        // A frozen beginning of the model has no gradient to pass on, and nobody who needs it.
        let Some((to, xs)) = given else {
            bail!("the {what:?} of {unit} is not there to be sent")
        };
        let rank = layout.rank_of(to.stage);
        self.channels.send(&xs.get()?, rank, what, &mut self.sends)
    }

    /// What the unit gets, once it is here; `None` at the beginning or end of the model.
    fn take(&mut self, unit: Unit, what: Message) -> Result<Option<Stored>> {
        if let Some(posted) = self.posted.remove(&(unit, what)) {
            return Ok(posted.received.wait()?.pop().map(Stored::Here));
        }
        let is_end = Plan::is_end(self.part.layout(), unit, what);
        match self.given.remove(&(unit, what)) {
            None if !is_end => {
                bail!("the {what:?} of {unit} is asked for before the stage beside it has given it")
            }
            given => Ok(given),
        }
    }

    /// Keeps what a unit gave for the stage after or before it.
    fn give(&mut self, unit: Unit, what: Message, xs: Tensor) -> Result<()> {
        let layout = self.part.layout();
        let Some(to) = Plan::receiver(layout, unit, what) else {
            return Ok(());
        };
        let lane = match what {
            Message::Activation => Lane::Activations,
            Message::Gradient => Lane::Gradients,
        };
        let xs = match layout.rank_of(to.stage) == layout.rank_of(unit.stage) {
            true => self.part.params().put_away(lane, xs)?,
            false => Stored::Here(xs),
        };
        self.given.insert((to, what), xs);
        Ok(())
    }

    /// Carries out an instruction of a training step; `next` is the block that comes after it on this rank, whose weights may come
    /// meanwhile.
    pub fn train(
        &mut self,
        instruction: Instruction,
        next: Option<usize>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let pp = &self.pipeline.pp;
        pp.set_phase(|| instruction.to_string());
        let done = match instruction {
            Instruction::Forward(unit) => self.forward(unit, next, gradients),
            Instruction::Backward(unit) => {
                self.backward(unit, next, gradients, BackwardHalf::Whole)
            }
            Instruction::InputGrad(unit) => self.backward(unit, next, gradients, self.input_half),
            Instruction::WeightGrad(unit) => self.weight_half(unit, gradients),
            Instruction::Send(unit, what) => self.send(unit, what),
            Instruction::Recv(unit, what) => self.post(unit, what),
        };
        done.map_err(|err| err.context(format!("{instruction}")))
    }

    fn forward(
        &mut self,
        unit: Unit,
        next: Option<usize>,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let input = self.take(unit, Message::Activation)?;
        let timer = ComputeTimer::start();
        let (part, pass) = (self.part, self.pass(unit)?.clone());
        let kind = span(PassKind::Forward, unit);
        let (output, tape) = self.pipeline.timed(FORWARD, kind, || {
            part.forward(unit.stage, input, pass, next, gradients)
        })?;
        self.report.forward_secs += timer.secs();
        self.tapes.insert(unit, tape);
        if let Some(output) = output {
            self.give(unit, Message::Activation, output)?;
        }
        Ok(())
    }

    fn backward(
        &mut self,
        unit: Unit,
        next: Option<usize>,
        gradients: &mut Gradients,
        half: BackwardHalf,
    ) -> Result<()> {
        let upstream = self.take(unit, Message::Gradient)?;
        let upstream = upstream.map(|upstream| upstream.get()).transpose()?;
        let timer = ComputeTimer::start();
        let Some(tape) = self.tapes.remove(&unit) else {
            bail!("the schedule asks for the backward pass of {unit} before its forward pass")
        };
        let part = self.part;
        let puts_off = half != BackwardHalf::Whole;
        let kind = match puts_off {
            true => span(PassKind::InputGrad, unit),
            false => span(PassKind::Backward, unit),
        };
        let grad = self.pipeline.timed(BACKWARD, kind, || {
            part.backward(unit.stage, tape, upstream, next, gradients, half)
        })?;
        self.report.backward_secs += timer.secs();
        if let Some(loss) = grad.loss {
            self.losses[unit.micro_batch] = Some(loss);
        }
        if puts_off {
            self.jobs.insert(unit, grad.jobs);
        }
        if let Some(input) = grad.input {
            self.give(unit, Message::Gradient, input)?;
        }
        Ok(())
    }

    fn weight_half(&mut self, unit: Unit, gradients: &mut Gradients) -> Result<()> {
        let timer = ComputeTimer::start();
        let Some(jobs) = self.jobs.remove(&unit) else {
            bail!("the schedule asks for the weight half of {unit} before its input half")
        };
        let part = self.part;
        let kind = span(PassKind::WeightGrad, unit);
        self.pipeline.timed(BACKWARD, kind, || {
            part.weight_half(unit.stage, jobs, gradients)
        })?;
        self.report.backward_secs += timer.secs();
        Ok(())
    }

    /// Carries out a forward pass without a backward pass, or a message: what the head is to be given, if this is the last stage. `observe`
    /// gets what each block gives.
    pub fn infer(
        &mut self,
        instruction: Instruction,
        next: Option<usize>,
        observe: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        let unit = instruction.unit();
        match instruction {
            Instruction::Send(_, what) => self.send(unit, what).map(|()| None),
            Instruction::Recv(_, what) => self.post(unit, what).map(|()| None),
            _ => {
                let input = self.take(unit, Message::Activation)?;
                let pass = self.pass(unit)?;
                let output = self.part.infer(unit.stage, input, pass, next, observe)?;
                if unit.stage + 1 == self.part.layout().num_stages() {
                    return Ok(Some(output));
                }
                self.give(unit, Message::Activation, output)?;
                Ok(None)
            }
        }
    }

    /// Waits for what is under way; what the passes gave.
    pub fn finish(self) -> Result<PassReport> {
        self.sends.finish()?;
        if let Some(waiting) = self.part.params().waiting() {
            waiting.finish()?;
        }
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

fn span(pass: PassKind, Unit { stage, micro_batch }: Unit) -> SpanKind {
    SpanKind::Pass {
        pass,
        stage,
        micro_batch,
    }
}
