//! Whether an adapter is used with the model that it was trained on. Layers and shapes that do not fit are errors where its weights are
//! read; here is what the names and types of the two models tell.

use std::path::{Component, Path};

use candle_core::{Result, bail};
use candle_parallel::Adapter;
use candle_parallel::checkpoint::read_text_file;
use candle_train::hub::find_model;
use serde_json::Value;

/// What to warn of before the adapter in `dir` is used with `model`, as its user calls it, whose files are in `model_dir`: its
/// `adapter_config.json` names a model of another name.
///
/// # Errors
/// An adapter that cannot be read; that model is at hand, a folder or in the hub's cache, and is of another type.
pub(crate) fn check_base(dir: &Path, model: &str, model_dir: &Path) -> Result<Option<String>> {
    let adapter = Adapter::open(dir)?;
    let base = adapter.config().base_model.as_deref();
    let Some(base) = base.filter(|base| !base.is_empty()) else {
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
