//! The flags of a command line as clap knows them, and the values of a TOML table as such flags.

pub(crate) mod defaults;
pub(crate) mod idle;
pub(crate) mod without_effect;

use std::any::TypeId;
use std::ffi::OsString;

use candle_core::{Error, Result, bail};
use clap::{Arg, Args, Command, FromArgMatches};
use toml::{Table, Value};

use crate::flags::idle::Idle;

/// Flags that are of a command line alone, and say nothing of a run.
const OF_COMMAND_LINE: [&str; 5] = ["help", "version", "config", "dry-run", "json"];

/// The flags of a part of a configuration, none of which is required.
pub(crate) fn arguments<A: Args>(name: &'static str) -> Command {
    let command = A::augment_args(Command::new(name));
    let command = command.disable_help_flag(true).no_binary_name(true);
    let mut command = numbers_may_be_negative(command.args_override_self(true));
    // Defaults of arguments that are not built have no text.
    command.build();
    command
}

/// A part of a configuration with its defaults, which are those of its flags.
pub(crate) fn default_of<A: Args>() -> A {
    let matches = arguments::<A>("default").try_get_matches_from([] as [&str; 0]);
    let args = matches.and_then(|matches| A::from_arg_matches(&matches));
    // Cannot happen: a field that is no Option, list or switch has a default in its attribute, and a test makes each part.
    args.expect("a flag that is no Option has a default")
}

/// `--lr -1` is a value that is out of range, not a flag `-1`.
pub fn numbers_may_be_negative(command: Command) -> Command {
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

/// The flag that a key names, written with `-` or `_`.
pub fn find<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    let key = key.replace('_', "-");
    let mut args = command.get_arguments();
    args.find(|arg| names(arg).contains(&key))
}

/// The long names of a flag.
fn names(arg: &Arg) -> Vec<String> {
    let aliases = arg.get_all_aliases().unwrap_or_default();
    let names = arg.get_long().into_iter().chain(aliases);
    names.map(str::to_string).collect()
}

/// Whether one of the two flags may not be given beside the other.
fn contradict(command: &Command, one: &Arg, other: &Arg) -> bool {
    let names = |one: &Arg, other: &Arg| {
        let others = command.get_arg_conflicts_with(one);
        others.iter().any(|named| named.get_id() == other.get_id())
    };
    names(one, other) || names(other, one)
}

/// Whether a flag may not be given beside those of a table.
pub(crate) fn is_contradicted(command: &Command, flag: &str, given: &Table) -> bool {
    let others = given.keys().filter_map(|key| find(command, key));
    find(command, flag).is_some_and(|arg| {
        let mut others = others.filter(|other| other.get_id() != arg.get_id());
        others.any(|other| contradict(command, arg, other))
    })
}

/// Values of flags from one place, such as a file, which go before those of others and after those of a command line.
pub struct Layer<'a> {
    command: &'a Command,
    values: Vec<(&'a Arg, Vec<OsString>)>,
    /// Whether they are defaults, of which one that would do nothing is left out.
    is_default: bool,
}

impl<'a> Layer<'a> {
    /// The flags of `command` that a table has, some of them in `sections`.
    ///
    /// # Errors
    /// A key that is no flag, or is there twice; a value that no flag has.
    pub fn of(command: &'a Command, table: &Table, sections: &[String]) -> Result<Self> {
        let mut layer = Self {
            command,
            values: Vec::new(),
            is_default: false,
        };
        for (key, value) in table {
            match value {
                Value::Table(section) if sections.contains(key) || find(command, key).is_none() => {
                    if !sections.contains(key) {
                        bail!(
                            "[{key}] is no section\nhint: there are {}",
                            sections.join(", ")
                        );
                    }
                    for (key, value) in section {
                        layer.push(key, value)?;
                    }
                }
                value => layer.push(key, value)?,
            }
        }
        Ok(layer)
    }

    /// They are defaults, of which one that would do nothing is left out.
    pub fn as_defaults(self) -> Self {
        Self {
            is_default: true,
            ..self
        }
    }

    fn push(&mut self, key: &str, value: &Value) -> Result<()> {
        let name = self.command.get_name();
        let is_of_run = |name: &str| !OF_COMMAND_LINE.contains(&name);
        let arg = find(self.command, key);
        let Some(arg) = arg.filter(|arg| arg.get_long().is_some_and(is_of_run)) else {
            let names = self.command.get_arguments().flat_map(names);
            let names = names.filter(|name| is_of_run(name));
            let nearest = names.max_by(|a, b| {
                let similar = |name: &str| strsim::jaro_winkler(name, &key.replace('_', "-"));
                similar(a).total_cmp(&similar(b))
            });
            bail!(
                "{key} is no flag of {name}\nhint: the nearest one is {}",
                nearest.unwrap_or_default()
            );
        };
        if self.has(arg) {
            bail!("{key} is there twice");
        }
        match words_of(arg, value) {
            Ok(words) => self.values.push((arg, words)),
            Err(expected) => bail!("{key} is {value}; expected {expected}"),
        }
        Ok(())
    }

    /// Whether it has a value of the flag of this name.
    pub fn has_flag(&self, name: &str) -> bool {
        find(self.command, name).is_some_and(|arg| self.has(arg))
    }

    /// Whether it has a value of a flag.
    fn has(&self, arg: &Arg) -> bool {
        let mut values = self.values.iter();
        values.any(|(own, _)| own.get_id() == arg.get_id())
    }
}

/// The words of layers, the strongest of which is the first, beside flags that are `typed`: a flag is taken from the first one that has it,
/// unless it contradicts one that goes before it.
fn words_of_layers(layers: &[Layer], typed: impl Fn(&str) -> bool) -> Vec<OsString> {
    let mut taken: Vec<&(&Arg, Vec<OsString>)> = Vec::new();
    for (index, layer) in layers.iter().enumerate() {
        let command = layer.command;
        let is_typed = |arg: &Arg| names(arg).iter().any(|name| typed(name));
        let before: Vec<&Arg> = command
            .get_arguments()
            .filter(|arg| is_typed(arg) || layers[..index].iter().any(|layer| layer.has(arg)))
            .collect();
        let given = |name: &str| {
            let mut before = before.iter();
            before.any(|arg| arg.get_long() == Some(name))
        };
        let is_free = |arg: &Arg| {
            // Of the data and the model in the file.
            let is_of_others = match arg.get_long() {
                Some("date") => given("data") || given("model"),
                Some("columns") => given("data"),
                _ => false,
            };
            let is_overruled =
                |other: &&Arg| other.get_id() == arg.get_id() || contradict(command, arg, other);
            !is_of_others && !before.iter().any(is_overruled)
        };
        taken.extend(layer.values.iter().filter(|(arg, _)| is_free(arg)));
    }
    let words = taken.into_iter().flat_map(|(_, words)| words.clone());
    words.collect()
}

/// Leaves a flag that does nothing out of the layers, where one that is `typed` is why, or where it is a default; whether there was one.
fn leave_out(layers: &mut [Layer], idle: &Idle, typed: impl Fn(&str) -> bool) -> bool {
    let is_because = idle.by.iter().any(|by| typed(by)) && !typed(idle.flag);
    let mut is_changed = false;
    for layer in layers {
        if is_because || layer.is_default {
            let before = layer.values.len();
            let is_it = |arg: &Arg| arg.get_long() == Some(idle.flag);
            layer.values.retain(|(arg, _)| !is_it(arg));
            is_changed |= layer.values.len() < before;
        }
    }
    is_changed
}

/// What layers of values say beside flags that are `typed`, the strongest of which is the first: `parse` makes it of their
/// words, and `idle` tells which of its flags do nothing.
///
/// # Errors
/// Those of `parse`; flags that would do nothing.
pub fn parse_layers<T>(
    layers: &mut [Layer],
    typed: impl Fn(&str) -> bool,
    parse: impl Fn(Vec<OsString>) -> Result<T>,
    idle: impl Fn(&T) -> Vec<Idle>,
) -> Result<T> {
    loop {
        let args = parse(words_of_layers(layers, &typed))?;
        let idle = idle(&args);
        let mut some = idle.iter();
        if !some.any(|idle| leave_out(layers, idle, &typed)) {
            Idle::refuse(&idle)?;
            return Ok(args);
        }
    }
}

/// What words alone say.
///
/// # Errors
/// Values that a flag does not take; flags that contradict each other.
pub(crate) fn parse_words<T: FromArgMatches>(command: &Command, words: Vec<OsString>) -> Result<T> {
    let matches = command.clone().try_get_matches_from(words);
    let args = matches.and_then(|matches| T::from_arg_matches(&matches));
    args.map_err(|err| {
        let said = err.render().to_string();
        let said = said.strip_prefix("error: ").unwrap_or(&said);
        let said = said.split("\n\nUsage:").next().unwrap_or_default();
        let said = said.split("\n\nFor more information").next();
        Error::msg(said.unwrap_or_default().trim_end().to_string())
    })
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
