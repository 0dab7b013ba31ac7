//! Checkpoint folders made and looked at by hand, with the safetensors crate alone.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// Files of a folder by name.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A tensor of a file: (name, type, shape, bytes).
pub type Raw = (String, Dtype, Vec<usize>, Vec<u8>);

pub fn raw(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Raw {
    (name.to_string(), dtype, shape.to_vec(), bytes)
}

/// An f32 tensor that counts up from 0.
pub fn counting(name: &str, shape: &[usize]) -> Raw {
    let len: usize = shape.iter().product();
    let bytes = (0..len).flat_map(|i| (i as f32).to_le_bytes());
    raw(name, Dtype::F32, shape, bytes.collect())
}

pub fn write_file(path: &Path, tensors: &[Raw]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (name.clone(), view)
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// The tensors of a file, in name order.
pub fn read_file(path: &Path) -> Vec<Raw> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<Raw> = file
        .iter()
        .map(|(name, view)| raw(name, view.dtype(), view.shape(), view.data().to_vec()))
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

/// Writes `file` with one change to its list of tensors.
pub fn edit_file(path: &Path, edit: impl FnOnce(&mut Vec<Raw>)) {
    let mut tensors = read_file(path);
    edit(&mut tensors);
    write_file(path, &tensors);
}

pub fn read_folder(dir: &Path) -> Files {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// Names of the files and folders directly in `dir`, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}
