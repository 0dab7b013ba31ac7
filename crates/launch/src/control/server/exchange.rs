//! Questions that wait for other ranks: gathers and checks. No I/O: it returns what to answer to whom.

use std::collections::{BTreeMap, HashMap};

use crate::control::message::{Answer, Question};
use crate::control::{RankGroup, Verdict};

/// An answer to a rank's question, with its body.
pub(super) struct Reply {
    pub rank: usize,
    pub id: u64,
    pub answer: Answer,
    pub body: Vec<u8>,
}

/// What has been asked and not answered yet.
#[derive(Default)]
pub(super) struct Exchange {
    gathers: HashMap<String, BTreeMap<usize, (u64, Vec<u8>)>>,
    checks: HashMap<(String, u64), Check>,
}

struct Check {
    group: RankGroup,
    /// By world rank: the question's id, the call, its site.
    calls: BTreeMap<usize, (u64, String, String)>,
}

impl Exchange {
    /// Takes the question of a rank of `world_size` and returns the answers that are due.
    pub(super) fn ask(
        &mut self,
        (rank, id): (usize, u64),
        question: Question,
        body: Vec<u8>,
        world_size: usize,
    ) -> Vec<Reply> {
        match question {
            Question::Gather { key } => {
                let gather = self.gathers.entry(key.clone()).or_default();
                gather.insert(rank, (id, body));
                if gather.len() < world_size {
                    return Vec::new();
                }
                self.gathers.remove(&key).map_or_else(Vec::new, gathered)
            }
            Question::Check {
                group,
                seq,
                call,
                site,
            } => self.check((rank, id), group, seq, (call, site)),
        }
    }

    fn check(
        &mut self,
        (rank, id): (usize, u64),
        group: RankGroup,
        seq: u64,
        (call, site): (String, String),
    ) -> Vec<Reply> {
        let key = (group.id.clone(), seq);
        let check = self.checks.entry(key.clone()).or_insert_with(|| Check {
            group,
            calls: BTreeMap::new(),
        });
        check.calls.insert(rank, (id, call, site));
        if check.calls.len() < check.group.members.len() {
            return Vec::new();
        }
        let Some(check) = self.checks.remove(&key) else {
            return Vec::new();
        };
        let verdict = Answer::Verdict(check.verdict());
        let reply =
            |(rank, (id, ..)): (&usize, &(u64, String, String))| bare(*rank, *id, verdict.clone());
        check.calls.iter().map(reply).collect()
    }

    /// Answers the questions that need a rank of `left`, none of which will ask again.
    pub(super) fn without(&mut self, left: &[usize], report: &str) -> Vec<Reply> {
        let mut replies = Vec::new();
        self.gathers.retain(|_, gather| {
            let Some(rank) = left.iter().find(|rank| !gather.contains_key(rank)) else {
                return true;
            };
            let answer = Answer::Left { rank: *rank };
            replies.extend(
                gather
                    .iter()
                    .map(|(to, (id, _))| bare(*to, *id, answer.clone())),
            );
            false
        });
        self.checks.retain(|_, check| {
            let absent = |rank: &&usize| {
                check.group.members.contains(rank) && !check.calls.contains_key(rank)
            };
            let Some(rank) = left.iter().find(absent) else {
                return true;
            };
            let verdict = Verdict::Left {
                rank: *rank,
                report: report.to_string(),
            };
            let answer = Answer::Verdict(verdict);
            replies.extend(
                check
                    .calls
                    .iter()
                    .map(|(to, (id, ..))| bare(*to, *id, answer.clone())),
            );
            false
        });
        replies
    }
}

impl Check {
    fn verdict(&self) -> Verdict {
        let mut calls = self.calls.iter();
        let Some((first, (_, call, site))) = calls.next() else {
            return Verdict::Agree;
        };
        match calls.find(|(_, (_, other, _))| other != call) {
            None => Verdict::Agree,
            Some((second, (_, other, other_site))) => Verdict::Differ {
                first: (*first, format!("{call} at {site}")),
                second: (*second, format!("{other} at {other_site}")),
            },
        }
    }
}

fn bare(rank: usize, id: u64, answer: Answer) -> Reply {
    let body = Vec::new();
    Reply {
        rank,
        id,
        answer,
        body,
    }
}

fn gathered(gather: BTreeMap<usize, (u64, Vec<u8>)>) -> Vec<Reply> {
    let lens: Vec<usize> = gather.values().map(|(_, bytes)| bytes.len()).collect();
    let body: Vec<u8> = gather
        .values()
        .flat_map(|(_, bytes)| bytes.iter().copied())
        .collect();
    let reply = |(rank, (id, _)): (&usize, &(u64, Vec<u8>))| Reply {
        rank: *rank,
        id: *id,
        answer: Answer::Gathered { lens: lens.clone() },
        body: body.clone(),
    };
    gather.iter().map(reply).collect()
}
