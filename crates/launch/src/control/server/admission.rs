//! Who is let into the run.

use std::net::TcpStream;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::hub::{Hub, Peer, State};
use super::{report, spawn};
use crate::control::SAME_WORDS;
use crate::control::activity::Snapshot;
use crate::control::hello::Hello;
use crate::control::message::ToRank;
use crate::control::wire;

/// What somebody is told who is not let in: `retry` if it may be due to a moment only, `all` if nobody is.
fn refused(message: String, retry: bool, all: bool) -> ToRank {
    ToRank::Refused {
        message,
        retry,
        all,
    }
}

impl Hub {
    /// Lets a rank, which knows the secret, in, or says why not. The reason ends the run for all: it could never start.
    pub(super) fn admit(
        &self,
        hello: Hello,
        version: u32,
        stream: &TcpStream,
    ) -> Result<(), Box<ToRank>> {
        let mut state = self.lock();
        if state.started {
            let message = format!(
                "rank {} on host {} comes too late: all {} ranks of the run are there already",
                hello.rank,
                hello.host,
                self.world_size()
            );
            return Err(refused(message, false, false).into());
        }
        if state.refusal.is_none()
            && let Some(why) = self.objection(&state, &hello, version)
        {
            self.refuse_all(&mut state, why);
        }
        if let Some(message) = state.refusal.clone() {
            if hello.rank < self.world_size() {
                state.told.insert(hello.rank);
            }
            self.notify();
            return Err(refused(message, false, true).into());
        }
        let (rank, cannot_start) = (hello.rank, hello.cannot_start.clone());
        let peer = self.peer(hello, stream).map_err(|error| {
            let message = format!("rank 0 has no thread or connection left: {error}");
            Box::new(refused(message, true, false))
        })?;
        state.peers[rank] = Some(peer);
        if let Some(why) = cannot_start {
            state.unable.insert(rank, why);
            state.unable_since.get_or_insert(self.clock.now());
        }
        let missing = state.missing();
        if missing.is_empty() && !state.unable.is_empty() {
            self.refuse_unable(&mut state);
        } else if missing.is_empty() {
            let now = self.clock.now();
            for peer in state.peers.iter_mut().flatten() {
                peer.heard = now;
            }
            state.started = true;
            let host = self.own.host.clone();
            state.broadcast(&ToRank::Welcome { host });
        } else if let Some(peer) = &state.peers[rank] {
            peer.send(&ToRank::Waiting { missing }, &[]);
        }
        Ok(())
    }

    fn objection(&self, state: &State, hello: &Hello, version: u32) -> Option<String> {
        if let Some(why) = self.own.objection(hello, version) {
            return Some(why);
        }
        // Rank 0 is this process, also before its own connection has come.
        let zero = (&self.own.host, self.own.pid);
        let there = match &state.peers[hello.rank] {
            Some(peer) => (&peer.host, peer.pid),
            None if hello.rank == 0 && (&hello.host, hello.pid) != zero => zero,
            None => return None,
        };
        Some(format!(
            "{}: this rank is there already, from host {} (process {})\n\
             hint: each process of a run needs a rank of its own",
            report::name(hello.rank, &hello.host, hello.pid),
            there.0,
            there.1
        ))
    }

    /// Gives up when a rank cannot start and the others have had their time to say the same.
    pub(super) fn find_unable(&self, state: &mut State, now: Duration) {
        let since = state.unable_since;
        if since.is_some_and(|since| now > since + SAME_WORDS) {
            self.refuse_unable(state);
        }
    }

    /// What all ranks say is said without naming any.
    fn refuse_unable(&self, state: &mut State) {
        let mut ranks_by_words: Vec<(&str, Vec<usize>)> = Vec::new();
        for (rank, why) in &state.unable {
            match ranks_by_words.iter_mut().find(|(said, _)| said == why) {
                Some((_, ranks)) => ranks.push(*rank),
                None => ranks_by_words.push((why, vec![*rank])),
            }
        }
        let message = match ranks_by_words.as_slice() {
            [(why, ranks)] if ranks.len() == self.world_size() => (*why).to_string(),
            said => {
                let said = said
                    .iter()
                    .map(|(why, ranks)| format!("{}: {why}", report::rank_list(ranks)));
                let said: Vec<_> = said.collect();
                format!("the run cannot start: {}", said.join("\n"))
            }
        };
        self.refuse_with(state, message);
    }

    fn refuse_all(&self, state: &mut State, why: String) {
        self.refuse_with(state, format!("the run cannot start: {why}"));
    }

    /// The run does not start, for all that are here and all that come.
    fn refuse_with(&self, state: &mut State, message: String) {
        state.broadcast(&refused(message.clone(), false, true));
        let present: Vec<usize> = state.present().map(|(rank, _)| rank).collect();
        state.told.extend(present);
        state.refusal = Some(message);
        self.notify();
    }

    /// Gives up when ranks have not come in time.
    pub(super) fn find_overdue(&self, state: &mut State, now: Duration) {
        if now <= self.join_timeout {
            return;
        }
        let why = format!(
            "of {} ranks these have not come within {} s: {}\n\
             hint: look whether they run and what they said; they need the same MASTER_ADDR and MASTER_PORT, and a way to \
             reach rank 0 on host {}",
            self.world_size(),
            self.join_timeout.as_secs_f64(),
            report::rank_list(&state.missing()),
            self.own.host,
        );
        self.refuse_all(state, why);
    }

    fn peer(&self, hello: Hello, stream: &TcpStream) -> std::io::Result<Peer> {
        let (queue, frames) = mpsc::channel::<Arc<Vec<u8>>>();
        let writer = stream.try_clone()?;
        let stream = stream.try_clone()?;
        spawn("control-write", move || wire::write_queue(writer, frames))?;
        Ok(Peer {
            host: hello.host,
            pid: hello.pid,
            snapshot: Snapshot::default(),
            heard: self.clock.now(),
            left: false,
            failed: None,
            noted: false,
            gone: false,
            queue,
            stream,
        })
    }
}
