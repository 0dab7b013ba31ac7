//! Messages between two ranks that need not be expected: with tags, received from one rank or from any, in the order in which they come.
//!
//! Collectives end with the first rank that fails. Here the end of a rank is something that the others hear, and what they do then is
//! theirs to decide: [`Received::Left`].

mod connection;
mod departure;
mod group;
mod inbox;
mod mail;
mod mailbox_config;
mod received;
mod wire;

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::{Device, Tensor};

pub use departure::Departure;
pub use mail::Mail;
pub use mailbox_config::MailboxConfig;
pub use received::Received;

use crate::{Error, ProcessGroup, element};
use connection::Connection;
use inbox::Inbox;

type Result<T> = std::result::Result<T, Error>;

/// Tags from this one on are those of [groups](Mailbox::group).
const FIRST_GROUP_TAG: u64 = 1 << 63;

/// How long a rank that fails waits until the others know.
const LAST_WORDS: Duration = Duration::from_secs(2);

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
    routes: Vec<Option<Route>>,
    has_left: AtomicBool,
}

/// How messages get to a rank.
enum Route {
    /// It is a thread of this process.
    Thread(Arc<Inbox>),
    Process(Arc<Connection>),
}

impl Mailbox {
    /// The mailboxes of ranks that are threads of one process, by rank.
    pub fn of_threads(world_size: usize, config: &MailboxConfig) -> Vec<Self> {
        let inbox = |rank| Arc::new(Inbox::new((rank, world_size), config.inbox_bytes));
        let inboxes: Vec<Arc<Inbox>> = (0..world_size).map(inbox).collect();
        let mailbox = |rank: usize| {
            let to = |(to, inbox): (usize, &Arc<Inbox>)| {
                let is_other = to != rank;
                is_other.then(|| Route::Thread(inbox.clone()))
            };
            let routes = inboxes.iter().enumerate().map(to).collect();
            Self::new(rank, config, inboxes[rank].clone(), routes)
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
        let inbox = Arc::new(Inbox::new((rank, streams.len()), config.inbox_bytes));
        let mut routes = Vec::new();
        for (peer, stream) in streams.into_iter().enumerate() {
            let limits = (config.silence, config.deadline);
            let start = |stream| Connection::start(peer, stream, &inbox, limits);
            let connection = stream.map(start).transpose();
            let connection = connection.map_err(|error| {
                Error::Mail(format!(
                    "rank {rank} has no connection to rank {peer}: {error}"
                ))
            })?;
            routes.push(connection.map(Route::Process));
        }
        Ok(Self::new(rank, config, inbox, routes))
    }

    fn new(
        rank: usize,
        config: &MailboxConfig,
        inbox: Arc<Inbox>,
        routes: Vec<Option<Route>>,
    ) -> Self {
        Self {
            rank,
            config: config.clone(),
            inbox,
            routes,
            has_left: AtomicBool::new(false),
        }
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
        let other = self.routes.get(rank)?.as_ref();
        other.and_then(|_| self.inbox.departure(rank))
    }

    /// The bytes of what has come and was not received.
    pub fn num_waiting_bytes(&self) -> usize {
        self.inbox.num_bytes()
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
        let gone = |otherwise: &str| {
            let why = self.inbox.departure(to);
            let why = why.map_or(otherwise.to_string(), |why| why.to_string());
            Error::Mail(format!(
                "rank {} cannot send a message to rank {to}: {why}",
                self.rank
            ))
        };
        let route = self.route(to)?;
        if self.inbox.departure(to).is_some() {
            return Err(gone(""));
        }
        match route {
            Route::Process(connection) => connection.send(tag, tensors).map_err(|error| {
                // Whoever reads from it knows why, in a moment.
                self.inbox.wait_for_farewells(&[to], LAST_WORDS);
                gone(&error.to_string())
            }),
            Route::Thread(inbox) => {
                if !inbox.wait_for_room(self.rank, self.config.deadline) {
                    let secs = self.config.deadline.as_secs_f64();
                    return Err(gone(&format!("it has received nothing for {secs} s")));
                }
                let tensors = tensors.iter().map(Tensor::detach).collect();
                let from = self.rank;
                inbox.put(Mail { from, tag, tensors });
                Ok(())
            }
        }
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
        let group = group::MailGroup::new(self.clone(), members)?;
        Ok(ProcessGroup::new(Box::new(group)))
    }

    fn route(&self, rank: usize) -> Result<&Route> {
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

    /// Says that this rank has failed, and why.
    pub fn fail(&self, why: &str) {
        self.end(Some(why));
    }

    fn end(&self, why: Option<&str>) {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return;
        }
        for route in self.routes.iter().flatten() {
            if let Route::Thread(inbox) = route {
                inbox.note_departure(Departure {
                    rank: self.rank,
                    why: why.map(str::to_string),
                });
            }
        }
        // Wakes threads that wait for room, which then know that this rank is gone.
        self.inbox.close();
        for route in self.routes.iter().flatten() {
            if let Route::Process(connection) = route {
                connection.say_farewell(why);
            }
        }
        let connections = self.routes.iter().enumerate();
        let connections = connections.filter_map(|(peer, route)| match route {
            Some(Route::Process(connection)) => Some((peer, connection)),
            _ => None,
        });
        let (peers, connections): (Vec<usize>, Vec<_>) = connections.unzip();
        let limit = why.map_or(self.config.deadline, |_| LAST_WORDS);
        self.inbox.wait_for_farewells(&peers, limit);
        for connection in connections {
            connection.close();
        }
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
