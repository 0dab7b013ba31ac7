//! An operation of all ranks of a group: they meet, then each does its task.

use std::sync::Arc;

use super::context::Context;
use super::engine::{Activity, Progress};
use super::header::Header;
use super::in_flight::InFlight;
use super::meeting::Meeting;
use crate::Error;
use crate::call::Call;

type Result<T> = std::result::Result<T, Error>;

/// What a rank does once all have met.
pub(super) trait Task: Send {
    /// What the operation gives.
    type Output: Send;

    /// What this rank sends with its first message.
    fn data(&self) -> Result<Vec<u8>>;

    /// Starts, given what each rank sent with its first message, for operation `seq` of `group`.
    fn start(
        &mut self,
        ctx: &mut Context,
        place: (usize, u64),
        data: Vec<Vec<u8>>,
    ) -> Result<Status<Self::Output>>;

    /// Goes on; returns whether something has moved, and the output when nothing is under way any more.
    fn poll(&mut self, ctx: &mut Context) -> Result<(bool, Status<Self::Output>)>;
}

/// How far a task is.
pub(super) enum Status<T> {
    Working,
    Done(T),
}

/// An operation of all ranks of a group on its way.
pub(super) struct Collective<W: Task> {
    in_flight: Arc<InFlight<W::Output>>,
    call: Call,
    task: W,
    place: (usize, u64),
    meeting: Option<Meeting>,
    phase: Phase,
}

enum Phase {
    Meeting,
    Working,
    /// The result is there.
    Done,
}

impl<W: Task> Collective<W> {
    pub fn new(in_flight: Arc<InFlight<W::Output>>, call: Call, task: W) -> Self {
        Self {
            in_flight,
            call,
            task,
            place: (0, 0),
            meeting: None,
            phase: Phase::Meeting,
        }
    }

    fn complete(&mut self, outcome: Result<W::Output>) {
        self.phase = Phase::Done;
        self.in_flight.complete(outcome);
    }

    fn poll_meeting(&mut self, ctx: &Context) -> Result<bool> {
        let Some(meeting) = &mut self.meeting else {
            return Ok(false);
        };
        if meeting.is_over() {
            return Ok(false);
        }
        let moved = meeting.poll(ctx)?;
        if moved && matches!(self.phase, Phase::Meeting) {
            match meeting.mismatch(ctx) {
                Some(error) => self.complete(Err(error)),
                None => self.in_flight.set_missing(meeting.missing(ctx)),
            }
        }
        Ok(moved)
    }

    fn work(&mut self, ctx: &mut Context, may_move: bool) -> Result<bool> {
        let (moved, step) = match (&self.phase, &mut self.meeting) {
            (Phase::Meeting, Some(meeting)) if may_move && meeting.is_complete() => {
                let data = meeting.take_data();
                self.phase = Phase::Working;
                (true, self.task.start(ctx, self.place, data)?)
            }
            (Phase::Working, _) => self.task.poll(ctx)?,
            _ => (false, Status::Working),
        };
        if let Status::Done(output) = step {
            self.complete(Ok(output));
        }
        Ok(moved)
    }
}

impl<W: Task> Activity for Collective<W> {
    fn begin(&mut self, ctx: &Context, group: usize, seq: u64) -> Result<()> {
        self.place = (group, seq);
        let Call {
            operation,
            tensor,
            site,
        } = &self.call;
        let on = match tensor {
            Some((shape, dtype)) => format!(" of {} {:?}", dtype.as_str(), shape.dims()),
            None => String::new(),
        };
        let header = Header {
            call: format!("{operation}{on}"),
            site: site.to_string(),
            data: self.task.data()?,
        };
        let meeting = Meeting::begin(ctx, group, seq, header)?;
        self.in_flight.set_missing(meeting.missing(ctx));
        self.meeting = Some(meeting);
        Ok(())
    }

    fn poll(&mut self, ctx: &mut Context, may_move: bool) -> Result<Progress> {
        let outcome = self
            .poll_meeting(ctx)
            .and_then(|met| Ok(met | self.work(ctx, may_move)?));
        let moved = match outcome {
            Ok(moved) => moved,
            Err(error) => {
                // Everybody else gets the error from the engine; this operation is not among its own any more.
                self.complete(Err(error.clone()));
                return Err(error);
            }
        };
        let has_met = self.meeting.as_ref().is_none_or(Meeting::is_over);
        Ok(match (&self.phase, moved) {
            (Phase::Done, _) if has_met => Progress::Over,
            (_, true) => Progress::Some,
            _ => Progress::None,
        })
    }

    fn missing(&self, ctx: &Context) -> Vec<usize> {
        let meeting = self.meeting.as_ref();
        meeting.map_or(Vec::new(), |meeting| meeting.missing(ctx))
    }

    fn fail(&mut self, ctx: &Context, error: &dyn Fn(&str) -> Error) {
        self.complete(Err(error(&self.in_flight.call)));
        if let Some(mut meeting) = self.meeting.take()
            && let Err(error) = meeting.cancel(ctx)
        {
            tracing::warn!("receives could not be given up: {error}");
        }
    }
}
