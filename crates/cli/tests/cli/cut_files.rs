//! Files of weights that become shorter while a command reads them.

use std::fs::{self, File};
use std::path::Path;

use super::folder::names;
use super::large::{export, is_saving, large_model, merge};
use super::program::Program;
use super::workspace::{Workspace, candle_train};

/// Cuts the file when `is_time`, which must end the program with a message that names it, and without what it has begun.
#[track_caller]
fn ends_when_cut(
    workspace: &Workspace,
    program: &Program,
    file: &Path,
    is_time: impl Fn(u32) -> bool,
) {
    let (before, whole) = (names(&workspace.path("")), file.metadata().unwrap().len());
    let cut = |len| {
        File::options()
            .write(true)
            .open(file)
            .unwrap()
            .set_len(len)
            .unwrap()
    };
    let mut is_cut = false;
    let outcome = program.run_and_pid(|_, pid| {
        if !is_cut && is_time(pid) {
            cut(100);
            is_cut = true;
        }
    });
    assert!(is_cut, "{}", outcome.stderr);
    assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
    let said = format!(
        "{} became shorter while it was read: it has 100 bytes, expected {whole}, as when it was opened",
        file.display()
    );
    outcome.assert_error(&[&said, "hint: another program writes to it"]);
    assert_eq!(names(&workspace.path("")), before);
}

/// Whether a process has read more of the mapped file than its header.
fn reads(pid: u32, file: &Path) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let lines = maps
        .lines()
        .skip_while(|line| !line.ends_with(&file.display().to_string()));
    let mut resident =
        lines.filter_map(|line| line.strip_prefix("Rss:")?.trim().strip_suffix(" kB"));
    resident
        .next()
        .is_some_and(|num_kb| num_kb.parse::<usize>().unwrap() > 4096)
}

#[test]
fn an_export_and_a_merge_name_the_file() {
    let workspace = Workspace::new();
    let weights = large_model(&workspace).join("model.safetensors");
    let header = fs::read(&weights).unwrap();
    for program in [export(&workspace), merge(&workspace)] {
        ends_when_cut(&workspace, &program, &weights, |_| is_saving(&workspace));
        fs::write(&weights, &header).unwrap();
    }
}

#[test]
fn so_do_a_start_of_a_run_and_generate() {
    let workspace = Workspace::new();
    let dir = large_model(&workspace);
    let weights = dir.join("model.safetensors");
    let header = fs::read(&weights).unwrap();
    let finetune = workspace
        .finetune_by_default()
        .flag("--model", dir.display())
        .flag("--output", workspace.path("new").display());
    let generate = candle_train("generate")
        .flag("--model", dir.display())
        .flag("--prompt", "a");
    for program in [finetune, generate] {
        ends_when_cut(&workspace, &program, &weights, |pid| reads(pid, &weights));
        fs::write(&weights, &header).unwrap();
    }
}
