//! The `candle-train` command.

use std::ffi::OsString;
use std::process::ExitCode;

use candle_launch::RankEnv;
use candle_launch::launcher::{LaunchOptions, become_rank, launch, run_agent};
use clap::Parser;

/// Train language models with candle, on one process or on many.
#[derive(Parser)]
#[command(name = "candle-train", version)]
enum Command {
    /// Start the ranks of a run, on this host or on several, and end them together.
    Launch(Box<LaunchOptions>),
    /// Print who this process is in its run, to try a launcher: `mpirun -n 2 candle-train env`.
    Env,
    /// Runs the ranks of one host; started by `launch`.
    #[command(hide = true)]
    Agent,
    /// Becomes a rank; started by an agent.
    #[command(hide = true)]
    Rank {
        agent_pid: i32,
        program: OsString,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match Command::parse() {
        Command::Launch(options) => launch(&options),
        Command::Env => print_env(),
        Command::Agent => run_agent(),
        Command::Rank {
            agent_pid,
            program,
            args,
        } => {
            eprintln!("candle-train: {}", become_rank(agent_pid, &program, &args));
            ExitCode::from(127)
        }
    }
}

fn print_env() -> ExitCode {
    let env = match RankEnv::from_env() {
        Ok(env) => env,
        Err(error) => {
            eprintln!("candle-train: {error}");
            return ExitCode::FAILURE;
        }
    };
    match env.master() {
        Ok((host, port)) => println!("{env}; the ranks meet at {host}, port {port}"),
        Err(_) if env.world_size() == 1 => println!("{env}"),
        Err(error) => println!("{env}\n{error}"),
    }
    ExitCode::SUCCESS
}
