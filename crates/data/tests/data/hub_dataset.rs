use std::fs;
use std::path::PathBuf;

use candle_core::Result;
use candle_data::hub::{DataUse, DatasetFiles, HubConfig, resolve_dataset_with};

use crate::assert_error;
use crate::hub::COMMIT;
use crate::hub_server::HubServer;

const REPO: &str = "datasets/org/data";
const FILES: [(&str, &[u8]); 4] = [
    ("README.md", b"#"),
    ("train/a.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"b\"}\n"),
    ("train/more/b.txt", b"some text"),
    ("test/c.json", b"[{\"text\": \"c\"}]"),
];

struct Setup {
    server: HubServer,
    config: HubConfig,
    _cache: tempfile::TempDir,
}

fn setup() -> Setup {
    let (server, cache) = (HubServer::start(), tempfile::tempdir().unwrap());
    server.publish(REPO, "main", COMMIT, &FILES);
    let config = HubConfig {
        endpoint: server.endpoint(),
        cache_dir: cache.path().join("hub"),
        token: None,
        offline: false,
    };
    Setup {
        server,
        config,
        _cache: cache,
    }
}

#[test]
fn files_with_data_are_fetched_once() {
    let Setup {
        server,
        config,
        _cache,
    } = setup();
    let resolve = |name: &str| resolve_dataset_with(name, DataUse::Training, &config).unwrap();
    let snapshot = config
        .cache_dir
        .join("datasets--org--data/snapshots")
        .join(COMMIT);
    let paths =
        |names: &[&str]| -> Vec<PathBuf> { names.iter().map(|name| snapshot.join(name)).collect() };
    let of_train = ["train/a.jsonl", "train/more/b.txt"];
    assert_eq!(resolve("datasets/org/data/train").files, paths(&of_train));
    assert_eq!(
        fs::read(snapshot.join("train/a.jsonl")).unwrap(),
        FILES[1].1
    );
    assert!(!snapshot.join("test").exists());
    server.take_downloads();
    let DatasetFiles { files, taken, left } = resolve("datasets/org/data@main");
    assert_eq!(files, paths(&of_train));
    assert_eq!(
        (taken, left),
        (
            of_train.map(String::from).to_vec(),
            vec!["test/c.json".to_string()]
        )
    );
    let file = resolve("datasets/org/data/train/a.jsonl");
    assert_eq!((file.files, file.left), (paths(&of_train[..1]), vec![]));
    assert_eq!(server.take_downloads(), [""; 0]);
    assert!(!snapshot.join("test").exists() && !snapshot.join("README.md").exists());
}

#[test]
fn splits_are_chosen_by_use_and_globs_and_files_by_name() {
    let Setup {
        server: _server,
        config,
        _cache,
    } = setup();
    let names = |name: &str, usage: DataUse| {
        resolve_dataset_with(name, usage, &config).map(|found| found.taken)
    };
    let training = |name: &str| names(name, DataUse::Training);
    let evaluation = |name: &str| names(name, DataUse::Evaluation);
    assert_eq!(evaluation("datasets/org/data").unwrap(), ["test/c.json"]);
    // What is named is taken whatever its use.
    for (path, want) in [
        ("test/c.json", vec!["test/c.json"]),
        ("test", vec!["test/c.json"]),
        ("*/*.json*", vec!["test/c.json", "train/a.jsonl"]),
        ("train/*", vec!["train/a.jsonl"]),
        ("train/**/?.txt", vec!["train/more/b.txt"]),
    ] {
        let name = format!("datasets/org/data/{path}");
        assert_eq!(training(&name).unwrap(), want, "{path}");
        assert_eq!(evaluation(&name).unwrap(), want, "{path}");
    }
    assert_error(
        training("datasets/org/data/*.json"),
        &["has no file that ends in", "train/a.jsonl"],
    );
    assert_error(training("datasets/org/data/[a"), &["is no glob"]);
}

#[test]
fn a_data_set_without_the_split_that_is_needed_is_an_error() {
    let server = HubServer::start();
    let cache = tempfile::tempdir().unwrap();
    let config = HubConfig {
        endpoint: server.endpoint(),
        cache_dir: cache.path().join("hub"),
        token: None,
        offline: false,
    };
    let text: &[u8] = b"text";
    let files = [
        ("data/train.txt", text),
        ("more/test.txt", text),
        ("more/val.txt", text),
    ];
    server.publish(REPO, "main", COMMIT, &files);
    assert_error(
        resolve_dataset_with("datasets/org/data/data", DataUse::Evaluation, &config),
        &["for training only", "data/train.txt", "--eval-fraction"],
    );
    assert_error(
        resolve_dataset_with("datasets/org/data/more", DataUse::Training, &config),
        &[
            "for validation or test only",
            "more/test.txt, more/val.txt",
            "hint: name the files",
        ],
    );
}

#[test]
fn offline_what_was_fetched_is_used_if_it_is_complete() {
    let Setup {
        server,
        config,
        _cache,
    } = setup();
    resolve_dataset_with("datasets/org/data/train", DataUse::Training, &config).unwrap();
    drop(server);
    let offline = HubConfig {
        offline: true,
        ..config.clone()
    };
    for config in [&offline, &config] {
        assert!(resolve_dataset_with("datasets/org/data/train", DataUse::Training, config).is_ok());
    }
    assert_error(
        resolve_dataset_with("datasets/org/data", DataUse::Evaluation, &offline),
        &["org/data@main", "not complete", "HF_HUB_OFFLINE"],
    );
    assert_error(
        resolve_dataset_with("datasets/org/data", DataUse::Evaluation, &config),
        &["cannot fetch the list of files", "org/data"],
    );
}

/// As `huggingface_hub` leaves it: blobs, a snapshot of links, and a ref; no list of files.
#[test]
fn offline_what_another_program_has_fetched_is_used_if_it_was_not_kept_from_it() {
    let cache = tempfile::tempdir().unwrap();
    let repo = cache.path().join("datasets--org--data");
    let snapshot = repo.join("snapshots").join(COMMIT);
    for (blob, file) in [("1a", "train/a.jsonl"), ("2b", "test/b.jsonl")] {
        let (blob, link) = (repo.join("blobs").join(blob), snapshot.join(file));
        for path in [&blob, &link] {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        }
        std::fs::write(&blob, "{}").unwrap();
        std::os::unix::fs::symlink(&blob, link).unwrap();
    }
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), COMMIT).unwrap();
    // Nobody listens there.
    let config = |offline| HubConfig {
        endpoint: "http://127.0.0.1:1".to_string(),
        cache_dir: cache.path().to_path_buf(),
        token: None,
        offline,
    };
    let resolve =
        |offline| resolve_dataset_with("datasets/org/data", DataUse::Training, &config(offline));
    for offline in [true, false] {
        let found = resolve(offline).unwrap();
        assert_eq!(found.taken, ["train/a.jsonl"]);
        assert_eq!(found.left, ["test/b.jsonl"]);
        assert_eq!(std::fs::read_to_string(&found.files[0]).unwrap(), "{}");
    }
    std::fs::write(repo.join("blobs/3c.incomplete"), "{").unwrap();
    assert_error(resolve(true), &["not complete in the cache"]);
    assert_error(resolve(false), &["cannot fetch the list of files"]);
}

#[test]
fn names_and_files_that_are_not_there_are_told() {
    let Setup {
        server: _server,
        config,
        _cache,
    } = setup();
    let resolve = |name: &str| -> Result<DatasetFiles> {
        resolve_dataset_with(name, DataUse::Training, &config)
    };
    for name in [
        "org/data",
        "datasets/data",
        "datasets/org/data/../x",
        "models/org/data",
    ] {
        assert_error(resolve(name), &["is not the name of a data set", "hint:"]);
    }
    assert_error(
        resolve("datasets/org/other"),
        &["no such dataset", "org/other"],
    );
    assert_error(
        resolve("datasets/org/data/nowhere"),
        &["has no file that ends in", "nowhere", "train/a.jsonl"],
    );
}
