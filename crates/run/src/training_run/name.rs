//! The name of a run, by which its metrics and checkpoints are known among those of others.

use std::hash::{BuildHasher, RandomState};

use candle_comm::RunConfig;
use candle_core::{Error, Result};
use candle_trainer::TrainingRecord;
use twox_hash::XxHash64;

use crate::args::data::DATE;
use crate::args::logs::LogsOf;
use crate::record::{GLOBAL_BATCH_SIZE, NUM_STEPS};
use crate::training_run::TrainingRun;

/// Settings that may be others when a run starts again: what fewer ranks choose, and the day.
const MAY_CHANGE: [&str; 3] = [GLOBAL_BATCH_SIZE, NUM_STEPS, DATE];

impl TrainingRun<'_> {
    /// What this run is called: as in the checkpoint that it goes on from. One that was to go on and has no checkpoint begins again, and is
    /// the one whose logs are there if that had the same model, data and settings. Any other has a name of its own: a digest of these
    /// and a random number.
    ///
    /// # Errors
    /// A log that cannot be read, or holds something else.
    pub(crate) fn name(&self, record: &TrainingRecord, ranks: &RunConfig) -> Result<String> {
        let (training, is_restart) = (&self.spec.training, ranks.env.num_restarts() > 0);
        if let Some(noted) = training.checkpoints.noted(is_restart) {
            return Ok(noted.run);
        }
        let digest = digest_of(record)?;
        // The first rank has the file, and tells the others.
        if ranks.is_first() && (is_restart || training.checkpoints.resume.is_some()) {
            let begun = training.logs.runs()?.into_iter();
            if let Some(run) = begun.flatten().find(|run| run.starts_with(&digest)) {
                return Ok(run);
            }
        }
        let random = RandomState::new().hash_one(std::process::id());
        Ok(format!("{digest}{random:016x}"))
    }

    /// Whose logs the run writes.
    pub(crate) fn logs_of<'a>(&self, run: &'a str, is_resumed: bool) -> LogsOf<'a> {
        LogsOf {
            run,
            is_resumed,
            overwrites: self.spec.training.output.overwrite,
        }
    }
}

/// Of what a run trains and how, as a name begins with it.
fn digest_of(record: &TrainingRecord) -> Result<String> {
    let mut settings = record.settings.clone();
    settings.retain(|name, _| !MAY_CHANGE.contains(&name.as_str()));
    let all = serde_json::to_vec(&(settings, &record.model)).map_err(Error::wrap)?;
    Ok(format!("{:08x}-", XxHash64::oneshot(0, &all) >> 32))
}
