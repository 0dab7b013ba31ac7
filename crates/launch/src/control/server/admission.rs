//! Who is let into the run.

use std::time::Duration;

use super::run::{Peer, ServedRun, rank_list};
use crate::control::SAME_WORDS;
use crate::control::activity::Snapshot;
use crate::control::message::{Hello, ToRank};
use crate::control::wire::{self, Outbox};

impl ServedRun {
    /// Lets a rank, which knows the secret, in, or tells it why not. The reason ends the run for all, as it could never start, but for a
    /// process too many: that alone is refused. The number of its connection, if it is in.
    pub fn admit(
        &mut self,
        hello: Hello,
        version: u32,
        outbox: Outbox,
        now: Duration,
    ) -> Option<u64> {
        let rank = hello.rank;
        let turn_away = |message: String, all: bool| {
            outbox.tell(&ToRank::Refused { message, all });
            None
        };
        if self.started {
            // Who comes late may say any number.
            if let Some(Some(peer)) = self.peers.get_mut(rank)
                && peer.hello.is_of_same_process(&hello)
                && !peer.has_spoken
            {
                // It gave up waiting for a word a moment before the last rank came.
                peer.connection = self.next_connection;
                self.next_connection += 1;
                peer.outbox = outbox;
                peer.heard = now;
                let host = self.own.host.clone();
                peer.outbox.tell(&ToRank::Welcome { host });
                return Some(peer.connection);
            }
            let (host, num_ranks) = (&hello.host, self.peers.len());
            let message = format!(
                "rank {rank} on host {host} comes too late: all {num_ranks} ranks of the run are there already"
            );
            return turn_away(message, false);
        }
        if self.refusal.is_none() {
            if let Some(message) = self.comes_twice(&hello) {
                return turn_away(message, false);
            }
            if let Some(why) = self.objection(&hello, version) {
                self.refuse(format!("the run cannot start: {why}"));
            }
        }
        if let Some(message) = self.refusal.clone() {
            self.told.insert(rank);
            return turn_away(message, true);
        }
        if let Some(why) = hello.cannot_start.clone() {
            self.unable.insert(rank, why);
            self.unable_since.get_or_insert(now);
        }
        let connection = self.next_connection;
        self.next_connection += 1;
        self.peers[rank] = Some(Peer {
            hello,
            connection,
            outbox,
            snapshot: Snapshot::default(),
            heard: now,
            has_spoken: false,
            left: false,
            failed: None,
            noted: false,
            gone: false,
        });
        let missing = self.missing();
        if !missing.is_empty() {
            if let Some(peer) = &self.peers[rank] {
                peer.outbox.tell(&ToRank::Waiting { missing });
            }
        } else if self.unable.is_empty() {
            (self.peers.iter_mut().flatten()).for_each(|peer| peer.heard = now);
            self.started = true;
            let host = self.own.host.clone();
            self.broadcast(&ToRank::Welcome { host });
        } else {
            self.refuse_unable();
        }
        Some(connection)
    }

    /// What keeps a rank that knows the secret out of the run; `None` if nothing does.
    fn objection(&self, hello: &Hello, version: u32) -> Option<String> {
        let own = &self.own;
        let who = format!("rank {} on host {}", hello.rank, hello.host);
        if version != wire::VERSION {
            return Some(format!(
                "{who}: it speaks version {version} of the control protocol, expected {} as on rank 0\n\
                 hint: start the same build of the program on all hosts",
                wire::VERSION
            ));
        }
        if hello.world_size != own.world_size {
            return Some(format!(
                "{who}: its world size is {}, expected {} as on rank 0\n\
                 hint: start all ranks with the same number of ranks",
                hello.world_size, own.world_size
            ));
        }
        if hello.rank >= own.world_size {
            return Some(format!(
                "{who}: expected a rank below the world size, {}",
                own.world_size
            ));
        }
        // One that cannot start may not have come to what there is to compare.
        if own.cannot_start.is_none() && hello.cannot_start.is_none() {
            let differences = own.differences(hello);
            if !differences.is_empty() {
                return Some(format!(
                    "{who}: {}\nhint: start all ranks with the same program, flags and data",
                    differences.join("; ")
                ));
            }
        }
        None
    }

    /// What is said to a second process with the number of one that is in; `None` to the same one, whose connection broke off.
    fn comes_twice(&self, hello: &Hello) -> Option<String> {
        // Rank 0 is this process, also before its own connection has come.
        let own = (hello.rank == 0).then_some(&self.own);
        let there = self.peers.get(hello.rank)?;
        let there = there.as_ref().map(|peer| &peer.hello).or(own)?;
        (!there.is_of_same_process(hello)).then(|| {
            format!(
                "{}: this rank is there already, from host {} (process {})\n\
             hint: each process of a run needs a rank of its own",
                hello.name(),
                there.host,
                there.pid
            )
        })
    }

    /// Gives up when a rank cannot start and the others have had their time to say the same.
    pub fn find_unable(&mut self, now: Duration) {
        let since = self.unable_since;
        if since.is_some_and(|since| now > since + SAME_WORDS) {
            self.refuse_unable();
        }
    }

    /// What all ranks say is said without naming any.
    fn refuse_unable(&mut self) {
        let mut ranks_by_words: Vec<(&str, Vec<usize>)> = Vec::new();
        for (rank, why) in &self.unable {
            match ranks_by_words.iter_mut().find(|(said, _)| said == why) {
                Some((_, ranks)) => ranks.push(*rank),
                None => ranks_by_words.push((why, vec![*rank])),
            }
        }
        let message = match ranks_by_words.as_slice() {
            [(why, ranks)] if ranks.len() == self.peers.len() => (*why).to_string(),
            said => {
                let said = said.iter();
                let said: Vec<_> = said
                    .map(|(why, ranks)| format!("{}: {why}", rank_list(ranks)))
                    .collect();
                format!("the run cannot start: {}", said.join("\n"))
            }
        };
        self.refuse(message);
    }

    /// Gives up when ranks have not come in time.
    pub fn find_overdue(&mut self, now: Duration) {
        let limit = self.config.join_timeout;
        if now > limit && self.refusal.is_none() {
            self.refuse(format!(
                "the run cannot start: of {} ranks these have not come within {} s: {}\n\
                 hint: look whether they run and what they said; they need the same MASTER_ADDR and MASTER_PORT, and a way to \
                 reach rank 0 on host {}",
                self.peers.len(),
                limit.as_secs_f64(),
                rank_list(&self.missing()),
                self.own.host,
            ));
        }
    }

    /// The run does not start, for all that are here and all that come.
    fn refuse(&mut self, message: String) {
        let refused = ToRank::Refused {
            message: message.clone(),
            all: true,
        };
        self.broadcast(&refused);
        let present: Vec<usize> = self.present().map(|(rank, _)| rank).collect();
        self.told.extend(present);
        self.refusal = Some(message);
    }
}
