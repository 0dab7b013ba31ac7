//! How a run of threads ends: when all have, or, of a rank that computes for ever after another one has failed, with the process.

use std::sync::PoisonError;
use std::time::Duration;

use candle_launch::{end_process, print_aside};

use super::World;
use super::world::WorldState;
use crate::deadline::Deadline;
use crate::error::rank_list;

/// Ranks that notice a failure have ended by then, and the caller hears of it; else it is printed.
const PRINT_AFTER: Duration = Duration::from_secs(1);

/// Of a process that ends because a rank has failed and others do not end.
const EXIT_CODE: u8 = 1;

impl World {
    /// Waits until the first `num_ranks` ranks have ended. If others go on when one has failed the failure is printed, and after
    /// [`LocalConfig::abort_after`](crate::LocalConfig::abort_after) the process ends.
    pub(crate) fn wait_for_ends(&self, num_ranks: usize) {
        let mut state = self.lock();
        let mut since_failure = Deadline::new(self.config.abort_after);
        let mut is_printed = false;
        loop {
            let running = state.running(num_ranks);
            if running.is_empty() {
                return;
            }
            if !state.has_failed() {
                let woken = self.ended.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if since_failure.is_over() {
                end_process(self.last_words(&state, &running), EXIT_CODE);
            }
            if !is_printed && since_failure.waited() >= PRINT_AFTER {
                print_aside(self.warning(&state, &running, since_failure.waited()));
                is_printed = true;
            }
            state = since_failure.wait(&self.ended, state);
        }
    }

    fn warning(&self, state: &WorldState, running: &[usize], waited: Duration) -> String {
        let failure = state.first_failure();
        let failure = failure.lines().next().unwrap_or_default();
        format!(
            "{failure}; {} may take {:.0} s more to end, then the process ends\n",
            rank_list(running),
            self.config.abort_after.saturating_sub(waited).as_secs_f64()
        )
    }

    fn last_words(&self, state: &WorldState, running: &[usize]) -> String {
        format!(
            "error: {} did not end within {} s after another rank had failed, so the process ends; the last operation of each:\n{}\n{}\n",
            rank_list(running),
            self.config.abort_after.as_secs_f64(),
            state.last_operations(),
            state.first_failure()
        )
    }
}
