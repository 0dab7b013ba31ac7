//! Runs a schedule: the one train-step engine of every layout.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use candle_comm::trace::{self, SpanKind};
use candle_comm::{Mesh, P2p, ProcessGroup};
use candle_core::{Result, Shape, Tensor, bail};
use candle_ops::Stopwatch;

use super::input_check::InputCheck;
use super::micro_batch::MicroBatch;
use super::pass_report::{ComputeTimer, PassReport};
use super::schedule::{Instruction, Schedule};
use super::stage::{Stage, Tape};
use crate::gradients::Gradients;

/// Interprets a [`Schedule`] over the ranks of a pipeline group. Without a pipeline the group has one rank.
pub struct Pipeline {
    schedule: Schedule,
    pub(super) pp: ProcessGroup,
    /// Compares what the ranks of a replica are given.
    input_check: Option<InputCheck>,
    /// Of forward and backward passes on the device, if they are timed there.
    stopwatches: Option<[Mutex<Stopwatch>; 2]>,
    /// Whether a batch was evaluated twice, to see that it gives the same.
    pub(super) evaluates_alike: AtomicBool,
}

/// Places of the stopwatches.
const FORWARD: usize = 0;
const BACKWARD: usize = 1;

/// What is in flight on a stage; keys are micro-batch indices.
#[derive(Default)]
struct InFlight {
    inputs: HashMap<usize, Tensor>,
    outputs: HashMap<usize, Tensor>,
    tapes: HashMap<usize, Tape>,
    upstream: HashMap<usize, Tensor>,
    input_grads: HashMap<usize, Tensor>,
}

impl Pipeline {
    /// A pipeline over the ranks of `mesh.pp`, one stage each.
    pub fn new(schedule: Schedule, mesh: &Mesh) -> Self {
        Self {
            schedule,
            pp: mesh.pp.clone(),
            input_check: InputCheck::new(mesh),
            stopwatches: None,
            evaluates_alike: AtomicBool::new(false),
        }
    }

    /// Times passes on the stage's device from now on: see [`Self::take_device_secs`].
    pub fn with_device_times(mut self) -> Self {
        self.stopwatches = Some(Default::default());
        self
    }

    /// The seconds that forward and backward passes took on the device since this was last asked; waits for their end. Zeros
    /// without [`Self::with_device_times`].
    ///
    /// # Errors
    /// The device has failed.
    pub fn take_device_secs(&self) -> Result<[f64; 2]> {
        let Some(stopwatches) = &self.stopwatches else {
            return Ok([0.0; 2]);
        };
        let take = |stopwatch: &Mutex<Stopwatch>| {
            let mut stopwatch = stopwatch.lock().unwrap_or_else(PoisonError::into_inner);
            stopwatch.take_secs()
        };
        Ok([take(&stopwatches[FORWARD])?, take(&stopwatches[BACKWARD])?])
    }

    fn timed<T>(
        &self,
        (pass, kind): (usize, SpanKind),
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let device = self.pp.device();
        trace::record(kind, device, || match &self.stopwatches {
            None => work(),
            Some(stopwatches) => {
                let stopwatch = stopwatches[pass].lock();
                let mut stopwatch = stopwatch.unwrap_or_else(PoisonError::into_inner);
                stopwatch.time(device, work)
            }
        })
    }

    /// Forward and backward passes of all micro-batches of a step: adds to `gradients` those of the sum of the losses over
    /// this replica's targets, times [`Gradients::loss_scale`]. [`Gradients::reduce`] makes them those of the mean over the global batch.
    ///
    /// Every rank of a replica, whatever its stage, must be given the same micro-batches. A step may have several calls, whose losses,
    /// targets and gradients add up; with replicas each call sums over them, unless
    /// [`DataParallel::overlap`](crate::DataParallel::overlap) is off.
    ///
    /// # Errors
    /// Ranks of a replica that were given different micro-batches, with ZeRO-2 and 3 replicas that were given unequal numbers of
    /// them, gradients of another model, and what blocks return. After an error `gradients` have nothing of the step: it begins anew.
    pub fn forward_backward(
        &self,
        stage: &Stage,
        micro_batches: &[MicroBatch],
        gradients: &mut Gradients,
    ) -> Result<PassReport> {
        gradients.check_are_of(stage.params())?;
        let report = self.run_passes(stage, micro_batches, gradients);
        if report.is_err() {
            gradients.clear();
        }
        report
    }

    fn run_passes(
        &self,
        stage: &Stage,
        micro_batches: &[MicroBatch],
        gradients: &mut Gradients,
    ) -> Result<PassReport> {
        if let Some(check) = &self.input_check {
            let counts_are_equal = stage.params().groups().shards_gradients();
            check.run(micro_batches, counts_are_equal)?;
        }
        gradients.begin_passes()?;
        stage.begin();
        stage.params().meter().begin_passes(stage.device())?;
        let (rank, num_stages) = (self.pp.rank(), self.pp.world_size());
        let instructions = self
            .schedule
            .instructions(rank, num_stages, micro_batches.len());
        if let Some(sharded) = stage.params().sharded() {
            // What a step that failed has left.
            sharded.free_all()?;
        }
        let mut num_backwards = 0;
        let mut flight = InFlight::default();
        let mut report = PassReport::default();
        let mut losses = vec![None; micro_batches.len()];
        let mut next = 0;
        while next < instructions.len() {
            let is_compute = |instruction: &Instruction| {
                matches!(
                    instruction,
                    Instruction::Forward(_) | Instruction::Backward(_)
                )
            };
            match instructions[next] {
                Instruction::Forward(index) => {
                    let timer = ComputeTimer::start();
                    let input = flight.inputs.remove(&index);
                    let kind = SpanKind::Forward { micro_batch: index };
                    let (output, tape) = self.timed((FORWARD, kind), || {
                        stage.forward(input, &micro_batches[index], gradients)
                    })?;
                    flight.tapes.insert(index, tape);
                    if stage.is_last() {
                        losses[index] = Some(scalar_loss(&output)?);
                    } else {
                        flight.outputs.insert(index, output);
                    }
                    report.forward_secs += timer.secs();
                    next += 1;
                }
                Instruction::Backward(index) => {
                    let timer = ComputeTimer::start();
                    let tape = take(&mut flight.tapes, index, "forward pass")?;
                    let upstream = match stage.is_last() {
                        true => None,
                        false => Some(take(&mut flight.upstream, index, "gradient of the output")?),
                    };
                    num_backwards += 1;
                    let is_last = num_backwards == micro_batches.len();
                    let kind = SpanKind::Backward { micro_batch: index };
                    let input_grad = self.timed((BACKWARD, kind), || {
                        stage.backward(tape, upstream, gradients, is_last)
                    })?;
                    if let Some(grad) = input_grad {
                        flight.input_grads.insert(index, grad);
                    }
                    report.backward_secs += timer.secs();
                    next += 1;
                }
                _ => {
                    let rest = &instructions[next..];
                    let len = rest.iter().position(is_compute).unwrap_or(rest.len());
                    self.send_recv(stage, micro_batches, &rest[..len], &mut flight)?;
                    next += len;
                }
            }
        }
        drop(flight);
        stage.params().meter().end_passes(stage.device())?;
        for batch in micro_batches {
            report.num_targets += batch.num_targets()?;
        }
        for loss in losses.into_iter().flatten() {
            report.loss_sum = Some(match report.loss_sum {
                None => loss,
                Some(sum) => (sum + loss)?,
            });
        }
        gradients.add_passes(report.loss_sum.as_ref(), report.num_targets)?;
        Ok(report)
    }

    /// Issues neighbouring sends and receives as one batch. One at a time they can wait for each other in a circle.
    fn send_recv(
        &self,
        stage: &Stage,
        micro_batches: &[MicroBatch],
        batch: &[Instruction],
        flight: &mut InFlight,
    ) -> Result<()> {
        let rank = self.pp.rank();
        let mut sent = Vec::new();
        for &instruction in batch {
            match instruction {
                Instruction::SendForward(index) => {
                    let output = take(&mut flight.outputs, index, "output")?;
                    sent.push((output.contiguous()?, rank + 1));
                }
                Instruction::SendBackward(index) => {
                    let grad = take(&mut flight.input_grads, index, "gradient of the input")?;
                    sent.push((grad.contiguous()?, rank - 1));
                }
                _ => {}
            }
        }
        let mut sends = sent.iter();
        let mut ops = Vec::with_capacity(batch.len());
        for &instruction in batch {
            ops.push(match instruction {
                Instruction::RecvForward(index) => recv(stage, &micro_batches[index], rank - 1)?,
                Instruction::RecvBackward(index) => recv(stage, &micro_batches[index], rank + 1)?,
                _ => match sends.next() {
                    Some((xs, dst)) => P2p::Send { xs, dst: *dst },
                    None => bail!("{instruction:?} is neither a send nor a receive"),
                },
            });
        }
        let mut received = self.pp.batch_send_recv(&ops)?.into_iter();
        for &instruction in batch {
            match instruction {
                Instruction::RecvForward(index) => {
                    flight.inputs.extend(received.next().map(|xs| (index, xs)));
                }
                Instruction::RecvBackward(index) => {
                    flight
                        .upstream
                        .extend(received.next().map(|xs| (index, xs)));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// What the stage `src` sends of a micro-batch.
pub(super) fn recv<'a>(stage: &Stage, batch: &MicroBatch, src: usize) -> Result<P2p<'a>> {
    Ok(P2p::Recv {
        shape: Shape::from(stage.boundary_shape(batch)?),
        dtype: stage.dtype(),
        src,
    })
}

fn take<T>(values: &mut HashMap<usize, T>, index: usize, what: &str) -> Result<T> {
    match values.remove(&index) {
        Some(value) => Ok(value),
        None => {
            bail!("the schedule asks for the {what} of micro-batch {index}, which is not there")
        }
    }
}

fn scalar_loss(output: &Tensor) -> Result<Tensor> {
    if output.rank() != 0 {
        bail!(
            "the last block returned shape {:?}; expected a scalar, the sum of the losses of the micro-batch",
            output.shape()
        );
    }
    output.detach().to_dtype(candle_core::DType::F64)
}
