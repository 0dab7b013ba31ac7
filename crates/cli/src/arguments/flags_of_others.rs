//! What people type who know another program, and what it is here.

use std::path::Path;
use std::sync::LazyLock;

use candle_train_run::find;
use clap::{Arg, Command};
use regex::Regex;

/// The flags most typed for transformers' Trainer, TRL, LLaMA-Factory, axolotl, torchtune, unsloth, DeepSpeed and Megatron-LM, which
/// have another name here or do not exist, and one that this program had: in each line names that mean the same, and what a tip says of them.
/// Flags of the same name, and aliases, are not among them.
const TABLE: &str = include_str!("flags_of_others.txt");

/// Subcommands of other programs, and what they are here.
const COMMANDS: [(&str, &str); 8] = [
    (
        "eval evaluate test validate",
        "candle-train finetune --steps 0 --eval-data FILE --output DIR tells the loss of a model on a file",
    ),
    (
        "serve server api webui ui deploy vllm",
        "there is no server here: candle-train export writes a GGUF file for llama.cpp's llama-server and Ollama, and candle-train chat \
         answers in a terminal",
    ),
    (
        "convert quantize gguf",
        "candle-train export writes a model as a GGUF file or with other types",
    ),
    (
        "predict infer inference sample complete run",
        "candle-train generate writes texts",
    ),
    (
        "lora qlora peft",
        "candle-train finetune --lora-rank 16 trains adapters",
    ),
    ("pt", "candle-train finetune trains on plain text, too"),
    ("fuse", "candle-train merge folds an adapter into its model"),
    (
        "dpo kto orpo ppo grpo rm reward",
        "there is no DPO, KTO, PPO or reward model here, only candle-train finetune",
    ),
];

/// The command here that does what a subcommand of another program does, if it is known.
pub(crate) fn tip_of_command(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let mut commands = COMMANDS.iter();
    let (_, tip) = commands.find(|(names, _)| names.split(' ').any(|other| other == name))?;
    Some(tip)
}

/// Guesses the flag that is missing before a word that no command takes: that of a model or of data.
pub(crate) fn tip_of_word(command: &Command, word: &str) -> Option<String> {
    // A model is a folder, or on the hub.
    let is_data = Path::new(word).is_file();
    let is_required = |name: &str| find(command, name).is_some_and(Arg::is_required_set);
    let flag = match command.get_name() {
        _ if word.starts_with('-') => return None,
        _ if is_data && find(command, "data").is_some() => "data",
        _ if is_required("adapter") => "adapter",
        _ => "model",
    };
    find(command, flag).map(|_| format!("a name without a flag is nothing here: --{flag} {word}"))
}

/// The names of each line, and its tip.
fn table() -> impl Iterator<Item = (std::str::SplitWhitespace<'static>, &'static str)> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    let lines = lines.filter_map(|line| line.split_once(": "));
    lines.map(|(names, tip)| (names.split_whitespace(), tip))
}

/// A flag in a tip.
static FLAG: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new("--([a-z0-9-]+)").ok());

/// What the flag of another program is here, if it is known and the command has what the tip names; `name` has no dashes before it.
pub(crate) fn tip(command: &Command, name: &str) -> Option<&'static str> {
    let name = name.replace('_', "-");
    let mut tips =
        table().filter_map(|(mut names, tip)| names.any(|other| other == name).then_some(tip));
    let is_here = |tip: &&'static str| flags_of(tip).all(|flag| find(command, flag).is_some());
    tips.find(is_here)
}

/// The flags that a tip says belong to the command itself.
fn flags_of(tip: &'static str) -> impl Iterator<Item = &'static str> {
    let own = tip.split("; candle-train").next().unwrap_or_default();
    let found = FLAG.iter().flat_map(move |flag| flag.captures_iter(own));
    found
        .filter_map(|found| found.get(1))
        .map(|flag| flag.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::program::command;

    #[test]
    fn every_tip_names_flags_that_exist_and_every_name_is_one_of_others() {
        let command = command();
        let commands: Vec<&Command> = ["finetune", "generate"]
            .iter()
            .filter_map(|name| command.find_subcommand(name))
            .collect();
        assert_eq!(commands.len(), 2);
        let lines = TABLE.lines().filter(|line| !line.is_empty());
        assert_eq!(
            table().count(),
            lines.filter(|line| !line.starts_with('#')).count()
        );
        let mut seen = BTreeSet::new();
        let mut twice = Vec::new();
        for (names, tip) in table() {
            let has = |command: &&&Command| flags_of(tip).all(|flag| find(command, flag).is_some());
            let of_another = commands.iter().find(has).unwrap_or_else(|| panic!("{tip}"));
            for name in names {
                assert!(find(of_another, name).is_none(), "{name} is a flag");
                if !seen.insert(name) {
                    twice.push(name);
                }
            }
        }
        // One of a sequence, one of an answer.
        assert_eq!(twice, ["max-length"]);
    }

    #[test]
    fn commands_and_words_of_others_are_answered() {
        let command = command();
        for (names, tip) in COMMANDS {
            for name in names.split(' ') {
                assert!(command.find_subcommand(name).is_none(), "{name}");
                assert_eq!(tip_of_command(name), Some(tip));
            }
            let named = tip.split("candle-train ").skip(1);
            let named = named.filter_map(|tip| tip.split(' ').next());
            for name in named.filter(|name| *name != "chat") {
                assert!(command.find_subcommand(name).is_some(), "{name}");
            }
        }
        assert_eq!(tip_of_command("no-such-command"), None);
        let tip = |name: &str, word: &str| {
            let command = command.find_subcommand(name).unwrap();
            tip_of_word(command, word).unwrap_or_default()
        };
        assert!(tip("finetune", "org/name").ends_with("--model org/name"));
        assert!(tip("generate", "my-model").ends_with("--model my-model"));
        assert!(tip("preview", "Cargo.toml").ends_with("--data Cargo.toml"));
        assert!(tip("merge", "adapter").ends_with("--adapter adapter"));
        assert_eq!(tip("finetune", "--what"), "");
    }

    #[test]
    fn a_tip_fits_the_command() {
        let command = command();
        let tip = |name, flag| tip(command.find_subcommand(name).unwrap_or(&command), flag);
        assert!(tip("finetune", "max_length").is_some_and(|tip| tip.contains("--seq-len")));
        assert!(tip("generate", "max-length").is_some_and(|tip| tip.contains("--max-new-tokens")));
        assert_eq!(tip("generate", "save-steps"), None);
        assert_eq!(tip("finetune", "no-such-flag"), None);
    }
}
