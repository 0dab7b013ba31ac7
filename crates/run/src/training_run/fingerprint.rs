//! What the ranks of a training run compare when they meet.

use std::path::Path;

use crate::reading::TrainingData;
use crate::record::files_with;
use candle_comm::{Fingerprint, RunConfig};
use candle_core::{Device, Error, Result};

/// The program, its flags, its tokens and the folders of weights that it starts from, each with its flag, of a rank that is one of
/// several processes.
///
/// # Errors
/// The checkpoint's files cannot be read.
pub(crate) fn fingerprint(
    run: &RunConfig,
    flags: &[(String, String)],
    data: &TrainingData,
    folders: &[(&str, Option<&Path>)],
) -> Result<Fingerprint> {
    if run.env.world_size() == 1 {
        return Ok(Fingerprint::default());
    }
    let mut fingerprint = fingerprint_of_program(run, flags)?;
    let samples = &data.samples;
    let weights = format!("{:?}", samples.config().weights);
    fingerprint = fingerprint
        .value("the tokens of --data", samples.tokens().digest())
        .value("the weights of --data", weights);
    if let Some(samples) = &data.eval_samples {
        fingerprint = fingerprint.value("the tokens of --eval-data", samples.tokens().digest());
    }
    let given = folders
        .iter()
        .filter_map(|(flag, dir)| Some((flag, (*dir)?)));
    for (flag, dir) in given {
        for path in files_with(dir, &["json", "safetensors"])? {
            if path.is_file() {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let name = format!("{name} of {flag}");
                fingerprint = fingerprint.file(name, &path).map_err(Error::wrap)?;
            }
        }
    }
    Ok(fingerprint)
}

/// The program, what it chose for itself, and its flags.
///
/// # Errors
/// The program's own file cannot be read.
pub fn fingerprint_of_program(run: &RunConfig, flags: &[(String, String)]) -> Result<Fingerprint> {
    let on_gpus = run.devices.iter().any(Device::is_cuda);
    let mut fingerprint = Fingerprint::of_program()
        .map_err(Error::wrap)?
        .value("the backend", run.backend.to_string())
        .value("the device", if on_gpus { "a GPU" } else { "the CPU" })
        .value("the number of restarts", run.env.num_restarts().to_string());
    for (name, value) in flags {
        fingerprint = fingerprint.value(name, value);
    }
    Ok(fingerprint)
}
