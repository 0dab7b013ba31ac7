//! Messages between the stages of a pipeline while units are under way.

use std::collections::HashMap;

use candle_comm::Pending;
use candle_core::{Result, Tensor, bail};

use super::channels::{Channels, Sends};
use crate::memory::{MemoryCategory, MemoryGuard};
use crate::offload::{Lane, Stored};
use crate::pass::Pass;
use crate::pipeline::ModelPart;
use crate::schedule::{Message, Plan, Unit};

/// The messages of a rank: from other stages, and to them.
pub(super) struct Messages<'a> {
    channels: &'a Channels,
    part: &'a ModelPart,
    /// Receives that were posted, by what they are for.
    posted: HashMap<(Unit, Message), Posted>,
    sends: Sends,
    /// Outputs and gradients that a stage of this rank gave: for another one of this rank, or until they are sent.
    given: HashMap<(Unit, Message), Stored>,
}

/// A receive under way.
struct Posted {
    received: Pending<Vec<Tensor>>,
    /// Counts what was allocated for it.
    _memory: Option<MemoryGuard>,
}

impl<'a> Messages<'a> {
    pub fn new(channels: &'a Channels, part: &'a ModelPart) -> Result<Self> {
        channels.begin()?;
        Ok(Self {
            channels,
            part,
            posted: HashMap::new(),
            sends: Sends::default(),
            given: HashMap::new(),
        })
    }

    /// Posts the receive of what a unit needs, whose micro-batch is `pass`.
    pub fn post(&mut self, unit: Unit, what: Message, pass: &Pass) -> Result<()> {
        let Some(source) = Plan::source(self.part.layout(), unit, what) else {
            bail!("nobody sends the {what:?} of {unit}")
        };
        let giving = match what {
            Message::Activation => unit.stage - 1,
            Message::Gradient => unit.stage,
        };
        let (shape, dtype) = self.part.border_of_stage(giving, pass)?;
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
    pub fn send(&mut self, unit: Unit, what: Message) -> Result<()> {
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

    /// Waits for the input of a unit, or for the gradient of its output; `None` at the beginning or end of the model.
    pub fn take(&mut self, unit: Unit, what: Message) -> Result<Option<Stored>> {
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
    pub fn give(&mut self, unit: Unit, what: Message, xs: Tensor) -> Result<()> {
        let layout = self.part.layout();
        let Some(to) = Plan::receiver(layout, unit, what) else {
            return Ok(());
        };
        let lane = match what {
            Message::Activation => Lane::Activations,
            Message::Gradient => Lane::Gradients,
        };
        let xs = if layout.rank_of(to.stage) == layout.rank_of(unit.stage) {
            self.part.params().put_away(lane, xs)?
        } else {
            Stored::Here(xs)
        };
        self.given.insert((to, what), xs);
        Ok(())
    }

    /// Waits for what is under way.
    pub fn finish(self) -> Result<()> {
        self.sends.finish()?;
        if let Some(waiting) = self.part.params().waiting() {
            waiting.finish()?;
        }
        self.channels.end();
        Ok(())
    }
}
