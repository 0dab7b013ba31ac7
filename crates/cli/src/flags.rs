//! The flags of a program, for itself and to compare with those of the other ranks.

use std::any::TypeId;
use std::ffi::OsString;

use candle_core::Result;
use candle_launch::RankEnv;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, FromArgMatches};

use crate::config_file::{effective, meant, with_config, with_free_defaults};
use crate::flags_of_others::tip;
use crate::idle_flags::check;
use crate::output::{in_words, print_for_all, print_message};
use crate::program::FlagDefault;
use crate::spellings::as_spelled_here;

/// Flags that may differ between ranks: where a host has its files (what is in them is compared instead), and its device.
const LOCAL: &[&str] = &[
    "model",
    "adapter",
    "data",
    "eval-data",
    "chat-template",
    "tokenizer",
    "metrics",
    "tensorboard",
    "device",
    "config",
];

/// Columns of a line of help, where the terminal has more or there is none.
const MAX_WIDTH: usize = 110;

/// The flags of a program, or of the subcommand that is run.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// Names and values, those that were not given with their defaults.
    values: Vec<(String, String)>,
    /// Names of those that were given.
    given: Vec<String>,
    /// And of those of them with another value than their default.
    changed: Vec<String>,
    /// All that decide a run, as a file for `--config`.
    pub(crate) config: toml::Table,
}

impl Flags {
    /// Names and values of the flags that all ranks must have alike.
    pub fn shared(&self) -> impl Iterator<Item = (&str, &str)> {
        let values = self.values.iter();
        values.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The value of the flag of this name, with its dashes, if all ranks must have it alike.
    pub(crate) fn value(&self, name: &str) -> Option<&str> {
        let mut values = self.shared();
        values
            .find(|(other, _)| *other == name)
            .map(|(_, value)| value)
    }

    /// Whether the flag of this name, with its dashes, was given a value that is not its default.
    pub(crate) fn is_changed(&self, name: &str) -> bool {
        self.changed.iter().any(|changed| changed == name)
    }

    /// Whether the flag of this name, with its dashes, was given.
    pub fn is_given(&self, name: &str) -> bool {
        self.given.iter().any(|given| given == name)
    }
}

/// Parses the command line, and ends the program with clap's message if it is wrong. The flags, of the subcommand if there is one, come
/// along.
pub fn parse<T: CommandFactory + FromArgMatches>() -> (T, Flags) {
    parse_command(T::command(), &[])
}

/// As [`parse`], for a command of one's own, with those of `defaults` that [depend on another flag](FlagDefault::unless).
pub(crate) fn parse_command<T: FromArgMatches>(
    command: Command,
    defaults: &[FlagDefault],
) -> (T, Flags) {
    let command = command.version(env!("CARGO_PKG_VERSION"));
    let settled = |command: Command| {
        let command = numbers_may_be_negative(command);
        command.args_override_self(true).max_term_width(MAX_WIDTH)
    };
    let mut command = settled(command).mut_subcommands(settled);
    // Defaults of arguments that are not built have no text.
    command.build();
    let spelled = as_spelled_here(&command, std::env::args_os().collect());
    let words = match with_config(&command, spelled) {
        Ok(words) => with_free_defaults(&command, words, defaults),
        Err(err) => exit_with_message(&in_words(&err), is_training(&command)),
    };
    let matches = command
        .try_get_matches_from_mut(&words)
        .unwrap_or_else(|err| {
            exit_with_usage(&with_tip(err, &command, &words), is_training(&command))
        });
    let flags = match matches.subcommand() {
        None => flags(&command, &matches),
        Some((name, matches)) => command
            .find_subcommand(name)
            .map_or_else(|| Ok(Flags::default()), |command| flags(command, matches)),
    };
    let flags =
        flags.unwrap_or_else(|err| exit_with_message(&in_words(&err), is_training(&command)));
    match T::from_arg_matches(&matches) {
        Ok(args) => (args, flags),
        Err(error) => exit_with_usage(&error, is_training(&command)),
    }
}

/// `--lr -1` is a value that is out of range, not a flag `-1`.
fn numbers_may_be_negative(command: Command) -> Command {
    command.mut_args(|arg| {
        // clap does not take -1e-5 for a number.
        let is_real = arg.get_value_parser().type_id() == TypeId::of::<f64>();
        match arg.get_action().takes_values() {
            true if is_real => arg.allow_hyphen_values(true),
            true => arg.allow_negative_numbers(true),
            false => arg,
        }
    })
}

/// The error with what a flag of another program is here, in place of the flag that is spelled nearly so.
fn with_tip(mut err: clap::Error, whole: &Command, words: &[OsString]) -> clap::Error {
    if err.kind() != clap::error::ErrorKind::UnknownArgument {
        return err;
    }
    let Some(ContextValue::String(unknown)) = err.get(ContextKind::InvalidArg) else {
        return err;
    };
    let name = unknown.trim_start_matches("--");
    let name = name.split('=').next().unwrap_or_default();
    if let Some(tip) = tip(meant(whole, words).0, name) {
        // The usage would have the flag that is spelled nearly so.
        err.remove(ContextKind::SuggestedArg);
        err.remove(ContextKind::Usage);
        let tips = vec![StyledStr::from(tip)];
        err.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    err
}

/// Whether the processes that run the command may be ranks of one run.
fn is_training(command: &Command) -> bool {
    let first = std::env::args_os().nth(1).unwrap_or_default();
    let subcommand = command.find_subcommand(first).map(Command::get_name);
    !command.has_subcommands() || matches!(subcommand, Some("finetune" | "pretrain"))
}

/// As clap does with what is wrong on a command line, but once for all ranks.
fn exit_with_usage(err: &clap::Error, is_training: bool) -> ! {
    let is_one_of_several = RankEnv::from_env().is_ok_and(|env| env.world_size() > 1);
    if !(err.use_stderr() && is_training && is_one_of_several) {
        err.exit()
    }
    let message = err.render().to_string();
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    exit_with_message(message.trim_end(), true)
}

fn exit_with_message(message: &str, is_training: bool) -> ! {
    match is_training {
        true => print_for_all(message),
        false => print_message(message),
    }
    std::process::exit(2)
}

/// # Errors
/// A flag that does nothing beside the others.
fn flags(command: &Command, matches: &ArgMatches) -> Result<Flags> {
    let value = |id: &str| -> String {
        let values = matches.try_get_raw(id).ok().flatten();
        let values = values.into_iter().flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        values.join(" ")
    };
    let args = command.get_arguments();
    let names = args.filter_map(|arg| Some((arg.get_id().as_str(), arg.get_long()?)));
    let names: Vec<_> = names.collect();
    let is_given = |id: &str| {
        let source = matches
            .try_contains_id(id)
            .ok()
            .and_then(|_| matches.value_source(id));
        source.is_some_and(|source| source != ValueSource::DefaultValue)
    };
    check(command, matches, is_given)?;
    let given = names.iter().filter(|(id, _)| is_given(id));
    let is_changed = |arg: &&Arg| {
        let default = arg.get_default_values();
        let default: Vec<_> = default
            .iter()
            .map(|value| value.to_string_lossy())
            .collect();
        let id = arg.get_id().as_str();
        is_given(id) && value(id) != default.join(" ")
    };
    let changed = command.get_arguments().filter(is_changed);
    let changed = changed.filter_map(|arg| Some(format!("--{}", arg.get_long()?)));
    let shared = names.iter().filter(|(_, long)| !LOCAL.contains(long));
    Ok(Flags {
        values: shared
            .map(|(id, long)| (format!("--{long}"), value(id)))
            .collect(),
        given: given.map(|(_, long)| format!("--{long}")).collect(),
        changed: changed.collect(),
        config: effective(command, matches, is_given),
    })
}
