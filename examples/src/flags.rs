//! The flags of a program, for itself and to compare with those of the other ranks.

use clap::{CommandFactory, FromArgMatches};

/// Flags that may differ between ranks: where a host has its files (what is in them is compared instead), and its device.
const LOCAL: &[&str] = &["model", "data", "tokenizer", "metrics", "device"];

/// Names and values.
pub type Flags = Vec<(String, String)>;

/// Parses the command line, and ends the program with clap's message if it is wrong. The names and values of all flags come
/// along, those that were not given with their defaults.
pub fn parse<T: CommandFactory + FromArgMatches>() -> (T, Flags) {
    let command = T::command();
    let names: Vec<(String, String)> = command
        .get_arguments()
        .filter_map(|arg| Some((arg.get_id().to_string(), arg.get_long()?.to_string())))
        .filter(|(_, long)| !LOCAL.contains(&long.as_str()))
        .collect();
    let matches = command.get_matches();
    let value = |id: &str| -> String {
        let values = matches.try_get_raw(id).ok().flatten();
        let values = values.into_iter().flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        values.join(" ")
    };
    let flags = names
        .iter()
        .map(|(id, long)| (format!("--{long}"), value(id)))
        .collect();
    match T::from_arg_matches(&matches) {
        Ok(args) => (args, flags),
        Err(error) => error.exit(),
    }
}
