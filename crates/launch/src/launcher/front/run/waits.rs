//! What the launcher says while it waits for agents.

use super::{AgentState, RunningAgent, RunningRanks};
use crate::SpokenWait;
use crate::launcher::wire::ALIVE_INTERVAL;

impl RunningRanks<'_> {
    /// Says for which agents the launcher waits: those that have not answered yet, and later those that say nothing, not even that they
    /// live.
    pub(super) fn say_waits(&mut self) {
        let waits_for = match (self.start_deadline, self.started) {
            (Some(_), _) => Some(self.missing_in_words()),
            (None, true) => self.silent_in_words(),
            (None, false) => None,
        };
        let Some(waits_for) = waits_for else {
            self.wait = None;
            return;
        };
        let wait = self.wait.get_or_insert_with(|| {
            SpokenWait::begin(self.layout.wait_notices, "candle-train: the launcher")
        });
        wait.say(waits_for);
    }

    fn missing_in_words(&self) -> String {
        let asked = self.agents.iter();
        let asked = asked.filter(|agent| agent.state == AgentState::Asked);
        let names = asked.map(|agent| match &self.layout.mpi {
            Some(_) => agent.plan.first_rank.to_string(),
            None => agent.plan.host.clone(),
        });
        let missing = names.collect::<Vec<_>>().join(", ");
        match &self.layout.mpi {
            Some(mpi) => format!("for {} to start ranks {missing}", mpi.words[0]),
            None => format!("for an answer of hosts {missing}"),
        }
    }

    fn silent_in_words(&self) -> Option<String> {
        let is_silent = |agent: &&RunningAgent| {
            let link = agent.link.as_ref();
            agent.state == AgentState::Ready
                && link.is_some_and(|link| link.silence() > 2 * ALIVE_INTERVAL)
        };
        let silent = self.agents.iter().filter(is_silent);
        let mut hosts: Vec<&str> = silent.map(|agent| agent.plan.host.as_str()).collect();
        hosts.dedup();
        let hosts = hosts.join(", ");
        (!hosts.is_empty()).then(|| format!("for word of the agents of hosts {hosts}"))
    }
}
