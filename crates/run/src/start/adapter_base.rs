//! The model that an adapter was trained on: where it is, and whether the adapter is used with it. Layers and shapes that do not fit are
//! errors where weights are read; here is what the names and types of the two models tell.

use std::path::{Component, Path, PathBuf};

use candle_core::{Result, bail};
use candle_parallel::checkpoint::read_text_file;
use candle_parallel::{ADAPTER_CONFIG_FILE, Adapter};
use candle_trainer::hub::{find_model, resolve_model};
use serde_json::Value;

use crate::output::print_note;

/// What flags name: a model, and perhaps an adapter of it.
#[derive(Debug)]
pub struct NamedModel {
    /// A folder, or a name on the hub.
    pub model: String,
    /// Folder of the adapter.
    pub adapter: Option<PathBuf>,
}

impl NamedModel {
    /// What `--model` and `--adapter` name. Where `--model` is an adapter's folder that is the adapter, and the model is the one that it was
    /// trained on.
    ///
    /// # Errors
    /// That model is not here; two adapters.
    pub fn of_flags(model: &str, adapter: Option<&Path>) -> Result<Self> {
        let dir = Path::new(model);
        let (model, adapter) = match adapter {
            Some(adapter) => {
                refuse_adapter(model)?;
                (model.to_string(), Some(adapter))
            }
            None if is_adapter(dir) => (base_of(dir)?, Some(dir)),
            None => (model.to_string(), None),
        };
        Ok(Self {
            model,
            adapter: adapter.map(Path::to_path_buf),
        })
    }
}

/// Whether a folder has an adapter and no model.
pub fn is_adapter(dir: &Path) -> bool {
    dir.join(ADAPTER_CONFIG_FILE).is_file() && !dir.join("config.json").is_file()
}

/// The model that the adapter in `dir` was trained on, as `--model` names it: a folder, which may be noted relative to the adapter's, or what
/// the hub's cache has.
///
/// # Errors
/// An adapter that cannot be read, or does not say; the model is not here.
pub fn base_of(dir: &Path) -> Result<String> {
    let adapter = Adapter::open(dir)?;
    let shown = dir.display();
    let Some(base) = noted_base(&adapter) else {
        bail!(
            "the adapter in {shown} does not say which model it was trained on (base_model_name_or_path)\nhint: give that model too: \
             --model BASE --adapter {shown}"
        );
    };
    match find_base(dir, base) {
        Some(found) => Ok(found),
        None => bail!(
            "the adapter in {shown} was trained on {base}, which is neither a folder here nor in the hub's cache\nhint: give that \
             model's folder, or its name on the hub, too: --model {base} --adapter {shown}"
        ),
    }
}

/// The folder of the model with which the adapter in `dir` goes: what `--model` names, or else the one that it was trained on. A warning
/// says if the adapter notes another one.
///
/// # Errors
/// An adapter that cannot be read, or does not fit; the model is not here.
pub fn resolve_base(dir: &Path, model: Option<&str>) -> Result<PathBuf> {
    let named = match model {
        Some(model) => {
            refuse_adapter(model)?;
            model.to_string()
        }
        None => base_of(dir)?,
    };
    let model = resolve_model(&named)?;
    if let Some(warning) = check_base(dir, &named, &model)? {
        print_note(&format!("warning: {warning}"));
    }
    Ok(model)
}

/// The model that an adapter notes.
fn noted_base(adapter: &Adapter) -> Option<&str> {
    let base = adapter.config().base_model.as_deref();
    base.filter(|base| !base.is_empty())
}

/// A model that the adapter in `dir` notes, as `--model` names it, if it is here.
fn find_base(dir: &Path, base: &str) -> Option<String> {
    // Of a relative path the folder is not known: the adapter's own, or the one that it lies in.
    let places = [Some(dir), dir.parent()].into_iter().flatten();
    let mut beside = places.map(|place| place.join(base));
    let beside = beside.find(|place| place.join("config.json").is_file());
    if let Some(beside) = beside.filter(|_| !Path::new(base).is_dir()) {
        return beside.to_str().map(str::to_string);
    }
    find_model(base).map(|_| base.to_string())
}

/// An error if `--model` is an adapter's folder where only a model can be meant.
///
/// # Errors
/// That it is one, with the model that it was trained on.
pub fn refuse_adapter(model: &str) -> Result<()> {
    let dir = Path::new(model);
    if !is_adapter(dir) {
        return Ok(());
    }
    let adapter = Adapter::open(dir)?;
    let base = noted_base(&adapter).map(|base| {
        let found = find_base(dir, base);
        found.unwrap_or_else(|| base.to_string())
    });
    let base = base.unwrap_or_else(|| "BASE".to_string());
    bail!(
        "--model {model} is an adapter, and no model\nhint: give the model that it was trained on, and the adapter by its own flag: \
         --model {base} --adapter {model}"
    )
}

/// What to warn of before the adapter in `dir` is used with `model`, as its user calls it, whose files are in `model_dir`: its
/// `adapter_config.json` names a model of another name.
///
/// # Errors
/// An adapter that cannot be read; that model is at hand, a folder or in the hub's cache, and is of another type.
pub fn check_base(dir: &Path, model: &str, model_dir: &Path) -> Result<Option<String>> {
    let adapter = Adapter::open(dir)?;
    let Some(base) = noted_base(&adapter) else {
        return Ok(None);
    };
    let shown = dir.display();
    let types = find_model(base)
        .and_then(|base| type_of(&base))
        .zip(type_of(model_dir));
    if let Some((expected, got)) = types
        && expected != got
    {
        bail!(
            "the adapter in {shown} was trained on {base}, a model of type {expected}, and {model} is of type {got}\nhint: --model names \
             the model that the adapter was trained on"
        );
    }
    let (names, expected) = (names_of(model), names_of(base));
    let is_known = names.iter().any(|name| expected.contains(name));
    Ok((!is_known).then(|| {
        format!(
            "the adapter in {shown} was trained on {base}, and --model is {model}\nhint: on other weights than those it was trained on \
             an adapter does something else"
        )
    }))
}

/// The `model_type` of the model in a folder.
fn type_of(dir: &Path) -> Option<String> {
    let text = read_text_file(&dir.join("config.json")).ok()?;
    let config: Value = serde_json::from_str(&text).ok()?;
    config["model_type"].as_str().map(str::to_string)
}

/// What a model may be called: the last part of its name, and of a folder what it is really called, on the hub if it is in its cache.
fn names_of(model: &str) -> Vec<String> {
    let name = |path: &Path| {
        let name = path.file_name()?.to_str()?;
        Some(name.to_string())
    };
    let Ok(real) = Path::new(model).canonicalize() else {
        // The revision is no part of a repository's name.
        let repository = model.split('@').next().unwrap_or_default();
        return name(Path::new(repository)).into_iter().collect();
    };
    let cached = real.components().filter_map(|part| match part {
        Component::Normal(part) => part.to_str()?.strip_prefix("models--")?.rsplit("--").next(),
        _ => None,
    });
    let names = [name(Path::new(model)), name(&real)].into_iter().flatten();
    names.chain(cached.map(str::to_string)).collect()
}
