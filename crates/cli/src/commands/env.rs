//! `candle-train env`: who this process is in its run.

use std::process::ExitCode;

use candle_launch::RankEnv;
use candle_train_run::{exit_with, print_line, print_note};

/// Prints what the variables of the launcher say.
pub(crate) fn print_env() -> ExitCode {
    let env = match RankEnv::from_env() {
        Ok(env) => env,
        Err(error) => {
            print_note(&format!("candle-train: {error}"));
            return ExitCode::from(candle_launch::WOULD_FAIL_AGAIN_EXIT_CODE);
        }
    };
    print_line(&match env.master() {
        Ok((host, port)) => format!("{env}; the ranks meet at {host}, port {port}"),
        Err(_) if env.world_size() == 1 => env.to_string(),
        Err(error) => format!("{env}\n{error}"),
    });
    exit_with(Ok(()))
}
