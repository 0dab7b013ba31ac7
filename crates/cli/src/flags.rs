//! The flags of a program, for itself and to compare with those of the other ranks.

use std::any::TypeId;

use candle_core::{Error, Result};
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};

use crate::config_file::{effective, with_config};
use crate::output::print_error;

/// Flags that may differ between ranks: where a host has its files (what is in them is compared instead), and its device.
const LOCAL: &[&str] = &[
    "model",
    "data",
    "eval-data",
    "tokenizer",
    "metrics",
    "device",
    "config",
];

/// What the flags of a program are.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// Names and values, but for those that may differ between ranks.
    pub(crate) compared: Vec<(String, String)>,
    /// All of them, as a file for `--config`.
    pub(crate) config: String,
}

/// Parses the command line, and ends the program with clap's message if it is wrong. The names and values of all flags, of the
/// subcommand if there is one, come along, those that were not given with their defaults.
pub fn parse<T: CommandFactory + FromArgMatches>() -> (T, Flags) {
    parse_command(T::command())
}

/// As [`parse`], for a command of one's own.
pub(crate) fn parse_command<T: FromArgMatches>(command: Command) -> (T, Flags) {
    let command = command.version(env!("CARGO_PKG_VERSION"));
    let mut command = numbers_may_be_negative(command).mut_subcommands(numbers_may_be_negative);
    // Defaults of arguments that are not built have no text.
    command.build();
    let words = match with_config(&command, std::env::args_os().collect()) {
        Ok(words) => words,
        Err(err) => exit_at_once(&err),
    };
    let matches = command
        .try_get_matches_from_mut(words)
        .unwrap_or_else(|err| err.exit());
    let flags = match matches.subcommand() {
        None => flags(&command, &matches),
        Some((name, matches)) => command
            .find_subcommand(name)
            .map_or_else(|| Ok(Flags::default()), |command| flags(command, matches)),
    };
    let flags = match flags {
        Ok(flags) => flags,
        Err(err) => exit_at_once(&err),
    };
    match T::from_arg_matches(&matches) {
        Ok(args) => (args, flags),
        Err(error) => error.exit(),
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

/// As clap does with what is wrong on a command line.
fn exit_at_once(err: &Error) -> ! {
    print_error(err);
    std::process::exit(2)
}

fn flags(command: &Command, matches: &ArgMatches) -> Result<Flags> {
    let value = |id: &str| -> String {
        let values = matches.try_get_raw(id).ok().flatten();
        let values = values.into_iter().flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        values.join(" ")
    };
    let names = command.get_arguments();
    let names = names.filter_map(|arg| Some((arg.get_id().as_str(), arg.get_long()?)));
    let compared = names
        .filter(|(_, long)| !LOCAL.contains(long))
        .map(|(id, long)| (format!("--{long}"), value(id)));
    Ok(Flags {
        compared: compared.collect(),
        config: effective(command, matches)?,
    })
}
