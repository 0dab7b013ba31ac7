//! Checkpoints that are incomplete, corrupt or of another model, and reading parts of tensors.

use std::path::Path;

use candle_core::Result;
use candle_parallel::checkpoint::{Checkpoint, HfSave, INDEX_FILE, WEIGHTS_FILE, save_hf};
use candle_parallel::{ModelPart, ParamStore, Shard, part};
use half::{bf16, f16};
use safetensors::Dtype;
use tempfile::{TempDir, tempdir};

use crate::chain::Chain;
use crate::check::{assert_says, message, single_mesh};
use crate::folder::{counting, edit_file, raw, write_file};

/// A folder with the checkpoint of the default chain.
fn chain_folder() -> TempDir {
    let (dir, mesh) = (tempdir().unwrap(), single_mesh());
    let part = Chain::default().part(&mesh, &ParamStore::init(5)).unwrap();
    save_hf(part.params(), &mesh, &HfSave::new(dir.path(), Vec::new())).unwrap();
    dir
}

fn load(dir: &Path) -> Result<ModelPart> {
    Chain::default().part(&single_mesh(), &ParamStore::from_pretrained(dir)?)
}

/// The message of loading a chain's folder after `spoil`.
fn spoiled(spoil: impl FnOnce(&Path)) -> String {
    let dir = chain_folder();
    load(dir.path()).unwrap();
    spoil(dir.path());
    message(load(dir.path()))
}

fn open(dir: &TempDir) -> String {
    message(Checkpoint::open(dir.path()))
}

#[test]
fn a_folder_or_file_that_is_missing() {
    let dir = tempdir().unwrap();
    assert_says(&open(&dir), &[WEIGHTS_FILE, INDEX_FILE, "neither", "hint"]);
    let missing = dir.path().join("nothing here");
    let said = message(Checkpoint::open(&missing));
    assert_says(&said, &["nothing here", "does not exist"]);
}

#[test]
fn a_file_that_is_cut_or_garbage() {
    let whole = std::fs::read(chain_folder().path().join(WEIGHTS_FILE)).unwrap();
    let mut huge_header = whole.clone();
    huge_header[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut broken_header = whole.clone();
    broken_header[8..12].copy_from_slice(b"!!!!");
    let mut longer = whole.clone();
    longer.extend([0; 16]);
    let cases: [(&str, &[u8]); 9] = [
        ("without the last byte", &whole[..whole.len() - 1]),
        ("half", &whole[..whole.len() / 2]),
        ("in the header", &whole[..100]),
        ("in the length", &whole[..5]),
        ("empty", &[]),
        ("text", b"<!doctype html><title>404: not found</title>"),
        ("huge header", &huge_header),
        ("broken header", &broken_header),
        ("longer", &longer),
    ];
    for (what, bytes) in cases {
        let said = spoiled(|dir| std::fs::write(dir.join(WEIGHTS_FILE), bytes).unwrap());
        let len = format!("({} bytes)", bytes.len());
        let words = [
            WEIGHTS_FILE,
            &len,
            "not a complete safetensors file",
            "hint",
        ];
        assert!(words.iter().all(|w| said.contains(w)), "{what}: {said}");
    }
}

/// A folder with two files and this index.
fn indexed(index: &str) -> TempDir {
    let dir = tempdir().unwrap();
    for (file, name) in [("one.safetensors", "a"), ("two.safetensors", "b")] {
        write_file(&dir.path().join(file), &[counting(name, &[2, 3])]);
    }
    std::fs::write(dir.path().join(INDEX_FILE), index).unwrap();
    dir
}

#[test]
fn an_index_of_two_files() {
    let index = r#"{"metadata": {"total_size": 48}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#;
    let checkpoint = Checkpoint::open(indexed(index).path()).unwrap();
    let names: Vec<_> = checkpoint.tensors().keys().collect();
    assert_eq!(names, ["a", "b"]);
    let values = checkpoint.read("b", &[2, 3], None).unwrap();
    assert_eq!(values, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn an_index_that_is_wrong() {
    let cases = [
        (
            "{\"weight_map\": 3}",
            vec![INDEX_FILE, "not a safetensors index"],
        ),
        ("not json", vec![INDEX_FILE, "not a safetensors index"]),
        (
            r#"{"weight_map": {"a": "one.safetensors", "c": "three.safetensors"}}"#,
            vec![INDEX_FILE, "three.safetensors", "does not exist", "hint"],
        ),
        (
            r#"{"weight_map": {"a": "../one.safetensors"}}"#,
            vec![INDEX_FILE, "../one.safetensors", "plain file names"],
        ),
        (
            r#"{"weight_map": {"a": "/etc/hostname"}}"#,
            vec!["/etc/hostname", "plain file names"],
        ),
        (r#"{"weight_map": {"a": ".."}}"#, vec!["plain file names"]),
        (
            r#"{"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}"#,
            vec![INDEX_FILE, "tensor c", "two.safetensors", "but it is not"],
        ),
        (
            r#"{"weight_map": {"a": "two.safetensors", "b": "two.safetensors"}}"#,
            vec!["tensor a", "two.safetensors", "but it is not"],
        ),
    ];
    for (index, words) in cases {
        assert_says(&open(&indexed(index)), &words);
    }
    let dir = indexed(r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#);
    write_file(
        &dir.path().join("two.safetensors"),
        &[counting("a", &[2, 3]), counting("b", &[1])],
    );
    let words = ["tensor a is in both", "one.safetensors", "two.safetensors"];
    assert_says(&open(&dir), &words);
}

/// What Git has in the place of a large file that was not fetched.
const LFS_POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";

#[test]
fn what_is_no_file_is_called_what_it_is() {
    let link = |target: &str, path: &Path| std::os::unix::fs::symlink(target, path).unwrap();
    let pipe = |path: &Path| {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
    };
    type Make<'a> = &'a dyn Fn(&Path);
    let cases: [(Make, &str); 5] = [
        (
            &|path| std::fs::create_dir(path).unwrap(),
            "it is a folder, expected a file",
        ),
        (&pipe, "it is a pipe, expected a file\nhint: "),
        (&|path| link(WEIGHTS_FILE, path), "it is in a loop of links"),
        (
            &|path| link("gone", path),
            "is a link to gone, which is missing",
        ),
        (
            &|path| std::fs::write(path, LFS_POINTER).unwrap(),
            "it is a Git LFS pointer",
        ),
    ];
    let index = format!("{{\"weight_map\": {{\"a\": {WEIGHTS_FILE:?}}}}}");
    for (make, words) in cases {
        let dir = tempdir().unwrap();
        make(&dir.path().join(WEIGHTS_FILE));
        assert_says(&open(&dir), &[WEIGHTS_FILE, words]);
        // One of several files, and the index of them.
        std::fs::rename(dir.path().join(WEIGHTS_FILE), dir.path().join("b")).unwrap();
        std::fs::write(
            dir.path().join(INDEX_FILE),
            index.replace(WEIGHTS_FILE, "b"),
        )
        .unwrap();
        if !words.contains("loop") {
            assert_says(&open(&dir), &["/b", words]);
        }
        std::fs::remove_file(dir.path().join(INDEX_FILE)).unwrap();
        std::fs::rename(dir.path().join("b"), dir.path().join(INDEX_FILE)).unwrap();
        if !words.contains("loop") {
            assert_says(&open(&dir), &[INDEX_FILE, words]);
        }
    }
}

#[test]
fn a_tensor_that_is_missing() {
    let weights = |dir: &Path| dir.join(WEIGHTS_FILE);
    let said = spoiled(|dir| {
        edit_file(&weights(dir), |all| {
            all.retain(|t| t.0 != "layers.1.up.bias")
        });
    });
    let words = [
        "tensor layers.1.up.bias is missing",
        "16 tensors",
        "up.bias",
    ];
    assert_says(&said, &words);
    let said = spoiled(|dir| {
        edit_file(&weights(dir), |all| {
            all.iter_mut().for_each(|t| t.0 = format!("base.{}", t.0));
        });
    });
    let words = [
        "tensor embed.weight is missing",
        "hint: it does have base.embed.weight",
    ];
    assert_says(&said, &words);
}

#[test]
fn a_tensor_of_another_shape_or_type() {
    let edit = |name: &'static str, with: fn(&mut crate::folder::Raw)| {
        spoiled(move |dir| {
            edit_file(&dir.join(WEIGHTS_FILE), |all| {
                with(all.iter_mut().find(|t| t.0 == name).unwrap());
            });
        })
    };
    let said = edit("layers.0.up.weight", |t| t.2 = vec![6, 7]);
    let words = [
        "layers.0.up.weight",
        "[6, 7]",
        "expected [7, 6]",
        WEIGHTS_FILE,
    ];
    assert_says(&said, &words);
    let said = edit("layers.0.norm.weight", |t| t.2 = vec![6, 1]);
    assert_says(&said, &["layers.0.norm.weight", "[6, 1]", "expected [6]"]);
    let said = edit("head.weight", |t| t.1 = Dtype::I32);
    assert_says(&said, &["head.weight", "I32", "expected F32, F16 or BF16"]);
}

#[test]
fn a_tensor_that_the_model_does_not_use() {
    let said = spoiled(|dir| {
        edit_file(&dir.join(WEIGHTS_FILE), |all| {
            all.push(counting("layers.3.up.weight", &[7, 6]));
            all.push(counting("layers.3.down.weight", &[6, 7]));
        });
    });
    let words = [
        "holds 2 tensors",
        "the first is layers.3.down.weight",
        "hint",
    ];
    assert_says(&said, &words);
}

/// Slices along dim 0, 1 and 2 in every storage type, for parts of every size.
#[test]
fn parts_of_tensors_in_every_type() {
    let shape = [5, 4, 3];
    let value = |i: usize| i as f32 * 0.25 - 7.0;
    let bytes = |of: fn(f32) -> Vec<u8>| (0..60).flat_map(|i| of(value(i))).collect::<Vec<u8>>();
    let dir = tempdir().unwrap();
    let tensors = [
        raw("f32", Dtype::F32, &shape, bytes(|x| x.to_le_bytes().into())),
        raw(
            "f16",
            Dtype::F16,
            &shape,
            bytes(|x| f16::from_f32(x).to_le_bytes().into()),
        ),
        raw(
            "bf16",
            Dtype::BF16,
            &shape,
            bytes(|x| bf16::from_f32(x).to_le_bytes().into()),
        ),
    ];
    write_file(&dir.path().join(WEIGHTS_FILE), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for name in ["f32", "f16", "bf16"] {
        let whole = checkpoint.read(name, &shape, None).unwrap();
        assert_eq!(whole, (0..60).map(value).collect::<Vec<_>>(), "{name}");
        for dim in 0..3 {
            for parts in 1..=4 {
                for range in (0..parts).map(|index| part(shape[dim], index, parts)) {
                    let one = Shard::new(dim, range, shape[dim]);
                    let (half, rest) = (shape[dim] / 2, shape[dim] - shape[dim] / 2);
                    let halves = [half, rest].map(|len| {
                        let range = part(len, parts / 2, parts);
                        Shard::new(dim, range, len)
                    });
                    for shard in [one, Shard::fused(&halves).unwrap()] {
                        let is_held = |i: &usize| {
                            let index = [i / 12, i / 3 % 4, i % 3][dim];
                            shard.ranges().iter().any(|range| range.contains(&index))
                        };
                        let expected: Vec<f32> = (0..60).filter(is_held).map(value).collect();
                        let mine = checkpoint.read(name, &shape, Some(&shard)).unwrap();
                        assert_eq!(mine, expected, "{name} {shard:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_bit_pattern_of_16_bits_is_read_exactly() {
    let dir = tempdir().unwrap();
    let all = || {
        (0..=u16::MAX)
            .flat_map(u16::to_le_bytes)
            .collect::<Vec<u8>>()
    };
    let tensors = [
        raw("f16", Dtype::F16, &[65536], all()),
        raw("bf16", Dtype::BF16, &[65536], all()),
    ];
    write_file(&dir.path().join(WEIGHTS_FILE), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let read = |name| checkpoint.read(name, &[65536], None).unwrap();
    for (bits, (half, brain)) in read("f16").into_iter().zip(read("bf16")).enumerate() {
        let bits = bits as u16;
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(same(half, f16::from_bits(bits).to_f32()), "{bits:#x}");
        assert!(same(brain, bf16::from_bits(bits).to_f32()), "{bits:#x}");
    }
}

#[test]
fn parts_that_no_weight_joins_are_refused() {
    let message = |parts: &[Shard]| Shard::fused(parts).unwrap_err().to_string();
    assert_says(&message(&[]), &["at least one part"]);
    let (rows, columns) = (Shard::new(0, 0..2, 4), Shard::new(1, 0..2, 4));
    assert_says(&message(&[rows.clone(), columns]), &["dim 0", "dim 1"]);
    let beyond = Shard::new(0, 3..5, 4);
    assert_says(&message(&[rows, beyond]), &["[3..5] of 4"]);
}
