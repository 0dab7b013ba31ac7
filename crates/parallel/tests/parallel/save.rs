//! Saved folders: what is in them, on every layout, and what is left alone.

use std::path::Path;

use candle_core::{DType, Result};
use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, INDEX_FILE, WEIGHTS_FILE, save_hf, sidecar_files};
use safetensors::{Dtype, SafeTensors};
use tempfile::tempdir;

use crate::chain::Chain;
use crate::check::{assert_says, message, on_mesh, single_mesh};
use crate::folder::{Files, counting, edit_file, raw, read_file, read_folder};

type Layout = (usize, usize, usize);

const LAYOUTS: [Layout; 6] = [
    (1, 1, 1),
    (1, 1, 3),
    (3, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
    (3, 2, 1),
];

/// Saves the chain in what `store` gives on a layout.
fn save(
    chain: Chain,
    layout: Layout,
    store: impl Fn() -> Result<ParamStore> + Sync,
    save: &HfSave,
) {
    on_mesh(layout, |mesh| {
        let stage = chain.stage(&mesh, &store()?)?;
        save_hf(stage.params(), &mesh, save)
    });
}

fn save_init(dir: &Path, save_as: HfSave) {
    let save_as = HfSave {
        output: dir.to_path_buf(),
        ..save_as
    };
    save(
        Chain::default(),
        (1, 1, 1),
        || Ok(ParamStore::init(5)),
        &save_as,
    );
}

fn plain() -> HfSave {
    HfSave::new("", Vec::new())
}

#[test]
fn a_loaded_checkpoint_is_saved_as_it_was_on_every_layout() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (input, output) = (tempdir().unwrap(), tempdir().unwrap());
        let dtype = Some(dtype);
        save_init(input.path(), HfSave { dtype, ..plain() });
        let expected = read_folder(input.path());
        assert_eq!(expected.keys().collect::<Vec<_>>(), [WEIGHTS_FILE]);
        for layout in LAYOUTS {
            let load = || ParamStore::from_pretrained(input.path());
            let to = HfSave::new(output.path().join("new/folder"), Vec::new());
            save(Chain::default(), layout, load, &to);
            let saved = read_folder(&output.path().join("new/folder"));
            assert!(saved == expected, "{layout:?} {dtype:?}");
        }
    }
}

#[test]
fn the_file_is_what_transformers_expects() {
    let dir = tempdir().unwrap();
    save_init(dir.path(), plain());
    let bytes = std::fs::read(dir.path().join(WEIGHTS_FILE)).unwrap();
    let (header_len, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    assert_eq!((header_len + 8) % 8, 0);
    let tensors = read_file(&dir.path().join(WEIGHTS_FILE));
    assert!(tensors.iter().all(|t| t.1 == Dtype::F32));
    let names: Vec<_> = tensors.iter().map(|t| t.0.as_str()).collect();
    assert_eq!(names.len(), 17);
    assert!(names.contains(&"layers.2.down.bias"));
}

fn several_files(dir: &Path, layout: Layout, max_file_bytes: usize) {
    let to = HfSave {
        max_file_bytes,
        ..HfSave::new(dir, Vec::new())
    };
    save(Chain::default(), layout, || Ok(ParamStore::init(5)), &to);
}

#[test]
fn several_files_and_an_index() {
    let single = tempdir().unwrap();
    save_init(single.path(), plain());
    let whole = read_file(&single.path().join(WEIGHTS_FILE));
    for layout in [(1, 1, 1), (2, 1, 2)] {
        for max_file_bytes in [1, 300, 1000] {
            let dir = tempdir().unwrap();
            several_files(dir.path(), layout, max_file_bytes);
            let files = read_folder(dir.path());
            let index: serde_json::Value = serde_json::from_slice(&files[INDEX_FILE]).unwrap();
            let map = index["weight_map"].as_object().unwrap();
            let num_files = files.len() - 1;
            let mut joined = Vec::new();
            for number in 1..=num_files {
                let name = format!("model-{number:05}-of-{num_files:05}.safetensors");
                let tensors = read_file(&dir.path().join(&name));
                let size: usize = tensors.iter().map(|t| t.3.len()).sum();
                assert!(
                    size <= max_file_bytes || tensors.len() == 1,
                    "{name}: {size}"
                );
                assert!(tensors.iter().all(|t| map[&t.0] == name.as_str()));
                joined.extend(tensors);
            }
            joined.sort_by(|a, b| a.0.cmp(&b.0));
            assert!(joined == whole, "{layout:?} {max_file_bytes}");
            assert_eq!(map.len(), whole.len());
            let total: usize = whole.iter().map(|t| t.3.len()).sum();
            assert_eq!(index["metadata"]["total_size"], total);
            // And it can be read again.
            let store = ParamStore::from_pretrained(dir.path()).unwrap();
            Chain::default().stage(&single_mesh(), &store).unwrap();
        }
    }
}

#[test]
fn files_of_the_checkpoint_before_go_and_others_stay() {
    let dir = tempdir().unwrap();
    let others = [
        "notes.txt",
        "tokenizer.json",
        "model-lora.safetensors",
        "model_backup.safetensors",
        "my-model.safetensors",
        "model-00001-of-00002.safetensors.bak",
    ];
    for name in others {
        std::fs::write(dir.path().join(name), name).unwrap();
    }
    std::fs::create_dir(dir.path().join("checkpoints")).unwrap();
    let check = |weights: &dyn Fn(&Files) -> bool| {
        let mut files = read_folder(dir.path());
        for name in others {
            assert_eq!(
                files.remove(name).as_deref(),
                Some(name.as_bytes()),
                "{name}"
            );
        }
        assert!(weights(&files), "{:?}", files.keys());
        assert!(dir.path().join("checkpoints").is_dir());
        let store = ParamStore::from_pretrained(dir.path()).unwrap();
        Chain::default().stage(&single_mesh(), &store).unwrap();
    };
    several_files(dir.path(), (1, 1, 1), 300);
    let mut many = 0;
    check(&|files| files.len() > 4 && files.contains_key(INDEX_FILE));
    many += read_folder(dir.path()).len();
    several_files(dir.path(), (1, 1, 1), 1000);
    check(&|files| files.len() < many - others.len() && files.contains_key(INDEX_FILE));
    several_files(dir.path(), (1, 1, 1), 1_000_000);
    check(&|files| files.keys().eq([WEIGHTS_FILE]));
    several_files(dir.path(), (1, 1, 1), 300);
    check(&|files| files.len() == many - others.len() && !files.contains_key(WEIGHTS_FILE));
}

#[test]
fn a_checkpoint_can_be_saved_over_the_one_it_came_from() {
    let dir = tempdir().unwrap();
    save_init(dir.path(), plain());
    let before = read_folder(dir.path());
    let load = || ParamStore::from_pretrained(dir.path());
    let to = HfSave::new(dir.path(), Vec::new());
    save(Chain::default(), (2, 1, 2), load, &to);
    assert!(read_folder(dir.path()) == before);
}

#[test]
fn constants_and_second_names_are_saved_back() {
    let (input, output) = (tempdir().unwrap(), tempdir().unwrap());
    let chain = Chain {
        tied: true,
        ..Chain::default()
    };
    let to = HfSave::new(input.path(), Vec::new());
    save(chain, (1, 1, 1), || Ok(ParamStore::init(5)), &to);
    edit_file(&input.path().join(WEIGHTS_FILE), |all| {
        let mut alias = all.iter().find(|t| t.0 == "embed.weight").unwrap().clone();
        alias.0 = "head.weight".into();
        all.push(alias);
        all.push(counting("layers.0.rotary.inv_freq", &[5]));
        all.push(raw(
            "layers.1.rotary.inv_freq",
            Dtype::I64,
            &[2],
            vec![7; 16],
        ));
    });
    let refused = ParamStore::from_pretrained(input.path()).unwrap();
    let said = message(chain.stage(&single_mesh(), &refused));
    assert_says(&said, &["holds 3 tensors", "head.weight"]);
    for layout in [(1, 1, 1), (3, 1, 2), (2, 2, 2)] {
        let load = || {
            let store = ParamStore::from_pretrained(input.path())?;
            store.allow_alias("head.weight", "embed.weight");
            store.allow_unused(".inv_freq");
            Ok(store)
        };
        let to = HfSave::new(output.path(), Vec::new());
        save(chain, layout, load, &to);
        let read = |dir: &Path| read_file(&dir.join(WEIGHTS_FILE));
        assert!(read(output.path()) == read(input.path()), "{layout:?}");
    }
}

#[test]
fn a_second_name_with_other_values_is_refused() {
    let input = tempdir().unwrap();
    let chain = Chain {
        tied: true,
        ..Chain::default()
    };
    let to = HfSave::new(input.path(), Vec::new());
    save(chain, (1, 1, 1), || Ok(ParamStore::init(5)), &to);
    edit_file(&input.path().join(WEIGHTS_FILE), |all| {
        let mut alias = all.iter().find(|t| t.0 == "embed.weight").unwrap().clone();
        alias.0 = "head.weight".into();
        alias.3[5] ^= 1;
        all.push(alias);
    });
    let store = ParamStore::from_pretrained(input.path()).unwrap();
    store.allow_alias("head.weight", "embed.weight");
    let said = message(chain.stage(&single_mesh(), &store));
    assert_says(
        &said,
        &["head.weight", "embed.weight", "different values", "hint:"],
    );
}

#[test]
fn small_files_are_copied_along() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    save_init(from.path(), plain());
    let small = [
        "config.json",
        "tokenizer.json",
        "LICENSE",
        "merges.txt",
        "README.md",
    ];
    let left = [
        INDEX_FILE,
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ];
    for name in small.iter().chain(&left) {
        std::fs::write(from.path().join(name), name).unwrap();
    }
    let sidecars = sidecar_files(from.path()).unwrap();
    let names: Vec<_> = sidecars.iter().map(|(name, _)| name.as_str()).collect();
    let mut expected = small.to_vec();
    expected.sort();
    assert_eq!(names, expected);
    save_init(to.path(), HfSave::new("", sidecars));
    let files = read_folder(to.path());
    assert_eq!(files.len(), small.len() + 1);
    assert!(small.iter().all(|name| files[*name] == name.as_bytes()));
    assert_says(&message(sidecar_files(&to.path().join("gone"))), &["gone"]);
}

#[test]
fn check_writable_changes_nothing() {
    let dir = tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    HfSave::new(dir.path(), Vec::new())
        .check_writable()
        .unwrap();
    assert_eq!(read_folder(dir.path()).len(), 1);
    let said = message(HfSave::new(dir.path().join("file"), Vec::new()).check_writable());
    assert_says(&said, &["cannot write to the output folder", "file"]);
    for name in ["config.json", WEIGHTS_FILE, INDEX_FILE] {
        let dir = tempdir().unwrap();
        std::fs::create_dir(dir.path().join(name)).unwrap();
        let to = HfSave::new(dir.path(), vec![("config.json".into(), Vec::new())]);
        let said = message(to.check_writable());
        assert_says(&said, &["cannot write to the output folder", name]);
    }
}
