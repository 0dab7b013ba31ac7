use std::fs;
use std::path::{Path, PathBuf};

use candle_core::Result;
use candle_data::hub::{HubConfig, RepoSpec, resolve_model_with};

use crate::assert_error;
use crate::hub_server::HubServer;

pub const COMMIT: &str = "1111111111111111111111111111111111111111";
const NEXT_COMMIT: &str = "2222222222222222222222222222222222222222";
pub const INDEX: &[u8] = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;

/// A server with one model, and a client's settings with an empty cache.
pub struct Setup {
    pub server: HubServer,
    pub config: HubConfig,
    pub _cache: tempfile::TempDir,
}

pub fn setup(files: &[(&str, &[u8])]) -> Setup {
    let (server, cache) = (HubServer::start(), tempfile::tempdir().unwrap());
    server.publish("org/model", "main", COMMIT, files);
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

pub fn weights() -> Vec<u8> {
    (0..100_000u32).flat_map(u32::to_le_bytes).collect()
}

pub fn model(weights: &[u8]) -> Vec<(&str, &[u8])> {
    vec![
        ("config.json", br#"{"a": 1}"#),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", weights),
        ("README.md", b"#"),
    ]
}

pub fn resolve(config: &HubConfig) -> Result<PathBuf> {
    resolve_model_with("org/model", config)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn first_run_fetches_the_second_does_not() {
    let weights = weights();
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(&weights));
    let dir = resolve(&config).unwrap();
    assert_eq!(
        dir,
        config
            .cache_dir
            .join("models--org--model/snapshots")
            .join(COMMIT)
    );
    assert_eq!(
        names(&dir),
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights);
    assert_eq!(fs::read(dir.join("config.json")).unwrap(), br#"{"a": 1}"#);
    assert_eq!(
        fs::read_to_string(config.cache_dir.join("models--org--model/refs/main")).unwrap(),
        COMMIT
    );
    assert_eq!(server.take_downloads().len(), 3);

    assert_eq!(resolve(&config).unwrap(), dir);
    // One look at the commit and its files.
    assert_eq!(
        server.state.lock().unwrap().log,
        ["GET /api/models/org/model/revision/main "]
    );
    assert!(server.take_downloads().is_empty());
}

#[test]
fn shards_and_optional_files_come_along() {
    let mut files = model(b"");
    files.retain(|(name, _)| *name != "model.safetensors");
    files.extend([
        ("model.safetensors.index.json", INDEX),
        ("model-00001-of-00002.safetensors", b"one".as_slice()),
        ("model-00002-of-00002.safetensors", b"two"),
        ("tokenizer_config.json", br#"{"b": 2}"#),
        ("generation_config.json", b"{} "),
        ("special_tokens_map.json", b" {}"),
        ("chat_template.jinja", b"{{ bos_token }}"),
        ("additional_chat_templates/tool_use.jinja", b"{{ tools }}"),
        ("additional_chat_templates/notes.txt", b"no template"),
    ]);
    let Setup {
        server,
        config,
        _cache,
    } = setup(&files);
    let dir = resolve(&config).unwrap();
    assert_eq!(names(&dir).len(), 10);
    assert_eq!(
        names(&dir.join("additional_chat_templates")),
        ["tool_use.jinja"]
    );
    assert_eq!(
        fs::read(dir.join("additional_chat_templates/tool_use.jinja")).unwrap(),
        b"{{ tools }}"
    );
    assert_eq!(
        fs::read(dir.join("chat_template.jinja")).unwrap(),
        b"{{ bos_token }}"
    );
    assert_eq!(
        fs::read(dir.join("model-00002-of-00002.safetensors")).unwrap(),
        b"two"
    );
    assert_eq!(server.take_downloads().len(), 10);

    // Offline, a missing shard is noticed.
    let offline = HubConfig {
        offline: true,
        ..config.clone()
    };
    assert_eq!(resolve(&offline).unwrap(), dir);
    fs::remove_file(dir.join("model-00002-of-00002.safetensors")).unwrap();
    assert_error(
        resolve(&offline),
        &["lacks model-00002-of-00002.safetensors"],
    );
}

#[test]
fn offline_and_unreachable() {
    let weights = weights();
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(&weights));
    let offline = HubConfig {
        offline: true,
        ..config.clone()
    };
    assert_error(
        resolve(&offline),
        &["org/model@main", "cache", "HF_HUB_OFFLINE", "hint:"],
    );
    let dir = resolve(&config).unwrap();
    server.take_downloads();
    assert_eq!(resolve(&offline).unwrap(), dir);
    assert!(
        server.state.lock().unwrap().log.is_empty(),
        "offline asks nobody"
    );

    let port = config.endpoint.clone();
    drop(server);
    assert_eq!(
        resolve(&config).unwrap(),
        dir,
        "a complete cache does without the hub"
    );
    assert_error(
        resolve_model_with("org/other", &config),
        &["org/other", &port, "HF_ENDPOINT"],
    );
}

#[test]
fn revisions_and_moving_branches() {
    let weights = weights();
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(&weights));
    server.publish(
        "org/model",
        "refs/pr-1",
        NEXT_COMMIT,
        &[("config.json", b"{}"), ("tokenizer.json", b"{}")],
    );
    server.publish("org/model", "v2", NEXT_COMMIT, &model(b"two"));
    let by_tag = resolve_model_with("org/model@v2", &config).unwrap();
    assert_eq!(fs::read(by_tag.join("model.safetensors")).unwrap(), b"two");
    let main = resolve(&config).unwrap();
    assert_eq!(fs::read(main.join("model.safetensors")).unwrap(), weights);
    server.take_downloads();

    // A commit never changes: no question at all.
    let by_commit = resolve_model_with(&format!("org/model@{COMMIT}"), &config).unwrap();
    assert_eq!(by_commit, main);
    assert!(server.state.lock().unwrap().log.is_empty());

    // The branch moves on; what stays the same is not fetched again.
    let mut files = model(&weights);
    files[0].1 = br#"{"a": 2}"#;
    server.publish("org/model", "main", NEXT_COMMIT, &files);
    fs::remove_dir_all(by_tag).unwrap();
    let moved = resolve(&config).unwrap();
    assert!(moved.ends_with(NEXT_COMMIT));
    assert_eq!(fs::read(moved.join("config.json")).unwrap(), br#"{"a": 2}"#);
    assert_eq!(fs::read(moved.join("model.safetensors")).unwrap(), weights);
    #[cfg(unix)]
    assert_eq!(
        server.take_downloads(),
        ["GET /org/model/resolve/main/config.json bytes=0-"]
    );
    let offline = HubConfig {
        offline: true,
        ..config
    };
    assert_eq!(resolve(&offline).unwrap(), moved);
}

#[test]
fn folders_and_names() {
    let dir = tempfile::tempdir().unwrap();
    let Setup { config, .. } = setup(&[]);
    let path = dir.path().to_str().unwrap();
    assert_eq!(resolve_model_with(path, &config).unwrap(), dir.path());
    let file = dir.path().join("config.json");
    fs::write(&file, "{}").unwrap();
    assert_error(
        resolve_model_with(file.to_str().unwrap(), &config),
        &["is a file", "hint:"],
    );
    for spec in [
        "",
        "llama",
        "./missing/model",
        "/missing/model",
        "org/model/more",
        "org/model@",
        "org/mo del",
        "org/../model",
        "org/model@../x",
        "org/model@a//b",
        "-org/model",
    ] {
        assert_error(
            resolve_model_with(spec, &config),
            &["neither an existing folder nor", "org/name@revision"],
        );
    }
    let spec = RepoSpec::parse("org/my.model-7B@refs/pr/1").unwrap();
    assert_eq!(
        (spec.repo_id.as_str(), spec.revision.as_str()),
        ("org/my.model-7B", "refs/pr/1")
    );
}

#[test]
fn the_environment_is_that_of_huggingface_hub() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().to_str().unwrap();
    let from = |vars: &[(&str, &str)]| {
        HubConfig::from_vars(|name| {
            vars.iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| v.to_string())
        })
    };
    let config = from(&[("HOME", "/h")]).unwrap();
    assert_eq!(config.endpoint, "https://huggingface.co");
    assert_eq!(config.cache_dir, Path::new("/h/.cache/huggingface/hub"));
    assert_eq!((config.token, config.offline), (None, false));
    let cache = |vars: &[(&str, &str)]| from(vars).unwrap().cache_dir;
    assert_eq!(
        cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]),
        Path::new("/x/huggingface/hub")
    );
    assert_eq!(
        cache(&[("HOME", "/h"), ("HF_HOME", "/f")]),
        Path::new("/f/hub")
    );
    assert_eq!(
        cache(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/f")]),
        Path::new("/c")
    );
    assert_error(from(&[]), &["HF_HOME"]);
    assert_eq!(
        from(&[("HOME", "/h"), ("HF_ENDPOINT", "http://hub:1/")])
            .unwrap()
            .endpoint,
        "http://hub:1"
    );

    let token = |vars: &[(&str, &str)]| from(vars).unwrap().token;
    fs::write(dir.path().join("token"), "from file\n").unwrap();
    assert_eq!(token(&[("HF_HOME", home)]).unwrap(), "from file");
    assert_eq!(
        token(&[("HF_HOME", home), ("HF_TOKEN", " direct ")]).unwrap(),
        "direct"
    );
    let file = dir.path().join("token");
    assert_eq!(
        token(&[("HOME", "/h"), ("HF_TOKEN_PATH", file.to_str().unwrap())]).unwrap(),
        "from file"
    );
    for (value, offline) in [
        ("1", true),
        ("true", true),
        ("Yes", true),
        ("0", false),
        ("", false),
    ] {
        assert_eq!(
            from(&[("HOME", "/h"), ("HF_HUB_OFFLINE", value)])
                .unwrap()
                .offline,
            offline
        );
    }
}

#[test]
fn weights_may_lie_elsewhere() {
    let weights = weights();
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(&weights));
    server.state.lock().unwrap().redirects = true;
    let dir = resolve(&config).unwrap();
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights);
    assert!(
        server
            .take_downloads()
            .iter()
            .any(|r| r.starts_with("GET /cdn/org/model"))
    );
    assert_eq!(resolve(&config).unwrap(), dir);
    assert!(server.take_downloads().is_empty());
}

#[test]
fn of_several_that_want_a_model_one_fetches_it() {
    let weights = weights();
    let files = model(&weights);
    let setup = setup(&files);
    let dirs: Vec<PathBuf> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| resolve(&setup.config)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap().unwrap())
            .collect()
    });
    assert!(dirs.iter().all(|dir| *dir == dirs[0]));
    assert_eq!(
        fs::read(dirs[0].join("model.safetensors")).unwrap(),
        weights
    );
    let downloads = setup.server.take_downloads();
    let of_weights = downloads
        .iter()
        .filter(|file| file.contains("model.safetensors"));
    assert_eq!(of_weights.count(), 1, "{downloads:?}");
}

#[test]
fn a_file_in_a_folder_that_another_commit_has_too_is_linked() {
    let weights = weights();
    let mut files = model(&weights);
    files.push(("chat_template.jinja", b"{{ bos_token }}"));
    files.push(("additional_chat_templates/rag.jinja", b"{{ documents }}"));
    let Setup {
        server,
        config,
        _cache,
    } = setup(&files);
    resolve(&config).unwrap();
    files[0].1 = b"{}";
    server.publish("org/model", "main", NEXT_COMMIT, &files);
    let dir = resolve(&config).unwrap();
    assert!(dir.ends_with(NEXT_COMMIT));
    assert_eq!(
        fs::read(dir.join("additional_chat_templates/rag.jinja")).unwrap(),
        b"{{ documents }}"
    );
}
