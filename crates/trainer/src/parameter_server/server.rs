//! A server: it holds a part of the parameters, updates them, and tells the workers.

use std::sync::Arc;

use candle_comm::{Departure, Mailbox, Mesh, Received, ReduceOp, sum_in_order};
use candle_core::{Device, Error, Result, Tensor, bail};
use candle_parallel::{
    ContextRank, DistributedOptimizer, GradientSums, Parameters, ReducedGradients, ReducedLoss,
    StepReport,
};

use super::message::{HELLO, PUSH, Push, REPLY, Reply, START, Start};
use super::{Consistency, Staleness};
use crate::lr_schedule::LrSchedule;

/// A server's end of the workers, which are the ranks after the servers.
pub struct ParameterServer {
    mailbox: Arc<Mailbox>,
    num_servers: usize,
    consistency: Consistency,
    workers: Vec<Seat>,
    last_loss: ReducedLoss,
    last_norm: f64,
    /// What was wrong with the first gradient that could not be applied.
    diverged: Option<String>,
    /// The step before which all stop, once that was asked for.
    stops_at: Option<usize>,
    /// Whether a server has gradients of steps that are not over.
    is_within_steps: bool,
}

/// What a server knows of a worker.
#[derive(Clone, Copy, Debug, Default)]
struct Seat {
    /// Its next step.
    clock: usize,
    /// It waits for weights.
    waits: bool,
    is_gone: bool,
    /// It is gone since it has done its steps.
    is_done: bool,
}

/// What a step of the servers needs to know.
pub(crate) struct ServedStep<'a> {
    pub step: usize,
    pub lr: &'a LrSchedule,
    pub max_norm: Option<f64>,
    pub mesh: &'a Mesh,
    pub asks_to_stop: bool,
    /// The next step before which the servers do something else than steps, with the weights of all steps before it and of no other: no
    /// worker begins it earlier.
    pub pauses_at: usize,
}

/// What a step did, whether this rank's passes or workers computed its gradients.
pub(crate) struct StepDone {
    pub report: StepReport,
    /// Positions of the global batch, with a target or not.
    pub num_positions: usize,
    /// What context-parallel ranks have computed.
    pub context: Vec<ContextRank>,
    pub staleness: Option<Staleness>,
}

impl ParameterServer {
    /// One of the first `num_servers` ranks, which serves all others.
    ///
    /// # Errors
    /// There are no workers, or this rank is none of the servers.
    pub fn new(
        mailbox: &Arc<Mailbox>,
        num_servers: usize,
        consistency: Consistency,
    ) -> Result<Self> {
        let (rank, world_size) = (mailbox.rank(), mailbox.world_size());
        if rank >= num_servers || num_servers >= world_size {
            bail!(
                "rank {rank} of {world_size} cannot be one of {num_servers} servers with workers"
            );
        }
        Ok(Self {
            mailbox: mailbox.clone(),
            num_servers,
            consistency,
            workers: vec![Seat::default(); world_size - num_servers],
            last_loss: ReducedLoss {
                mean: f64::NAN,
                num_targets: 0,
            },
            last_norm: f64::NAN,
            diverged: None,
            stops_at: None,
            is_within_steps: false,
        })
    }

    /// Whether a server has applied gradients of steps that are not over, which come again if a run goes on from its weights: the same on
    /// all servers.
    pub(crate) fn is_within_steps(&self) -> bool {
        self.is_within_steps
    }

    /// Takes messages as large as a model of these parameters makes them, and no larger ones. Every server must call it before they gather
    /// weights; [`Trainer::of_server`](crate::Trainer::of_server) does.
    ///
    /// # Errors
    /// Failures of servers.
    pub fn bound_messages(&self, params: &Parameters) -> Result<()> {
        self.mailbox.bound_tensors(params.largest_bucket_bytes());
        // Now each server knows that the others have.
        params.shard_group().all_gather_bytes(&[]).map(drop)
    }

    /// Whether workers need not wait for each other.
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.consistency != Consistency::Synchronous
    }

    pub(crate) fn num_workers(&self) -> usize {
        self.workers.len()
    }

    /// Gives all workers the weights with which they begin: at `step` of `num_steps`, and at this position in the data if that is not the
    /// beginning.
    pub(crate) fn admit(
        &mut self,
        (params, optimizer): (&Parameters, &DistributedOptimizer),
        (step, num_steps): (usize, usize),
        position: Option<usize>,
    ) -> Result<()> {
        let start = Start {
            step,
            num_steps,
            position,
        };
        let ranges = params.own_ranges();
        for worker in 0..self.workers.len() {
            let rank = self.num_servers + worker;
            match self.mailbox.recv(Some(rank), Some(HELLO))? {
                // Of its end the server hears again when it looks for messages of any worker.
                Received::Left(_) if self.is_asynchronous() => {}
                Received::Left(departure) => return Err(ended_by(&departure)),
                Received::Mail(_) => {
                    let start = start.into_tensors(&ranges)?;
                    self.send(rank, START, &start)?;
                }
            }
            self.workers[worker].clock = step;
            self.workers[worker].waits = true;
        }
        self.answer((params, optimizer), false, |_| true)
    }

    /// A step of all workers, the next one, as far as this server's values go. Every server must call it.
    pub(crate) fn step(
        &mut self,
        (params, optimizer): (&Parameters, &mut DistributedOptimizer),
        step: &ServedStep,
    ) -> Result<StepDone> {
        match self.consistency {
            Consistency::Synchronous => self.step_of_all(params, optimizer, step),
            Consistency::Asynchronous { max_staleness } => {
                self.step_of_each((params, optimizer), step, max_staleness)
            }
        }
    }

    fn step_of_all(
        &mut self,
        params: &Parameters,
        optimizer: &mut DistributedOptimizer,
        step: &ServedStep,
    ) -> Result<StepDone> {
        let mut pushes: Vec<Option<Push>> = self.workers.iter().map(|_| None).collect();
        while pushes.iter().any(Option::is_none) {
            match self.mailbox.recv(None, Some(PUSH))? {
                Received::Left(departure) => return Err(ended_by(&departure)),
                Received::Mail(mail) => {
                    let push = self.note_push(Push::of(mail)?)?;
                    let worker = push.worker - self.num_servers;
                    pushes[worker] = Some(push);
                }
            }
        }
        let pushes: Vec<Push> = pushes.into_iter().flatten().collect();
        let num_buckets = pushes[0].slices.len();
        let slices = (0..num_buckets).map(|bucket| {
            let of_workers = pushes.iter().map(|push| push.slices.get(bucket).cloned());
            let of_workers: Option<Vec<Tensor>> = of_workers.collect();
            sum_in_order(&of_workers.unwrap_or_default())
        });
        let loss_sums = pushes
            .iter()
            .map(|push| Tensor::new(push.loss_sum, &Device::Cpu));
        let loss_sum = sum_in_order(&loss_sums.collect::<Result<Vec<_>>>()?)?;
        let sums = GradientSums {
            slices: slices.collect::<Result<_>>()?,
            loss_sum: loss_sum.to_scalar()?,
            num_targets: pushes.iter().map(|push| push.num_targets).sum(),
            loss_scale: optimizer.loss_scale(),
            norm: None,
            asks_to_stop: step.asks_to_stop || pushes.iter().any(|push| push.asks_to_stop),
        };
        let num_positions = pushes.iter().map(|push| push.num_positions).sum();
        drop(pushes);
        let reduced = ReducedGradients::from_sums(params, step.mesh, sums)?;
        let lr = step.lr.at(step.step);
        let report = optimizer.step_reduced(reduced, lr, step.max_norm)?;
        self.answer((params, optimizer), report.is_asked_to_stop, |_| true)?;
        Ok(StepDone {
            report,
            num_positions,
            context: Vec::new(),
            staleness: None,
        })
    }

    fn step_of_each(
        &mut self,
        (params, optimizer): (&Parameters, &mut DistributedOptimizer),
        step: &ServedStep,
        max_staleness: usize,
    ) -> Result<StepDone> {
        let mut applied = Applied::default();
        let pauses_at = (step.pauses_at).min(self.stops_at.unwrap_or(usize::MAX));
        loop {
            let slowest = self.slowest();
            self.answer((params, optimizer), false, |seat| {
                seat.clock <= slowest.saturating_add(max_staleness) && seat.clock < pauses_at
            })?;
            if slowest > step.step {
                break;
            }
            match self.mailbox.recv(None, Some(PUSH))? {
                Received::Left(departure) => self.drop_worker(&departure)?,
                Received::Mail(mail) => {
                    let push = self.note_push(Push::of(mail)?)?;
                    applied.note(&push, push.step.saturating_sub(slowest));
                    self.apply((params, optimizer), push, step)?;
                }
            }
        }
        if let Some((loss, norm)) = applied.means() {
            (self.last_loss, self.last_norm) = (loss, norm);
        } else {
            self.last_loss.num_targets = 0;
        }
        let num_done = step.step + 1;
        let [asks_to_stop, is_diverged, clock, next_clock] =
            self.most_of_all(step, applied.asks_to_stop)?;
        self.is_within_steps = is_diverged > 0 || clock > num_done;
        if asks_to_stop > 0 {
            // Where all workers can meet: some have begun the steps before it.
            self.stops_at.get_or_insert(next_clock.max(num_done));
        }
        if is_diverged > 0 {
            optimizer.set_diverged();
            // The first one prints it, and may not have seen that gradient yet.
            let why = self.diverged.as_deref().unwrap_or_default();
            let all = step.mesh.world.all_gather_bytes(why.as_bytes())?;
            let said = all.iter().find(|why| !why.is_empty());
            bail!("{}", String::from_utf8_lossy(said.unwrap_or(&Vec::new())));
        }
        Ok(StepDone {
            report: StepReport {
                metrics: Default::default(),
                pipeline: Vec::new(),
                loss: self.last_loss,
                grad_norm: self.last_norm,
                is_skipped: false,
                is_asked_to_stop: self.stops_at.is_some_and(|at| num_done >= at),
            },
            num_positions: applied.num_positions,
            context: Vec::new(),
            staleness: Some(Staleness {
                mean: applied.staleness as f64 / applied.num_pushes.max(1) as f64,
                max: applied.max_staleness,
            }),
        })
    }

    /// The most that any server says, at the end of a step, of itself and of its workers: 1 if it is to stop, 1 if it
    /// has diverged, steps of a worker whose gradients were applied, and these with the one that it computes with the
    /// weights that it has.
    fn most_of_all(&self, step: &ServedStep, asks_to_stop: bool) -> Result<[usize; 4]> {
        let clocks = self.workers.iter().map(|seat| seat.clock);
        let alive = self.workers.iter().filter(|seat| !seat.is_gone);
        let next_clocks = alive.map(|seat| seat.clock + usize::from(!seat.waits));
        let own = [
            f64::from(u8::from(step.asks_to_stop || asks_to_stop)),
            f64::from(u8::from(self.diverged.is_some())),
            clocks.max().unwrap_or_default() as f64,
            next_clocks.max().unwrap_or_default() as f64,
        ];
        let own = Tensor::new(&own, step.mesh.world.device())?;
        let most = step.mesh.world.all_reduce(&own, ReduceOp::Max)?;
        let most = most.to_vec1::<f64>()?;
        Ok(std::array::from_fn(|index| most[index] as usize))
    }

    /// The update of one worker's gradient. One that is not finite changes nothing and ends the run at the end of the step, where all
    /// servers hear of it: until then they may be at different pushes.
    fn apply(
        &mut self,
        (params, optimizer): (&Parameters, &mut DistributedOptimizer),
        push: Push,
        step: &ServedStep,
    ) -> Result<()> {
        if push.num_targets == 0 {
            return Ok(());
        }
        let (worker, at) = (push.worker, push.step);
        let sums = GradientSums {
            slices: push.slices,
            loss_sum: push.loss_sum,
            num_targets: push.num_targets,
            loss_scale: 1.0,
            norm: Some(push.norm),
            asks_to_stop: false,
        };
        let mut reduced = ReducedGradients::from_sums(params, step.mesh, sums)?;
        if !reduced.is_finite() {
            self.diverged.get_or_insert_with(|| {
                format!(
                    "in step {} of rank {worker} the loss is {} and the gradient norm {}\nhint: a lower learning rate, more warm-up \
                     steps or gradient clipping may help; its gradient was not applied",
                    at + 1,
                    reduced.loss().mean,
                    reduced.norm()
                )
            });
            return Ok(());
        }
        if let Some(max_norm) = step.max_norm {
            reduced.clip(max_norm)?;
        }
        // The optimizer has the constants that go with it.
        let lr = step.lr.at(at) / (self.workers.len() as f64).sqrt();
        optimizer.apply(reduced, lr)
    }

    /// Takes note of a push, which comes from a worker whose turn it is.
    fn note_push(&mut self, push: Push) -> Result<Push> {
        let worker = push.worker.checked_sub(self.num_servers);
        let seat = worker.and_then(|worker| self.workers.get_mut(worker));
        match seat {
            Some(seat) if seat.clock == push.step && !seat.waits => {
                seat.clock += 1;
                seat.waits = true;
                Ok(push)
            }
            seat => bail!(
                "rank {} sent gradients of step {}, expected those of {:?}",
                push.worker,
                push.step + 1,
                seat.map(|seat| seat.clock + 1)
            ),
        }
    }

    /// The next step of the slowest worker; none of those that are gone is.
    fn slowest(&self) -> usize {
        let alive = self.workers.iter().filter(|seat| !seat.is_gone);
        alive.map(|seat| seat.clock).min().unwrap_or(usize::MAX)
    }

    /// Sends the weights to those who wait for them and may go on.
    fn answer(
        &mut self,
        (params, optimizer): (&Parameters, &DistributedOptimizer),
        is_stopped: bool,
        may_go_on: impl Fn(&Seat) -> bool,
    ) -> Result<()> {
        let mut slices = None;
        for worker in 0..self.workers.len() {
            let seat = self.workers[worker];
            if seat.is_gone || !seat.waits || !may_go_on(&seat) {
                continue;
            }
            let slices = match &slices {
                Some(slices) => slices,
                None => slices.insert(params.own_slices()?),
            };
            let reply = Reply {
                num_updates: optimizer.num_steps(),
                loss_scale: optimizer.loss_scale(),
                is_stopped,
                slices: slices.clone(),
            };
            let rank = self.num_servers + worker;
            if self.send(rank, REPLY, &reply.into_tensors()?)? {
                self.workers[worker].waits = false;
            }
        }
        Ok(())
    }

    /// Sends to a worker unless it is gone, of which the server hears when it looks for messages.
    fn send(&self, rank: usize, tag: u64, tensors: &[Tensor]) -> Result<bool> {
        match self.mailbox.send(rank, tag, tensors) {
            Ok(()) => Ok(true),
            Err(_) if self.mailbox.departure(rank).is_some() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Goes on without a worker that is done, or that died.
    fn drop_worker(&mut self, departure: &Departure) -> Result<()> {
        let worker = departure.rank.checked_sub(self.num_servers);
        let Some(seat) = worker.and_then(|worker| self.workers.get_mut(worker)) else {
            return Err(ended_by(departure));
        };
        seat.is_gone = true;
        seat.is_done = departure.why.is_none();
        if seat.is_done {
            return Ok(());
        }
        let num_left = self.workers.iter().filter(|seat| !seat.is_gone).count();
        if num_left == 0 && !self.workers.iter().any(|seat| seat.is_done) {
            bail!("{departure}\nno worker is left");
        }
        if self.mailbox.rank() == 0 {
            tracing::warn!(
                "{departure}; the run goes on without it and its samples, with {} of {} workers",
                num_left,
                self.workers.len()
            );
        }
        Ok(())
    }
}

fn ended_by(departure: &Departure) -> Error {
    Error::msg(format!(
        "{departure}\nhint: without a server nothing goes on, and without a worker only --async does"
    ))
}

/// Sums over the gradients that were applied in a step.
#[derive(Default)]
struct Applied {
    num_pushes: usize,
    loss_sum: f64,
    num_targets: usize,
    num_positions: usize,
    norms: f64,
    staleness: usize,
    max_staleness: usize,
    asks_to_stop: bool,
}

impl Applied {
    fn note(&mut self, push: &Push, staleness: usize) {
        self.num_pushes += 1;
        self.loss_sum += push.loss_sum;
        self.num_targets += push.num_targets;
        self.num_positions += push.num_positions;
        self.norms += push.norm / push.num_targets.max(1) as f64;
        self.staleness += staleness;
        self.max_staleness = self.max_staleness.max(staleness);
        self.asks_to_stop |= push.asks_to_stop;
    }

    /// The mean loss, and the mean of the norms.
    fn means(&self) -> Option<(ReducedLoss, f64)> {
        let loss = ReducedLoss {
            mean: self.loss_sum / self.num_targets as f64,
            num_targets: self.num_targets,
        };
        (self.num_targets > 0).then_some((loss, self.norms / self.num_pushes as f64))
    }
}
