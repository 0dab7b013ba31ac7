//! A temporary folder with a model, a text and an output folder that holds an earlier checkpoint.

use std::fs;
use std::path::{Path, PathBuf};

use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use super::folder::{
    Snapshot, Tensors, copy_folder, edit_json, edit_tensors, fixture, names, snapshot,
};
use super::program::{Outcome, Program};

/// What is wrong with a model of which only a dry run can be made.
pub const NO_WEIGHTS: &str = "has neither model.safetensors nor";

/// `candle-train` with this subcommand.
pub fn candle_train(subcommand: &'static str) -> Program {
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_candle-train"));
    Program::new(binary, Some(subcommand))
}

pub struct Workspace {
    dir: TempDir,
    before: Snapshot,
}

impl Workspace {
    /// With the fixture `gqa`: 4 heads, 2 key/value heads, 4 layers, vocabulary 307, one file of f32 weights.
    pub fn new() -> Self {
        Self::with_model("gqa")
    }

    pub fn with_model(name: &str) -> Self {
        let dir = TempDir::new().unwrap();
        let path = dir.path();
        copy_folder(&fixture(name).join("model"), &path.join("model"));
        fs::copy(fixture("text.txt"), path.join("text.txt")).unwrap();
        // Another model, in several files.
        let output = path.join("output");
        copy_folder(&fixture("bf16_sharded/model"), &output);
        let before = snapshot(&output);
        Self { dir, before }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A file with the first lines of the text, for what is not better for being long.
    pub fn short_text(&self) -> PathBuf {
        let path = self.path("short.txt");
        let text = fs::read_to_string(fixture("text.txt")).unwrap();
        let lines: Vec<&str> = text.lines().take(80).collect();
        fs::write(&path, lines.join("\n")).unwrap();
        path
    }

    pub fn model(&self, file: &str) -> PathBuf {
        self.path("model").join(file)
    }

    pub fn output(&self) -> PathBuf {
        self.path("output")
    }

    pub fn edit_config(&self, edit: impl FnOnce(&mut Value)) {
        edit_json(&self.model("config.json"), edit);
    }

    pub fn edit_weights(&self, edit: impl FnOnce(&mut Tensors)) {
        edit_tensors(&self.model("model.safetensors"), edit);
    }

    /// Two small steps on 2 x 2 x 2 ranks, without samples.
    pub fn finetune(&self) -> Program {
        self.finetune_by_default()
            .flag("--tp", 2)
            .flag("--pp", 2)
            .flag("--dp", 2)
            .flag("--lr", 1e-3)
            .flag("--steps", 2)
            .flag("--seq-len", 16)
            .flag("--global-batch-size", 4)
            .flag("--micro-batch-size", 1)
            .flag("--sample-tokens", 0)
    }

    /// With the program's own defaults, but for the output, which is replaced.
    pub fn finetune_by_default(&self) -> Program {
        candle_train("finetune")
            .flag("--model", self.path("model").display())
            .flag("--data", self.path("text.txt").display())
            .flag("--output", self.output().display())
            .switch("--overwrite")
            .variable("HF_HOME", self.path("hub").display())
    }

    /// The program must not start, with an error that mentions `parts`, which is what `--dry-run` says, too, and leave the output folder as it
    /// is and nothing beside it.
    #[track_caller]
    pub fn refuses(&self, program: &Program, parts: &[&str]) {
        let error = |outcome: Outcome| {
            let error = outcome
                .stderr
                .find("error:")
                .map(|at| &outcome.stderr[at..]);
            let error = error.and_then(|error| error.split("Usage:").next());
            (outcome.code, error.map(str::to_string))
        };
        let refused = error(self.fails(program, parts));
        if program.trains() {
            let around = self.around();
            let told = program.clone().switch("--dry-run").run();
            match parts.contains(&NO_WEIGHTS) {
                true => assert_eq!(told.code, Some(0), "{}", told.stderr),
                false => assert_eq!(error(told), refused),
            }
            self.assert_output_is_untouched();
            assert_eq!(self.around(), around);
        }
    }

    /// As [`Self::refuses`] of a program that may fail later.
    #[track_caller]
    pub fn fails(&self, program: &Program, parts: &[&str]) -> Outcome {
        let before = self.around();
        let outcome = program.fails(parts);
        self.assert_output_is_untouched();
        assert_eq!(self.around(), before);
        outcome
    }

    /// What lies beside the output. The hub's cache is not the run's.
    fn around(&self) -> Vec<String> {
        let names = names(self.dir.path()).into_iter();
        names.filter(|name| name != "hub").collect()
    }

    /// The program must refuse to run with an error that mentions `parts`, and leave the output folder as it is now.
    #[track_caller]
    pub fn run_refused(&self, program: &Program, parts: &[&str]) {
        let before = snapshot(&self.output());
        program.fails(parts);
        assert!(snapshot(&self.output()) == before);
    }

    /// The process that is this rank of the workspace's `finetune` or `pretrain`.
    pub fn process_of_rank(&self, rank: usize) -> Option<Pid> {
        let folder = self.path("model").display().to_string();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let read = |pid: i32, what: &str| {
            let bytes = fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let is_it = |pid: &i32| {
            let (words, variables) = (read(*pid, "cmdline"), read(*pid, "environ"));
            let value = |name: &&str| {
                let variables = variables.split('\0');
                let mut pairs = variables.filter_map(|variable| variable.split_once('='));
                pairs.find(|(other, _)| other == name).map(|pair| pair.1)
            };
            // Ranks of an mpirun that a launcher has started have its RANK too.
            let own = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"];
            matches!(words.split('\0').nth(1), Some("finetune" | "pretrain"))
                && words.contains(&folder)
                && own.iter().find_map(value) == Some(&rank.to_string())
        };
        pids.find(is_it).map(Pid::from_raw)
    }

    #[track_caller]
    pub fn assert_output_is_untouched(&self) {
        let after = snapshot(&self.output());
        let names = |files: &Snapshot| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&after), names(&self.before));
        for (name, content) in &after {
            assert!(
                content == &self.before[name],
                "{} has changed",
                name.display()
            );
        }
    }
}

/// The default run on a model folder that `spoil` has changed must be refused with an error that mentions `parts`.
#[track_caller]
pub fn refuses_model(spoil: impl FnOnce(&Workspace), parts: &[&str]) {
    let workspace = Workspace::new();
    spoil(&workspace);
    workspace.refuses(&workspace.finetune(), parts);
}

/// The same after a change of the file at `path` below the workspace.
#[track_caller]
pub fn refuses_file(path: &str, spoil: impl FnOnce(&Path), parts: &[&str]) {
    refuses_model(|workspace| spoil(&workspace.path(path)), parts);
}
