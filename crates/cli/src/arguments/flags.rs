//! Command lines: flags as people type them, those of a file, and what is wrong with them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use candle_core::Result;
use candle_launch::{RankEnv, without_long_words};
use candle_train_run::{
    Idle, Layer, check_printed, find, in_words, keep_printed, numbers_may_be_negative,
    parse_layers, print_error, print_for_all, print_message, read_table,
};
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, FromArgMatches};
use toml::Table;

use crate::arguments::flags_of_others::{tip, tip_of_command, tip_of_word};
use crate::arguments::spellings::{as_spelled_here, meant};

/// Columns of a line of help, where the terminal has more or there is none.
const MAX_WIDTH: usize = 110;

/// Where values of flags come from that are not on the command line.
#[derive(Default)]
pub(crate) struct Beside {
    /// Sections of a file that `--config` names.
    pub sections: Vec<String>,
    /// What is taken where neither the command line nor the file says.
    pub defaults: Table,
    /// Those of them that hold where `--model` is given, too.
    pub defaults_of_any_model: Table,
}

/// Parses the command line, and ends the program with clap's message if it is wrong.
pub fn parse<T: CommandFactory + FromArgMatches>() -> T {
    parse_command(T::command(), |_| Beside::default(), |_| Vec::new()).0
}

/// As [`parse`], for a command of one's own, with flags of the file that its `--config` names, which comes along, and defaults. A flag that is
/// given on the command line is not taken from the file, nor is one that contradicts it or does nothing beside it.
pub(crate) fn parse_command<T: FromArgMatches>(
    command: Command,
    beside: impl Fn(&str) -> Beside,
    idle: impl Fn(&T) -> Vec<Idle>,
) -> (T, Option<PathBuf>) {
    let command = command.version(env!("CARGO_PKG_VERSION"));
    let settled = |command: Command| {
        let command = numbers_may_be_negative(command);
        command.args_override_self(true).max_term_width(MAX_WIDTH)
    };
    let mut command = settled(command).mut_subcommands(settled);
    // Defaults of arguments that are not built have no text.
    command.build();
    let spelled = as_spelled_here(&command, std::env::args_os().collect());
    let fail = |err| exit_with_message(&in_words(&err), is_training(&command));
    parse_spelled(&command, spelled, beside, idle).unwrap_or_else(fail)
}

fn parse_spelled<T: FromArgMatches>(
    whole: &Command,
    (words, switched_off): (Vec<OsString>, Vec<String>),
    beside: impl Fn(&str) -> Beside,
    idle: impl Fn(&T) -> Vec<Idle>,
) -> Result<(T, Option<PathBuf>)> {
    let (command, place) = meant(whole, &words);
    let typed =
        |name: &str| is_given(name, &words[place..]) || switched_off.iter().any(|off| off == name);
    let Beside {
        sections,
        defaults,
        defaults_of_any_model,
    } = beside(command.get_name());
    let file = find(command, "config").and_then(|_| value_of("--config", &words[place..]));
    let file = file.map(PathBuf::from);
    let mut layers = Vec::new();
    if let Some(path) = &file {
        let table = read_table(path)?;
        let layer = Layer::of(command, &table, &sections);
        layers.push(layer.map_err(|err| with_path(err, path, command))?);
    }
    let has_model = typed("model") || layers.iter().any(|layer| layer.has_flag("model"));
    let defaults = if has_model {
        defaults_of_any_model
    } else {
        defaults
    };
    layers.push(Layer::of(command, &defaults, &sections)?.as_defaults());
    let parse = |more| {
        let mut all = words.clone();
        all.splice::<_, Vec<OsString>>(place..place, more);
        let matches = whole.clone().try_get_matches_from(&all);
        let exit = |err| exit_with_usage(&with_tip(err, whole, &all), is_training(whole));
        let matches = matches.unwrap_or_else(exit);
        let args = T::from_arg_matches(&matches);
        Ok(args.unwrap_or_else(|err| exit_with_usage(&err, is_training(whole))))
    };
    Ok((parse_layers(&mut layers, typed, parse, idle)?, file))
}

/// The error of a file, with its path, and what a flag of another program is here.
fn with_path(err: candle_core::Error, path: &Path, command: &Command) -> candle_core::Error {
    let said = candle_comm::message_of(&err);
    let key = said.split(" is no flag of ").next().unwrap_or_default();
    let said = match tip(command, key) {
        Some(tip) if key != said => {
            let first = said.lines().next().unwrap_or_default();
            format!("{first}\nhint: {tip}")
        }
        _ => said,
    };
    candle_core::Error::msg(format!("{}: {said}", path.display()))
}

/// Whether a flag is among the words.
fn is_given(name: &str, words: &[OsString]) -> bool {
    let flag = format!("--{name}");
    let mut words = words.iter().map(|word| word.to_string_lossy());
    words.any(|word| word == flag || word.starts_with(&format!("{flag}=")))
}

fn value_of(flag: &str, words: &[OsString]) -> Option<OsString> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        match text.split_once('=') {
            Some((name, value)) if name == flag => return Some(value.into()),
            None if text == flag => return words.next().cloned(),
            _ => {}
        }
    }
    None
}

/// The error with what a flag or a subcommand of another program is here, in place of one that is spelled nearly so.
fn with_tip(mut err: clap::Error, whole: &Command, words: &[OsString]) -> clap::Error {
    let kind = match err.kind() {
        ErrorKind::UnknownArgument => ContextKind::InvalidArg,
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => return err,
    };
    let Some(ContextValue::String(unknown)) = err.get(kind) else {
        return err;
    };
    let command = meant(whole, words).0;
    let tip = match unknown.strip_prefix("--") {
        Some(flag) => tip(command, flag.split('=').next().unwrap_or_default()).map(str::to_string),
        None if kind == ContextKind::InvalidSubcommand => {
            tip_of_command(unknown).map(str::to_string)
        }
        None => tip_of_word(command, unknown),
    };
    if let Some(tip) = tip {
        // The usage would have the flag that is spelled nearly so.
        err.remove(ContextKind::SuggestedArg);
        err.remove(ContextKind::SuggestedSubcommand);
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
    let message = err.render().to_string();
    let is_short = without_long_words(&message) == message;
    if is_short && !(err.use_stderr() && is_training && is_one_of_several) {
        if err.use_stderr() {
            err.exit()
        }
        // Help, or the version.
        keep_printed(err.print());
        if let Err(lost) = check_printed() {
            print_error(&lost);
            std::process::exit(1)
        }
        std::process::exit(err.exit_code())
    }
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    exit_with_message(&without_long_words(message.trim_end()), is_training)
}

fn exit_with_message(message: &str, is_training: bool) -> ! {
    match is_training {
        true => print_for_all(message),
        false => print_message(message),
    }
    std::process::exit(2)
}
