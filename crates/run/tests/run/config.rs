//! A run as flags, as TOML and as a value.

use candle_train_run::{Finetune, Pretrain, Run, Start, find};
use clap::{Args, Command};
use toml::{Table, Value};

/// A value of each flag of a run that is not its default; those that may not be given together in groups of their own.
fn values() -> Vec<(&'static str, &'static str)> {
    vec![
        ("data", "a.jsonl"),
        ("columns", "prompt=question"),
        ("chat-template", "chatml"),
        ("chat-template-kwargs", "{\"enable_thinking\":false}"),
        ("date", "2026-01-31"),
        ("micro-batch-size", "3"),
        ("global-batch-size", "6"),
        ("gradient-accumulation-steps", "5"),
        ("per-device-train-batch-size", "2"),
        ("batch-ramp", "3,3,100"),
        ("seq-len", "77"),
        ("overlong", "drop"),
        ("no-packing", "true"),
        ("no-document-mask", "true"),
        ("train-on-prompt", "true"),
        ("mask-history", "true"),
        ("keep-argument-strings", "true"),
        ("steps", "7"),
        ("max-secs", "8"),
        ("epochs", "2.5"),
        ("no-shuffle", "true"),
        ("seed", "9"),
        ("freeze", "layers\\.[0-3]"),
        ("lr", "0.0005"),
        ("lr-schedule", "wsd"),
        ("lr-decay-ratio", "0.3"),
        ("min-lr-ratio", "0.25"),
        ("warmup-ratio", "0.5"),
        ("warmup-steps", "4"),
        ("weight-decay", "0.125"),
        ("adam-beta1", "0.5"),
        ("adam-beta2", "0.75"),
        ("adam-eps", "1e-9"),
        ("max-grad-norm", "2"),
        ("loss-scale-init", "128"),
        ("loss-scale-window", "10"),
        ("max-loss-ratio", "3"),
        ("stop-on-divergence", "true"),
        ("eval-data", "b.jsonl:0.5"),
        ("eval-fraction", "0.1"),
        ("eval-every", "3"),
        ("patience", "2"),
        ("save-every", "5"),
        ("save-dir", "saves"),
        ("keep", "3"),
        ("resume", "latest"),
        ("resume-anyway", "true"),
        ("metrics", "m.jsonl"),
        ("tensorboard", "tb"),
        ("trace", "t.json"),
        ("trace-steps", "3..9"),
        ("output", "out"),
        ("save-dtype", "bf16"),
        ("overwrite", "true"),
        ("export-gguf", "q8_0"),
        ("rescue-dir", "rescue"),
        ("tp", "2"),
        ("pp", "3"),
        ("dp", "4"),
        ("zero", "3"),
        ("zero-group", "2"),
        ("zero-secondary", "2"),
        ("grad-reduce-dtype", "bf16"),
        ("quantize-gradients", "int8"),
        ("quantize-weights", "int8"),
        ("tile-linears", "2"),
        ("no-overlap", "true"),
        ("schedule", "zb-h1"),
        ("virtual-stages", "2"),
        ("pipeline-layout", "3,4,4"),
        ("pipeline-prefetch", "2"),
        ("sequence-parallel", "true"),
        ("cp", "2"),
        ("cp-method", "all-gather"),
        ("ulysses", "2"),
        ("recompute", "full"),
        ("pack-weights", "on"),
        ("dtype", "bf16"),
        ("offload", "params,optimizer"),
        ("offload-dir", "scratch"),
        ("strategy", "parameter-server"),
        ("servers", "2"),
        ("async", "true"),
        ("max-staleness", "4"),
        ("backend", "local"),
        ("device", "cpu"),
        ("check-collectives", "true"),
        ("half-sums", "native"),
        ("deterministic", "true"),
        ("matmul-precision", "high"),
        ("deadline", "60"),
        ("rank-timeout", "7"),
        ("prompt", "once\nupon \"a\" time"),
        ("sample-tokens", "33"),
        ("temperature", "0.75"),
        ("top-p", "0.5"),
    ]
}

pub(super) fn of_finetune() -> Vec<(&'static str, &'static str)> {
    let own = [
        ("model", "org/name@main"),
        ("rope-scaling", "yarn:4.5"),
        ("lora-rank", "8"),
        ("lora-alpha", "32"),
        ("lora-dropout", "0.25"),
        ("lora-targets", "q_proj"),
        ("rslora", "true"),
        ("base-dtype", "q4k"),
        ("adapter", "adapter"),
    ];
    [values(), own.into()].concat()
}

fn of_pretrain() -> Vec<(&'static str, &'static str)> {
    let own = [
        ("tokenizer", "tok"),
        ("vocab-size", "99"),
        ("hidden-size", "64"),
        ("intermediate-size", "96"),
        ("layers", "3"),
        ("heads", "2"),
        ("kv-heads", "1"),
        ("max-positions", "64"),
        ("untied", "true"),
    ];
    [values(), own.into()].concat()
}

/// Flags that say the same as another one.
const OTHER_WORDS: [&str; 2] = ["bf16", "fp16"];

/// Flags without which another one would be refused.
const COMPANIONS: &[(&str, &[(&str, &str)])] = &[
    ("sample-tokens", &[("prompt", "a")]),
    ("temperature", &[("prompt", "a")]),
    ("top-p", &[("prompt", "a")]),
    ("lr-decay-ratio", &[("lr-schedule", "wsd")]),
    ("keep", &[("save-dir", "s")]),
    ("servers", &[("strategy", "parameter-server")]),
    ("async", &[("strategy", "parameter-server")]),
    (
        "max-staleness",
        &[("strategy", "parameter-server"), ("async", "true")],
    ),
    ("trace-steps", &[("trace", "t")]),
];

pub(super) fn value(text: &str) -> Value {
    match text {
        "true" => Value::Boolean(true),
        text => Value::String(text.to_string()),
    }
}

fn flags<S: Start>() -> Command {
    Run::<S>::augment_args(Command::new("run"))
}

/// Of a run with one flag: the same comes back from its own table, its text, and the words of a command line.
fn comes_back<S: Start>(flag: &str, text: &str) {
    let mut table = Table::from_iter([(flag.to_string(), value(text))]);
    let companions = COMPANIONS.iter().filter(|(of, _)| *of == flag);
    for (name, text) in companions.flat_map(|(_, companions)| *companions) {
        table.insert(name.to_string(), value(text));
    }
    let run = Run::<S>::from_table(&table).unwrap_or_else(|err| panic!("{flag}: {err}"));
    let all = run.to_table().unwrap();
    assert_ne!(all, Run::<S>::default().to_table().unwrap(), "{flag}");
    let text = run.to_toml().unwrap();
    let again: Run<S> = toml::from_str(&text).unwrap_or_else(|err| panic!("{text}: {err}"));
    assert_eq!(again.to_table().unwrap(), all, "{text}");
    assert_eq!(again.to_toml().unwrap(), text);
    // Nothing is written but what was said.
    let written: Table = text.parse().unwrap();
    let count = |table: &Table| -> usize {
        let values = table.values();
        let lens = values.map(|value| value.as_table().map_or(1, Table::len));
        lens.sum()
    };
    assert!(count(&written) <= table.len(), "{text}");
}

#[test]
fn every_flag_is_a_field_and_comes_back_from_its_text() {
    for (flag, text) in of_finetune() {
        comes_back::<candle_train_run::FromCheckpoint>(flag, text);
    }
    for (flag, text) in of_pretrain() {
        comes_back::<candle_train_run::FromScratch>(flag, text);
    }
    // And there are no others.
    let names = |command: &Command| -> Vec<String> {
        let names = command.get_arguments().filter_map(|arg| arg.get_long());
        names.map(str::to_string).collect()
    };
    let mut known = of_finetune()
        .into_iter()
        .map(|(flag, _)| flag)
        .collect::<Vec<_>>();
    known.extend(of_pretrain().into_iter().map(|(flag, _)| flag));
    let of_finetune = names(&flags::<candle_train_run::FromCheckpoint>());
    for name in of_finetune
        .iter()
        .chain(&names(&flags::<candle_train_run::FromScratch>()))
    {
        let is_known = known.contains(&name.as_str()) || OTHER_WORDS.contains(&name.as_str());
        assert!(is_known, "{name}");
    }
}

/// Pairs of flags at random, of which each is free to contradict the other: what is accepted comes back.
#[test]
fn what_is_accepted_together_comes_back_together() {
    let all = of_finetune();
    let (mut state, mut accepted, mut refused) = (7u64, 0, 0);
    let mut next = |below: usize| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for _ in 0..60 {
        let chosen: Vec<_> = (0..1 + next(9)).map(|_| all[next(all.len())]).collect();
        let table: Table = chosen
            .iter()
            .map(|(flag, text)| (flag.to_string(), value(text)))
            .collect();
        match Finetune::from_table(&table) {
            Err(err) => {
                let said = err.to_string();
                assert!(said.contains("--") && !said.contains("Usage"), "{said}");
                refused += 1;
            }
            Ok(run) => {
                let text = run.to_toml().unwrap();
                let again = Finetune::from_table(&text.parse().unwrap()).unwrap();
                assert_eq!(again.to_table().unwrap(), run.to_table().unwrap(), "{text}");
                accepted += 1;
            }
        }
    }
    assert!(accepted > 10 && refused > 10, "{accepted} {refused}");
}

#[test]
fn a_builder_says_what_flags_say() {
    let built = Finetune::new("org/name")
        .data("chat.jsonl")
        .lora(16)
        .epochs(2);
    let text = built.to_toml().unwrap();
    let want = "model = \"org/name\"\n\n[adapters]\nlora-rank = 16\n\n[batches]\nepochs = 2.0\n\n[data]\ndata = [\"chat.jsonl\"]\n";
    assert_eq!(text, want);
    // As the flags of a command line, in no section.
    let flat = "model = 'org/name'\nlora_rank = 16\nepochs = 2\ndata = 'chat.jsonl'\n";
    let read: Finetune = toml::from_str(flat).unwrap();
    assert_eq!(read.to_toml().unwrap(), text);
    // A new model is small.
    let new = Pretrain::new();
    assert_eq!(new.training.optimizer.lr, Some(1e-3));
    assert_eq!(new.to_toml().unwrap(), "");
}

#[test]
fn what_is_no_run_is_refused_with_the_key() {
    for (text, parts) in [
        (
            "[optimizer]\nlearning = 1",
            &["learning is no flag of finetune", "nearest"][..],
        ),
        (
            "[optimiser]\nlr = 1",
            &["[optimiser] is no section", "optimizer"],
        ),
        ("lr = 1\n[optimizer]\nlr = 2", &["lr is there twice"]),
        ("lr = -1", &["'-1'", "--lr", "a number >= 0"]),
        ("[layout]\nschedule = 'zigzag'", &["'zigzag'", "1f1b"]),
        (
            "epochs = 1\nsteps = 2",
            &["--epochs", "cannot be used with", "--steps"],
        ),
        (
            "temperature = 0.7",
            &["--temperature is given where nothing is sampled"],
        ),
        ("no-shuffle = 'yes'", &["expected true or false"]),
    ] {
        let table: Table = text.parse().unwrap();
        let said = Finetune::from_table(&table).unwrap_err().to_string();
        for part in parts {
            assert!(said.contains(part), "{part:?} is not in {said:?}");
        }
    }
}

/// Where a host has its files, and its devices, is its own matter.
#[test]
fn what_ranks_compare_is_the_run_without_what_is_local() {
    let run = |extra: &str| -> Finetune {
        let text = format!("model = 'm'\ndata = 'd'\nlr = 0.5\n{extra}");
        toml::from_str(&text).unwrap()
    };
    let shared = |extra: &str| run(extra).shared().unwrap();
    let other = "device = 'cpu'\nmetrics = 'm.jsonl'\ntensorboard = 't'\neval-data = 'e'\nchat-template = 'c'\n";
    assert_eq!(shared(""), shared(other));
    for extra in [
        "seed = 1",
        "output = 'o'",
        "tp = 2",
        "lora-rank = 4",
        "bf16 = true",
    ] {
        assert_ne!(shared(""), shared(extra), "{extra}");
    }
    let value = |name: &str| {
        let shared = shared("tp = 2");
        shared
            .into_iter()
            .find(|(other, _)| other == name)
            .unwrap()
            .1
    };
    assert_eq!(
        [
            value("--lr"),
            value("--tp"),
            value("--dp"),
            value("--model")
        ],
        ["0.5", "2", "", ""]
    );
    let command = flags::<candle_train_run::FromCheckpoint>();
    assert!(
        shared("")
            .iter()
            .all(|(name, _)| find(&command, &name[2..]).is_some())
    );
}
