use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use candle_data::hub::{HubConfig, resolve_model_with};

use crate::assert_error;
use crate::hub::{COMMIT, INDEX, Setup, model, resolve, setup, weights};

#[test]
fn what_the_hub_refuses() {
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(b"weights"));
    assert_error(
        resolve_model_with("org/missing", &config),
        &[
            "org/missing",
            "status 404",
            "no folder",
            &config.endpoint,
            "hint:",
        ],
    );
    assert_error(
        resolve_model_with("org/model@v9", &config),
        &["revision v9", "status 404"],
    );

    for status in [401, 403] {
        server.state.lock().unwrap().gate = Some(("secret".to_string(), status));
        assert_error(
            resolve(&config),
            &[
                "org/model",
                &format!("status {status}"),
                "hint:",
                "HF_TOKEN",
            ],
        );
        let wrong = HubConfig {
            token: Some("wrong".to_string()),
            ..config.clone()
        };
        assert_error(
            resolve(&wrong),
            &[&format!("status {status}"), "hint:", "HF_TOKEN"],
        );
    }
    let token = HubConfig {
        token: Some("secret".to_string()),
        ..config.clone()
    };
    resolve(&token).unwrap();
    assert!(!format!("{token:?}").contains("secret"));
}

#[test]
fn incomplete_models_are_named() {
    let without = |name: &str| {
        let mut files = model(b"weights");
        files.retain(|(file, _)| *file != name);
        let Setup {
            config,
            server,
            _cache,
        } = setup(&files);
        let error = resolve(&config).map(drop);
        assert!(
            !server
                .take_downloads()
                .iter()
                .any(|r| r.contains("model.safetensors "))
                || name == "README.md"
        );
        error
    };
    assert_error(
        without("tokenizer.json"),
        &["org/model@main has no tokenizer.json", "hint:"],
    );
    assert_error(
        without("model.safetensors"),
        &["neither model.safetensors nor", "hint:"],
    );
    assert_error(without("config.json"), &["has no config.json", "hint:"]);

    let mut files = vec![("config.json", b"{}".as_slice()), ("tokenizer.json", b"{}")];
    files.push(("model.safetensors.index.json", INDEX));
    assert_error(
        resolve(&setup(&files).config),
        &["has no model-00001-of-00002.safetensors"],
    );
    for index in [
        r#"{"weight_map": {"a": "../../secret.safetensors"}}"#,
        r#"{"weight_map": {"a": "x.bin"}}"#,
        "{}",
    ] {
        files[2].1 = index.as_bytes();
        assert_error(
            resolve(&setup(&files).config),
            &["index of the weights", "model.safetensors.index.json"],
        );
    }
}

#[test]
fn a_cut_connection_leaves_nothing_that_looks_complete() {
    let weights = weights();
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(&weights));
    server.state.lock().unwrap().cut = Some(("model.safetensors".to_string(), 90_000));
    assert_error(
        resolve(&config),
        &["cannot fetch model.safetensors", "org/model", "hint:"],
    );
    let dir = config
        .cache_dir
        .join("models--org--model/snapshots")
        .join(COMMIT);
    assert!(!dir.join("model.safetensors").exists());
    let offline = HubConfig {
        offline: true,
        ..config.clone()
    };
    assert_error(resolve(&offline), &["lacks model.safetensors"]);

    // Three tries of 90,000 bytes have arrived: the next run continues there.
    server.state.lock().unwrap().cut = None;
    server.take_downloads();
    assert_eq!(resolve(&config).unwrap(), dir);
    assert_eq!(
        server.take_downloads(),
        ["GET /org/model/resolve/main/model.safetensors bytes=270000-"]
    );
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn a_connection_cut_once_is_continued() {
    let weights = weights();
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(&weights));
    server.state.lock().unwrap().cut = Some(("model.safetensors".to_string(), 200_000));
    let dir = resolve(&config).unwrap();
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn leftovers_of_broken_downloads_do_no_harm() {
    let weights = weights();
    let Setup {
        server,
        config,
        _cache,
    } = setup(&model(&weights));
    // A server that starts over although a range was asked for: the sum of the parts is too long.
    server.state.lock().unwrap().cut = Some(("model.safetensors".to_string(), 90_000));
    assert!(resolve(&config).is_err());
    {
        let mut state = server.state.lock().unwrap();
        state.cut = None;
        state.ignores_ranges = true;
    }
    let dir = resolve(&config).unwrap();
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights);

    // A run that was killed between the last byte and the renaming.
    server.state.lock().unwrap().ignores_ranges = false;
    let blob = fs::canonicalize(dir.join("model.safetensors")).unwrap();
    fs::rename(&blob, blob.with_extension("part")).unwrap();
    resolve(&config).unwrap();
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights);
}

/// Somebody else who may write to the cache has put links there, at names of files that this program makes.
#[test]
fn links_in_the_cache_are_not_written_through() {
    let weights = weights();
    let Setup {
        server: _server,
        config,
        _cache,
    } = setup(&model(&weights));
    // What the files that have a name of their own in the cache are called, in another one.
    let other = HubConfig {
        cache_dir: _cache.path().join("other"),
        ..config.clone()
    };
    let blob = fs::canonicalize(resolve(&other).unwrap().join("model.safetensors")).unwrap();
    let blob = Path::new("blobs").join(blob.file_name().unwrap());
    let thesis = _cache.path().join("thesis");
    fs::write(&thesis, "years of work").unwrap();
    let repo = config.cache_dir.join("models--org--model");
    let links = [
        config
            .cache_dir
            .join(".locks/candle-train--org--model.lock"),
        repo.join(".files").join(COMMIT),
        repo.join("refs/main"),
        repo.join(&blob).with_extension("part"),
        repo.join(&blob).with_extension("lock"),
    ];
    for link in &links {
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(&thesis, link).unwrap();
    }
    let dir = resolve(&config).unwrap();
    assert_eq!(fs::read(dir.join("model.safetensors")).unwrap(), weights);
    assert_eq!(fs::read_to_string(&thesis).unwrap(), "years of work");
}
