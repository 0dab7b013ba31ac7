//! A model that is fetched from a hub (on loopback) and kept.

use std::fs;

use super::folder::{fixture, names};
use super::hub_server::HubServer;
use super::workspace::Workspace;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn publish(server: &HubServer) {
    let dir = fixture("bf16_sharded/model");
    let files = names(&dir).into_iter().map(|name| {
        let bytes = fs::read(dir.join(&name)).unwrap();
        (name, bytes)
    });
    let files: Vec<(String, Vec<u8>)> = files.collect();
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
        .collect();
    server.publish("someone/tiny", "main", COMMIT, &files);
}

#[test]
fn a_model_from_the_hub_is_fetched_once_and_then_used_offline() {
    let workspace = Workspace::new();
    let server = HubServer::start();
    publish(&server);
    let program = workspace
        .finetune()
        .flag("--model", "someone/tiny")
        .variable("HF_ENDPOINT", server.endpoint());
    let outcome = program.clone().variable("HF_HUB_OFFLINE", "").succeeds();
    outcome.says(&["fetching model-00001-of-00005.safetensors"]);
    assert!(!server.take_downloads().is_empty());
    let saved = fs::read(workspace.output().join("model.safetensors")).unwrap();

    fs::remove_dir_all(workspace.output()).unwrap();
    program.succeeds();
    assert!(server.state.lock().unwrap().log.is_empty());
    assert!(fs::read(workspace.output().join("model.safetensors")).unwrap() == saved);
}

#[test]
fn a_model_that_the_hub_does_not_have_is_an_error_with_its_name() {
    let workspace = Workspace::new();
    let server = HubServer::start();
    publish(&server);
    let program = workspace
        .finetune()
        .variable("HF_ENDPOINT", server.endpoint())
        .variable("HF_HUB_OFFLINE", "");
    let missing = program.clone().flag("--model", "someone/else");
    workspace.refuses(
        &missing,
        &["someone/else", "status 404", &server.endpoint()],
    );
    let revision = program.flag("--model", "someone/tiny@v2");
    workspace.refuses(&revision, &["someone/tiny", "revision v2", "status 404"]);
}

#[test]
fn data_from_the_hub_is_trained_on_and_evaluated_on_by_split() {
    let workspace = Workspace::new();
    let server = HubServer::start();
    let text = fs::read(workspace.path("text.txt")).unwrap();
    let files: [(&str, &[u8]); 3] = [
        ("data/train.txt", &text),
        ("data/val.txt", &text[..text.len() / 2]),
        ("data/test.txt", &text[..text.len() / 3]),
    ];
    server.publish("datasets/org/data", "main", COMMIT, &files);
    let name = "hub://datasets/org/data";
    let program = workspace
        .finetune()
        .flag("--data", name)
        .flag("--eval-data", name)
        .variable("HF_ENDPOINT", server.endpoint())
        .variable("HF_HUB_OFFLINE", "");
    let outcome = program.succeeds();
    outcome.says(&[
        "1 of the files of hub://datasets/org/data are read (data/train.txt), and 2 are left (data/test.txt, data/val.txt)\n",
        "1 of the files of hub://datasets/org/data are read (data/val.txt), and 2 are left (data/test.txt, data/train.txt)\n",
    ]);
    let named = program.flag("--data", format!("{name}/data/t*.txt"));
    let outcome = named.without("--eval-data").succeeds();
    outcome.prints(&[": 2 texts, "]);
    assert!(!outcome.stderr.contains("are left"), "{}", outcome.stderr);
}
