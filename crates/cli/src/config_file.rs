//! `--config FILE`: flags from a TOML file, and the flags of a run as such a file.

use std::any::TypeId;
use std::ffi::OsString;
use std::path::Path;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::read_text_file;
use clap::{Arg, ArgMatches, Command};
use toml::{Table, Value};

use crate::flags_of_others::tip;
use crate::idle_flags::{is_idle, is_idled_by};
use crate::program::FlagDefault;
use crate::spellings::Spelled;

/// The file in a model's folder that says how the model was made.
pub(crate) const CONFIG_FILE: &str = "candle_train.toml";

/// Flags that say nothing about a run, or something that is over when it is run again.
const NOT_STORED: [&str; 11] = [
    "help",
    "version",
    "config",
    "resume",
    "resume-anyway",
    "save-every",
    "save-dir",
    "keep",
    "overwrite",
    "rescue-dir",
    "metrics",
];

/// The words of a command line, and before its flags those of the file that its `--config` names. A flag that is given on the command line is
/// not taken from the file, nor is one that contradicts it or does nothing beside it.
///
/// # Errors
/// A file that cannot be read, a key that is no flag, a value that no flag has.
pub(crate) fn with_config(
    whole: &Command,
    Spelled {
        words,
        switched_off,
    }: Spelled,
) -> Result<Vec<OsString>> {
    let (command, place) = meant(whole, &words);
    let given =
        |name: &str| is_given(name, &words[place..]) || switched_off.iter().any(|off| off == name);
    if !command
        .get_arguments()
        .any(|arg| arg.get_long() == Some("config"))
        || !given("config")
    {
        return Ok(words);
    }
    let Some(path) = value_of("--config", &words[place..]) else {
        return Ok(words);
    };
    let table = read(path.as_ref())?;
    let mut flags = Vec::new();
    for (key, value) in &table {
        let fail = |what: String| -> Result<()> { bail!("{}: {what}", Path::new(&path).display()) };
        let Some(arg) = find(command, key) else {
            let names = command.get_arguments().flat_map(names);
            let names = names.filter(|name| !NOT_STORED[..3].contains(&name.as_str()));
            let nearest = names.max_by(|a, b| {
                let similar = |name: &str| strsim::jaro_winkler(name, &key.replace('_', "-"));
                similar(a).total_cmp(&similar(b))
            });
            let hint = match tip(command, key) {
                Some(tip) => tip.to_string(),
                None => format!("the nearest one is {}", nearest.unwrap_or_default()),
            };
            fail(format!(
                "{key} is no flag of {}\nhint: {hint}",
                command.get_name()
            ))?;
            continue;
        };
        let others = command.get_arguments();
        let others = others.filter(|other| is_typed(other, given));
        let is_overruled = |other: &Arg| contradict(command, arg, other);
        // Of the data and the model in the file.
        let is_of_others = match arg.get_long() {
            Some("date") => given("data") || given("model"),
            Some("columns") => given("data"),
            _ => false,
        };
        if is_of_others || is_typed(arg, given) || others.into_iter().any(is_overruled) {
            continue;
        }
        match words_of(arg, value) {
            Ok(words) => flags.push((arg.get_long().unwrap_or_default(), words)),
            Err(expected) => fail(format!("{key} is {value}; expected {expected}"))?,
        }
    }
    let with = |flags: Vec<(&str, Vec<OsString>)>| {
        let mut all = words.clone();
        all.splice(place..place, flags.into_iter().flat_map(|(_, words)| words));
        all
    };
    let is_typed = |flag: &str| find(command, flag).is_some_and(|arg| is_typed(arg, given));
    // What is wrong with the words is said later.
    if let Ok(matches) = whole.clone().try_get_matches_from(with(flags.clone())) {
        let matches = matches
            .subcommand()
            .map_or(&matches, |(_, matches)| matches);
        flags.retain(|(flag, _)| !is_idled_by(command, matches, flag, is_typed));
    }
    Ok(with(flags))
}

/// The words with those of `defaults` that hold unless another flag is given, where neither it nor the flag itself is, nor one that contradicts
/// that.
pub(crate) fn with_free_defaults(
    command: &Command,
    mut words: Vec<OsString>,
    defaults: &[FlagDefault],
) -> Vec<OsString> {
    let (command, place) = meant(command, &words);
    let given = |name: &str| is_given(name, &words[place..]);
    let is_free = |default: &&FlagDefault| {
        let typed = command.get_arguments().filter(|arg| is_typed(arg, given));
        let rules_out = |arg: &Arg, typed: &Arg| {
            arg.get_id() == typed.get_id() || contradict(command, arg, typed)
        };
        let flag = find(command, default.flag);
        let is_ruled_out =
            flag.is_some_and(|arg| typed.into_iter().any(|typed| rules_out(arg, typed)));
        default.unless.is_some_and(|other| !given(other)) && !is_ruled_out
    };
    let free = defaults.iter().filter(is_free);
    let free = free.map(|default| format!("--{}={}", default.flag, default.value).into());
    let free: Vec<OsString> = free.collect();
    words.splice(place..place, free);
    words
}

/// The subcommand that is meant, or the command itself, and where its words begin.
pub(crate) fn meant<'a>(command: &'a Command, words: &[OsString]) -> (&'a Command, usize) {
    match words.get(1).and_then(|word| command.find_subcommand(word)) {
        Some(subcommand) => (subcommand, 2),
        None => (command, 1.min(words.len())),
    }
}

/// Whether a flag is among the words.
fn is_given(name: &str, words: &[OsString]) -> bool {
    let flag = format!("--{name}");
    let mut words = words.iter().map(|word| word.to_string_lossy());
    words.any(|word| word == flag || word.starts_with(&format!("{flag}=")))
}

/// Whether one of a flag's names is among those that are `given`.
fn is_typed(arg: &Arg, given: impl Fn(&str) -> bool) -> bool {
    names(arg).iter().any(|name| given(name))
}

/// Whether one of the two flags may not be given beside the other.
fn contradict(command: &Command, one: &Arg, other: &Arg) -> bool {
    let names = |one: &Arg, other: &Arg| {
        let others = command.get_arg_conflicts_with(one);
        others.iter().any(|named| named.get_id() == other.get_id())
    };
    names(one, other) || names(other, one)
}

fn value_of(flag: &str, words: &[OsString]) -> Option<OsString> {
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        if text == flag {
            return words.next().cloned();
        }
        if let Some(value) = text
            .strip_prefix(flag)
            .and_then(|rest| rest.strip_prefix('='))
        {
            return Some(value.into());
        }
    }
    None
}

fn read(path: &Path) -> Result<Table> {
    let text = read_text_file(path).map_err(|err| {
        Error::msg(format!(
            "cannot read the configuration {}: {err}",
            path.display()
        ))
    })?;
    text.parse().map_err(|err: toml::de::Error| {
        let line = err
            .span()
            .map(|span| text[..span.start].lines().count().max(1));
        let line = line.map_or(String::new(), |line| format!(", line {line}"));
        Error::msg(format!(
            "{}{line} is no TOML: {}",
            path.display(),
            err.message()
        ))
    })
}

/// The flag that a key names, written with `-` or `_`.
pub(crate) fn find<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    let key = key.replace('_', "-");
    let mut args = command.get_arguments();
    let is_meant = |arg: &&Arg| names(arg).contains(&key);
    args.find(is_meant).filter(|_| key != "config")
}

/// The long names of a flag.
fn names(arg: &Arg) -> Vec<String> {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    let names = arg.get_long().into_iter().chain(aliases);
    names.map(str::to_string).collect()
}

/// A value as words of a command line, or what is expected instead.
fn words_of(arg: &Arg, value: &Value) -> std::result::Result<Vec<OsString>, &'static str> {
    let name = arg.get_long().unwrap_or_default();
    if !arg.get_action().takes_values() {
        return match value {
            Value::Boolean(true) => Ok(vec![format!("--{name}").into()]),
            Value::Boolean(false) => Ok(Vec::new()),
            _ => Err("true or false"),
        };
    }
    let word = |value: &Value| {
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Datetime(date) => date.to_string(),
            _ => return Err("a number or a text"),
        };
        Ok(format!("--{name}={value}").into())
    };
    match value {
        Value::Array(values) => values.iter().map(word).collect(),
        value => Ok(vec![word(value)?]),
    }
}

/// The flags of a command with their values, those that were not given with their defaults, as a file for `--config`. A default that a flag which
/// was given rules out, or that does nothing, is not among them.
pub(crate) fn effective(
    command: &Command,
    matches: &ArgMatches,
    is_given: impl Fn(&str) -> bool,
) -> Table {
    let mut table = Table::new();
    for arg in command.get_arguments() {
        let (id, Some(name)) = (arg.get_id().as_str(), arg.get_long()) else {
            continue;
        };
        let Ok(Some(values)) = matches.try_get_raw(id) else {
            continue;
        };
        let mut given = command
            .get_arguments()
            .filter(|other| is_given(other.get_id().as_str()));
        let is_ruled_out =
            given.any(|given| contradict(command, given, arg)) || is_idle(command, matches, name);
        if NOT_STORED.contains(&name) || is_ruled_out && !is_given(id) {
            continue;
        }
        let values = values.filter_map(|value| value.to_str());
        let mut values: Vec<Value> = values.map(|value| typed(arg, value)).collect();
        let value = match values.len() {
            0 => continue,
            1 => values.remove(0),
            _ => Value::Array(values),
        };
        table.insert(name.to_string(), value);
    }
    table
}

/// The text of a file for `--config`: `flags`, and in their place those that were `taken` by default, such as `--lr 2e-5`.
pub(crate) fn text_of(mut flags: Table, taken: &[String]) -> Result<String> {
    for flag in taken {
        let Some((name, value)) = flag.trim_start_matches("--").split_once(' ') else {
            continue;
        };
        let whole = value.parse().ok().map(Value::Integer);
        let number = whole.or_else(|| value.parse().ok().map(Value::Float));
        let value = number.unwrap_or_else(|| Value::String(value.to_string()));
        flags.insert(name.to_string(), value);
        if name == "global-batch-size" {
            // Another way to say it, which is refused beside it.
            flags.remove("gradient-accumulation-steps");
        }
    }
    toml::to_string(&flags).map_err(Error::wrap)
}

/// The text of a flag's value in the type that the flag has.
fn typed(arg: &Arg, text: &str) -> Value {
    let type_id = arg.get_value_parser().type_id();
    let is = |other: TypeId| type_id == other;
    let is_whole = is(TypeId::of::<usize>()) || is(TypeId::of::<u64>()) || is(TypeId::of::<u8>());
    let number = match is_whole {
        true => text.parse().ok().map(Value::Integer),
        false if is(TypeId::of::<f64>()) => text.parse().ok().map(Value::Float),
        false if !arg.get_action().takes_values() => text.parse().ok().map(Value::Boolean),
        false => None,
    };
    number.unwrap_or_else(|| Value::String(text.to_string()))
}
