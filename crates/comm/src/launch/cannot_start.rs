//! What keeps a rank from meeting the others is said once for all of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_launch::{Control, ControlConfig, Error, RankEnv, Result, in_time};

/// How long this rank waits for the others to hear it.
const PATIENCE: Duration = Duration::from_secs(5);

/// What rank 0 gets to show why the run ends: a launcher ends all ranks when the first of them is gone.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What rank 0 needs beyond its patience, to hear those that came and to tell them what all say.
const ANSWER: Duration = Duration::from_secs(4);

/// This rank has gone to meet the others: from then on its failures reach them by [`Control`].
static HAS_MET: AtomicBool = AtomicBool::new(false);

/// All ranks know the same reason why they end, and rank 0 shows it for all.
static IS_SAID_BY_ALL: AtomicBool = AtomicBool::new(false);

/// Reports that this process cannot start, and why. Rank 0 collects reports for 5 s and shows one message by `say`, without naming ranks if
/// all say the same; if they do not, a rank with a reason of its own shows that message too, as rank 0 may be on another host. A rank that
/// cannot reach rank 0, or that has failed since they met, shows its own.
///
/// No call about ranks may follow; it may come after or instead of [`run`](super::run).
pub fn cannot_start(env: &RankEnv, why: &str, say: impl FnOnce(&str)) {
    if env.world_size() == 1 {
        return say(why);
    }
    let of_all = if IS_SAID_BY_ALL.load(Ordering::Acquire) {
        Some(why.to_string())
    } else if HAS_MET.load(Ordering::Acquire) {
        None
    } else {
        told_in_time(env, why)
    };
    match of_all {
        None => say(why),
        Some(of_all) => {
            // All have the same reason, or this rank has one of its own, or it is the one that does not fit the others.
            let is_own = of_all != why || of_all.contains(&format!("rank {} on host ", env.rank()));
            if env.rank() == 0 || is_own {
                say(&of_all);
            }
            // So that all end at about the same time.
            std::thread::sleep(LAST_WORDS);
        }
    }
}

/// Tells the others, and returns what all ranks now know.
fn told_in_time(env: &RankEnv, why: &str) -> Option<String> {
    let limit = match env.rank() {
        0 => PATIENCE + ANSWER,
        _ => PATIENCE,
    };
    let (env, why) = (env.clone(), why.to_string());
    // MPI_Init waits for all ranks, which this one cannot.
    match in_time("cannot-start", limit, move || tell(&env, why))? {
        Err(Error::CannotStart(of_all)) => Some(of_all),
        _ => None,
    }
}

/// Meets the others as they would meet, to say it. An error in any case.
fn tell(env: &RankEnv, why: String) -> Result<()> {
    let config = |master| ControlConfig {
        cannot_start: Some(why),
        join_timeout: PATIENCE,
        ..ControlConfig::at(env, master)
    };
    #[cfg(feature = "mpi")]
    if env.started_by().speaks_mpi() {
        let mpi = crate::MpiConfig::default();
        let met = super::mpi(mpi, |world| {
            // An error in here would end all ranks by MPI_Abort before this one has been heard.
            Ok(super::meeting::meet_over(&world, env, config))
        });
        let met = met
            .flatten()
            .map_err(|error| Error::Join(error.to_string()))?;
        return met.map(drop);
    }
    Control::join(&config(env.master()?)).map(drop)
}

/// From now on this rank's failures reach the others by [`Control`].
pub(super) fn meeting_begins() {
    HAS_MET.store(true, Ordering::Release);
}

/// All ranks know the same reason.
pub(super) fn said_by_all() {
    IS_SAID_BY_ALL.store(true, Ordering::Release);
}

/// An error of joining; notes who says it.
pub(super) fn known(error: Error) -> candle_core::Error {
    if matches!(error, Error::CannotStart(_)) {
        said_by_all();
    }
    candle_core::Error::wrap(error)
}

/// The words for a failed rank, if it is to say any; without, time has passed in which rank 0 says them.
#[cfg(feature = "mpi")]
pub(crate) fn words_of_failed(rank: usize, message: &str) -> Option<String> {
    match (IS_SAID_BY_ALL.load(Ordering::Acquire), rank) {
        (true, 0) => Some(format!("error: {message}\n")),
        (true, _) => {
            std::thread::sleep(LAST_WORDS);
            None
        }
        (false, _) => Some(format!("rank {rank} failed: {message}\n")),
    }
}
