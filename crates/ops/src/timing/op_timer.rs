//! Time of each operation on the CPU, as the thread that asked for it waits for it. While the thread has no profile an operation
//! only looks whether it has.

use super::awake::keep_pool_awake;
use super::op_times::OpTime;
use super::op_times::{OpName, OpTimes};
use candle_core::{DType, Result, bail};
use std::cell::RefCell;
use std::time::Instant;

thread_local! {
    /// The profile of this thread.
    static RUNNING: RefCell<Option<Running>> = const { RefCell::new(None) };
}

struct Running {
    began: Instant,
    /// Whether an operation is under way: what it calls is part of it.
    is_in_op: bool,
    ops: OpTimes,
}

/// Times the operation of this name until it is dropped.
#[must_use]
pub(crate) fn op(name: &'static str) -> OpTimer {
    OpTimer::start(OpName::Named(name))
}

/// Times the product of an operation, and what belongs to it, until it is dropped: sums of `num_terms` that fill rows of shape
/// `out`, and the types of what is read and written.
#[must_use]
pub(crate) fn product(
    op: &'static str,
    out: &[usize],
    num_terms: usize,
    dtypes: [DType; 2],
) -> OpTimer {
    let (len, rows) = out
        .split_last()
        .map_or((1, out), |(len, rows)| (*len, rows));
    let sizes = [len, rows.iter().product(), num_terms];
    OpTimer::start(OpName::Product(op, sizes, dtypes))
}

/// An operation that is under way.
pub(crate) struct OpTimer(Option<(OpName, Instant)>);

impl OpTimer {
    /// Each operation on the CPU begins here.
    fn start(name: OpName) -> Self {
        keep_pool_awake();
        let is_timed = RUNNING.with_borrow_mut(|running| match running {
            Some(running) => !std::mem::replace(&mut running.is_in_op, true),
            None => false,
        });
        Self(is_timed.then(|| (name, Instant::now())))
    }
}

impl Drop for OpTimer {
    fn drop(&mut self) {
        let Some((name, start)) = self.0 else { return };
        let secs = start.elapsed().as_secs_f64();
        RUNNING.with_borrow_mut(|running| {
            if let Some(running) = running {
                running.is_in_op = false;
                running.ops.add(name, secs);
            }
        });
    }
}

/// Times the operations of this thread from now on.
pub(crate) fn start_profile() -> Result<()> {
    RUNNING.with_borrow_mut(|running| {
        if running.is_some() {
            bail!("a profile runs already: finish it before the next one")
        }
        *running = Some(Running {
            began: Instant::now(),
            is_in_op: false,
            ops: OpTimes::default(),
        });
        Ok(())
    })
}

/// Ends the profile of this thread: the seconds from its start to its end, and those of each operation.
pub(crate) fn finish_profile() -> Result<(f64, Vec<OpTime>)> {
    match RUNNING.take() {
        Some(Running { began, ops, .. }) => Ok((began.elapsed().as_secs_f64(), ops.into_vec())),
        None => bail!("no profile runs: start one first"),
    }
}

#[cfg(test)]
mod tests {
    use super::{finish_profile, op, product, start_profile};
    use candle_core::{DType, Result};

    #[test]
    fn what_an_operation_calls_is_part_of_it() -> Result<()> {
        start_profile()?;
        for _ in 0..2 {
            let _outer = op("attention");
            drop(product("linear", &[2, 3, 4], 5, [DType::F32; 2]));
            drop(op("add_into"));
        }
        drop(op("add_into"));
        let (total_secs, mut ops) = finish_profile()?;
        ops.sort_by(|a, b| a.op.cmp(&b.op));
        let counts: Vec<_> = ops.iter().map(|op| (&*op.op, op.num_calls)).collect();
        assert_eq!(counts, [("add_into", 1), ("attention", 2)]);
        assert!(ops.iter().map(|op| op.secs).sum::<f64>() <= total_secs);
        Ok(())
    }
}
