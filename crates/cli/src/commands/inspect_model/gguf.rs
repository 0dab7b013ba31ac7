//! What `candle-train inspect` says of a GGUF file.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Result, bail};
use candle_parallel::checkpoint::{check_file, size_in_words};
use candle_parallel::gguf::{GgufReader, GgufValue, type_name};
use candle_train_run::print_line;
use candle_trainer::counted;

use super::{Wanted, verify_values};

/// Characters of a text that are shown.
const SHOWN: usize = 60;
/// Values of a list that are shown.
const FIRST: usize = 4;

/// What is in a GGUF file.
///
/// # Errors
/// It cannot be read; what is found wrong where all is read.
pub(crate) fn inspect_gguf(path: &Path, wanted: Wanted) -> Result<()> {
    if let Err(err) = check_file(path) {
        bail!("cannot read {}: {err}", path.display());
    }
    let file = GgufReader::open(path)?;
    print_line(&format!("{} is a GGUF file", path.display()));
    let metadata = file.metadata();
    for (key, value) in metadata.iter() {
        print_line(&format!("{:<39} {}", key.escape_debug(), in_words(value)));
    }
    let mut of_type: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    let mut num_values = 0;
    for tensor in file.tensors() {
        let (number, num_bytes) = of_type.entry(type_name(tensor.dtype)).or_default();
        *number += 1;
        *num_bytes += tensor.num_bytes();
        num_values += tensor.shape.iter().product::<usize>();
    }
    for (name, (number, num_bytes)) in &of_type {
        print_line(&format!(
            "{}: {name}, {}",
            counted(*number, "tensor"),
            size_in_words(*num_bytes)
        ));
    }
    print_line(&format!("{num_values} values"));
    let kind = metadata
        .get("general.type")
        .and_then(|kind| kind.to_string().ok());
    if kind.is_some_and(|kind| kind == "adapter") {
        print_line("an adapter: llama.cpp takes it beside its base (--lora)");
    }
    for tensor in file.tensors().iter().filter(|_| wanted.tensors) {
        let dtype = type_name(tensor.dtype);
        let name = tensor.name.escape_debug();
        print_line(&format!("  {name} {:?} {dtype}", tensor.shape));
    }
    if wanted.verify {
        let names = file.tensors().iter().map(|tensor| &tensor.name);
        verify_values(path, names.map(|name| (name, file.values(name))))?;
    }
    Ok(())
}

fn in_words(value: &GgufValue) -> String {
    match value {
        GgufValue::U8(number) => number.to_string(),
        GgufValue::I8(number) => number.to_string(),
        GgufValue::U16(number) => number.to_string(),
        GgufValue::I16(number) => number.to_string(),
        GgufValue::U32(number) => number.to_string(),
        GgufValue::I32(number) => number.to_string(),
        GgufValue::U64(number) => number.to_string(),
        GgufValue::I64(number) => number.to_string(),
        GgufValue::F32(number) => number.to_string(),
        GgufValue::F64(number) => number.to_string(),
        GgufValue::Bool(is_true) => is_true.to_string(),
        GgufValue::String(text) => {
            let shown: String = text.chars().take(SHOWN).collect();
            let more = if shown.len() < text.len() { " .." } else { "" };
            format!("{shown:?}{more}")
        }
        GgufValue::Array(values) => {
            let first: Vec<String> = values.iter().take(FIRST).map(in_words).collect();
            let more = if values.len() > FIRST { ", .." } else { "" };
            format!(
                "[{}{more}], {}",
                first.join(", "),
                counted(values.len(), "value")
            )
        }
    }
}
