//! Starting all ranks again after a failure.

use std::time::Instant;

use super::outcome::{Outcome, Remedy};
use super::verdict::LOST_HOST_EXIT_CODE;
use crate::launcher::config::LaunchConfig;
use crate::launcher::shares::{self, Share};
use crate::{Error, Result};

/// The hosts of a run, and how often its ranks may still be started on them.
pub(super) struct Restarts {
    max_restarts: usize,
    min_nodes: usize,
    num_restarts: usize,
    all: Vec<Share>,
    /// Places among `all` of those that the ranks are started on.
    present: Vec<usize>,
}

/// What comes after an end of the ranks.
pub(super) enum Next {
    /// They are started again, for this reason, at this time if not at once.
    Start(String, Option<Instant>),
    /// They are started again, through MPI.
    ThroughMpi,
    /// That was the last one.
    End(Outcome),
}

impl Restarts {
    /// # Errors
    /// Options about restarts that contradict the others.
    pub(super) fn new(config: &LaunchConfig, all: Vec<Share>) -> Result<Self> {
        let num_hosts = all.len();
        let problem = match (config.max_restarts, config.min_nodes, config.nnodes) {
            (1.., _, 2..) => {
                "--max-restarts works where one launcher starts all ranks, and --nnodes has one on each host\n\
                 hint: --hostfile starts the ranks of several hosts"
            }
            (0, Some(_), _) => "--min-nodes is for --max-restarts, which is not given",
            (_, Some(_), _) if config.hostfile.is_none() => {
                "--min-nodes is for the hosts of a --hostfile, which is not given"
            }
            (_, Some(_), _) if config.rdzv.is_some() => {
                "--min-nodes and --rdzv: the host where the ranks meet may be the one that is lost\n\
                 hint: without --rdzv they meet on the first host that is left"
            }
            (_, Some(min_nodes), _) if min_nodes > num_hosts => {
                return Err(Error::Launch(format!(
                    "--min-nodes: expected at most the {num_hosts} hosts of the host file, got {min_nodes}"
                )));
            }
            _ => {
                return Ok(Self {
                    max_restarts: config.max_restarts,
                    min_nodes: config.min_nodes.unwrap_or(num_hosts).max(1),
                    num_restarts: 0,
                    present: (0..num_hosts).collect(),
                    all,
                });
            }
        };
        Err(Error::Launch(problem.to_string()))
    }

    /// How often the ranks were started before.
    pub(super) fn num_restarts(&self) -> usize {
        self.num_restarts
    }

    /// The hosts to start them on.
    pub(super) fn hosts(&self) -> Vec<Share> {
        match self.present.len() == self.all.len() {
            true => self.all.clone(),
            false => shares::numbered(self.present.iter().map(|host| self.all[*host].clone())),
        }
    }

    /// What is to be done after the ranks have ended.
    pub(super) fn after(&mut self, outcome: Outcome) -> Next {
        let Some(sentence) = &outcome.sentence else {
            return Next::End(outcome);
        };
        let why = sentence.lines().next().unwrap_or_default().to_string();
        match &outcome.remedy {
            Remedy::ThroughMpi => Next::ThroughMpi,
            _ if self.max_restarts == 0 => Next::End(outcome),
            Remedy::None(reason) if reason.is_empty() => Next::End(outcome),
            Remedy::None(reason) => {
                let note = format!("the ranks are not started again: {reason}");
                Next::End(outcome.with_note(&note))
            }
            Remedy::StartAgain { .. } if self.num_restarts == self.max_restarts => {
                let note = format!("--max-restarts {} are used up", self.max_restarts);
                Next::End(outcome.with_note(&note))
            }
            Remedy::StartAgain { at } => {
                self.num_restarts += 1;
                // Hosts that were lost may be back.
                self.present = (0..self.all.len()).collect();
                let (number, of) = (self.num_restarts, self.max_restarts);
                let wait = at.map(|at| at.saturating_duration_since(Instant::now()));
                let wait = wait.map_or(String::new(), |wait| {
                    format!(
                        ", in {} s, when its ranks have ended too",
                        wait.as_secs() + 1
                    )
                });
                Next::Start(format!("{why}; restart {number} of {of}{wait}"), *at)
            }
            // What is wrong at the first start is wrong.
            Remedy::Without(_) if self.num_restarts == 0 => Next::End(outcome),
            Remedy::Without(hosts) => {
                let mut place = 0..;
                self.present
                    .retain(|_| !place.next().is_some_and(|place| hosts.contains(&place)));
                let (left, all, least) = (self.present.len(), self.all.len(), self.min_nodes);
                let left = format!("{left} of {all} hosts are left");
                if self.present.len() < least {
                    let note = format!("{left}, and --min-nodes is {least}");
                    return Next::End(Outcome {
                        exit_code: LOST_HOST_EXIT_CODE,
                        ..outcome.with_note(&note)
                    });
                }
                Next::Start(format!("{why}; {left}"), None)
            }
        }
    }
}
