//! A worker: it computes gradients with the weights that the servers have.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use candle_comm::{Departure, Mailbox, Mesh, ProcessGroup, Received};
use candle_core::{Device, Error, Result, Tensor};
use candle_parallel::{Gradients, ModelPart, Pass, Pipeline, Schedule};

use super::message::{HELLO, PUSH, Push, REPLY, Reply, START, Start};
use candle_data::Batches;

/// A rank that computes gradients for a [`ParameterServer`](super::ParameterServer). It holds the model's weights whole, and no
/// optimizer.
pub struct Worker {
    mailbox: Arc<Mailbox>,
    part: ModelPart,
    pipeline: Pipeline,
    gradients: Gradients,
    /// Of each server, the values of each bucket that it updates.
    servers: Vec<Vec<Range<usize>>>,
    start: Start,
    asks_to_stop: Option<Box<dyn Fn() -> bool + Send>>,
}

impl Worker {
    /// A worker for the servers that are the first `num_servers` ranks; it waits until they have begun, and there is none if they leave before
    /// that. `build` makes its model, the one that the servers have, on a mesh of this rank alone.
    ///
    /// # Errors
    /// What building the model returns; servers that are gone, or have another model.
    pub fn join(
        mailbox: &Arc<Mailbox>,
        num_servers: usize,
        build: impl FnOnce(&Mesh) -> Result<ModelPart>,
    ) -> Result<Option<Self>> {
        let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Default::default())?;
        let part = build(&mesh)?;
        let mut worker = Self {
            mailbox: mailbox.clone(),
            pipeline: Pipeline::new(Schedule::OneForwardOneBackward, &mesh),
            gradients: Gradients::new(part.params(), &mesh)?,
            part,
            servers: Vec::new(),
            start: Start::default(),
            asks_to_stop: None,
        };
        mailbox.bound_tensors(worker.part.params().largest_bucket_bytes());
        for server in 0..num_servers {
            worker.send(server, HELLO, &[])?;
        }
        for server in 0..num_servers {
            match worker.mailbox.recv(Some(server), Some(START))? {
                Received::Left(departure) if departure.why.is_none() => return Ok(None),
                Received::Left(departure) => return Err(gone(&departure)),
                Received::Mail(mail) => {
                    let (start, ranges) = Start::of(&mail)?;
                    worker.start = start;
                    worker.servers.push(ranges);
                }
            }
        }
        worker.check_ranges()?;
        worker.take_replies()?;
        Ok(Some(worker))
    }

    /// Asks `asks` in each step whether this rank wants all of them to stop.
    pub fn with_stop(mut self, asks: impl Fn() -> bool + Send + 'static) -> Self {
        self.asks_to_stop = Some(Box::new(asks));
        self
    }

    /// Computes the gradients of `batches`, this worker's share, until the servers want no more.
    ///
    /// # Errors
    /// A server that has failed, and what blocks return.
    pub fn train(&mut self, batches: Batches) -> Result<()> {
        let Start {
            step,
            num_steps,
            position,
        } = self.start;
        let batches = match position {
            Some(position) => batches.continued(step, position),
            None => batches,
        };
        for step in step..num_steps {
            self.push(step, &batches.batch(step)?)
                .map_err(|err| err.context(format!("step {} failed", step + 1)))?;
            if !self.take_replies()? {
                break;
            }
        }
        Ok(())
    }

    /// An error unless the servers have each value once.
    fn check_ranges(&self) -> Result<()> {
        let own = self.part.params().own_ranges();
        for (bucket, own) in own.iter().enumerate() {
            let mut ranges = self.servers.iter().map(|ranges| ranges.get(bucket));
            let end = ranges.try_fold(0, |end, range| {
                let range = range.filter(|range| range.start == end)?;
                Some(range.end)
            });
            let num_buckets = self.servers.iter().map(Vec::len).max();
            if end != Some(own.end) || num_buckets != Some(self.servers[0].len()) {
                return Err(Error::msg(format!(
                    "the servers do not have the {} values of bucket {bucket} once each\nhint: start all ranks with the same model and \
                     flags",
                    own.end
                )));
            }
        }
        Ok(())
    }

    /// Computes a step's gradients and sends them to the servers.
    fn push(&mut self, step: usize, micro_batches: &[Pass]) -> Result<()> {
        self.gradients.clear();
        let passes =
            self.pipeline
                .forward_backward(&self.part, micro_batches, &mut self.gradients)?;
        let loss_sum = match &passes.loss_sum {
            Some(sum) => sum.to_scalar::<f64>()?,
            None => 0.0,
        };
        let num_positions = micro_batches.iter().map(|batch| {
            let (b, t) = batch.dims()?;
            Ok(b * t)
        });
        let num_positions = num_positions.sum::<Result<usize>>()?;
        let norm = self.gradients.own_norm()?;
        let asks_to_stop = self.asks_to_stop.as_ref().is_some_and(|asks| asks());
        for (server, ranges) in self.servers.iter().enumerate() {
            let push = Push {
                worker: self.mailbox.rank(),
                step,
                loss_sum,
                num_targets: passes.num_targets as usize,
                num_positions,
                asks_to_stop,
                norm,
                // The servers have taken them before they reply, and nothing is written before that.
                slices: self.gradients.slices(ranges)?,
            };
            self.send(server, PUSH, &push.into_tensors()?)?;
        }
        Ok(())
    }

    /// Sends to a server unless it has left: that is told where its reply does not come.
    fn send(&self, server: usize, tag: u64, tensors: &[Tensor]) -> Result<()> {
        match self.mailbox.send(server, tag, tensors) {
            Err(_) if self.mailbox.departure(server).is_some() => Ok(()),
            sent => Ok(sent?),
        }
    }

    /// Waits for the weights of all servers, however long these save or evaluate before; whether they want more.
    fn take_replies(&mut self) -> Result<bool> {
        let mut goes_on = true;
        for (server, ranges) in self.servers.iter().enumerate() {
            let received = self
                .mailbox
                .recv_timeout(Some(server), Some(REPLY), Duration::MAX)?;
            match received {
                Some(Received::Mail(mail)) => {
                    let reply = Reply::of(mail)?;
                    let params = self.part.params();
                    params.take_slices(ranges, &reply.slices, reply.num_updates)?;
                    self.gradients.set_loss_scale(reply.loss_scale);
                    if reply.is_stopped {
                        goes_on = false;
                    }
                }
                Some(Received::Left(departure)) if departure.why.is_none() => goes_on = false,
                Some(Received::Left(departure)) => return Err(gone(&departure)),
                None => return Err(Error::msg("a wait without end has ended")),
            }
        }
        Ok(goes_on)
    }
}

fn gone(server: &Departure) -> Error {
    Error::msg(format!("{server}, a server, without which nothing goes on"))
}
