//! Which failure a run is said to have died of.

use std::time::Instant;

use nix::sys::signal::Signal;

use crate::control::STOPS;
use crate::launcher::end::{End, LOST_HOST_EXIT_CODE, PEER_FAILED_EXIT_CODE};
use crate::launcher::host_plan::HostPlan;
use crate::launcher::layout::Layout;

/// The end of a rank.
#[derive(Debug)]
pub(super) struct RankEnd {
    pub(super) host: usize,
    pub(super) rank: usize,
    pub(super) pid: i32,
    pub(super) end: End,
    pub(super) ended_at: Instant,
    /// What it last wrote to stderr.
    pub(super) last_lines: Vec<String>,
}

impl RankEnd {
    /// What the rank said about the one because of which it ended: `rank 1 on host b has not been heard of for 6 s`.
    fn peer_to_blame(&self) -> Option<&str> {
        let mut lines = self.last_lines.iter().rev();
        lines.find_map(|line| Some(line.split_once(STOPS)?.1))
    }

    /// The number of that one. A rank that is blocked waits for others, and is not to blame.
    fn rank_to_blame(&self) -> Option<usize> {
        let words = self.peer_to_blame()?.strip_prefix("rank ")?;
        let (number, what) = words.split_once(' ')?;
        let is_victim = what.starts_with("is blocked");
        number.parse().ok().filter(|_| !is_victim)
    }
}

/// A host whose agent is gone, before its time or because all is over there, or that cannot start its ranks.
#[derive(Debug)]
pub(super) struct HostLoss {
    pub(super) host: usize,
    pub(super) lost_at: Instant,
    pub(super) detail: String,
    pub(super) last_lines: Vec<String>,
    /// The detail is what its agent says.
    pub(super) is_refusal: bool,
}

/// All that went wrong in a run.
#[derive(Debug, Default)]
pub(super) struct Failures {
    pub(super) ranks: Vec<RankEnd>,
    pub(super) hosts: Vec<HostLoss>,
}

/// The cause of a run's end.
#[derive(Debug)]
pub(super) enum Cause<'a> {
    Rank(&'a RankEnd),
    /// All ranks, of this number, failed by themselves in the same way as this one.
    All(&'a RankEnd, usize),
    /// Ranks ended because of a peer, and none failed by itself: it is stopped or late, say, or its end came after what they said of it.
    Peer(&'a RankEnd),
    Host(&'a HostLoss),
}

impl Failures {
    pub(super) fn is_empty(&self) -> bool {
        self.ranks.is_empty() && self.hosts.is_empty()
    }

    /// The first of the ranks or their hosts that failed by itself until then; later ends are the launcher's doing, but not the
    /// loss of a host because of which ranks on others have ended. Where a rank has said which other one is to blame, that is it, and what ended
    /// after these words is no cause: mpirun ends others, or they found the same.
    pub(super) fn cause(&self, layout: &Layout, until: Option<Instant>) -> Option<Cause<'_>> {
        let num_ranks = layout.world_size;
        let in_time = |at: Instant| until.is_none_or(|until| at <= until);
        let ranks = self.ranks.iter().filter(|rank| in_time(rank.ended_at));
        let (due_to_peer, mut own): (Vec<_>, Vec<_>) =
            ranks.partition(|rank| rank.end.has_code(PEER_FAILED_EXIT_CODE));
        let told = due_to_peer
            .iter()
            .filter(|rank| rank.peer_to_blame().is_some());
        let told = told.min_by_key(|rank| rank.ended_at).copied();
        let is_after_words = |at: Instant| told.is_some_and(|told| told.ended_at <= at);
        let blamed = told.and_then(RankEnd::rank_to_blame);
        // What a signal ends after these words is mpirun's doing.
        let is_ended_by_mpi = |rank: &RankEnd| {
            let by_signal = rank.end.stopped_by().is_some() || rank.end == End::Killed(9);
            layout.mpi.is_some() && is_after_words(rank.ended_at) && by_signal
        };
        let mut culprits = own.iter().filter(|rank| Some(rank.rank) == blamed);
        if let Some(culprit) = culprits.find(|rank| !is_ended_by_mpi(rank)) {
            return Some(Cause::Rank(culprit));
        }
        own.retain(|rank| !is_after_words(rank.ended_at));
        if num_ranks > 1 && own.len() == num_ranks && are_alike(&own) {
            // Perhaps one of them has said why.
            let first = own
                .into_iter()
                .min_by_key(|rank| rank.last_lines.is_empty());
            return first.map(|first| Cause::All(first, num_ranks));
        }
        let rank = own.into_iter().min_by_key(|rank| rank.ended_at);
        let is_by_mpi = |loss: &HostLoss| layout.mpi.is_some() && is_after_words(loss.lost_at);
        let hosts = self.hosts.iter().filter(|loss| !is_by_mpi(loss));
        let host = hosts.clone().filter(|loss| in_time(loss.lost_at));
        match (rank, host.min_by_key(|loss| loss.lost_at)) {
            (Some(rank), Some(host)) if host.lost_at < rank.ended_at => Some(Cause::Host(host)),
            (Some(rank), _) => Some(Cause::Rank(rank)),
            (None, Some(host)) => Some(Cause::Host(host)),
            (None, None) => {
                let first = due_to_peer.into_iter().min_by_key(|rank| rank.ended_at)?;
                let first = told.unwrap_or(first);
                let lost = hosts.min_by_key(|loss| loss.lost_at);
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

    /// How ranks have ended that failed by themselves.
    pub(super) fn own_end(&self) -> Option<End> {
        match self {
            Self::Rank(failure) | Self::All(failure, _) => Some(failure.end),
            Self::Peer(_) | Self::Host(_) => None,
        }
    }

    /// The sentences about it.
    pub(super) fn describe(&self, hosts: &[HostPlan]) -> String {
        let sentence = match self {
            Self::Rank(failure) => {
                format!("{} failed first: {}", place(failure, hosts), failure.end)
            }
            Self::All(failure, num_ranks) => {
                format!("all {num_ranks} ranks failed: {}", failure.end)
            }
            Self::Peer(failure) => match failure.peer_to_blame() {
                Some(why) => return format!("{why} (says {})", place(failure, hosts)),
                None => format!(
                    "{} ended because another rank failed ({}), but none failed by itself",
                    place(failure, hosts),
                    failure.end
                ),
            },
            Self::Host(loss) if loss.is_refusal => {
                format!("host {}: {}", hosts[loss.host].host, loss.detail)
            }
            Self::Host(loss) => describe_loss(&hosts[loss.host], &loss.detail),
        };
        let (last_lines, who) = match self {
            Self::Rank(failure) | Self::Peer(failure) => (&failure.last_lines, "it"),
            Self::All(failure, _) => (&failure.last_lines, "they"),
            Self::Host(loss) => (&loss.last_lines, "it"),
        };
        let mut lines = vec![sentence];
        if !last_lines.is_empty() {
            lines.push(format!("the last lines {who} wrote to stderr:"));
            lines.extend(last_lines.iter().map(|line| format!("    {line}")));
        }
        lines.extend(self.hint(hosts).map(|hint| format!("hint: {hint}")));
        lines.join("\n")
    }

    fn hint(&self, hosts: &[HostPlan]) -> Option<&'static str> {
        match self {
            Self::Peer(_) => Some(
                "exit code 85 says that another rank failed, and none has said which one: see what they printed before",
            ),
            Self::Host(loss) if hosts[loss.host].via.is_some() && !loss.is_refusal => Some(
                "try the same command by hand, with `true` instead of the agent; --dry-run prints it",
            ),
            _ if self.own_end() == Some(End::Killed(9)) => Some(
                "SIGKILL comes from a user, a batch system or the kernel, which kills when memory runs out: see `dmesg`",
            ),
            _ => None,
        }
    }
}

/// `rank 3 (host node1, pid 4711)`
pub(super) fn place(failure: &RankEnd, hosts: &[HostPlan]) -> String {
    let host = &hosts[failure.host].host;
    format!("rank {} (host {host}, pid {})", failure.rank, failure.pid)
}

/// `lost host node2 with ranks 2 to 3: no answer`
fn describe_loss(plan: &HostPlan, detail: &str) -> String {
    let (host, first) = (&plan.host, plan.first_rank);
    match plan.num_ranks {
        1 => format!("lost host {host} with rank {first}: {detail}"),
        number => {
            let last = first + number - 1;
            format!("lost host {host} with ranks {first} to {last}: {detail}")
        }
    }
}

/// The sentence for a run that a signal ended.
pub(super) fn describe_signal(signal: Signal, ends: &[RankEnd]) -> String {
    let killed = ends.iter().filter(|failure| failure.end == End::Killed(9));
    let killed: Vec<String> = killed.map(|failure| failure.rank.to_string()).collect();
    let name = signal.as_str();
    match &killed[..] {
        [] => format!("stopped by {name}"),
        [rank] => format!("stopped by {name}; rank {rank} did not end in time and was killed"),
        ranks => format!(
            "stopped by {name}; ranks {} did not end in time and were killed",
            ranks.join(", ")
        ),
    }
}
