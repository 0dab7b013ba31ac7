//! Whether a loss is one of a run that goes well.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Losses of which the median is taken.
const WINDOW: usize = 100;
/// Smaller medians count as this, in nats: near zero losses of a step are many times larger than those of another one.
const LEAST_MEDIAN: f64 = 0.1;

/// The range in which a loss is usual: up to a multiple of the running median.
#[derive(Clone, Debug, PartialEq)]
pub struct LossRange {
    /// How many times the median of the last usual losses, 100 at most, a loss may be, more than 1; a median below 0.1 counts as that.
    pub max_ratio: f64,
    /// Whether the first loss out of the range ends the training.
    pub stops: bool,
    /// The losses so far.
    pub history: LossHistory,
}

/// The losses of a run so far, as far as its checkpoints note them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossHistory {
    /// The last usual ones.
    recent: VecDeque<f64>,
    /// Steps that the weights had when they first gave a loss out of the range, which has not come back to it since then.
    left_at: Option<usize>,
    /// Steps that the newest weights had, in this start, which gave a loss that is a number.
    #[serde(skip)]
    newest: Option<usize>,
}

/// What a loss says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LossChange {
    /// It is the first one out of the range, whose median is this.
    Left { median: f64 },
    /// It is the first one in the range again.
    CameBack,
}

impl Default for LossRange {
    fn default() -> Self {
        Self {
            max_ratio: 10.0,
            stops: false,
            history: LossHistory::default(),
        }
    }
}

impl LossRange {
    /// Notes the loss of weights after `step` steps.
    pub(crate) fn note(&mut self, step: usize, loss: f64) -> Option<LossChange> {
        let history = &mut self.history;
        if !loss.is_finite() {
            // A step that is skipped for its loss scale.
            return None;
        }
        history.newest = Some(step);
        let is_out = |median: &f64| loss > self.max_ratio * median.max(LEAST_MEDIAN);
        match (history.median().filter(is_out), history.left_at) {
            (Some(median), None) => {
                history.left_at = Some(step);
                Some(LossChange::Left { median })
            }
            (Some(_), Some(_)) => None,
            (None, left_at) => {
                history.left_at = None;
                history.add(loss);
                left_at.map(|_| LossChange::CameBack)
            }
        }
    }
}

impl LossHistory {
    /// Whether there was no loss yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.recent.is_empty()
    }

    /// Steps that the first weights had which gave no usual loss, if none was usual since then.
    pub fn left_at(&self) -> Option<usize> {
        self.left_at
    }

    /// Whether weights of `step` steps or more have given a loss that is a number.
    pub(crate) fn has_loss_since(&self, step: usize) -> bool {
        self.newest.is_some_and(|newest| newest >= step)
    }

    fn add(&mut self, loss: f64) {
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(loss);
    }

    /// The smaller one of the two in the middle.
    fn median(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.recent.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len().checked_sub(1)?;
        sorted.get(last / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(range: &mut LossRange, first_step: usize, losses: &[f64]) -> Vec<Option<LossChange>> {
        let losses = losses.iter().enumerate();
        losses
            .map(|(index, loss)| range.note(first_step + index, *loss))
            .collect()
    }

    #[test]
    fn a_loss_of_more_than_ten_medians_leaves_the_range_once_and_comes_back_once() {
        let mut range = LossRange::default();
        let losses = [8.3, 8.1, 8.2, 500.0, 900.0, f64::NAN, 80.0];
        let changes = noted(&mut range, 0, &losses);
        let left = Some(LossChange::Left { median: 8.2 });
        let back = Some(LossChange::CameBack);
        assert_eq!(changes, [None, None, None, left, None, None, back]);
        assert_eq!(range.history.left_at(), None);
    }

    #[test]
    fn losses_out_of_the_range_do_not_become_usual() {
        let mut range = LossRange::default();
        noted(&mut range, 0, &[8.3]);
        noted(&mut range, 1, &vec![82_305.0; 3 * WINDOW]);
        assert_eq!(range.history.left_at(), Some(1));
    }

    #[test]
    fn a_loss_that_climbs_over_a_run_leaves_the_range_and_one_that_falls_does_not() {
        let mut range = LossRange::default();
        let climbing: Vec<f64> = (0..60).map(|step| 8.3 * 1.17f64.powi(step)).collect();
        noted(&mut range, 0, &climbing);
        assert!(range.history.left_at().is_some());
        let mut range = LossRange::default();
        let falling: Vec<f64> = climbing.into_iter().rev().collect();
        assert!(noted(&mut range, 0, &falling).iter().all(Option::is_none));
    }

    #[test]
    fn near_zero_a_loss_may_be_many_times_the_median() {
        let mut range = LossRange::default();
        let changes = noted(&mut range, 0, &[0.001, 0.001, 0.9, 1.1]);
        assert_eq!(changes[..3], [None; 3]);
        assert!(changes[3].is_some());
    }

    #[test]
    fn the_median_is_of_the_last_losses() {
        let mut range = LossRange::default();
        noted(&mut range, 0, &vec![100.0; WINDOW]);
        noted(&mut range, WINDOW, &vec![1.0; WINDOW / 2 + 1]);
        assert_eq!(range.history.median(), Some(1.0));
        assert_eq!(range.history.recent.len(), WINDOW);
    }
}
