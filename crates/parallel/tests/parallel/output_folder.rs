//! Which folders are replaced, by whom, and what a process that is killed leaves.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Result;
use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{FolderLock, HfSave, OutputFolder, StagedFolder, save_hf};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tempfile::tempdir;

use crate::chain::Chain;
use crate::check::{assert_says, message, single_mesh};
use crate::folder::{names, read_folder};

fn save_from(store: &ParamStore, to: &HfSave) -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, store)?;
    save_hf(part.params(), &mesh, to)
}

fn save(seed: u64, to: &HfSave) -> Result<()> {
    save_from(&ParamStore::init(seed), to)
}

fn config(text: &str) -> Vec<(String, Vec<u8>)> {
    vec![("config.json".into(), text.into())]
}

/// A save of `run` to `dir`.
fn of_run(dir: &Path, run: &str) -> HfSave {
    HfSave {
        run: Some(run.to_string()),
        ..HfSave::new(dir, config("{}"))
    }
}

fn over(to: HfSave) -> HfSave {
    HfSave {
        overwrite: true,
        ..to
    }
}

/// The save must be refused before and at its time, and leave everything as it is.
#[track_caller]
fn refuses(to: &HfSave, parts: &[&str]) {
    let before = read_folder(to.output.path());
    for said in [message(to.check_output()), message(save(9, to))] {
        assert_says(&said, &["cannot write to the output folder"]);
        assert_says(&said, parts);
    }
    assert!(read_folder(to.output.path()) == before);
}

#[test]
fn a_model_is_replaced_by_the_same_run_or_when_that_is_allowed() {
    let dir = tempdir().unwrap();
    let place = dir.path().join("model");
    save(1, &of_run(&place, "a")).unwrap();
    let first = read_folder(&place);
    save(2, &of_run(&place, "a")).unwrap();
    assert!(read_folder(&place) != first);
    let already = "it holds a model already";
    refuses(&of_run(&place, "b"), &[already, "--overwrite"]);
    refuses(&HfSave::new(&place, config("{}")), &[already]);
    save(3, &over(of_run(&place, "b"))).unwrap();
    // One that is not of a run.
    save(3, &over(HfSave::new(&place, config("{}")))).unwrap();
    refuses(&of_run(&place, "b"), &[already]);
    assert_eq!(names(dir.path()), ["model"]);
}

#[test]
fn what_was_changed_by_hand_is_not_replaced_by_the_same_run() {
    let spoils: [&dyn Fn(&Path); 6] = [
        &|place| fs::write(place.join("config.json"), "{ }").unwrap(),
        &|place| fs::write(place.join("config.json"), "{}").unwrap(),
        &|place| fs::write(place.join("README.md"), "what I found").unwrap(),
        &|place| fs::remove_file(place.join("config.json")).unwrap(),
        &|place| fs::remove_file(place.join(".candle_train.json")).unwrap(),
        &|place| {
            let shard = |number| {
                let names = names(place).into_iter();
                let mut names = names.filter(|name| name.contains(number));
                place.join(names.next().unwrap())
            };
            fs::rename(shard("00002-of"), shard("00003-of")).unwrap();
        },
    ];
    for spoil in spoils {
        let dir = tempdir().unwrap();
        let place = dir.path().join("model");
        let to = HfSave {
            max_file_bytes: 300,
            ..of_run(&place, "a")
        };
        save(1, &to).unwrap();
        save(1, &to).unwrap();
        spoil(&place);
        refuses(&to, &["it holds a model already"]);
        save(1, &over(to)).unwrap();
    }
}

#[test]
fn a_folder_with_what_is_no_part_of_a_model_is_never_replaced() {
    let others = [
        "notes.txt",
        "train.json",
        "model-lora.safetensors",
        "model_backup.safetensors",
        "model-00001-of-00002.safetensors.bak",
        "checkpoints/step",
        "additional_chat_templates/notes",
    ];
    for name in others {
        let dir = tempdir().unwrap();
        let to = over(of_run(&dir.path().join("model"), "a"));
        save(1, &to).unwrap();
        let path = dir.path().join("model").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, name).unwrap();
        let named = name.strip_suffix("/step").unwrap_or(name);
        refuses(&to, &["it holds what is no part of a model", named]);
        assert_eq!(fs::read_to_string(path).unwrap(), name);
    }
    let dir = tempdir().unwrap();
    for name in ["README.md", "LICENSE"] {
        fs::write(dir.path().join(name), name).unwrap();
    }
    let to = over(of_run(dir.path(), "a"));
    refuses(&to, &["it holds LICENSE, README.md, but no model"]);
    for name in ["a.txt", "b.txt", "c.txt", "d.txt"] {
        fs::write(dir.path().join(name), name).unwrap();
    }
    refuses(&to, &["(a.txt, b.txt, c.txt, ..)"]);
}

#[test]
fn the_input_is_never_replaced_by_whatever_name() {
    let dir = tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    save(1, &HfSave::new(path("model"), config("{}"))).unwrap();
    let before = read_folder(&path("model"));
    symlink(path("model"), path("link")).unwrap();
    symlink("link", path("second")).unwrap();
    let from = |input: &str, output: &str| {
        let to = HfSave {
            inputs: vec![path(input)],
            ..over(HfSave::new(path(output), config("{}")))
        };
        refuses(&to, &["which this run reads", input]);
        let loaded = ParamStore::from_pretrained(path(input)).unwrap();
        let said = message(save_from(
            &loaded,
            &over(HfSave::new(path(output), Vec::new())),
        ));
        assert_says(&said, &["which this run reads"]);
    };
    for (input, output) in [
        ("model", "model"),
        ("model", "link"),
        ("model", "second"),
        ("model", "./link/../model/."),
        ("second", "model"),
    ] {
        from(input, output);
    }
    // A model that has its weights from there.
    fs::create_dir(path("linked")).unwrap();
    for name in names(&path("model")) {
        symlink(path("model").join(&name), path("linked").join(&name)).unwrap();
    }
    from("linked", "model");
    assert!(read_folder(&path("model")) == before);
    // What only links to the input can be replaced.
    let to = HfSave {
        inputs: vec![path("model")],
        ..over(HfSave::new(path("linked"), config("{}")))
    };
    save(2, &to).unwrap();
    assert!(read_folder(&path("model")) == before);
    assert!(!path("linked").join("config.json").is_symlink());
}

#[test]
fn a_link_to_a_folder_stays_one() {
    let dir = tempdir().unwrap();
    fs::create_dir_all(dir.path().join("disk/model")).unwrap();
    let link = dir.path().join("link");
    symlink(dir.path().join("disk/model"), &link).unwrap();
    save(1, &HfSave::new(&link, config("{}"))).unwrap();
    assert!(link.is_symlink());
    assert_eq!(names(&dir.path().join("disk")), ["model"]);
    assert_eq!(names(&dir.path().join("disk/model")).len(), 2);
    fs::remove_dir_all(dir.path().join("disk/model")).unwrap();
    let said = message(save(1, &HfSave::new(&link, config("{}"))));
    assert_says(&said, &["cannot write to the output folder", "link"]);
}

#[test]
fn one_run_at_a_time_and_nothing_stays_of_one_that_saves_nothing() {
    let dir = tempdir().unwrap();
    let place = dir.path().join("new/folders/model");
    let output = OutputFolder::new(&place);
    let claimed = output.claim().unwrap();
    assert!(place.parent().unwrap().is_dir());
    // The same value may claim and save again, another one may not.
    let clone = output.clone();
    clone.claim().unwrap();
    let said = message(OutputFolder::new(&place).claim());
    let process = format!("process {}", std::process::id());
    assert_says(&said, &["another run is writing to it", &process, "hint:"]);
    drop(claimed);
    assert!(names(dir.path()).is_empty());
    let claimed = output.claim().unwrap();
    let to = HfSave {
        output: clone,
        ..HfSave::new("", config("{}"))
    };
    save(1, &to).unwrap();
    drop(claimed);
    assert_eq!(names(place.parent().unwrap()), ["model"]);
}

#[test]
fn a_lock_is_released_by_death() {
    let dir = tempdir().unwrap();
    let place = dir.path().join("model");
    // What a process that was killed leaves.
    fs::write(dir.path().join(".model.lock"), "process 1\n").unwrap();
    drop(FolderLock::acquire(&place).unwrap());
    assert!(names(dir.path()).is_empty());
    let held = FolderLock::acquire(&place).unwrap();
    let other = std::thread::spawn(move || FolderLock::acquire(&place).map(drop));
    assert!(other.join().unwrap().is_err());
    drop(held);
}

/// Folders with one file each beside `model`, as a save that was killed leaves them.
fn leftovers(folders: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempdir().unwrap();
    for (folder, content) in folders {
        fs::create_dir(dir.path().join(folder)).unwrap();
        if !content.is_empty() {
            fs::write(dir.path().join(folder).join("config.json"), content).unwrap();
        }
    }
    dir
}

#[test]
fn a_kill_at_any_moment_leaves_one_whole_model() {
    const SAVING: &str = ".model.saving";
    const REPLACED: &str = ".model.replaced";
    type Folders<'a> = &'a [(&'a str, &'a str)];
    let cases: [(Folders, Option<&str>); 7] = [
        (&[("model", "old"), (SAVING, "half")], Some("old")),
        (&[(SAVING, "half")], None),
        (&[(REPLACED, "old"), (SAVING, "new")], Some("new")),
        (
            &[("model", ""), (REPLACED, "old"), (SAVING, "new")],
            Some("new"),
        ),
        (&[(REPLACED, "old")], Some("old")),
        (&[("model", "new"), (REPLACED, "old")], Some("new")),
        (&[("model", "new"), (REPLACED, "")], Some("new")),
    ];
    for (folders, expected) in cases {
        let dir = leftovers(folders);
        let place = dir.path().join("model");
        drop(OutputFolder::new(&place).claim().unwrap());
        let found = fs::read_to_string(place.join("config.json")).ok();
        assert_eq!(found.as_deref(), expected, "{folders:?}");
        let left = names(dir.path());
        assert!(left.iter().all(|name| name == "model"), "{left:?}");
    }
    // Somebody has put the old one back.
    let dir = leftovers(&[("model", "old"), (REPLACED, "old"), (SAVING, "new")]);
    let before = names(dir.path());
    let said = message(OutputFolder::new(dir.path().join("model")).claim());
    assert_says(&said, &[SAVING, REPLACED, "both complete", "hint:"]);
    assert_eq!(names(dir.path()), before);
}

#[test]
fn at_no_moment_of_a_replacement_has_nothing_the_name() {
    let dir = tempdir().unwrap();
    let place = dir.path().join("model");
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("number"), "0").unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watched = scope.spawn(|| {
            let mut num_looks = 0;
            while !is_done.load(Ordering::Relaxed) {
                assert!(place.exists(), "after {num_looks} looks");
                num_looks += 1;
            }
            num_looks
        });
        for number in 1..200 {
            let staged = StagedFolder::create(&place).unwrap();
            std::fs::write(staged.path().join("number"), number.to_string()).unwrap();
            staged.commit(true).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
        assert!(watched.join().unwrap() > 0);
    });
    assert_eq!(std::fs::read(place.join("number")).unwrap(), b"199");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_folder_gets_its_name_when_it_is_complete() {
    let dir = tempdir().unwrap();
    let place = dir.path().join("checkpoint");
    let write = |content: &str| {
        let staged = StagedFolder::create(&place).unwrap();
        fs::create_dir(staged.path().join("inside")).unwrap();
        fs::write(staged.path().join("inside/file"), content).unwrap();
        staged
    };
    let read = || fs::read_to_string(place.join("inside/file")).unwrap();
    drop(write("half"));
    assert!(names(dir.path()).is_empty());
    write("first").commit(false).unwrap();
    assert_eq!(read(), "first");
    write("second").commit(false).unwrap_err();
    assert_eq!(read(), "first");
    write("second").commit(true).unwrap();
    assert_eq!(read(), "second");
    assert_eq!(names(dir.path()), ["checkpoint"]);
    fs::remove_dir_all(&place).unwrap();
    fs::write(&place, "a file").unwrap();
    write("third").commit(true).unwrap_err();
    assert_eq!(fs::read_to_string(&place).unwrap(), "a file");
}

#[test]
fn the_folder_in_which_the_program_runs_is_refused() {
    for place in [".", ".."] {
        let said = message(OutputFolder::new(place).claim());
        assert_says(&said, &["the program runs in it", "hint:"]);
    }
}

/// Somebody else who may write to the folder has put something in the place of a lock.
#[test]
fn what_has_the_name_of_a_lock_and_is_no_lock_is_refused_and_stays() {
    let dir = tempdir().unwrap();
    let (shared, thesis) = (dir.path().join("shared"), dir.path().join("thesis"));
    let place = shared.join("model");
    type Put = fn(&Path, &Path) -> std::io::Result<()>;
    let cases: [(&str, Put); 5] = [
        ("is a link to", |thesis, lock| symlink(thesis, lock)),
        ("is a link to", |thesis, lock| {
            symlink(thesis.with_file_name("new"), lock)
        }),
        ("has another name", |thesis, lock| {
            fs::hard_link(thesis, lock)
        }),
        ("is a pipe", |_, lock| Ok(mkfifo(lock, Mode::S_IRWXU)?)),
        ("is a folder", |_, lock| fs::create_dir(lock)),
    ];
    for (what, put) in cases {
        for lock in [shared.join(".model.lock"), place.join(".lock")] {
            fs::create_dir_all(&place).unwrap();
            fs::write(&thesis, "years of work").unwrap();
            put(&thesis, &lock).unwrap();
            let is_inside = lock.ends_with(".lock");
            let results = match is_inside {
                true => [
                    FolderLock::check_free_inside(&place),
                    FolderLock::acquire_inside(&place).map(drop),
                ],
                false => [
                    FolderLock::check_free(&place),
                    FolderLock::acquire(&place).map(drop),
                ],
            };
            for result in results {
                let said = result.unwrap_err().to_string();
                assert_says(&said, &[lock.to_str().unwrap(), what, "hint:"]);
            }
            assert_eq!(fs::read_to_string(&thesis).unwrap(), "years of work");
            assert_eq!(names(dir.path()), ["shared", "thesis"]);
            assert!(lock.symlink_metadata().is_ok());
            fs::remove_dir_all(&shared).unwrap();
        }
    }
}
