use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::Ordering;

use candle_data::{EncoderConfig, Record, RecordEncoder, RecordKind, Tokenizer};
use serde_json::{Value, json};

use crate::assert_error;

const TEXT: &str = "the cat sat on the mat\nand the cat ate the rat\n\nthat sat on the mat\n";

fn trained() -> Tokenizer {
    Tokenizer::train_bpe([TEXT].into_iter(), 280).unwrap()
}

/// A saved tokenizer, and a way to change its files.
fn saved() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    trained().save(dir.path()).unwrap();
    dir
}

fn write(dir: &Path, name: &str, value: Value) {
    fs::write(dir.join(name), value.to_string()).unwrap();
}

#[test]
fn any_text_survives_encoding_and_decoding() {
    let tokenizer = trained();
    assert_eq!(tokenizer.vocab_size(), 280);
    assert_eq!((tokenizer.bos_id(), tokenizer.eos_id()), (Some(0), 1));
    for text in [TEXT, "  naïve \r\n\t漢字 🦀", "\u{feff}x"] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
    }
    assert!(tokenizer.encode(TEXT).unwrap().len() < TEXT.len() / 2);
    assert_eq!(
        tokenizer.encode("a<|end_of_text|>").unwrap().last(),
        Some(&1)
    );
    assert_eq!(tokenizer.decode(&[1]).unwrap(), "");
    assert_eq!(tokenizer.token(1).unwrap(), "<|end_of_text|>");
    assert_error(
        Tokenizer::train_bpe([TEXT].into_iter(), 260),
        &["vocab_size(260)", "261"],
    );
    let few = Tokenizer::train_bpe(["ab"].into_iter(), 1000).unwrap();
    assert_eq!(few.vocab_size(), 262);
}

#[test]
fn saved_and_read_again_it_is_the_same() {
    let dir = saved();
    let (saved, read) = (trained(), Tokenizer::from_dir(dir.path()).unwrap());
    assert_eq!(read.encode(TEXT).unwrap(), saved.encode(TEXT).unwrap());
    assert_eq!(
        (read.eos_id(), read.bos_id(), read.vocab_size()),
        (1, Some(0), 280)
    );
    let mut names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["tokenizer.json", "tokenizer_config.json"]);
    assert_error(
        saved.save(dir.path().join("missing")),
        &["missing", "tokenizer.json"],
    );
}

#[test]
fn the_bytes_of_a_long_text_are_counted_as_they_are_encoded() {
    let tokenizer = trained();
    let text = "the cat sat on the mat\n".repeat(200_000);
    tokenizer.encode("short").unwrap();
    let num_encoded = || tokenizer.num_encoded_bytes().load(Ordering::Relaxed);
    assert_eq!(num_encoded(), 0);
    tokenizer.encode(&text).unwrap();
    assert_eq!(num_encoded(), text.len() as u64);
}

#[test]
fn files_that_would_be_waited_for_are_refused() {
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let dir = saved();
        let path = dir.path().join(name);
        let _ = fs::remove_file(&path);
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        assert_error(Tokenizer::from_dir(dir.path()), &[name, "it is a pipe"]);
    }
}

#[test]
fn texts_end_with_eos() {
    let tokenizer = trained();
    let encoder = RecordEncoder::new(&tokenizer, None, EncoderConfig::default()).unwrap();
    let encoded = encoder.encode(&Record::Text("the cat".into())).unwrap();
    let mut expected = tokenizer.encode("the cat").unwrap();
    expected.push(1);
    assert_eq!((encoded.kind, encoded.ids), (RecordKind::Text, expected));
    assert!(!encoded.has_loss[0] && encoded.has_loss[1..].iter().all(|&has| has));
}

#[test]
fn the_file_may_not_cut_or_pad_texts() {
    let dir = saved();
    let path = dir.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    file["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 500}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|begin_of_text|>"});
    write(dir.path(), "tokenizer.json", file);
    let read = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(read.encode(TEXT).unwrap(), trained().encode(TEXT).unwrap());
}

#[test]
fn eos_is_looked_for_in_four_files() {
    let dir = saved();
    let dir = dir.path();
    let eos = || Tokenizer::from_dir(dir).map(|t| t.eos_id());
    write(
        dir,
        "generation_config.json",
        json!({"eos_token_id": [3, 4]}),
    );
    write(dir, "config.json", json!({"eos_token_id": 4}));
    write(
        dir,
        "special_tokens_map.json",
        json!({"eos_token": {"content": "<|start_header_id|>"}}),
    );
    assert_eq!(eos().unwrap(), 1);
    write(
        dir,
        "tokenizer_config.json",
        json!({"eos_token": {"content": "<|eot_id|>", "lstrip": false}}),
    );
    assert_eq!(eos().unwrap(), 4);
    write(dir, "tokenizer_config.json", json!({"eos_token": null}));
    assert_eq!(eos().unwrap(), 2);
    for unset in [
        json!({"eos_token": ""}),
        json!({"eos_token": {"content": ""}}),
    ] {
        write(dir, "tokenizer_config.json", unset);
        assert_eq!(eos().unwrap(), 2);
    }
    fs::remove_file(dir.join("special_tokens_map.json")).unwrap();
    assert_eq!(eos().unwrap(), 4);
    write(
        dir,
        "config.json",
        json!({"eos_token_id": [2, 3], "bos_token_id": 0}),
    );
    assert_eq!(eos().unwrap(), 2);
    assert_eq!(Tokenizer::from_dir(dir).unwrap().bos_id(), Some(0));
    write(dir, "config.json", json!({}));
    assert_eq!(eos().unwrap(), 3);
    assert_eq!(Tokenizer::from_dir(dir).unwrap().bos_id(), None);
    write(dir, "generation_config.json", json!({"eos_token_id": 9999}));
    assert_error(eos(), &["generation_config.json", "9999"]);
    write(dir, "generation_config.json", json!([]));
    assert_error(eos(), &["no end-of-sequence token", "hint:"]);
    write(dir, "tokenizer_config.json", json!({"eos_token": "</s>"}));
    assert_error(eos(), &["tokenizer_config.json", "</s>"]);
    fs::write(dir.join("tokenizer_config.json"), "{").unwrap();
    assert_error(eos(), &["tokenizer_config.json", "not valid JSON"]);
}

#[test]
fn missing_and_foreign_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let read = || Tokenizer::from_dir(dir.path());
    assert_error(
        read(),
        &["tokenizer.json", "hint: only tokenizer.json is supported"],
    );
    fs::write(dir.path().join("tokenizer.model"), "").unwrap();
    assert_error(
        read(),
        &["tokenizer.json", "hint: tokenizer.model is not read"],
    );
    for foreign in [
        "",
        "{}",
        "\u{0}\u{1}",
        r#"{"version": "1.0", "model": {"type": "Other"}}"#,
    ] {
        fs::write(dir.path().join("tokenizer.json"), foreign).unwrap();
        assert_error(read(), &["tokenizer.json", "is not a tokenizer", "hint:"]);
    }
}

/// The library panics on each of these, at the latest when it decodes.
#[test]
fn files_that_the_library_panics_on_are_errors() {
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[GONE]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    });
    let model = json!({
        "type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": [["a", "b"]],
        "continuing_subword_prefix": "######", "dropout": null, "unk_token": null, "end_of_word_suffix": null,
        "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
    });
    let replace = |pattern: Value| json!({"type": "Replace", "pattern": pattern, "content": "x"});
    let twenty = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(20)});
    let hostile = [
        ("normalizer", replace(json!({"String": ""}))),
        (
            "normalizer",
            json!({"type": "Sequence", "normalizers": vec![&twenty; 8]}),
        ),
        (
            "normalizer",
            json!({"type": "Prepend", "prepend": "a".repeat(10 << 20)}),
        ),
        ("post_processor", template),
        ("model", model),
        (
            "decoder",
            json!({"type": "Strip", "content": "a", "start": 0, "stop": 1_u64 << 62}),
        ),
        (
            "decoder",
            json!({"type": "Sequence", "decoders": vec![&twenty; 8]}),
        ),
    ];
    for (part, value) in hostile {
        let dir = saved();
        let path = dir.path().join("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        file[part] = value;
        // The library normalizes it as soon as it makes the tokenizer.
        let normalized = json!({
            "id": 280, "content": "aa", "normalized": true, "special": false, "single_word": false, "lstrip": false, "rstrip": false,
        });
        file["added_tokens"]
            .as_array_mut()
            .unwrap()
            .push(normalized);
        if part == "model" {
            file["added_tokens"] = json!([]);
            write(
                dir.path(),
                "tokenizer_config.json",
                json!({"eos_token": "</s>"}),
            );
        }
        fs::write(&path, file.to_string()).unwrap();
        let tried = Tokenizer::from_dir(dir.path()).and_then(|tokenizer| {
            tokenizer.encode_with_special_tokens("a banana")?;
            tokenizer.encode_prompt("a banana")?;
            tokenizer.decode(&tokenizer.encode("a")?)
        });
        assert_error(tried, &[path.to_str().unwrap()]);
    }
}

#[test]
fn a_token_beyond_the_model_is_named() {
    let tokenizer = trained();
    tokenizer.check_vocab(&[0, 279], 280).unwrap();
    tokenizer.check_vocab(&[0, 278], 279).unwrap();
    let token = tokenizer.token(279).unwrap();
    assert_error(
        tokenizer.check_vocab(&[0, 279], 279),
        &["token id 279", &token, "has 280 tokens", "the model 279"],
    );
}

#[test]
fn saving_follows_no_link() {
    let dir = saved();
    let thesis = dir.path().join("thesis");
    fs::write(&thesis, "years of work").unwrap();
    let file = dir.path().join("tokenizer.json");
    let want = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    for name in ["tokenizer.json", "tokenizer.json.partial"] {
        symlink(&thesis, dir.path().join(name)).unwrap();
    }
    trained().save(dir.path()).unwrap();
    assert_eq!(fs::read_to_string(&thesis).unwrap(), "years of work");
    assert!(!file.is_symlink());
    assert_eq!(fs::read(&file).unwrap(), want);
}
