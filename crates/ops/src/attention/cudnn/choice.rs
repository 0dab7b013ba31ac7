//! The configuration in use, of several that may work: the first that can be planned, and after a failure the next.

use crate::cuda::cudnn_library::is_out_of_memory;
use candle_core::{Error, Result, bail};

/// A choice among plans, best first.
pub(super) struct Choice<P> {
    /// Number of the next one to plan.
    next: usize,
    /// The one in use, by its number.
    current: Option<(usize, P)>,
    /// The first that was planned and then failed, in words.
    failure: Option<String>,
}

impl<P> Choice<P> {
    /// Starts with the one of this number.
    pub(super) fn new(first: usize) -> Self {
        Self {
            next: first,
            current: None,
            failure: None,
        }
    }

    /// The one in use; if there is none, the next for which `plan` makes a plan. It returns none for numbers beyond the last.
    ///
    /// # Errors
    /// When no memory is left to plan with; when none is left to try, with the first failure, or if there was none with the
    /// first reason why one could not be planned.
    pub(super) fn current(
        &mut self,
        mut plan: impl FnMut(usize) -> Result<Option<P>>,
    ) -> Result<&P> {
        let mut refusal = None;
        while self.current.is_none() {
            match plan(self.next) {
                Ok(Some(plan)) => self.current = Some((self.next, plan)),
                Ok(None) => break,
                Err(err) if is_out_of_memory(&err) => return Err(err),
                Err(err) => refusal = refusal.or(Some(err)),
            }
            self.next += 1;
        }
        match (&self.current, &self.failure, refusal) {
            (Some((_, plan)), _, _) => Ok(plan),
            (None, Some(failure), _) => bail!(
                "{failure}\nhint: no other configuration worked either; CANDLE_TRAIN_ATTENTION=own leaves cuDNN out"
            ),
            (None, None, Some(refusal)) => Err(refusal),
            (None, None, None) => bail!(
                "cuDNN suggests no configuration\nhint: it needs libnvrtc.so.13, which comes with CUDA 13 and with PyPI's nvidia-cuda-nvrtc"
            ),
        }
    }

    /// The one in use has failed: the next takes its place. Says so once.
    ///
    /// # Errors
    /// Out of memory: another one would need as much.
    pub(super) fn failed(&mut self, err: Error) -> Result<()> {
        if is_out_of_memory(&err) {
            return Err(err);
        }
        let number = self.current.take().map_or(self.next, |(number, _)| number);
        if self.failure.is_none() {
            tracing::warn!("cuDNN's configuration {number} failed, others are tried: {err}");
            self.failure = Some(err.to_string());
        }
        Ok(())
    }

    /// The one in use and its number, if one is.
    pub(super) fn in_use(&self) -> Option<(usize, &P)> {
        self.current.as_ref().map(|(number, plan)| (*number, plan))
    }
}

#[cfg(test)]
mod tests {
    use super::Choice;
    use candle_core::{Error, Result};

    /// What becomes of the configuration of each number.
    #[derive(Clone, Copy)]
    enum Fate {
        Refused,
        Fails,
        OutOfMemory,
        Works,
    }
    use Fate::{Fails, OutOfMemory, Refused, Works};

    /// Plans and runs as the callers do; the number that worked.
    fn run(choice: &mut Choice<(usize, Fate)>, fates: &[Fate]) -> Result<usize> {
        let plan = |number: usize| match fates.get(number) {
            Some(Refused) => Err(Error::Msg(format!("{number} is not supported"))),
            fate => Ok(fate.map(|fate| (number, *fate))),
        };
        loop {
            match *choice.current(plan)? {
                (number, Works) => return Ok(number),
                (_, OutOfMemory) => choice.failed(Error::Msg("ALLOCATION_FAILED".into()))?,
                (number, _) => choice.failed(Error::Msg(format!("{number} failed")))?,
            }
        }
    }

    #[test]
    fn the_first_that_works_is_kept() -> Result<()> {
        for (first, fates, expected) in [
            (0, &[Works, Works][..], 0),
            (1, &[Works, Works], 1),
            (0, &[Refused, Works], 1),
            (0, &[Refused, Fails, Refused, Fails, Works], 4),
        ] {
            let mut choice = Choice::new(first);
            for _ in 0..2 {
                assert_eq!(run(&mut choice, fates)?, expected);
                assert_eq!(choice.in_use().map(|(number, _)| number), Some(expected));
            }
        }
        Ok(())
    }

    #[test]
    fn without_one_that_works_the_first_failure_is_the_error_each_time() {
        for (fates, expected) in [
            (&[][..], "suggests no configuration"),
            (&[Refused, Refused], "0 is not supported"),
            (&[Refused, Fails, Fails], "1 failed"),
            (&[Fails, OutOfMemory, Works], "ALLOCATION_FAILED"),
            (&[OutOfMemory, Works], "ALLOCATION_FAILED"),
        ] {
            let error = run(&mut Choice::new(0), fates).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let mut choice = Choice::new(0);
        for _ in 0..2 {
            let error = run(&mut choice, &[Fails]).unwrap_err().to_string();
            assert!(error.contains("0 failed"), "{error}");
        }
    }
}
