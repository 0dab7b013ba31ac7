//! Which failure a run is said to have died of.

use std::fmt;
use std::time::Instant;

use super::RankEnd;
use crate::launcher::end::{End, LOST_HOST_EXIT_CODE, signal_name};
use crate::launcher::layout::Host;

/// A host whose agent is gone before its time.
#[derive(Debug)]
pub(super) struct HostLoss {
    pub(super) host: usize,
    pub(super) lost_at: Instant,
    pub(super) detail: String,
    pub(super) last_lines: Vec<String>,
}

/// All that went wrong in a run.
#[derive(Debug)]
pub(super) struct Failures {
    /// The number of ranks that were started.
    num_ranks: usize,
    pub(super) ranks: Vec<RankEnd>,
    pub(super) hosts: Vec<HostLoss>,
}

/// The cause of a run's end.
#[derive(Debug)]
pub(super) enum Cause<'a> {
    Rank(&'a RankEnd),
    /// All ranks, of this number, failed by themselves in the same way as this one.
    All(&'a RankEnd, usize),
    /// Ranks ended because of a peer, but none that this launcher started failed by itself.
    Peer(&'a RankEnd),
    Host(&'a HostLoss),
}

impl Failures {
    pub(super) fn new(num_ranks: usize) -> Self {
        Self {
            num_ranks,
            ranks: Vec::new(),
            hosts: Vec::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranks.is_empty() && self.hosts.is_empty()
    }

    /// The first that failed by itself until then; later ends are the launcher's doing, but not the loss of a host because of which
    /// ranks on others have ended.
    pub(super) fn cause(&self, until: Option<Instant>) -> Option<Cause<'_>> {
        let in_time = |at: Instant| until.is_none_or(|until| at <= until);
        let ranks = self.ranks.iter().filter(|rank| in_time(rank.ended_at));
        let (due_to_peer, own): (Vec<_>, Vec<_>) =
            ranks.partition(|rank| rank.end.is_due_to_peer());
        if self.num_ranks > 1 && own.len() == self.num_ranks && are_alike(&own) {
            // Perhaps one of them has said why.
            let first = own
                .into_iter()
                .min_by_key(|rank| rank.last_lines.is_empty());
            return first.map(|first| Cause::All(first, self.num_ranks));
        }
        let rank = own.into_iter().min_by_key(|rank| rank.ended_at);
        let host = self.hosts.iter().filter(|loss| in_time(loss.lost_at));
        match (rank, host.min_by_key(|loss| loss.lost_at)) {
            (Some(rank), Some(host)) if host.lost_at < rank.ended_at => Some(Cause::Host(host)),
            (Some(rank), _) => Some(Cause::Rank(rank)),
            (None, Some(host)) => Some(Cause::Host(host)),
            (None, None) => {
                let first = due_to_peer.into_iter().min_by_key(|rank| rank.ended_at)?;
                let lost = self.hosts.iter().min_by_key(|loss| loss.lost_at);
                Some(lost.map_or(Cause::Peer(first), Cause::Host))
            }
        }
    }
}

/// Whether ranks ended in the same way, with the same last words, if any.
fn are_alike(ranks: &[&RankEnd]) -> bool {
    let last_words = ranks.iter().filter_map(|rank| rank.last_lines.last());
    let mut pairs = last_words.clone().zip(last_words.skip(1));
    pairs.all(|(one, next)| one == next) && ranks.iter().all(|rank| rank.end == ranks[0].end)
}

impl Cause<'_> {
    /// The code with which the launcher should exit.
    pub(super) fn exit_code(&self) -> u8 {
        match self {
            Self::Rank(failure) | Self::All(failure, _) | Self::Peer(failure) => {
                failure.end.exit_code()
            }
            Self::Host(_) => LOST_HOST_EXIT_CODE,
        }
    }

    /// Why the ranks are not started again, if that is so.
    pub(super) fn is_for_good(&self) -> Option<String> {
        match self {
            Self::Rank(failure) | Self::All(failure, _) => failure.end.is_for_good(),
            Self::Peer(_) | Self::Host(_) => None,
        }
    }

    /// Whether the ranks have to be started through MPI.
    pub(super) fn needs_mpi(&self) -> bool {
        match self {
            Self::Rank(failure) | Self::All(failure, _) => failure.end.needs_mpi(),
            Self::Peer(_) | Self::Host(_) => false,
        }
    }

    /// The sentences about it.
    pub(super) fn describe(&self, hosts: &[Host]) -> String {
        let mut text = match self {
            Self::Rank(failure) => {
                format!("{} failed first: {}", place(failure, hosts), failure.end)
            }
            Self::All(failure, num_ranks) => {
                format!("all {num_ranks} ranks failed: {}", failure.end)
            }
            Self::Peer(failure) => format!(
                "{} ended because another rank failed ({}), but no rank started here failed by itself",
                place(failure, hosts),
                failure.end
            ),
            Self::Host(loss) => {
                let host = &hosts[loss.host];
                format!(
                    "lost host {} with {}: {}",
                    host.name,
                    RankRange(host),
                    loss.detail
                )
            }
        };
        let last_lines = match self {
            Self::Rank(failure) | Self::All(failure, _) | Self::Peer(failure) => {
                &failure.last_lines
            }
            Self::Host(loss) => &loss.last_lines,
        };
        if !last_lines.is_empty() {
            let who = if matches!(self, Self::All(..)) {
                "they"
            } else {
                "it"
            };
            text.push_str(&format!("\nthe last lines {who} wrote to stderr:"));
            for line in last_lines {
                text.push_str("\n    ");
                text.push_str(line);
            }
        }
        if let Some(hint) = self.hint(hosts) {
            text.push_str("\nhint: ");
            text.push_str(hint);
        }
        text
    }

    fn hint(&self, hosts: &[Host]) -> Option<&'static str> {
        match self {
            Self::Rank(failure) | Self::All(failure, _) if failure.end == End::Killed(9) => Some(
                "SIGKILL comes from a user, a batch system or the kernel, which kills when memory runs out: see `dmesg`",
            ),
            Self::Peer(_) => Some("see what the launchers on the other hosts print"),
            Self::Host(loss) if hosts[loss.host].via.is_some() => Some(
                "try the same command by hand, with `true` instead of the agent; --dry-run prints it",
            ),
            Self::Rank(_) | Self::All(..) | Self::Host(_) => None,
        }
    }
}

/// `rank 3 (host node1, pid 4711)`
pub(super) fn place(failure: &RankEnd, hosts: &[Host]) -> String {
    let host = &hosts[failure.host].name;
    format!("rank {} (host {host}, pid {})", failure.rank, failure.pid)
}

/// `ranks 2 to 3`.
struct RankRange<'a>(&'a Host);

impl fmt::Display for RankRange<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = &self.0.plan;
        match plan.num_ranks {
            1 => write!(f, "rank {}", plan.first_rank),
            _ => write!(
                f,
                "ranks {} to {}",
                plan.first_rank,
                plan.first_rank + plan.num_ranks - 1
            ),
        }
    }
}

/// The sentence for a run that a signal ended.
pub(super) fn describe_signal(signal: i32, ends: &[RankEnd]) -> String {
    let killed = ends.iter().filter(|failure| failure.end == End::Killed(9));
    let killed: Vec<String> = killed.map(|failure| failure.rank.to_string()).collect();
    let name = signal_name(signal);
    match killed.len() {
        0 => format!("stopped by {name}"),
        1 => format!(
            "stopped by {name}; rank {} did not end in time and was killed",
            killed[0]
        ),
        _ => format!(
            "stopped by {name}; ranks {} did not end in time and were killed",
            killed.join(", ")
        ),
    }
}
