//! Which failure a run is said to have died of.

use std::time::Instant;

use nix::sys::signal::Signal;

use crate::control::STOPS;
use crate::launcher::end::{End, LOST_HOST_EXIT_CODE, PEER_FAILED_EXIT_CODE};
use crate::launcher::host_plan::HostPlan;
use crate::launcher::layout::Layout;
use crate::launcher::outcome::Outcome;

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

impl HostLoss {
    /// A host that is lost now, as far as its agent says nothing.
    pub(super) fn now(host: usize, detail: String) -> Self {
        Self {
            host,
            lost_at: Instant::now(),
            detail,
            last_lines: Vec::new(),
            is_refusal: false,
        }
    }
}

/// All that went wrong in a run.
#[derive(Debug, Default)]
pub(super) struct Failures {
    pub(super) ranks: Vec<RankEnd>,
    pub(super) hosts: Vec<HostLoss>,
}

impl Failures {
    pub(super) fn is_empty(&self) -> bool {
        self.ranks.is_empty() && self.hosts.is_empty()
    }

    /// The first of the ranks or their hosts that failed by itself until then; later ends are the launcher's doing, but not the
    /// loss of a host because of which ranks on others have ended. Where a rank has said which other one is to blame, that is it, and what ended
    /// after these words is no cause: mpirun ends others, or they found the same.
    pub(super) fn ending(&self, layout: &Layout, until: Option<Instant>) -> Option<Outcome> {
        let (num_ranks, plans) = (layout.world_size, layout.hosts.as_slice());
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
            return Some(of_rank(culprit, plans));
        }
        own.retain(|rank| !is_after_words(rank.ended_at));
        if num_ranks > 1 && own.len() == num_ranks && are_alike(&own) {
            // Perhaps one of them has said why.
            let first = own
                .into_iter()
                .min_by_key(|rank| rank.last_lines.is_empty());
            return first.map(|first| {
                let sentence = format!("all {num_ranks} ranks failed: {}", first.end);
                of_own(first, sentence, "they")
            });
        }
        let rank = own.into_iter().min_by_key(|rank| rank.ended_at);
        let is_by_mpi = |loss: &HostLoss| layout.mpi.is_some() && is_after_words(loss.lost_at);
        let hosts = self.hosts.iter().filter(|loss| !is_by_mpi(loss));
        let host = hosts.clone().filter(|loss| in_time(loss.lost_at));
        match (rank, host.min_by_key(|loss| loss.lost_at)) {
            (Some(rank), Some(host)) if host.lost_at < rank.ended_at => Some(of_host(host, plans)),
            (Some(rank), _) => Some(of_rank(rank, plans)),
            (None, Some(host)) => Some(of_host(host, plans)),
            (None, None) => {
                let first = due_to_peer.into_iter().min_by_key(|rank| rank.ended_at)?;
                let first = told.unwrap_or(first);
                Some(match hosts.min_by_key(|loss| loss.lost_at) {
                    Some(lost) => of_host(lost, plans),
                    None => of_peer(first, plans),
                })
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

/// This rank was the first that failed by itself.
fn of_rank(failure: &RankEnd, hosts: &[HostPlan]) -> Outcome {
    let place = place(failure, hosts);
    let sentence = format!("{place} failed first: {}", failure.end);
    of_own(failure, sentence, "it")
}

/// This rank failed by itself, as others did if there are several.
fn of_own(failure: &RankEnd, sentence: String, who: &str) -> Outcome {
    let hint = (failure.end == End::Killed(9)).then_some(
        "SIGKILL comes from a user, a batch system or the kernel, which kills when memory runs out: see `dmesg`",
    );
    let why = with_details(sentence, who, &failure.last_lines, hint);
    Outcome {
        own: Some(failure.end),
        ..Outcome::last(failure.end.exit_code(), Some(why))
    }
}

/// Ranks ended because of a peer, and none failed by itself: it is stopped or late, say, or its end came after what they
/// said of it.
fn of_peer(failure: &RankEnd, hosts: &[HostPlan]) -> Outcome {
    let (place, end) = (place(failure, hosts), failure.end);
    let why = match failure.peer_to_blame() {
        Some(why) => format!("{why} (says {place})"),
        None => {
            let sentence = format!(
                "{place} ended because another rank failed ({end}), but none failed by itself"
            );
            let hint = "exit code 85 says that another rank failed, and none has said which one: see what they printed before";
            with_details(sentence, "it", &failure.last_lines, Some(hint))
        }
    };
    Outcome::last(end.exit_code(), Some(why))
}

/// A host was lost, or cannot start its ranks.
fn of_host(loss: &HostLoss, hosts: &[HostPlan]) -> Outcome {
    Outcome::last(LOST_HOST_EXIT_CODE, Some(describe_host(loss, hosts)))
}

/// Describes a host that was lost, or that cannot start its ranks: `lost host node2 with ranks 2 to 3: no
/// answer`.
pub(super) fn describe_host(loss: &HostLoss, hosts: &[HostPlan]) -> String {
    let plan = &hosts[loss.host];
    let (host, detail, first) = (&plan.host, &loss.detail, plan.first_rank);
    let sentence = match (loss.is_refusal, plan.num_ranks) {
        (true, _) => format!("host {host}: {detail}"),
        (false, 1) => format!("lost host {host} with rank {first}: {detail}"),
        (false, number) => {
            let last = first + number - 1;
            format!("lost host {host} with ranks {first} to {last}: {detail}")
        }
    };
    let hint = (plan.via.is_some() && !loss.is_refusal).then_some(
        "try the same command by hand, with `true` instead of the agent; --dry-run prints it",
    );
    with_details(sentence, "it", &loss.last_lines, hint)
}

/// A sentence with what was last written to stderr, and a hint.
fn with_details(sentence: String, who: &str, last_lines: &[String], hint: Option<&str>) -> String {
    let mut lines = vec![sentence];
    if !last_lines.is_empty() {
        lines.push(format!("the last lines {who} wrote to stderr:"));
        lines.extend(last_lines.iter().map(|line| format!("    {line}")));
    }
    lines.extend(hint.map(|hint| format!("hint: {hint}")));
    lines.join("\n")
}

/// `rank 3 (host node1, pid 4711)`
pub(super) fn place(failure: &RankEnd, hosts: &[HostPlan]) -> String {
    let host = &hosts[failure.host].host;
    format!("rank {} (host {host}, pid {})", failure.rank, failure.pid)
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
