//! Questions that wait for other ranks: gathers and checks.

use std::collections::{BTreeMap, HashMap};

use crate::control::Verdict;
use crate::control::message::{Answer, Question};

/// An answer to the ranks' questions with these ids, and its body.
pub(super) struct Reply {
    pub to: Vec<(usize, u64)>,
    pub answer: Answer,
    pub body: Vec<u8>,
}

/// What has been asked and not answered yet: gathers by their key, checks by the group's id and their number in it.
#[derive(Default)]
pub(super) struct Exchange(HashMap<(String, Option<u64>), OpenQuestion>);

struct OpenQuestion {
    members: Vec<usize>,
    /// By world rank.
    asked: BTreeMap<usize, RankQuestion>,
}

struct RankQuestion {
    id: u64,
    /// What is gathered.
    body: Vec<u8>,
    /// What is checked: the call, and its site.
    call: (String, String),
}

impl Exchange {
    /// Takes the question of a rank of `world_size` and returns the answer that is due, if it was the last to ask.
    pub fn ask(
        &mut self,
        (rank, id): (usize, u64),
        question: Question,
        body: Vec<u8>,
        world_size: usize,
    ) -> Option<Reply> {
        let (key, members, call) = match question {
            Question::Gather { key } => {
                ((key, None), (0..world_size).collect(), Default::default())
            }
            Question::Check {
                group,
                seq,
                call,
                site,
            } => ((group.id, Some(seq)), group.members, (call, site)),
        };
        let open = self.0.entry(key.clone()).or_insert_with(|| OpenQuestion {
            members,
            asked: BTreeMap::new(),
        });
        open.asked.insert(rank, RankQuestion { id, body, call });
        if open.asked.len() < open.members.len() {
            return None;
        }
        let open = self.0.remove(&key)?;
        Some(match key {
            (_, None) => open.gathered(),
            (_, Some(_)) => open.reply(Answer::Verdict(open.verdict()), Vec::new()),
        })
    }

    /// Answers the questions that need a rank of `left`, none of which will ask again.
    pub fn without(&mut self, left: &[usize], report: &str) -> Vec<Reply> {
        let is_needed = |open: &OpenQuestion, rank: &usize| {
            open.members.contains(rank) && !open.asked.contains_key(rank)
        };
        let hopeless = self
            .0
            .extract_if(|_, open| left.iter().any(|rank| is_needed(open, rank)));
        let reply = |(_, open): (_, OpenQuestion)| {
            let rank = *left.iter().find(|rank| is_needed(&open, rank))?;
            let report = report.to_string();
            let verdict = Verdict::Left { rank, report };
            Some(open.reply(Answer::Verdict(verdict), Vec::new()))
        };
        hopeless.filter_map(reply).collect()
    }
}

impl OpenQuestion {
    fn reply(&self, answer: Answer, body: Vec<u8>) -> Reply {
        let to = self.asked.iter().map(|(rank, asked)| (*rank, asked.id));
        let to = to.collect();
        Reply { to, answer, body }
    }

    fn gathered(&self) -> Reply {
        let bodies = self.asked.values().map(|asked| asked.body.as_slice());
        let lens = bodies.clone().map(<[u8]>::len).collect();
        let body = bodies.collect::<Vec<_>>().concat();
        self.reply(Answer::Gathered { lens }, body)
    }

    /// Whether all have called what the first of them has.
    fn verdict(&self) -> Verdict {
        let mut calls = self.asked.iter().map(|(rank, asked)| (*rank, &asked.call));
        let place = |(rank, (call, site)): (usize, &(String, String))| {
            let call = format!("{call} at {site}");
            (rank, call)
        };
        let Some(first) = calls.next() else {
            return Verdict::Agree;
        };
        match calls.find(|(_, (call, _))| *call != first.1.0) {
            None => Verdict::Agree,
            Some(second) => Verdict::Differ {
                first: place(first),
                second: place(second),
            },
        }
    }
}
