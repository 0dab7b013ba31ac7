//! Folders: copied, compared, and the files in them changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Every file below a folder with its content, and every folder.
pub type Snapshot = BTreeMap<PathBuf, Option<Vec<u8>>>;

/// Tensors of a file: type, shape and bytes, by name.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A file or folder of the workspace's `tests/fixtures`.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures")).join(path)
}

pub fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy_folder(&path, &to),
            false => drop(fs::copy(&path, &to).unwrap()),
        }
    }
}

pub fn snapshot(dir: &Path) -> Snapshot {
    let mut files = Snapshot::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().to_path_buf();
            let is_folder = path.is_dir();
            files.insert(name, (!is_folder).then(|| fs::read(&path).unwrap()));
            folders.extend(is_folder.then_some(path));
        }
    }
    files
}

/// Names of the files and folders directly in `dir`, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

pub fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut value = read_json(path);
    edit(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

pub fn read_tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, TensorView<'_>)| {
        let content = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        (name, content)
    };
    file.tensors().into_iter().map(tensor).collect()
}

/// The tensors of all files of a checkpoint.
pub fn read_checkpoint(dir: &Path) -> Tensors {
    let files = names(dir).into_iter();
    let files = files.filter(|name| name.ends_with(".safetensors"));
    files
        .flat_map(|name| read_tensors(&dir.join(name)))
        .collect()
}

pub fn edit_tensors(path: &Path, edit: impl FnOnce(&mut Tensors)) {
    let mut tensors = read_tensors(path);
    edit(&mut tensors);
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}
