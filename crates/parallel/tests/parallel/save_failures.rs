//! Saves that fail leave the checkpoint before as it was, and fail on every rank.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, SpaceNeed, check_free_space, save_hf};
use tempfile::tempdir;

use crate::chain::Chain;
use crate::check::{assert_says, message, on_mesh, single_mesh};
use crate::folder::{names, read_folder};

/// Each rank's message of a save that must fail.
fn failures(chain: Chain, to: &HfSave) -> Vec<String> {
    let started = Instant::now();
    let said = on_mesh((2, 1, 2), |mesh| {
        let part = chain.part(&mesh, &ParamStore::init(6))?;
        Ok(message(save_hf(part.params(), &mesh, to)))
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
        let part = chain.part(&mesh, &ParamStore::init(5))?;
        let sidecars = vec![("config.json".to_string(), b"{}".to_vec())];
        save_hf(part.params(), &mesh, &HfSave::new(dir, sidecars))
    });
}

#[test]
fn an_output_that_cannot_be_a_folder() {
    let dir = tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    for output in ["file", "file/below"] {
        let to = HfSave::new(dir.path().join(output), Vec::new());
        let said = failures(Chain::default(), &to);
        assert_says(&said[0], &["cannot write to the output folder", "file"]);
    }
    assert_eq!(read_folder(dir.path()).len(), 1);
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"x");
}

#[test]
fn a_small_file_with_a_name_elsewhere() {
    let dir = tempdir().unwrap();
    let place = dir.path().join("model");
    for name in ["../config.json", "/config.json", "a/../../config.json"] {
        let to = HfSave::new(&place, vec![(name.to_string(), Vec::new())]);
        let said = failures(Chain::default(), &to);
        assert_says(&said[0], &["cannot save to", "is not a name in the folder"]);
        assert!(names(dir.path()).is_empty());
    }
}

#[test]
fn what_cannot_be_saved_to_its_folder_is_rescued() {
    let dir = tempdir().unwrap();
    let model = dir.path().join("model");
    save_first(Chain::default(), &model);
    let before = read_folder(&model);
    std::fs::write(dir.path().join("file"), "x").unwrap();
    let rescued = |output: &str, rescue_dir: &str| {
        let to = HfSave {
            rescue_dir: Some(dir.path().join(rescue_dir)),
            ..HfSave::new(dir.path().join(output), Vec::new())
        };
        failures(Chain::default(), &to).remove(0)
    };
    for name in ["model-rescued", "model-rescued-2", "model-rescued-3"] {
        let said = rescued("model", "new/rescues");
        assert_says(
            &said,
            &["it holds a model already", "the model was saved to", name],
        );
        let rescue = dir.path().join("new/rescues").join(name);
        ParamStore::from_pretrained(rescue).unwrap();
    }
    let said = rescued("model", "file");
    assert_says(
        &said,
        &[
            "it holds a model already",
            "nor could it be rescued",
            "file",
        ],
    );
    assert!(read_folder(&model) == before);
    assert_eq!(names(dir.path()), ["file", "model", "new"]);
}

#[test]
fn weights_that_are_no_numbers_are_not_rescued() {
    let dir = tempdir().unwrap();
    let to = HfSave {
        rescue_dir: Some(dir.path().to_path_buf()),
        ..HfSave::new(dir.path().join("new/model"), Vec::new())
    };
    let said = on_mesh((2, 1, 2), |mesh| {
        let part = Chain::default().part(&mesh, &ParamStore::init(6))?;
        for index in 0..part.params().len() {
            let values = part.params().values(index)?;
            part.params().refill(index, &(values * f64::NAN)?)?;
        }
        Ok(message(save_hf(part.params(), &mesh, &to)))
    });
    assert_says(&said[0], &["NaN or infinite"]);
    assert!(!said[0].contains("model was saved"), "{}", said[0]);
    assert!(names(dir.path()).is_empty());
}

/// Where the part of a test that runs in a process of its own finds its folder.
const FOLDER: &str = "SAVE_FAILURES_FOLDER";

/// A model whose embedding alone is 240 kB.
const LARGE: Chain = Chain {
    vocab: 10_000,
    num_layers: 3,
    tied: false,
    dtype: candle_core::DType::F32,
    fused: false,
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
fn save_must_fail(dir: &Path, parts: &[&str]) {
    let before = read_folder(dir);
    let around = names(dir.parent().unwrap());
    let to = HfSave {
        overwrite: true,
        ..HfSave::new(dir, Vec::new())
    };
    let said = failures(LARGE, &to);
    assert_says(&said[0], parts);
    assert!(
        read_folder(dir) == before,
        "the checkpoint before has changed"
    );
    assert_eq!(names(dir.parent().unwrap()), around);
}

const TOO_MUCH: [&str; 2] = ["cannot save to", "model.safetensors"];

#[test]
fn a_limit_of_file_size_while_saving() {
    if let Some(dir) = folder_of_child() {
        return save_must_fail(&dir.join("model"), &[&TOO_MUCH[..], &["large"]].concat());
    }
    let dir = tempdir().unwrap();
    save_first(LARGE, &dir.path().join("model"));
    let test = "save_failures::a_limit_of_file_size_while_saving";
    let limit = "trap '' XFSZ && ulimit -f 100";
    in_prepared_shell(test, &["env"], limit, dir.path());
}

/// A file system of its own, in a namespace of its own, with room for one checkpoint but not for two.
const SMALL_DISK: &str = "mount -t tmpfs -o size=700k none \"$SAVE_FAILURES_FOLDER\"";

#[test]
fn a_full_disk_while_saving() {
    if let Some(dir) = folder_of_child() {
        let model = dir.join("model");
        save_first(LARGE, &model);
        return save_must_fail(&model, &[&TOO_MUCH[..], &["space"]].concat());
    }
    let dir = tempdir().unwrap();
    let test = "save_failures::a_full_disk_while_saving";
    in_prepared_shell(test, &["unshare", "-Urm"], SMALL_DISK, dir.path());
}

#[test]
fn a_disk_without_room_is_known_before() {
    if let Some(dir) = folder_of_child() {
        let (mesh, new) = (single_mesh(), dir.join("new/model"));
        let part = LARGE.part(&mesh, &ParamStore::init(5)).unwrap();
        let save = HfSave::new(&new, Vec::new());
        let check = || check_free_space(&[save.space_need(part.params())?]);
        check().unwrap();
        save_first(LARGE, &dir.join("model"));
        let said = message(check());
        let place = new.display().to_string();
        assert_says(
            &said,
            &[
                "not enough space for the model",
                " kB needed",
                "kB free",
                &place,
            ],
        );
        let half = |folder: &Path| SpaceNeed {
            folder: folder.to_path_buf(),
            num_bytes: 130_000,
            what: "a half",
        };
        check_free_space(&[half(&dir)]).unwrap();
        let said = message(check_free_space(&[half(&dir), half(&new)]));
        assert_says(&said, &["a half", " and a half", "260.0 kB needed"]);
        // Another file system has room of its own.
        return check_free_space(&[half(&dir), half(dir.parent().unwrap())]).unwrap();
    }
    let dir = tempdir().unwrap();
    let test = "save_failures::a_disk_without_room_is_known_before";
    in_prepared_shell(test, &["unshare", "-Urm"], SMALL_DISK, dir.path());
}

#[test]
fn a_folder_that_may_only_be_read() {
    if let Some(dir) = folder_of_child() {
        return save_must_fail(
            &dir.join("model"),
            &["cannot write to the output folder", "Read-only"],
        );
    }
    let dir = tempdir().unwrap();
    save_first(LARGE, &dir.path().join("model"));
    let test = "save_failures::a_folder_that_may_only_be_read";
    let mount = format!(
        "mount --bind \"${FOLDER}\" \"${FOLDER}\" && mount -o remount,bind,ro \"${FOLDER}\""
    );
    in_prepared_shell(test, &["unshare", "-Urm"], &mount, dir.path());
}
