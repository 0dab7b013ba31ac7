//! Flags that would do nothing beside the others of a run: they are refused, not ignored.

use candle_core::{Result, bail};
use clap::{ArgMatches, Command};

/// What the flags of a command are, given or by default.
struct Values<'a> {
    command: &'a Command,
    matches: &'a ArgMatches,
}

/// When a flag does nothing.
struct Rule {
    flag: &'static str,
    /// The flags that decide it.
    by: &'static [&'static str],
    is_idle: fn(&Values) -> bool,
    /// What follows "is given".
    why: &'static str,
}

const NO_SAMPLES: &str = "where nothing is sampled\nhint: --prompt names the text that samples continue, and --sample-tokens \
    more than 0 of them";

/// A flag of a parameter server.
const fn of_servers(flag: &'static str) -> Rule {
    Rule {
        flag,
        by: &["strategy"],
        is_idle: |values| !values.has_servers(),
        why: "without --strategy parameter-server",
    }
}

/// A flag that says what replicas divide.
const fn of_replicas(flag: &'static str) -> Rule {
    Rule {
        flag,
        by: &["strategy"],
        is_idle: |values| values.has_servers(),
        why: "beside --strategy parameter-server, whose servers divide the parameters themselves",
    }
}

/// What clap cannot say, as it depends on values. What it can is said beside a flag.
const RULES: [Rule; 20] = [
    Rule {
        flag: "sample-tokens",
        by: &["prompt"],
        is_idle: |values| {
            values.has_samples() == Some(false) && values.number("sample-tokens") != Some(0.0)
        },
        why: NO_SAMPLES,
    },
    Rule {
        flag: "temperature",
        by: &["prompt", "sample-tokens"],
        is_idle: |values| values.has_samples() == Some(false),
        why: NO_SAMPLES,
    },
    Rule {
        flag: "top-p",
        by: &["prompt", "sample-tokens"],
        is_idle: |values| values.has_samples() == Some(false),
        why: NO_SAMPLES,
    },
    Rule {
        flag: "top-p",
        by: &["temperature"],
        is_idle: |values| values.number("temperature") == Some(0.0),
        why: "beside --temperature 0, which always takes the most likely token",
    },
    Rule {
        flag: "min-lr-ratio",
        by: &["lr-schedule"],
        is_idle: |values| values.is_one_of("lr-schedule", &["constant", "constant_with_warmup"]),
        why: "beside --lr-schedule constant, whose rate does not fall",
    },
    Rule {
        flag: "lr-decay-ratio",
        by: &["lr-schedule"],
        is_idle: |values| !values.is_one_of("lr-schedule", &["wsd", "warmup_stable_decay"]),
        why: "without --lr-schedule wsd, whose it is",
    },
    Rule {
        flag: "matmul-precision",
        by: &["dtype", "bf16", "fp16"],
        is_idle: |values| values.is_one_of("dtype", &["bf16", "f16"]),
        why: "beside --dtype bf16 or f16, and is about products of f32",
    },
    Rule {
        flag: "keep",
        by: &["save-dir"],
        is_idle: |values| values.of("save-dir").is_none(),
        why: "without --save-dir, the folder of the checkpoints",
    },
    Rule {
        flag: "mask-history",
        by: &["train-on-prompt"],
        is_idle: |values| values.of("train-on-prompt") == Some("true"),
        why: "beside --train-on-prompt, which learns all messages",
    },
    of_servers("servers"),
    of_servers("async"),
    of_servers("max-staleness"),
    Rule {
        flag: "max-staleness",
        by: &["async"],
        is_idle: |values| values.has_servers() && values.of("async") != Some("true"),
        why: "without --async, and no worker of a synchronous parameter server is ahead of another",
    },
    of_replicas("zero"),
    of_replicas("zero-group"),
    of_replicas("grad-reduce-dtype"),
    of_replicas("quantize-gradients"),
    of_replicas("quantize-weights"),
    of_replicas("tile-linears"),
    of_replicas("no-overlap"),
];

/// Whether a flag with this value would do nothing.
pub(crate) fn is_idle(command: &Command, matches: &ArgMatches, flag: &str) -> bool {
    let values = Values { command, matches };
    let mut rules = RULES.iter().filter(|rule| rule.flag == flag);
    rules.any(|rule| (rule.is_idle)(&values))
}

/// Whether a flag would do nothing because of one for which `is_typed`.
pub(crate) fn is_idled_by(
    command: &Command,
    matches: &ArgMatches,
    flag: &str,
    is_typed: impl Fn(&str) -> bool,
) -> bool {
    let values = Values { command, matches };
    let mut rules = RULES.iter().filter(|rule| rule.flag == flag);
    rules.any(|rule| rule.by.iter().any(|by| is_typed(by)) && (rule.is_idle)(&values))
}

/// An error if a flag for which `is_given` would do nothing.
///
/// # Errors
/// That one.
pub(crate) fn check(
    command: &Command,
    matches: &ArgMatches,
    is_given: impl Fn(&str) -> bool,
) -> Result<()> {
    let values = Values { command, matches };
    for rule in &RULES {
        if values.id(rule.flag).is_some_and(&is_given) && (rule.is_idle)(&values) {
            bail!("--{} is given {}", rule.flag, rule.why);
        }
    }
    Ok(())
}

impl Values<'_> {
    /// The name under which clap has a flag, if the command has that.
    fn id(&self, flag: &str) -> Option<&str> {
        let mut args = self.command.get_arguments();
        let arg = args.find(|arg| arg.get_long() == Some(flag))?;
        Some(arg.get_id().as_str())
    }

    fn of(&self, flag: &str) -> Option<&str> {
        let mut values = self.matches.try_get_raw(self.id(flag)?).ok()??;
        values.next()?.to_str()
    }

    fn is_one_of(&self, flag: &str, names: &[&str]) -> bool {
        self.of(flag).is_some_and(|value| names.contains(&value))
    }

    fn number(&self, flag: &str) -> Option<f64> {
        self.of(flag)?.parse().ok()
    }

    /// Whether the run has a parameter server.
    fn has_servers(&self) -> bool {
        self.is_one_of("strategy", &["parameter-server"])
    }

    /// Whether the run writes samples; `None` of commands that train nothing.
    fn has_samples(&self) -> Option<bool> {
        let num_tokens = self.number("sample-tokens")?;
        Some(num_tokens > 0.0 && self.of("prompt").is_some())
    }
}
