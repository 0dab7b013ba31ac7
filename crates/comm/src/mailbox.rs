//! Messages between two ranks that need not be expected: with tags, received from one rank or from any, in the order in which they come.
//!
//! Collectives end with the first rank that fails. Here the end of a rank is something that the others hear, and what they do then is
//! theirs to decide: [`Received::Left`].

mod connection;
mod group;
mod inbox;
mod received;
mod wire;

use std::net::TcpStream;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use candle_launch::{SpokenWait, WaitNotices};

pub use received::{Departure, Mail, Received};

use crate::reduction::element;
use crate::{Error, ProcessGroup};
use connection::Connection;
use inbox::Inbox;
use wire::Frame;

type Result<T> = std::result::Result<T, Error>;

/// Tags from this one on are those of [groups](Mailbox::group).
const FIRST_GROUP_TAG: u64 = 1 << 63;

/// What ranks tell each other in words has at most so many bytes.
const WORDS_BYTES: usize = 16 << 20;

/// How long a rank that fails waits until the others know.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The time between two attempts to say so.
const MOMENT: Duration = Duration::from_millis(1);

/// How a rank sends and receives messages: see [`Mailbox`].
#[derive(Debug, Clone)]
pub struct MailboxConfig {
    /// Messages of one sender that have come and were not received may have so many bytes before it waits; one more may then be on its
    /// way. Default: 256 MiB.
    pub inbox_bytes: usize,
    /// A tensor from another process may have so many bytes, until [`Mailbox::bound_tensors`] says otherwise. Who announces more is gone, before
    /// there is memory for it. Default: 256 MiB.
    pub largest_tensor_bytes: usize,
    /// How long a rank waits for a message, or for another rank to take one. Default: 10 minutes.
    pub deadline: Duration,
    /// A rank that is a process and says nothing for so long is gone. Default: 6 seconds.
    pub silence: Duration,
}

impl Default for MailboxConfig {
    fn default() -> Self {
        Self {
            inbox_bytes: 256 << 20,
            largest_tensor_bytes: 256 << 20,
            deadline: Duration::from_secs(600),
            silence: Duration::from_secs(6),
        }
    }
}

/// One rank's end of what ranks send each other.
///
/// Messages of one rank are received in the order in which they were sent, those of all ranks in the order in which they came, so nobody
/// who sends much keeps another one's waiting. Of each sender an inbox takes [`MailboxConfig::inbox_bytes`]; who sends more waits in
/// [`send`](Self::send) until some of it is received.
///
/// ```
/// use candle_comm::{Mailbox, MailboxConfig, Received};
/// use candle_core::{Device, Tensor};
///
/// let mut boxes = Mailbox::of_threads(2, &MailboxConfig::default()).into_iter();
/// let (zero, one) = (boxes.next().unwrap(), boxes.next().unwrap());
/// let worker = std::thread::spawn(move || -> candle_core::Result<()> {
///     one.send(0, 7, &[Tensor::new(&[1f32, 2.0], &Device::Cpu)?])?;
///     one.leave();
///     Ok(())
/// });
/// let Received::Mail(mail) = zero.recv(None, Some(7))? else { unreachable!() };
/// assert_eq!((mail.from, mail.tensors[0].to_vec1::<f32>()?), (1, vec![1.0, 2.0]));
/// // Rank 1 is done, which is no error.
/// let Received::Left(departure) = zero.recv(None, None)? else { unreachable!() };
/// assert_eq!((departure.rank, departure.why), (1, None));
/// worker.join().unwrap()?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct Mailbox {
    rank: usize,
    config: MailboxConfig,
    inbox: Arc<Inbox>,
    /// By rank; `None` of this one, and of those with which it is not connected.
    routes: Vec<Option<MailRoute>>,
    /// The rank because of which this one fails, if another one is to blame.
    blamed: OnceLock<Departure>,
    has_left: AtomicBool,
}

/// How messages get to a rank.
enum MailRoute {
    /// It is a thread of this process.
    Thread(Arc<Inbox>),
    Process(Arc<Connection>),
}

impl Mailbox {
    /// The mailboxes of ranks that are threads of one process, by rank.
    pub fn of_threads(world_size: usize, config: &MailboxConfig) -> Vec<Self> {
        let inbox = |_| Arc::new(Inbox::new(world_size, config));
        let inboxes: Vec<Arc<Inbox>> = (0..world_size).map(inbox).collect();
        let mailbox = |rank: usize| {
            let to = |(to, inbox): (usize, &Arc<Inbox>)| {
                let is_other = to != rank;
                is_other.then(|| MailRoute::Thread(inbox.clone()))
            };
            Self {
                rank,
                config: config.clone(),
                inbox: inboxes[rank].clone(),
                routes: inboxes.iter().enumerate().map(to).collect(),
                blamed: OnceLock::new(),
                has_left: AtomicBool::new(false),
            }
        };
        (0..world_size).map(mailbox).collect()
    }

    /// The mailbox of a rank that is a process, with a stream to each rank that it is connected with, by rank: see
    /// [`Control::connect_peers`](candle_launch::Control::connect_peers).
    ///
    /// # Errors
    /// A stream that is closed, and threads that the system does not give.
    pub fn of_process(
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        config: &MailboxConfig,
    ) -> Result<Self> {
        let inbox = Arc::new(Inbox::new(streams.len(), config));
        let mut routes = Vec::new();
        for (peer, stream) in streams.into_iter().enumerate() {
            let start = |stream| Connection::start(peer, stream, &inbox, config);
            let connection = stream.map(start).transpose().map_err(|error| {
                Error::Mail(format!(
                    "rank {rank} has no connection to rank {peer}: {error}"
                ))
            })?;
            routes.push(connection.map(MailRoute::Process));
        }
        Ok(Self {
            rank,
            config: config.clone(),
            inbox,
            routes,
            blamed: OnceLock::new(),
            has_left: AtomicBool::new(false),
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.routes.len()
    }

    /// The ranks with which this one is connected.
    pub fn peers(&self) -> Vec<usize> {
        let peers = self.routes.iter().enumerate();
        let connected = peers.filter(|(_, route)| route.is_some());
        connected.map(|(rank, _)| rank).collect()
    }

    /// The end of a rank, if this one has heard of it.
    pub fn departure(&self, rank: usize) -> Option<Departure> {
        self.inbox.departure(rank)
    }

    /// Takes from now on tensors of at most so many bytes from other processes, in place of
    /// [`MailboxConfig::largest_tensor_bytes`]; of 16 MiB in any case, for what ranks tell each other beside their tensors. Who sends large
    /// ones must know that this was called.
    pub fn bound_tensors(&self, largest_tensor_bytes: usize) {
        let largest = largest_tensor_bytes.max(WORDS_BYTES);
        self.inbox.largest_tensor.store(largest, Ordering::Release);
    }

    /// Sends a message, of any number of tensors of any shape, contiguous and on the CPU.
    ///
    /// To a thread the tensors go as they are: nobody may write to them in place afterwards. To a process their values are on the way when
    /// this returns.
    ///
    /// # Errors
    /// The rank is gone or not connected with this one; it takes nothing for longer than [`MailboxConfig::deadline`]; a tag of 2^63 or
    /// above; tensors of a type that ranks do not exchange.
    pub fn send(&self, to: usize, tag: u64, tensors: &[Tensor]) -> Result<()> {
        match tag < FIRST_GROUP_TAG {
            true => self.send_any(to, tag, tensors),
            false => Err(Error::Argument(format!(
                "a message to rank {to} has the tag {tag}, expected one below 2^63"
            ))),
        }
    }

    fn send_any(&self, to: usize, tag: u64, tensors: &[Tensor]) -> Result<()> {
        for xs in tensors {
            element::check(xs, self.rank, &Device::Cpu)
                .map_err(|error| Error::Argument(crate::message_of(&error)))?;
        }
        let route = self.route(to)?;
        let limit = self.config.deadline;
        let sent = match (self.inbox.departure(to), route) {
            (Some(_), _) => Err(String::new()),
            (None, MailRoute::Process(connection)) => {
                let sent = connection.send(&Frame::Mail(tag, tensors.to_vec()));
                sent.map_err(|error| {
                    // Whoever reads from it knows why, in a moment.
                    self.inbox.wait_for_farewells(&[to], LAST_WORDS);
                    error.to_string()
                })
            }
            (None, MailRoute::Thread(inbox)) if inbox.wait_for_room(self.rank, limit) => {
                let tensors = tensors.iter().map(Tensor::detach).collect();
                let from = self.rank;
                inbox.put(Mail { from, tag, tensors });
                Ok(())
            }
            (None, MailRoute::Thread(_)) => {
                let secs = limit.as_secs_f64();
                Err(format!("it has received nothing for {secs} s"))
            }
        };
        sent.map_err(|otherwise| {
            let departure = self.inbox.departure(to);
            let why = departure.map_or(otherwise, |departure| departure.to_string());
            let rank = self.rank;
            Error::Mail(format!(
                "rank {rank} cannot send a message to rank {to}: {why}"
            ))
        })
    }

    /// The first message from rank `from`, or any, with this tag, or any. It waits at most [`MailboxConfig::deadline`].
    ///
    /// When there is none and a rank from which it could come has gone, it is [`Received::Left`]: always, of the one that is
    /// asked for; once for each, of any.
    ///
    /// # Errors
    /// Nothing comes in time, or nobody is left from whom it could; a rank that is not connected with this one.
    pub fn recv(&self, from: Option<usize>, tag: Option<u64>) -> Result<Received> {
        let limit = self.config.deadline;
        match self.recv_timeout(from, tag, limit)? {
            Some(received) => Ok(received),
            None => {
                let secs = limit.as_secs_f64();
                let from = from.map_or("any rank".to_string(), |from| format!("rank {from}"));
                Err(Error::Mail(format!(
                    "rank {} has waited {secs} s for a message from {from}\nhint: a rank may be stuck; a slow machine may need a \
                     longer deadline",
                    self.rank
                )))
            }
        }
    }

    /// As [`recv`](Self::recv), for at most `limit`: `None` if nothing has come then. With a limit of zero it only looks.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(
        &self,
        from: Option<usize>,
        tag: Option<u64>,
        limit: Duration,
    ) -> Result<Option<Received>> {
        if let Some(from) = from {
            self.route(from)?;
        }
        let num_peers = self.routes.iter().flatten().count();
        // Nobody can come any more, so the rest is all there is.
        let is_alone = from.is_none() && self.inbox.num_departed() == num_peers;
        let limit = if is_alone { Duration::ZERO } else { limit };
        match self.inbox.take(from, tag, limit) {
            None if is_alone => Err(Error::Mail(format!(
                "rank {} waits for a message, and all ranks that could send one are gone",
                self.rank
            ))),
            received => Ok(received),
        }
    }

    /// The ranks of `members`, this one among them, as a group for collectives. Each of them must call it.
    ///
    /// Operations are complete when they return, and each rank computes its own part of them from all inputs: this is for few ranks
    /// and for what does not take the time of a run.
    ///
    /// # Errors
    /// This rank is not a member.
    pub fn group(self: &Arc<Self>, members: &[usize]) -> candle_core::Result<ProcessGroup> {
        let group = group::MailGroup::new(self.clone(), members.to_vec(), 0)?;
        Ok(ProcessGroup::new(Box::new(group)))
    }

    fn route(&self, rank: usize) -> Result<&MailRoute> {
        let route = self.routes.get(rank).and_then(Option::as_ref);
        route.ok_or_else(|| {
            Error::Argument(format!(
                "rank {} of {} is not connected with rank {rank}, only with {:?}",
                self.rank,
                self.world_size(),
                self.peers()
            ))
        })
    }

    /// Says that this rank is done, and waits until the others have what it sent. What has come for it is thrown away.
    pub fn leave(&self) {
        self.end(None);
    }

    /// Why this rank fails if the failure of one of these ranks, without which it cannot go on, is the reason: the end of the one that failed by
    /// itself, as far as it is known here. The others hear of that one, too, when this rank [fails](Self::fail).
    pub fn blame(&self, needed: Range<usize>) -> Option<Departure> {
        let first = self.inbox.first_failed(needed)?;
        Some(self.blamed.get_or_init(|| first.culprit().clone()).clone())
    }

    /// Says that this rank has failed, and why.
    pub fn fail(&self, why: &str) {
        self.end(Some(why));
    }

    fn end(&self, why: Option<&str>) {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return;
        }
        let because_of = self.blamed.get().filter(|_| why.is_some());
        let mut connections = Vec::new();
        for route in self.routes.iter().flatten() {
            match route {
                MailRoute::Thread(inbox) => inbox.note_departure(Departure {
                    rank: self.rank,
                    why: why.map(str::to_string),
                    because_of: because_of.cloned().map(Box::new),
                }),
                MailRoute::Process(connection) => connections.push(connection),
            }
        }
        // Wakes threads that wait for room, which then know that this rank is gone.
        self.inbox.close();
        let limit = why.map_or(self.config.deadline, |_| LAST_WORDS);
        let begun = Instant::now();
        let peers: Vec<_> = connections.iter().map(|it| it.peer).collect();
        let wait = SpokenWait::begin(WaitNotices::default(), &format!("rank {}", self.rank));
        if !peers.is_empty() {
            wait.say(format!("for ranks {peers:?} to hear that it ends"));
        }
        let mut untold = connections.clone();
        let farewell = Frame::Farewell {
            why: why.map(str::to_string),
            because_of: because_of.cloned(),
        };
        // No peer waits for the words behind one that does not read.
        while !untold.is_empty() && begun.elapsed() < limit {
            let rest = || limit.saturating_sub(begun.elapsed());
            untold.retain(|connection| !connection.try_farewell(&farewell, rest()));
            std::thread::sleep(MOMENT);
        }
        untold.iter().for_each(|connection| connection.close());
        self.inbox.wait_for_farewells(&peers, limit);
        connections.iter().for_each(|connection| connection.close());
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.end(Some(match std::thread::panicking() {
            true => "it panicked",
            false => "it ended before it had left",
        }));
    }
}
