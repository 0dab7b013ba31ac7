//! Compiled kernels: those in this program, or those of a folder that replace them.

use super::kernel_table::for_each_kernel;
use candle_core::{Error, Result, bail};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A file of `kernels/`, by its name without the ending.
pub(crate) struct KernelFile {
    pub(crate) name: &'static str,
    compiled: &'static [u8],
    pub(crate) kernels: &'static [Kernel],
}

/// A kernel, and the endings of the names of its instances.
pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    pub(crate) suffixes: &'static [&'static str],
}

macro_rules! suffixes {
    () => {
        &[""]
    };
    ($t:ident) => {
        &["_f32", "_bf16", "_f16"]
    };
}

macro_rules! files {
    ($($file:literal { $($name:ident $([$t:ident])? ($($argument:ident: $type:ty),* $(,)?);)* })*) => {
        /// All of them.
        pub(crate) const KERNEL_FILES: &[KernelFile] = &[$(KernelFile {
            name: $file,
            compiled: include_bytes!(concat!(env!("OUT_DIR"), "/", $file, ".fatbin")),
            kernels: &[$(Kernel { name: stringify!($name), suffixes: suffixes!($($t)?) }),*],
        }),*];
    };
}

for_each_kernel!(files);

/// Files that replace those in this program, by name.
#[derive(Default)]
pub(crate) struct Replacements(BTreeMap<&'static str, (PathBuf, Vec<u8>)>);

/// The endings of what nvcc compiles for a GPU.
const ENDINGS: [&str; 2] = ["cubin", "fatbin"];

/// How these begin: the driver reads on without looking.
const MAGIC: [&[u8]; 2] = [b"\x7fELF", &[0x50, 0xed, 0x55, 0xba]];

impl Replacements {
    /// Those of a folder: every cubin or fatbin in it.
    ///
    /// # Errors
    /// When the folder or a file cannot be read, there is none, or one has no name of a file of kernels.
    pub(crate) fn of(folder: &Path) -> Result<Self> {
        let failed = |path: &Path, err: std::io::Error| {
            let path = path.display();
            Error::Msg(format!(
                "CANDLE_TRAIN_KERNELS: {path} cannot be read: {err}"
            ))
        };
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(folder).map_err(|err| failed(folder, err))? {
            let path = entry.map_err(|err| failed(folder, err))?.path();
            let text = |part: Option<&std::ffi::OsStr>| {
                part.map(|part| part.to_string_lossy().into_owned())
                    .unwrap_or_default()
            };
            if !ENDINGS.contains(&&*text(path.extension())) {
                continue;
            }
            let stem = text(path.file_stem());
            let Some(file) = KERNEL_FILES.iter().find(|file| file.name == stem) else {
                let known: Vec<&str> = KERNEL_FILES.iter().map(|file| file.name).collect();
                bail!(
                    "CANDLE_TRAIN_KERNELS: {} replaces nothing; expected a name of {}",
                    path.display(),
                    known.join(", ")
                )
            };
            let bytes = std::fs::read(&path).map_err(|err| failed(&path, err))?;
            if !MAGIC.iter().any(|magic| bytes.starts_with(magic)) {
                bail!(
                    "CANDLE_TRAIN_KERNELS: {} of {} bytes is no output of nvcc: it begins neither as a cubin nor as a fatbin",
                    path.display(),
                    bytes.len()
                )
            }
            if let Some((other, _)) = found.insert(file.name, (path.clone(), bytes)) {
                bail!(
                    "CANDLE_TRAIN_KERNELS: both {} and {} replace {}",
                    path.display(),
                    other.display(),
                    file.name
                )
            }
        }
        if found.is_empty() {
            bail!(
                "CANDLE_TRAIN_KERNELS: {} has no .cubin and no .fatbin\nhint: nvcc -std=c++17 -cubin -arch=sm_90 -o {0}/NAME.cubin crates/ops/kernels/NAME.cu",
                folder.display()
            )
        }
        Ok(Self(found))
    }

    /// What to load for a file, and what it is called in errors.
    pub(crate) fn compiled(&self, file: &KernelFile) -> (Cow<'static, [u8]>, String) {
        match self.0.get(file.name) {
            Some((path, bytes)) => (
                Cow::Owned(bytes.clone()),
                format!("CANDLE_TRAIN_KERNELS: {}", path.display()),
            ),
            None => (
                Cow::Borrowed(file.compiled),
                format!("the kernels of {}.cu", file.name),
            ),
        }
    }

    /// The paths of all.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.values().map(|(path, _)| path.as_path())
    }
}

#[cfg(test)]
mod tests {
    use super::{KERNEL_FILES, MAGIC, Replacements};
    use candle_core::Result;

    /// A file that looks like a cubin.
    fn content(file: &str) -> Vec<u8> {
        [MAGIC[0], file.as_bytes()].concat()
    }

    /// Files of a folder that is removed again, and what comes of it; an empty file is called empty.
    fn of(name: &str, files: &[&str]) -> Result<Replacements> {
        let folder = std::env::temp_dir().join(format!("kernels-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        for file in files {
            match file.strip_prefix("empty ") {
                Some(file) => std::fs::write(folder.join(file), "")?,
                None => std::fs::write(folder.join(file), content(file))?,
            }
        }
        let replacements = Replacements::of(&folder);
        std::fs::remove_dir_all(&folder)?;
        replacements
    }

    #[test]
    fn a_folder_replaces_files_by_their_names() -> Result<()> {
        let replaced = of("some", &["rope.cubin", "adamw.fatbin", "rope.cu"])?;
        assert_eq!(replaced.paths().count(), 2);
        for file in KERNEL_FILES {
            let (bytes, what) = replaced.compiled(file);
            match file.name {
                "rope" => assert_eq!(*bytes, *content("rope.cubin")),
                "adamw" => assert_eq!(*bytes, *content("adamw.fatbin")),
                _ => assert!(bytes == file.compiled && what.contains(file.name), "{what}"),
            }
        }
        Ok(())
    }

    #[test]
    fn a_folder_that_replaces_nothing_is_an_error_that_names_what_is_wrong() {
        for (files, expected) in [
            (&["rope.cu"][..], "has no .cubin"),
            (
                &["ropes.cubin"],
                "ropes.cubin replaces nothing; expected a name of adamw",
            ),
            (&["rope.cubin", "rope.fatbin"], "replace rope"),
            (&["empty rope.cubin"], "rope.cubin of 0 bytes is no output"),
        ] {
            let error = of("wrong", files).err().map(|err| err.to_string());
            let error = error.unwrap_or_default();
            assert!(error.contains(expected), "{error}");
        }
        let missing = Replacements::of("no/such/folder".as_ref()).err();
        let error = missing.map(|err| err.to_string()).unwrap_or_default();
        assert!(error.contains("no/such/folder cannot be read"), "{error}");
    }
}
