//! Tokenizers that are missing, damaged or another model's.

use std::fs;

use serde_json::json;

use super::folder::edit_json;
use super::workspace::{Workspace, refuses_file, refuses_model};

#[test]
fn a_tokenizer_that_is_missing_or_damaged_is_named() {
    let file = "model/tokenizer.json";
    refuses_file(
        file,
        |path| fs::remove_file(path).unwrap(),
        &["cannot read the tokenizer", "tokenizer.json"],
    );
    let parts = ["tokenizer.json", "is not a tokenizer"];
    refuses_file(file, |path| fs::write(path, "").unwrap(), &parts);
    refuses_file(
        file,
        |path| fs::write(path, "not JSON at all").unwrap(),
        &parts,
    );
    refuses_file(
        file,
        |path| fs::write(path, "{\"version\": \"1.0\"}").unwrap(),
        &parts,
    );
    refuses_file(
        file,
        |path| {
            let half = fs::read(path).unwrap();
            fs::write(path, &half[..half.len() / 2]).unwrap();
        },
        &parts,
    );
    refuses_file(
        "model/tokenizer_config.json",
        |path| fs::write(path, "{").unwrap(),
        &["tokenizer_config.json", "not valid JSON"],
    );
}

#[test]
fn token_ids_beyond_the_vocabulary_are_an_error_when_they_are_used() {
    let workspace = Workspace::new();
    // An added token that the model has no row for does no harm until a text uses it.
    edit_json(&workspace.model("tokenizer.json"), |tokenizer| {
        let mut added = tokenizer["added_tokens"][0].clone();
        added["id"] = json!(307);
        added["content"] = json!("<extra>");
        tokenizer["added_tokens"]
            .as_array_mut()
            .unwrap()
            .push(added);
    });
    let prompted = workspace.finetune().flag("--prompt", "some <extra> text");
    let parts = [
        "token id 307",
        "\"<extra>\"",
        "the tokenizer has 308 tokens, the model 307",
    ];
    let samples = prompted.clone().flag("--sample-tokens", 1);
    workspace.refuses(&samples, &parts);
    prompted.succeeds();
    refuses_model(
        |workspace| workspace.edit_config(|config| config["vocab_size"] = json!(300)),
        &[
            "model.embed_tokens.weight",
            "has shape [307, 32]; expected [300, 32]",
        ],
    );
}

#[test]
fn a_tokenizer_without_an_end_of_sequence_token_is_an_error() {
    refuses_model(
        |workspace| {
            for (file, field) in [
                ("tokenizer_config.json", "eos_token"),
                ("config.json", "eos_token_id"),
                ("generation_config.json", "eos_token_id"),
            ] {
                edit_json(&workspace.model(file), |json| {
                    json.as_object_mut().unwrap().remove(field);
                });
            }
        },
        &["no end-of-sequence token", "eos_token"],
    );
    refuses_file(
        "model/tokenizer_config.json",
        |path| edit_json(path, |config| config["eos_token"] = json!("</s>")),
        &["eos_token \"</s>\"", "tokenizer.json does not have"],
    );
}
