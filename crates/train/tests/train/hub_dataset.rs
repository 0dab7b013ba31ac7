use std::fs;
use std::path::PathBuf;

use candle_core::Result;
use candle_train::hub::{HubConfig, resolve_dataset_with};

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
    let resolve = |name: &str| resolve_dataset_with(name, &config);
    let snapshot = config
        .cache_dir
        .join("datasets--org--data/snapshots")
        .join(COMMIT);
    assert_eq!(
        resolve("datasets/org/data/train").unwrap(),
        snapshot.join("train")
    );
    assert_eq!(
        fs::read(snapshot.join("train/a.jsonl")).unwrap(),
        FILES[1].1
    );
    assert!(snapshot.join("train/more/b.txt").exists() && !snapshot.join("test").exists());
    assert_eq!(resolve("datasets/org/data@main").unwrap(), snapshot);
    assert!(snapshot.join("test/c.json").exists() && !snapshot.join("README.md").exists());
    server.take_downloads();
    let file: PathBuf = resolve("datasets/org/data/train/a.jsonl").unwrap();
    assert_eq!(file, snapshot.join("train/a.jsonl"));
    let downloads = server.take_downloads();
    assert!(
        downloads.iter().all(|request| request.contains("/api/")),
        "{downloads:?}"
    );
}

#[test]
fn offline_what_was_fetched_is_used_if_it_is_complete() {
    let Setup {
        server,
        config,
        _cache,
    } = setup();
    resolve_dataset_with("datasets/org/data/train", &config).unwrap();
    drop(server);
    let offline = HubConfig {
        offline: true,
        ..config.clone()
    };
    for config in [&offline, &config] {
        assert!(resolve_dataset_with("datasets/org/data/train", config).is_ok());
    }
    assert_error(
        resolve_dataset_with("datasets/org/data", &offline),
        &["org/data@main", "not complete", "HF_HUB_OFFLINE"],
    );
    assert_error(
        resolve_dataset_with("datasets/org/data", &config),
        &["cannot fetch the list of files", "org/data"],
    );
}

#[test]
fn names_and_files_that_are_not_there_are_told() {
    let Setup {
        server: _server,
        config,
        _cache,
    } = setup();
    let resolve = |name: &str| -> Result<PathBuf> { resolve_dataset_with(name, &config) };
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
