//! The files of a data set: of folders, globs and datasets on a hub those with a known ending.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::check_file;

use super::columns::Columns;
use super::data_file::DataFile;
use super::data_spec::DataSpec;
use crate::file_format::{ENDINGS, FileFormat, GZIP_ENDING};
use crate::hub::{DataUse, resolve_dataset};
use crate::words::few;

/// The files of a data set, in a fixed order.
#[derive(Clone, Debug)]
pub struct Data {
    pub(crate) files: Vec<DataFile>,
    pub(crate) columns: Columns,
    specs: Vec<DataSpec>,
    skipped: Vec<PathBuf>,
    /// What was taken and what was left of data sets on a hub, in words.
    choices: Vec<String>,
}

fn hint() -> String {
    format!(
        "hint: give a file that ends in {ENDINGS} (all but the last also with {GZIP_ENDING} behind), a folder of such files, or a glob in quotes"
    )
}

/// Whether nothing is at a path that may be the name of a data set on a hub, such as `org/name`.
fn is_named_as_on_a_hub(path: &Path) -> bool {
    let is_name = path.is_relative() && path.components().count() == 2;
    is_name && FileFormat::of(path).is_none() && !path.exists()
}

impl Data {
    /// Finds the files of `specs`, in their order, those of a folder or glob by name. Of a dataset on a hub those for this `usage` are fetched.
    ///
    /// # Errors
    /// A path that is missing or a file with another ending; a folder or glob without a file that can be read; what the hub says.
    pub fn find(specs: &[DataSpec], usage: DataUse) -> Result<Self> {
        let mut data = Self {
            files: Vec::new(),
            columns: Columns::default(),
            specs: specs.to_vec(),
            skipped: Vec::new(),
            choices: Vec::new(),
        };
        for (source, spec) in specs.iter().enumerate() {
            let path = &spec.path;
            if let Some(name) = path.to_str().and_then(|path| path.strip_prefix("hub://")) {
                data.add_of_hub(source, name, usage)?;
                continue;
            }
            let num_files = data.files.len();
            data.add(source, path)?;
            if data.files.len() == num_files {
                bail!("the data {path:?} has no file that ends in {ENDINGS}");
            }
        }
        Ok(data)
    }

    /// With the fields of records read from these columns.
    pub fn with_columns(self, columns: &Columns) -> Self {
        Self {
            columns: columns.clone(),
            ..self
        }
    }

    fn add_of_hub(&mut self, source: usize, name: &str, usage: DataUse) -> Result<()> {
        let found = resolve_dataset(name, usage)?;
        for path in &found.files {
            self.add(source, path)?;
        }
        if !found.left.is_empty() {
            let (taken, left) = (found.taken.len(), found.left.len());
            self.choices.push(format!(
                "{taken} of the files of hub://{name} are read ({}), and {left} are left ({})",
                few(&found.taken),
                few(&found.left)
            ));
        }
        Ok(())
    }

    fn add(&mut self, source: usize, path: &Path) -> Result<()> {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => self.add_folder(source, path),
            Ok(_) => self.add_file(source, path),
            Err(_) => match path.to_str().filter(|path| path.contains(['*', '?', '['])) {
                Some(pattern) => self.add_glob(source, pattern),
                None => self.add_file(source, path),
            },
        }
    }

    fn add_file(&mut self, source: usize, path: &Path) -> Result<()> {
        // It is read for its checksum, and again for its records.
        if let Err(err) = check_file(path) {
            let err = err.to_string();
            let hint = match err.contains("\nhint: ") {
                true => String::new(),
                false if is_named_as_on_a_hub(path) => format!(
                    "\n{}; a data set on the hub is hub://datasets/{}",
                    hint(),
                    path.display()
                ),
                false => format!("\n{}", hint()),
            };
            bail!("cannot open data {path:?}: {err}{hint}");
        }
        match FileFormat::of(path) {
            Some(format) => {
                self.push(source, path, format);
                Ok(())
            }
            None => bail!("data {path:?} is not a {ENDINGS} file\n{}", hint()),
        }
    }

    fn add_glob(&mut self, source: usize, pattern: &str) -> Result<()> {
        // As in a shell.
        let options = glob::MatchOptions {
            require_literal_leading_dot: true,
            ..glob::MatchOptions::new()
        };
        let paths = match glob::glob_with(pattern, options) {
            Ok(paths) => paths,
            Err(err) => bail!("the data {pattern:?} is no glob: {err}"),
        };
        let (num_files, num_skipped) = (self.files.len(), self.skipped.len());
        let mut is_empty = true;
        for path in paths {
            let path = path.map_err(Error::wrap)?;
            is_empty = false;
            match path.is_dir() {
                true => self.add_folder(source, &path)?,
                false => self.add_found(source, &path),
            }
        }
        if is_empty {
            bail!("no file matches the data {pattern:?}\n{}", hint());
        }
        self.leave_once(num_files, num_skipped);
        Ok(())
    }

    fn add_folder(&mut self, source: usize, dir: &Path) -> Result<()> {
        let list = || -> std::io::Result<Vec<(PathBuf, bool)>> {
            let entries = fs::read_dir(dir)?.map(|entry| {
                let entry = entry?;
                // A link to a folder may lead around in a circle.
                Ok((entry.path(), entry.file_type()?.is_dir()))
            });
            entries.collect()
        };
        let mut entries = match list() {
            Ok(entries) => entries,
            Err(err) => bail!("cannot list the data folder {dir:?}: {err}"),
        };
        entries.sort();
        for (path, is_dir) in entries {
            let name = path.file_name().unwrap_or_default();
            if name.to_string_lossy().starts_with('.') {
                // What programs keep for themselves.
                self.skipped.push(path);
                continue;
            }
            match is_dir {
                true => self.add_folder(source, &path)?,
                false => self.add_found(source, &path),
            }
        }
        Ok(())
    }

    fn add_found(&mut self, source: usize, path: &Path) {
        match FileFormat::of(path) {
            Some(format) if path.is_file() => self.push(source, path, format),
            _ => self.skipped.push(path.to_path_buf()),
        }
    }

    /// Leaves each file that was found more than once, by links to folders, once.
    fn leave_once(&mut self, num_files: usize, num_skipped: usize) {
        let mut seen = BTreeSet::new();
        let mut is_new = |path: &Path| {
            let name = path.file_name().unwrap_or_default();
            let folder = path.parent().unwrap_or(Path::new(""));
            let real = folder.canonicalize().unwrap_or(folder.to_path_buf());
            seen.insert(real.join(name))
        };
        let found = self.files.split_off(num_files);
        let found = found.into_iter().filter(|file| is_new(&file.path));
        self.files.extend(found);
        let skipped = self.skipped.split_off(num_skipped);
        self.skipped
            .extend(skipped.into_iter().filter(|path| is_new(path)));
    }

    fn push(&mut self, source: usize, path: &Path, format: FileFormat) {
        self.files.push(DataFile {
            path: path.to_path_buf(),
            format,
            source,
        });
    }

    /// What was asked for.
    pub fn specs(&self) -> &[DataSpec] {
        &self.specs
    }

    /// The files that are read.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// What is in folders and no file that can be read, by its ending; hidden files and folders.
    pub fn skipped(&self) -> &[PathBuf] {
        &self.skipped
    }

    /// What was taken and what was left where a data set on a hub has more than one split, a line each.
    pub fn choices(&self) -> &[String] {
        &self.choices
    }

    /// Size of what all files say; `None` if some are compressed.
    pub(crate) fn num_text_bytes(&self) -> Result<Option<u64>> {
        if self.files.iter().any(DataFile::is_gzip) {
            Ok(None)
        } else {
            self.num_bytes().map(Some)
        }
    }

    /// Size of all files.
    pub(crate) fn num_bytes(&self) -> Result<u64> {
        Ok(self.stamps()?.iter().map(|(len, _)| len).sum())
    }

    /// Sizes in bytes and times of the last change.
    pub(crate) fn stamps(&self) -> Result<Vec<(u64, Option<SystemTime>)>> {
        let stamps = self
            .files
            .iter()
            .map(|file| match fs::metadata(&file.path) {
                Ok(metadata) => Ok((metadata.len(), metadata.modified().ok())),
                Err(err) => bail!("cannot open data {:?}: {err}", file.path),
            });
        stamps.collect()
    }
}
