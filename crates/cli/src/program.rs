//! The program `candle-train`, and programs that are one of its subcommands with other defaults.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::{Error, Result, bail};
use candle_launch::launcher::{
    LaunchConfig, RendezvousAddress, become_rank, launch, reach, run_agent,
};
use candle_launch::{NEEDS_MPI_EXIT_CODE, RankEnv, before_ending, ignore_file_size_signal};
use candle_parallel::checkpoint::{end_when_a_file_is_cut, remove_leftovers};
use candle_train_run::{
    Finetune, FromCheckpoint, FromScratch, Pretrain, Run, Start, exit_as_rank, exit_with, flat,
    print_line, print_note, written,
};
use clap::builder::{Resettable, StyledStr};
use clap::{Arg, Args, Command, CommandFactory, Parser};
use toml::{Table, Value};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::arguments::flags::{Beside, parse_command};
use crate::arguments::short_help::with_short_help;
use crate::commands::env::print_env;
use crate::commands::export::Export;
use crate::commands::generate::Generate;
use crate::commands::inspect::Inspect;
use crate::commands::merge::Merge;
use crate::commands::preview::Preview;
use crate::commands::schedule::ScheduleCommand;
use crate::pictures::plot::PlotArgs;
use crate::pictures::timeline::TimelineArgs;

/// Train language models with candle, on one process or on many.
#[derive(Parser)]
#[command(name = "candle-train", version, propagate_version = true)]
enum CandleTrain {
    /// Fine-tune a Hugging Face checkpoint on conversations or text
    #[command(visible_aliases = ["train", "sft"])]
    Finetune(Box<Training<FromCheckpoint>>),
    /// Train a small Llama, and its tokenizer, from nothing on text
    Pretrain(Box<Training<FromScratch>>),
    Preview(Box<Preview>),
    Merge(Merge),
    Generate(Box<Generate>),
    /// Start the ranks of a run, on this host or on several, and end them together
    Launch(Box<LaunchConfig>),
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

/// A run, to be done or to be told of.
#[derive(Args)]
struct Training<S: Start> {
    /// Make every check of a start, tell what would be done and what it takes, and do nothing
    ///
    /// Data, layout, steps, the memory of the ranks and room on disk are told, and what keeps the run from being started is the error
    /// that it would end with. Nothing is written. A model's weights need not be there, nor its tokenizer.json, without which the data is not
    /// read; of a model on the hub only configuration and tokenizer are fetched.
    #[arg(long, help_heading = None::<&str>)]
    dry_run: bool,
    /// With --dry-run: print steps, parameters, trained parameters, bits of frozen values and the memory of rank 0 as a JSON object, in the last line
    #[arg(long, requires = "dry_run", help_heading = None::<&str>)]
    json: bool,
    #[command(flatten)]
    run: Run<S>,
}

/// The command line of `candle-train`: its subcommands, and their flags with defaults and help.
pub fn command() -> Command {
    // In their order, which mut_subcommand changes.
    CandleTrain::command().mut_subcommands(|command| match command.get_name() {
        "finetune" => training_command::<FromCheckpoint>(command, &Table::new()),
        "pretrain" => training_command::<FromScratch>(command, &Table::new()),
        _ => command,
    })
}

/// The command of a training run, whose flags in `defaults` need not be given.
fn training_command<S: Start>(command: Command, defaults: &Table) -> Command {
    let config = Arg::new("config")
        .long("config")
        .value_name("FILE")
        .help_heading(None::<&str>)
        .help("Take flags from this TOML file, such as the candle_train.toml of a trained model [default: none]")
        .long_help(
            "Take flags from this TOML file, such as the candle_train.toml of a trained model [default: none]\n\n\
             A line is `lr = 1e-4` or `no-shuffle = true`, in a section such as [optimizer] or in none. Flags of the command line win.",
        );
    let mut all = S::defaults();
    all.extend(defaults.clone());
    let command = command.arg(config).mut_args(|arg| {
        let value = arg.get_long().and_then(|name| all.get(name));
        match (arg.get_long(), value) {
            (_, Some(value)) => with_default(arg, value),
            (Some("model" | "data"), None) => arg.default_value(Resettable::Reset).required(true),
            _ => arg,
        }
    });
    with_short_help(command)
}

/// The flag, whose help names this default in place of the ordinary one.
fn with_default(arg: Arg, value: &Value) -> Arg {
    let value = match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => {
            let values = values.iter().filter_map(Value::as_str);
            values.collect::<Vec<_>>().join(" ")
        }
        Value::Float(number) => written(*number),
        value => value.to_string(),
    };
    let with_default = |help: &StyledStr| {
        let help = help.to_string();
        let (first, more) = help.split_once("\n\n").unwrap_or((&help, ""));
        let first = first.split(" [default: ").next().unwrap_or_default();
        let first = format!("{first} [default: {value}]");
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
    arg.hide_default_value(true)
}

/// What a command takes beside its command line.
fn beside(command: &str) -> Beside {
    let (sections, defaults) = match command {
        FromCheckpoint::COMMAND => (Finetune::sections(), FromCheckpoint::defaults()),
        FromScratch::COMMAND => (Pretrain::sections(), FromScratch::defaults()),
        _ => (Vec::new(), Table::new()),
    };
    Beside {
        sections,
        defaults_of_any_model: defaults.clone(),
        defaults,
    }
}

/// Runs `candle-train` with the arguments of this process.
pub fn candle_train() -> ExitCode {
    let idle = |command: &CandleTrain| match command {
        CandleTrain::Finetune(training) => training.run.idle(),
        CandleTrain::Pretrain(training) => training.run.idle(),
        CandleTrain::Preview(args) => args.idle(),
        CandleTrain::Generate(args) => args.idle(),
        _ => Vec::new(),
    };
    let (command, file) = parse_command(command(), beside, idle);
    end_when_a_file_is_cut();
    let starts_others = matches!(
        command,
        CandleTrain::Launch(_)
            | CandleTrain::Agent { .. }
            | CandleTrain::Reach { .. }
            | CandleTrain::Rank { .. }
    );
    if !starts_others {
        // What others are started with they would ignore, too.
        ignore_file_size_signal();
    }
    // Training does so by itself.
    if let CandleTrain::Merge(_)
    | CandleTrain::Export(_)
    | CandleTrain::Plot(_)
    | CandleTrain::Timeline(_)
    | CandleTrain::Schedule(_) = command
    {
        before_ending(remove_leftovers);
    }
    match command {
        CandleTrain::Finetune(training) => training.run(file),
        CandleTrain::Pretrain(training) => training.run(file),
        CandleTrain::Preview(args) => exit_with(log_to_stderr().and_then(|()| args.run())),
        CandleTrain::Merge(args) => exit_with(args.run()),
        CandleTrain::Generate(args) => match args.ranks.needs_mpi() {
            Ok(true) => ExitCode::from(NEEDS_MPI_EXIT_CODE),
            _ => exit_with(log_to_stderr().and_then(|()| args.run())),
        },
        CandleTrain::Launch(config) => launch(&config),
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
            let error = become_rank(agent_pid, &program, &args);
            print_note(&format!("candle-train: {error}"));
            ExitCode::from(127)
        }
    }
}

/// A program that is `candle-train finetune` or `pretrain` under another name, where `run` says what its flags are that are not given. Where
/// `--model` is given, only what `run` says of the data holds.
pub fn run_with_flags<S: Start>(name: &'static str, run: &Run<S>) -> ExitCode {
    let changed = run.changed().map(|table| {
        let data = table.get("data").cloned().unwrap_or(Table::new().into());
        (table, Table::from_iter([("data".to_string(), data)]))
    });
    let (all, of_data) = match changed {
        Ok(tables) => tables,
        Err(err) => return exit_with(Err(err)),
    };
    let with_own = |table: &Table| {
        let mut flags = S::defaults();
        flags.extend(flat(table));
        flags
    };
    let command = training_command::<S>(
        Training::<S>::augment_args(Command::new(name)),
        &with_own(&all),
    );
    let beside = |_: &str| Beside {
        sections: Run::<S>::sections(),
        defaults: with_own(&all),
        defaults_of_any_model: with_own(&of_data),
    };
    let idle = |training: &Training<S>| training.run.idle();
    let (training, file) = parse_command(command, beside, idle);
    end_when_a_file_is_cut();
    training.run(file)
}

/// Shows events of level INFO and above, or those that `RUST_LOG` names.
fn log_to_stderr() -> Result<()> {
    let filter = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into());
    let filter = filter.try_from_env().or_else(|err| match std::env::var_os(EnvFilter::DEFAULT_ENV) {
        None => Ok(EnvFilter::default().add_directive(LevelFilter::INFO.into())),
        Some(value) => bail!(
            "RUST_LOG is {value:?}: {err}\nhint: expected levels by target, such as debug or candle_data=debug"
        ),
    })?;
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(filter)
        .init();
    Ok(())
}

impl<S: Start> Training<S> {
    fn run(self, file: Option<PathBuf>) -> ExitCode {
        let run = self.run.with_file(file);
        let done = log_to_stderr().and_then(|()| match self.dry_run {
            false => run.train_as_rank(),
            true => {
                let told = run.dry_run_as_rank()?;
                let is_first = RankEnv::from_env().is_ok_and(|env| env.rank() == 0);
                if self.json && is_first {
                    print_line(&serde_json::to_string(&told).map_err(Error::wrap)?);
                }
                Ok(ExitCode::SUCCESS)
            }
        });
        exit_as_rank(done, false)
    }
}
