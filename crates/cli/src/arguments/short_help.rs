//! `-h`: what a first run needs; `--help` has everything.

use clap::{Arg, Command};

/// The flags of a first run.
const FIRST: [&str; 25] = [
    "model",
    "data",
    "columns",
    "chat-template",
    "output",
    "overwrite",
    "config",
    "lora-rank",
    "base-dtype",
    "epochs",
    "steps",
    "seq-len",
    "micro-batch-size",
    "global-batch-size",
    "lr",
    "eval-fraction",
    "eval-every",
    "save-dir",
    "save-every",
    "resume",
    "metrics",
    "dp",
    "tp",
    "dtype",
    "recompute",
];

const REST: &str = "--help has all flags.";

const FINETUNE: &str =
    "Example, adapters for a chat model of your own data, and a conversation with it:
  candle-train finetune --model org/name --data chat.jsonl --lora-rank 16 --output adapter
  candle-train generate --model org/name --adapter adapter --chat";

const PRETRAIN: &str = "Example:
  candle-train pretrain --data texts/ --layers 6 --hidden-size 384 --epochs 2 --output model";

/// The command of a training run, with a short help beside the long one.
pub(crate) fn with_short_help(command: Command) -> Command {
    let (example, own): (_, &[&str]) = match command.get_name().starts_with("pretrain") {
        true => (PRETRAIN, &["tokenizer", "hidden-size", "layers"]),
        false => (FINETUNE, &[]),
    };
    let is_first = |arg: &Arg| {
        let name = arg.get_long().unwrap_or_default();
        FIRST.contains(&name) || own.contains(&name)
    };
    command
        .mut_args(|arg| {
            let is_first = is_first(&arg);
            arg.hide_short_help(!is_first)
        })
        .after_help(format!("{example}\n\n{REST}"))
        .after_long_help(example)
}
