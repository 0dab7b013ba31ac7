//! What the launcher says while it waits for agents.

use super::{Agent, AgentState, Run};
use crate::SpokenWait;
use crate::launcher::wire::ALIVE_INTERVAL;

impl Run<'_> {
    /// For whom the launcher waits that has not answered.
    pub(super) fn say_missing(&mut self) {
        let agents = self.agents.iter();
        let asked = agents.filter(|agent| agent.state == AgentState::Asked);
        let missing: Vec<String> = match &self.layout.mpi {
            Some(_) => asked
                .map(|agent| agent.plan.first_rank.to_string())
                .collect(),
            None => asked.map(|agent| agent.plan.host.clone()).collect(),
        };
        let missing = missing.join(", ");
        let what = match &self.layout.mpi {
            Some(mpi) => format!("for {} to start ranks {missing}", mpi.words[0]),
            None => format!("for an answer of hosts {missing}"),
        };
        match &self.wait {
            Some(wait) if self.start_deadline.is_some() => wait.say(what),
            _ => self.wait = None,
        }
    }

    /// Whose agents say nothing, not even that they live.
    pub(super) fn say_silent(&mut self) {
        let is_silent = |agent: &&Agent| {
            let link = agent
                .link
                .as_ref()
                .filter(|_| agent.state == AgentState::Ready);
            link.is_some_and(|link| link.silence() > 2 * ALIVE_INTERVAL)
        };
        let silent = self
            .agents
            .iter()
            .filter(|_| self.started)
            .filter(is_silent);
        let mut hosts: Vec<&str> = silent.map(|agent| agent.plan.host.as_str()).collect();
        hosts.dedup();
        if hosts.is_empty() {
            self.silent_wait = None;
            return;
        }
        let wait = self.silent_wait.get_or_insert_with(|| {
            SpokenWait::begin(self.layout.wait_notices, "candle-train: the launcher")
        });
        wait.say(format!(
            "for word of the agents of hosts {}",
            hosts.join(", ")
        ));
    }
}
