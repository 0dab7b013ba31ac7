//! Command lines as people bring them from other programs: `--num_train_epochs`, `--bf16 true`, `candle-train chat`.

use std::ffi::{OsStr, OsString};

use clap::{Arg, Command};

use candle_train_run::find;

/// The words of a command line as clap knows them, and names of the switches that are given as false. In names of flags
/// `_` stands for `-`; a switch may be followed by `true` or `false`; and `chat` is `generate --chat`. What a command
/// passes on to another program stays as it is.
pub(crate) fn as_spelled_here(
    whole: &Command,
    mut words: Vec<OsString>,
) -> (Vec<OsString>, Vec<String>) {
    let mut switched_off = Vec::new();
    if words.get(1).is_some_and(|word| word == "chat")
        && whole.find_subcommand("generate").is_some()
    {
        words.splice(1..2, ["generate".into(), "--chat".into()]);
    }
    let (command, place) = meant(whole, &words);
    let mut rest = words.split_off(place).into_iter().peekable();
    let passes_on = command.get_arguments().any(Arg::is_trailing_var_arg_set);
    while let Some(word) = rest.next() {
        let text = word.to_str().unwrap_or_default();
        let is_flag = text.starts_with('-');
        if text == "--" || passes_on && !is_flag {
            words.push(word);
            break;
        }
        let Some(flag) = Flag::of(text) else {
            words.push(word);
            continue;
        };
        let takes_values = |arg: &Arg| arg.get_action().takes_values();
        match find(command, &flag.name) {
            Some(arg) if !takes_values(arg) => {
                let said = match &flag.value {
                    Some(value) => truth(OsStr::new(value)),
                    // What is passed on may be a program of this name.
                    None if passes_on => Some(true),
                    None => {
                        let said = rest.peek().and_then(|next| truth(next));
                        if said.is_some() {
                            rest.next();
                        }
                        Some(said.unwrap_or(true))
                    }
                };
                let name: OsString = format!("--{}", flag.name).into();
                match said {
                    None => words.push(flag.word()),
                    Some(true) => {
                        switched_off.retain(|off| *off != flag.name);
                        words.push(name);
                    }
                    Some(false) => {
                        let given = words.split_off(place);
                        words.extend(given.into_iter().filter(|word| *word != name));
                        switched_off.push(flag.name);
                    }
                }
            }
            known => {
                let is_followed = known.is_some() && flag.value.is_none();
                words.push(flag.word());
                // A value is no flag, unless it looks like one.
                let is_value = |next: &&OsString| !next.to_string_lossy().starts_with("--");
                if is_followed && rest.peek().filter(is_value).is_some() {
                    words.extend(rest.next());
                }
            }
        }
    }
    words.extend(rest);
    (words, switched_off)
}

/// The subcommand that is meant, or the command itself, and where its words begin.
pub(crate) fn meant<'a>(command: &'a Command, words: &[OsString]) -> (&'a Command, usize) {
    match words.get(1).and_then(|word| command.find_subcommand(word)) {
        Some(subcommand) => (subcommand, 2),
        None => (command, 1.min(words.len())),
    }
}

/// A word of a command line that names a flag, perhaps with its value.
struct Flag {
    name: String,
    value: Option<String>,
}

impl Flag {
    fn of(word: &str) -> Option<Self> {
        let flag = word.strip_prefix("--").filter(|flag| !flag.is_empty())?;
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value.to_string())),
            None => (flag, None),
        };
        Some(Self {
            name: name.replace('_', "-"),
            value,
        })
    }

    fn word(&self) -> OsString {
        match &self.value {
            Some(value) => format!("--{}={value}", self.name).into(),
            None => format!("--{}", self.name).into(),
        }
    }
}

/// What a word says that is true or false.
fn truth(word: &OsStr) -> Option<bool> {
    word.to_str()?.to_ascii_lowercase().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::command;

    /// What becomes of a command line.
    fn spelled(line: &str) -> String {
        let words = line.split(' ').map(OsString::from).collect();
        let (words, _) = as_spelled_here(&command(), words);
        let words = words.iter().map(|word| word.to_string_lossy());
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn flags_of_scripts_are_understood() {
        for (typed, here) in [
            (
                "candle-train finetune --num_train_epochs 3.0 --base_dtype=q4k",
                "candle-train finetune --num-train-epochs 3.0 --base-dtype=q4k",
            ),
            (
                "candle-train sft --bf16 True --no_packing false --no-shuffle=true --rslora=False --async",
                "candle-train sft --bf16 --no-shuffle --async",
            ),
            (
                "candle-train finetune --bf16 --lr 1 --bf16 false --seed 3",
                "candle-train finetune --lr 1 --seed 3",
            ),
            // Values stay as they are, also those that look like something else.
            (
                "candle-train finetune --prompt true --data a_b.txt true --output=--x_y --lr -1 --not_there true",
                "candle-train finetune --prompt true --data a_b.txt true --output=--x_y --lr -1 --not-there true",
            ),
            (
                "candle-train chat --model m",
                "candle-train generate --chat --model m",
            ),
            ("candle-train chat", "candle-train generate --chat"),
            // What a launcher starts reads its own words.
            (
                "candle-train launch --nproc_per_node 2 prog --a_b true -- --c_d",
                "candle-train launch --nproc-per-node 2 prog --a_b true -- --c_d",
            ),
            (
                "candle-train launch --nproc-per-node 2 --dry_run true",
                "candle-train launch --nproc-per-node 2 --dry-run true",
            ),
            (
                "candle-train finetune -- --a_b",
                "candle-train finetune -- --a_b",
            ),
            (
                "candle-train finetune --bf16=maybe",
                "candle-train finetune --bf16=maybe",
            ),
        ] {
            assert_eq!(spelled(typed), here);
        }
    }

    #[cfg(unix)]
    #[test]
    fn words_that_are_no_text_pass() {
        use std::os::unix::ffi::OsStringExt;
        let path = OsString::from_vec(vec![b'-', b'-', 0xff]);
        let words = vec![
            "candle-train".into(),
            "finetune".into(),
            "--data".into(),
            path,
        ];
        assert_eq!(as_spelled_here(&command(), words.clone()).0, words);
    }
}
