//! The program `candle-train`, and programs that are one of its subcommands with other defaults.

use std::ffi::OsString;
use std::process::ExitCode;

use candle_core::{Result, bail};
use candle_launch::launcher::{RendezvousAddress, become_rank, launch, reach, run_agent};
use clap::builder::StyledStr;
use clap::{Command, CommandFactory, FromArgMatches, Parser};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::env::print_env;
use crate::export::Export;
use crate::finetune::Finetune;
use crate::flags::{Flags, parse_command};
use crate::generate::Generate;
use crate::inspect::Inspect;
use crate::launch::LaunchArgs;
use crate::merge::Merge;
use crate::output::{exit_as_rank, exit_with};
use crate::plot::PlotArgs;
use crate::pretrain::Pretrain;
use crate::preview::Preview;
use crate::schedule::ScheduleCommand;
use crate::short_help::with_short_help;
use crate::timeline::TimelineArgs;

/// Train language models with candle, on one process or on many.
#[derive(Parser)]
#[command(name = "candle-train", version, propagate_version = true)]
enum CandleTrain {
    #[command(visible_aliases = ["train", "sft"])]
    Finetune(Box<Finetune>),
    Pretrain(Box<Pretrain>),
    Preview(Box<Preview>),
    Merge(Merge),
    Generate(Box<Generate>),
    Launch(Box<LaunchArgs>),
    Plot(PlotArgs),
    Timeline(TimelineArgs),
    Schedule(ScheduleCommand),
    Inspect(Inspect),
    Export(Export),
    /// Print who this process is in its run, to try a launcher: `mpirun -n 2 candle-train env`
    Env,
    /// Runs the ranks of one host; started by `launch`
    #[command(hide = true)]
    Agent {
        /// Where the front listens, if it is not at the other end of stdin and stdout
        front: Option<String>,
    },
    /// Stands for ssh to a host that has called the front; started by `launch`
    #[command(hide = true)]
    Reach {
        front: String,
        port: u16,
        host: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Becomes a rank; started by an agent
    #[command(hide = true)]
    Rank {
        agent_pid: i32,
        program: OsString,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// A subcommand that trains.
pub trait TrainingCommand: CommandFactory + FromArgMatches {
    /// Does what the flags say; `flags` are their names and values, to compare with those of the other ranks. The exit code tells if a
    /// signal stopped it before the end, or a failure, which has been told.
    ///
    /// # Errors
    /// What keeps the first step from being done.
    fn run(&self, flags: Flags) -> Result<ExitCode>;
}

/// What a flag is where it is not given.
pub struct FlagDefault {
    /// The flag, without its dashes.
    pub flag: &'static str,
    /// Its value.
    pub value: &'static str,
    /// What `--help` calls it.
    pub description: &'static str,
    /// Another flag, without its dashes, with which this one has its ordinary default.
    pub unless: Option<&'static str>,
}

/// The command line of `candle-train`: its subcommands, and their flags with defaults and help.
pub fn command() -> Command {
    let command = CandleTrain::command();
    let of_pretrain = Pretrain::defaults();
    // In their order, which mut_subcommand changes.
    command.mut_subcommands(|command| match command.get_name() {
        "finetune" => with_short_help(command),
        "pretrain" => with_short_help(with_defaults(command, &of_pretrain)),
        _ => command,
    })
}

/// Runs `candle-train` with the arguments of this process.
pub fn candle_train() -> ExitCode {
    let of_pretrain = Pretrain::defaults();
    let is_pretrain = std::env::args_os()
        .nth(1)
        .is_some_and(|word| word == "pretrain");
    let defaults = if is_pretrain { &of_pretrain[..] } else { &[] };
    let (command, flags) = parse_command::<CandleTrain>(command(), defaults);
    match command {
        CandleTrain::Finetune(args) => train(&*args, flags),
        CandleTrain::Pretrain(args) => train(&*args, flags),
        CandleTrain::Preview(args) => exit_with(log_to_stderr().and_then(|()| args.run(&flags))),
        CandleTrain::Merge(args) => args.run(),
        CandleTrain::Generate(args) => exit_with(log_to_stderr().and_then(|()| args.run())),
        CandleTrain::Launch(args) => launch(&(*args).into()),
        CandleTrain::Plot(args) => exit_with(args.run()),
        CandleTrain::Timeline(args) => exit_with(args.run()),
        CandleTrain::Schedule(args) => exit_with(args.run()),
        CandleTrain::Inspect(args) => exit_with(log_to_stderr().and_then(|()| args.run())),
        CandleTrain::Export(args) => exit_with(log_to_stderr().and_then(|()| args.run())),
        CandleTrain::Env => print_env(),
        CandleTrain::Agent { front } => run_agent(front.as_deref()),
        CandleTrain::Reach {
            front,
            port,
            host,
            words,
        } => reach(&RendezvousAddress { host: front, port }, &host, &words),
        CandleTrain::Rank {
            agent_pid,
            program,
            args,
        } => {
            eprintln!("candle-train: {}", become_rank(agent_pid, &program, &args));
            ExitCode::from(127)
        }
    }
}

/// Runs a program that is a subcommand of `candle-train` under another name, whose flags in `defaults` need not be given.
pub fn run_with_defaults<T: TrainingCommand>(
    name: &'static str,
    defaults: &[FlagDefault],
) -> ExitCode {
    let command = with_defaults(T::command().name(name), defaults);
    let (args, flags) = parse_command::<T>(with_short_help(command), defaults);
    train(&args, flags)
}

/// As [`crate::parse`], where the flags in `defaults` have these defaults.
pub fn parse_with_defaults<T: CommandFactory + FromArgMatches>(
    defaults: &[FlagDefault],
) -> (T, Flags) {
    parse_command(with_defaults(T::command(), defaults), defaults)
}

fn with_defaults(command: Command, defaults: &[FlagDefault]) -> Command {
    defaults.iter().fold(command, |command, default| {
        // The id of an argument is the name of its field.
        command.mut_arg(default.flag.replace('-', "_"), |arg| {
            // Help may name the ordinary default.
            let with_default = |help: &StyledStr| {
                let help = help.to_string();
                let (first, more) = help.split_once("\n\n").unwrap_or((&help, ""));
                let first = first.split(" [default: ").next().unwrap_or_default();
                let first = format!("{first} [default: {}]", default.description);
                match more {
                    "" => first,
                    more => format!("{first}\n\n{more}"),
                }
            };
            let short = arg.get_help().map(with_default).unwrap_or_default();
            let long = arg.get_long_help().map(with_default);
            let arg = match long {
                Some(long) => arg.help(short).long_help(long),
                None => arg.help(short),
            };
            let arg = arg.hide_default_value(true);
            match default.unless {
                None => arg.required(false).default_value(default.value),
                // What else is given is known when the words are.
                Some(_) => arg,
            }
        })
    })
}

/// Shows events of level INFO and above, or those that `RUST_LOG` names.
fn log_to_stderr() -> Result<()> {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into());
    let filter = filter.try_from_env().or_else(|err| match std::env::var_os(EnvFilter::DEFAULT_ENV) {
        None => Ok(EnvFilter::default().add_directive(LevelFilter::INFO.into())),
        Some(value) => bail!(
            "RUST_LOG is {value:?}: {err}\nhint: expected levels by target, such as debug or candle_train=debug"
        ),
    })?;
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(filter)
        .init();
    Ok(())
}

fn train(command: &impl TrainingCommand, flags: Flags) -> ExitCode {
    exit_as_rank(log_to_stderr().and_then(|()| command.run(flags)), false)
}
