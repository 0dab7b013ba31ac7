//! Saved folders: what is in them, on every layout, and what is left alone.

use std::path::Path;

use candle_core::{DType, Result};
use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, INDEX_FILE, WEIGHTS_FILE, save_hf, sidecar_files};
use safetensors::{Dtype, SafeTensors};
use tempfile::tempdir;

use crate::chain::Chain;
use crate::check::{assert_says, message, on_mesh, single_mesh};
use crate::folder::{counting, edit_file, raw, read_file, read_folder};

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
        let part = chain.part(&mesh, &store()?)?;
        save_hf(part.params(), &mesh, save)
    });
}

fn save_init(dir: &Path, save_as: HfSave) {
    let save_as = HfSave {
        output: dir.to_path_buf().into(),
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

/// A save to `dir`, whatever model is there.
fn over(dir: &Path) -> HfSave {
    HfSave {
        overwrite: true,
        ..HfSave::new(dir, Vec::new())
    }
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
            let to = over(&output.path().join("new/folder"));
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
        ..over(dir)
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
            Chain::default().part(&single_mesh(), &store).unwrap();
        }
    }
}

#[test]
fn no_file_of_the_checkpoint_before_stays() {
    let dir = tempdir().unwrap();
    let names = || -> Vec<String> { read_folder(dir.path()).into_keys().collect() };
    several_files(dir.path(), (1, 1, 1), 300);
    let many = names();
    assert!(many.len() > 4 && many.iter().any(|name| name == INDEX_FILE));
    std::fs::write(dir.path().join("tokenizer.model"), "of another model").unwrap();
    several_files(dir.path(), (1, 1, 1), 1000);
    assert!(names().len() < many.len() && names().iter().all(|name| name != "tokenizer.model"));
    several_files(dir.path(), (1, 1, 1), 1_000_000);
    assert_eq!(names(), [WEIGHTS_FILE]);
    several_files(dir.path(), (1, 1, 1), 300);
    assert_eq!(names(), many);
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
    let said = message(chain.part(&single_mesh(), &refused));
    assert_says(&said, &["holds 3 tensors", "head.weight"]);
    for layout in [(1, 1, 1), (3, 1, 2), (2, 2, 2)] {
        let load = || {
            let store = ParamStore::from_pretrained(input.path())?;
            store.allow_alias("head.weight", "embed.weight");
            store.allow_unused(".inv_freq");
            Ok(store)
        };
        save(chain, layout, load, &over(output.path()));
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
    let said = message(chain.part(&single_mesh(), &store));
    assert_says(
        &said,
        &["head.weight", "embed.weight", "different values", "hint:"],
    );
}

#[test]
fn the_known_small_files_are_copied_along() {
    let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
    save_init(from.path(), plain());
    let small = [
        "LICENSE",
        "LICENSE.txt",
        "NOTICE",
        "README.md",
        "USE_POLICY.md",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
    ];
    let left = [
        INDEX_FILE,
        "additional_chat_templates/notes.txt",
        "notes.txt",
        "preprocessor_config.json",
        "pytorch_model.bin",
        "results.json",
        "texts/vocab.txt",
    ];
    for name in small.iter().chain(&left) {
        let path = from.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, name).unwrap();
    }
    let sidecars = sidecar_files(from.path()).unwrap();
    let names: Vec<_> = sidecars.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, small);
    save_init(to.path(), HfSave::new("", sidecars.clone()));
    assert_eq!(sidecar_files(to.path()).unwrap(), sidecars);
    let files = read_folder(to.path());
    let in_folders = small.iter().filter(|name| name.contains('/')).count();
    assert_eq!(files.len(), small.len() - in_folders + 1);
    assert_says(&message(sidecar_files(&to.path().join("gone"))), &["gone"]);
}

#[test]
fn the_size_is_known_before() {
    let chain = Chain::default();
    for max_file_bytes in [300, 1_000_000] {
        for dtype in [DType::F32, DType::BF16] {
            let dir = tempdir().unwrap();
            let to = HfSave {
                dtype: Some(dtype),
                max_file_bytes,
                ..HfSave::new(dir.path(), vec![("config.json".into(), b"{}".to_vec())])
            };
            let mesh = single_mesh();
            let part = chain.part(&mesh, &ParamStore::init(5)).unwrap();
            save_hf(part.params(), &mesh, &to).unwrap();
            let sizes = read_folder(dir.path()).into_values().map(|file| file.len());
            let size = sizes.sum::<usize>() as u64;
            assert_eq!(to.num_bytes(part.params()).unwrap(), size);
        }
    }
}
