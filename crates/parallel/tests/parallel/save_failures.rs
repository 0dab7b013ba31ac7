//! Saves that fail leave the checkpoint before as it was, and fail on every rank.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, save_hf};
use tempfile::tempdir;

use crate::chain::Chain;
use crate::check::{assert_says, message, on_mesh};
use crate::folder::read_folder;

/// Each rank's message of a save that must fail.
fn failures(chain: Chain, to: &HfSave) -> Vec<String> {
    let started = Instant::now();
    let said = on_mesh((2, 1, 2), |mesh| {
        let stage = chain.stage(&mesh, &ParamStore::init(6))?;
        Ok(message(save_hf(stage.params(), &mesh, to)))
    });
    assert!(started.elapsed() < Duration::from_secs(5));
    assert!(
        said[1..]
            .iter()
            .all(|said| said.contains("rank 0 could not save"))
    );
    said
}

fn save_first(chain: Chain, dir: &Path) {
    on_mesh((1, 1, 1), |mesh| {
        let stage = chain.stage(&mesh, &ParamStore::init(5))?;
        let sidecars = vec![("config.json".to_string(), b"{}".to_vec())];
        save_hf(stage.params(), &mesh, &HfSave::new(dir, sidecars))
    });
}

#[test]
fn a_folder_in_the_way_of_any_file() {
    let sidecars = || vec![("config.json".to_string(), b"new".to_vec())];
    let cases = [
        ("model-00001-of-00003.safetensors", 700),
        ("model-00003-of-00003.safetensors", 700),
        ("model.safetensors.index.json", 700),
        ("tokenizer.json", 5000),
    ];
    for (name, max_file_bytes) in cases {
        let dir = tempdir().unwrap();
        save_first(Chain::default(), dir.path());
        std::fs::create_dir_all(dir.path().join(name).join("inside")).unwrap();
        let before = read_folder(dir.path());
        let mut to = HfSave {
            max_file_bytes,
            ..HfSave::new(dir.path(), sidecars())
        };
        to.sidecars.push(("tokenizer.json".into(), b"new".to_vec()));
        let said = failures(Chain::default(), &to);
        assert_says(
            &said[0],
            &["cannot save to", name, "nothing that was there"],
        );
        assert!(
            read_folder(dir.path()) == before,
            "{name}: the folder has changed"
        );
    }
}

#[test]
fn an_output_that_cannot_be_a_folder() {
    let dir = tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    for output in ["file", "file/below"] {
        let to = HfSave::new(dir.path().join(output), Vec::new());
        let said = failures(Chain::default(), &to);
        assert_says(&said[0], &["cannot save to", "file"]);
    }
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"x");
}

/// Where the part of a test that runs in a process of its own finds its folder.
const FOLDER: &str = "SAVE_FAILURES_FOLDER";

/// A model whose embedding alone is 240 kB.
const LARGE: Chain = Chain {
    vocab: 10_000,
    num_layers: 3,
    tied: false,
    dtype: candle_core::DType::F32,
};

/// Runs this test again in a shell that has run `prepare`, as its own process; whether the preparation was possible.
pub fn in_prepared_shell(test: &str, shell: &[&str], prepare: &str, dir: &Path) -> bool {
    let script = format!("{prepare} || exit 77; exec \"$0\" --exact {test} --nocapture");
    let output = Command::new(shell[0])
        .args(&shell[1..])
        .args(["sh", "-c", &script])
        .arg(std::env::current_exe().unwrap())
        .env(FOLDER, dir)
        .stdin(Stdio::null())
        .output();
    let Ok(output) = output else { return false };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        assert!(text(&output.stdout).contains("1 passed"));
        return true;
    }
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(!said.contains("panicked"), "{said}");
    println!("skipped: the shell cannot run {prepare:?}: {said}");
    false
}

pub fn folder_of_child() -> Option<std::path::PathBuf> {
    std::env::var_os(FOLDER).map(Into::into)
}

/// Tries to save over the checkpoint in `dir`, which must fail and change nothing.
fn save_must_fail(dir: &Path, why: &str) {
    let before = read_folder(dir);
    let said = failures(LARGE, &HfSave::new(dir, Vec::new()));
    assert_says(&said[0], &["cannot save to", "model.safetensors", why]);
    assert!(
        read_folder(dir) == before,
        "the checkpoint before has changed"
    );
}

#[test]
fn a_limit_of_file_size_while_saving() {
    if let Some(dir) = folder_of_child() {
        return save_must_fail(&dir, "large");
    }
    let dir = tempdir().unwrap();
    save_first(LARGE, dir.path());
    let test = "save_failures::a_limit_of_file_size_while_saving";
    let limit = "trap '' XFSZ && ulimit -f 100";
    in_prepared_shell(test, &["env"], limit, dir.path());
}

#[test]
fn a_full_disk_while_saving() {
    if let Some(dir) = folder_of_child() {
        save_first(LARGE, &dir);
        return save_must_fail(&dir, "space");
    }
    // A file system of its own, in a namespace of its own, with room for one checkpoint but not for two.
    let dir = tempdir().unwrap();
    let test = "save_failures::a_full_disk_while_saving";
    let mount = format!("mount -t tmpfs -o size=700k none \"${FOLDER}\"");
    in_prepared_shell(test, &["unshare", "-Urm"], &mount, dir.path());
}
