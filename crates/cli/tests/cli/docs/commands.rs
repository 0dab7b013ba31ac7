//! Commands that the pages show are commands that there are.

use std::fs;
use std::process::{Command, Stdio};

use crate::cli::folder::fixture;

use super::pages::{pages, read, split};

/// The lines of a page's blocks of commands, each whole.
fn command_lines(page: &str) -> Vec<String> {
    let (blocks, _) = split(page);
    let shown = |language: &str| matches!(language, "" | "sh" | "text");
    let mut lines = Vec::new();
    for block in blocks.iter().filter(|block| shown(&block.language)) {
        let text = block.text.replace("\\\n", " ");
        lines.extend(text.lines().map(String::from));
    }
    lines
}

/// The words of a line that a shell would give to a program.
fn words(line: &str) -> Vec<String> {
    let words = shlex::split(line).unwrap_or_default();
    let ends = |word: &String| matches!(word.as_str(), "<" | ">" | "|" | "&&" | ";");
    words.into_iter().take_while(|word| !ends(word)).collect()
}

/// The arguments of each `candle-train` in a line; `launch` has another one behind it. What is left out, as `..`, is no command.
fn of_candle_train(line: &str) -> Vec<Vec<String>> {
    let mut words = words(line);
    if words.iter().any(|word| word == "..") {
        return Vec::new();
    }
    if words.starts_with(&["cargo".into(), "run".into()]) {
        return of_example(&words).into_iter().collect();
    }
    if let Some(place) = words.iter().position(|word| word == "candle-train") {
        // Variables, a prompt of a shell, or another launcher may be in front.
        let is_first = words[..place]
            .iter()
            .all(|word| word.contains('=') || word.ends_with('$') || word.starts_with('-'));
        let is_launched = matches!(words[0].as_str(), "mpirun" | "srun" | "torchrun");
        if !is_first && !is_launched {
            return Vec::new();
        }
        words.drain(..place);
    }
    let starts = (0..words.len()).filter(|&index| words[index] == "candle-train");
    starts.map(|start| words[start..].to_vec()).collect()
}

/// The example that fine-tunes takes the flags of `finetune`, and has a model and data by itself.
fn of_example(words: &[String]) -> Option<Vec<String>> {
    let example = words.iter().position(|word| word == "--example")?;
    if words.get(example + 1)? != "finetune_llama" {
        return None;
    }
    let flags = words.iter().skip_while(|word| *word != "--").skip(1);
    let mut args = vec!["candle-train".to_string(), "finetune".to_string()];
    args.extend(flags.cloned());
    for flag in ["--model", "--data"] {
        if !args.iter().any(|arg| arg == flag) {
            args.extend([flag.to_string(), "bundled".to_string()]);
        }
    }
    Some(args)
}

/// What clap finds wrong with a command; help that is asked for is not.
fn fault(command: &clap::Command, args: &[String]) -> Option<String> {
    match command.clone().try_get_matches_from(args) {
        Err(err) if err.use_stderr() => Some(format!("{}\n{err}", args.join(" "))),
        _ => None,
    }
}

#[test]
fn commands_of_the_pages_are_what_the_program_takes() {
    let command = candle_train_cli::command();
    let mut faults = Vec::new();
    for page in pages() {
        let mut count = 0;
        for line in command_lines(&read(&page)) {
            for args in of_candle_train(&line) {
                count += 1;
                faults.extend(fault(&command, &args).map(|fault| format!("{page}: {fault}")));
            }
        }
        if matches!(page.as_str(), "README.md" | "docs/long-runs.md") {
            assert!(count >= 5, "{page}: {count}");
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The README's way from a conversation to a model, with a model of a few kilobytes in place of the one on the hub, which learns at a higher rate.
#[test]
fn the_commands_of_the_readme_train_what_one_can_see() {
    let lines = command_lines(&read("README.md"));
    let begin = lines
        .iter()
        .position(|line| line == "cat > chat.jsonl <<'END'");
    let lines = &lines[begin.unwrap() + 1..];
    let end = lines.iter().position(|line| line == "END").unwrap();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat.jsonl"), lines[..end].join("\n")).unwrap();
    let small = fixture("gqa/model").display().to_string();
    let mut done = Vec::new();
    for line in &lines[end + 1..] {
        for args in of_candle_train(line).into_iter().take(1) {
            let args = args.into_iter().skip(1);
            let args = args.map(|arg| match arg.as_str() {
                "HuggingFaceTB/SmolLM2-135M" => small.clone(),
                "1e-3" => "1e-2".to_string(),
                _ => arg,
            });
            let args: Vec<String> = args.collect();
            let ended = Command::new(env!("CARGO_BIN_EXE_candle-train"))
                .args(&args)
                .current_dir(dir.path())
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let [out, err] =
                [&ended.stdout, &ended.stderr].map(|text| String::from_utf8_lossy(text));
            assert!(ended.status.success(), "{args:?}\n{out}{err}");
            if args[0] == "generate" {
                let (_, answer) = line.split_once("# ").unwrap();
                // The template's end of a turn is no token of this model, which goes on.
                assert!(out.starts_with(answer), "{out}");
            }
            done.push(args[0].clone());
        }
        if done.last().is_some_and(|last| last == "export") {
            break;
        }
    }
    assert_eq!(done, ["preview", "finetune", "merge", "generate", "export"]);
}

#[test]
fn what_is_wrong_with_a_command_is_found() {
    let command = candle_train_cli::command();
    let faults = |line: &str| -> Vec<bool> {
        let found = of_candle_train(line);
        let found = found.iter().map(|args| fault(&command, args).is_some());
        found.collect()
    };
    let data = "--model a --data b";
    for (line, expected) in [
        (
            format!("candle-train finetune {data}  # and so on"),
            vec![false],
        ),
        (
            format!("candle-train finetune {data} --no-such-flag"),
            vec![true],
        ),
        (format!("candle-train finetune {data} --zero 7"), vec![true]),
        ("candle-train finetune --model a".to_string(), vec![true]),
        ("candle-train no-such-command".to_string(), vec![true]),
        (
            format!("candle-train launch --nproc-per-node 2 candle-train finetune {data} --tp no"),
            vec![false, true],
        ),
        (
            "cargo run --release --example finetune_llama".to_string(),
            vec![false],
        ),
        (
            "cargo run --release --example finetune_llama -- --tp x".to_string(),
            vec![true],
        ),
        ("candle-train finetune ..".to_string(), vec![]),
        ("pkill -9 candle-train".to_string(), vec![]),
    ] {
        assert_eq!(faults(&line), expected, "{line}");
    }
}
