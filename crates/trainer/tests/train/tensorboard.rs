use std::fs;
use std::path::Path;

use candle_trainer::{StepMetrics, TensorBoard};

use crate::assert_error;
use crate::metrics::step;

/// A field of a protocol-buffer message: its number, and the value as a number or as bytes.
#[derive(Debug, Clone)]
enum Field {
    Number(u64, f64),
    Bytes(u64, Vec<u8>),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for index in 0.. {
        let (byte, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

fn fields(mut bytes: &[u8]) -> Vec<Field> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let number = key >> 3;
        let len = match key & 7 {
            0 => {
                fields.push(Field::Number(number, varint(&mut bytes) as f64));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        let (value, rest) = bytes.split_at(len);
        bytes = rest;
        fields.push(match key & 7 {
            1 => Field::Number(number, f64::from_le_bytes(value.try_into().unwrap())),
            5 => Field::Number(number, f32::from_le_bytes(value.try_into().unwrap()).into()),
            _ => Field::Bytes(number, value.to_vec()),
        });
    }
    fields
}

fn number(fields: &[Field], wanted: u64) -> Option<f64> {
    fields.iter().find_map(|field| match field {
        Field::Number(number, value) if *number == wanted => Some(*value),
        _ => None,
    })
}

fn bytes(fields: &[Field], wanted: u64) -> Vec<Vec<u8>> {
    let found = fields.iter().filter_map(|field| match field {
        Field::Bytes(number, value) if *number == wanted => Some(value.clone()),
        _ => None,
    });
    found.collect()
}

/// The messages of an event file; the checksums are those of unit tests and of TensorBoard itself (scripts/check_tensorboard.py).
fn events(path: &Path) -> Vec<Vec<Field>> {
    let file = fs::read(path).unwrap();
    let mut rest = file.as_slice();
    let mut events = Vec::new();
    while !rest.is_empty() {
        let len = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        events.push(fields(&rest[12..12 + len]));
        rest = &rest[16 + len..];
    }
    events
}

/// The only event file of a folder.
fn file(dir: &Path) -> std::path::PathBuf {
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    // Beside the lock.
    let mut files = files.filter(|path| !path.ends_with(".tensorboard.lock"));
    let file = files.next().unwrap();
    assert!(files.next().is_none());
    assert!(file.display().to_string().contains("tfevents"));
    file
}

#[test]
fn each_number_of_a_step_is_a_point_of_its_curve() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("runs/a");
    let mut board = TensorBoard::create(&folder, "4f2a-01", 300).unwrap();
    let skipped = StepMetrics {
        loss: f64::NAN,
        ..step(301)
    };
    for step in [step(300), skipped] {
        board.log(&(&step).into()).unwrap();
    }
    assert_eq!(
        TensorBoard::run_of(&folder).unwrap().as_deref(),
        Some("4f2a-01")
    );
    let events = events(&file(&folder));
    assert_eq!(bytes(&events[0], 3), [b"brain.Event:2"]);
    // A start at this step: readers forget what they know of it and of later ones.
    assert_eq!(number(&events[1], 2), Some(300.0));
    assert_eq!(number(&fields(&bytes(&events[1], 7)[0]), 1), Some(1.0));
    let points = |event: &[Field]| -> Vec<(String, f64)> {
        assert!(number(event, 1).unwrap() > 1.7e9);
        let values = bytes(&fields(&bytes(event, 5)[0]), 1).into_iter();
        let point = |value: Vec<u8>| {
            let value = fields(&value);
            let tag = String::from_utf8(bytes(&value, 1).remove(0)).unwrap();
            (tag, number(&value, 2).unwrap())
        };
        values.map(point).collect()
    };
    let first = points(&events[2]);
    for (tag, value) in [
        ("train/loss", 2.5),
        ("train/grad_norm", 0.75),
        ("train/learning_rate", f64::from(1e-3f32)),
        ("train/num_tokens", 512.0),
        ("train/tokens_per_sec", 2048.0),
        ("train/positions_per_sec", 4096.0),
        ("train/epoch", 0.5),
        ("memory/weights_bytes", 0.0),
    ] {
        assert!(first.contains(&(tag.to_string(), value)), "{tag} {first:?}");
    }
    assert!(first.iter().all(|(tag, _)| !tag.ends_with("step")));
    // A number that is none is no point.
    let second = points(&events[3]);
    assert_eq!(number(&events[3], 2), Some(301.0));
    assert_eq!(second.len(), first.len() - 1);
    assert!(second.iter().all(|(tag, _)| tag != "train/loss"));
}

#[test]
fn two_runs_need_two_folders() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(TensorBoard::run_of(dir.path()).unwrap(), None);
    let first = TensorBoard::create(dir.path(), "a.b/c", 0).unwrap();
    let process = format!("process {}", std::process::id());
    let words = ["TensorBoard", "another run is writing to it", &process];
    assert_error(TensorBoard::create(dir.path(), "b", 0), &words);
    drop(first);
    // No name leads out of the folder.
    let run = || TensorBoard::run_of(dir.path()).unwrap();
    assert_eq!(run().as_deref(), Some("a-b-c"));
    TensorBoard::create(dir.path(), "b", 0).unwrap();
    assert_eq!(run().as_deref(), Some("b"));
    // Beside them those of a profiler and of other programs do not count.
    for name in [
        "events.out.tfevents.9999999999.host.profile-empty",
        "z.tfevents.v2",
    ] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    assert_eq!(run().as_deref(), Some("b"));
    // Those of an earlier version have no name.
    fs::write(
        dir.path()
            .join("events.out.tfevents.9999999999.1.candle-train"),
        "",
    )
    .unwrap();
    assert_eq!(run().as_deref(), Some(""));
}

#[test]
fn a_folder_that_cannot_be_made() {
    let dir = tempfile::tempdir().unwrap();
    let taken = dir.path().join("file");
    fs::write(&taken, "").unwrap();
    assert_error(
        TensorBoard::create(&taken, "a", 0),
        &["file", "hint: --tensorboard"],
    );
}
