//! `adapter_config.json`, in the words of `peft`.

use std::collections::BTreeSet;

use candle_core::{Error, Result, bail};
use serde_json::{Map, Value, json};

use super::config::{LoraConfig, LoraTargets};

/// Fields of a configuration that are read here, or that change nothing about a trained adapter.
const KNOWN: [&str; 23] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
    "eva_config",
];

/// Ways to begin with which peft subtracts the first adapter from the model's weights.
const CHANGE_THE_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Whether a value asks for nothing.
fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text == "none",
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// How an adapter that this crate does not have becomes a model that it has.
const MERGE_HINT: &str = "hint: peft folds such an adapter into its model: merge_and_unload(), then save_pretrained() of that, whose folder is a \
    model like any other";

/// What fields that are not supported ask for, in words.
const UNSUPPORTED: [(&str, &str); 9] = [
    (
        "use_dora",
        "DoRA (weights as sizes and directions) is not supported",
    ),
    (
        "modules_to_save",
        "the adapter holds whole modules that were trained beside it, which is not supported",
    ),
    (
        "bias",
        "biases that were trained beside the adapter are not supported",
    ),
    (
        "rank_pattern",
        "layers with ranks of their own are not supported",
    ),
    (
        "alpha_pattern",
        "layers with an alpha of their own are not supported",
    ),
    (
        "trainable_token_indices",
        "rows of the embedding that were trained beside the adapter are not supported",
    ),
    (
        "layer_replication",
        "a model whose layers are repeated is not supported",
    ),
    (
        "target_parameters",
        "adapters of parameters that are no linear layers are not supported",
    ),
    (
        "alora_invocation_tokens",
        "an adapter that is active from some tokens on only (aLoRA) is not supported",
    ),
];

/// An error if a configuration asks for what this crate does not have; the file's fields.
pub(super) fn supported(text: &str) -> Result<Map<String, Value>> {
    let file: Map<String, Value> = serde_json::from_str(text).map_err(Error::wrap)?;
    let peft_type = file.get("peft_type").cloned().unwrap_or(json!("LORA"));
    if peft_type != json!("LORA") {
        let name = peft_type.as_str().unwrap_or_default().to_uppercase();
        // These put tokens or values before a text, and have no weights to be added to the model's.
        let is_prompt = ["PROMPT", "PREFIX", "P_TUNING", "ADAPTION"];
        let hint = match is_prompt.iter().any(|kind| name.contains(kind)) {
            true => "hint: train low-rank adapters instead, as finetune --lora-rank 16 does",
            false => MERGE_HINT,
        };
        bail!("peft_type is {peft_type}; supported: \"LORA\"\n{hint}");
    }
    let asks = |field: &str| file.get(field).filter(|value| !is_nothing(value));
    for (field, why) in UNSUPPORTED {
        if let Some(value) = asks(field) {
            bail!("{field} is {value}: {why}\n{MERGE_HINT}");
        }
    }
    let is_unknown =
        |(field, value): &(&String, &Value)| !KNOWN.contains(&field.as_str()) && !is_nothing(value);
    if let Some((field, value)) = file.iter().find(is_unknown) {
        bail!(
            "{field} is {value}, which is not supported; expected an adapter of linear layers without it\n{MERGE_HINT}"
        );
    }
    let init = file.get("init_lora_weights").and_then(Value::as_str);
    let changes_base = |init: &&str| {
        let init = init.to_lowercase();
        CHANGE_THE_BASE.iter().any(|kind| init.starts_with(kind))
    };
    if let Some(init) = init.filter(changes_base) {
        bail!(
            "init_lora_weights is {init:?}, which changes the model's own weights; expected an adapter of the model as it is\nhint: peft's save_pretrained converts it, with path_initial_model_for_weight_conversion"
        );
    }
    Ok(file)
}

/// The configuration of an adapter with these [fields](supported), whose file has these layers.
pub(super) fn from_fields(
    file: &Map<String, Value>,
    modules: &BTreeSet<String>,
) -> Result<LoraConfig> {
    let number = |field: &str| match file.get(field).and_then(Value::as_f64) {
        Some(number) => Ok(number),
        None => bail!("{field} is missing or not a number"),
    };
    let Some(rank) = file.get("r").and_then(Value::as_u64) else {
        bail!("r is missing or not a whole number");
    };
    let flag = |field: &str| file.get(field).and_then(Value::as_bool).unwrap_or(false);
    let config = LoraConfig {
        rank: rank as usize,
        alpha: number("lora_alpha")?,
        dropout: file
            .get("lora_dropout")
            .map_or(Ok(0.0), |_| number("lora_dropout"))?,
        targets: targets(file, modules),
        use_rslora: flag("use_rslora"),
        seed: 0,
        base_model: file
            .get("base_model_name_or_path")
            .and_then(Value::as_str)
            .map(str::to_string),
    };
    config.validate()?;
    Ok(config)
}

/// The list of names if that is all that decides, else the layers of the file.
fn targets(file: &Map<String, Value>, modules: &BTreeSet<String>) -> LoraTargets {
    let is_given = |field: &&str| file.get(*field).is_some_and(|value| !is_nothing(value));
    let others = ["layers_to_transform", "layers_pattern", "exclude_modules"];
    let names = file.get("target_modules").and_then(Value::as_array);
    let names = names.filter(|_| !others.iter().any(is_given));
    let names: Option<Vec<String>> = names.and_then(|names| {
        let names = names.iter().map(|name| name.as_str().map(str::to_string));
        names.collect()
    });
    LoraTargets::Names(names.unwrap_or_else(|| modules.iter().cloned().collect()))
}

/// The text that `peft` reads, of an adapter of these layers.
pub(crate) fn to_json(config: &LoraConfig, modules: &BTreeSet<&str>) -> Result<Vec<u8>> {
    let targets: BTreeSet<&str> = match &config.targets {
        LoraTargets::Names(names) => names.iter().map(String::as_str).collect(),
        // The names of peft's own expansion: the last part of each layer's.
        LoraTargets::AllLinear => {
            let names = modules.iter();
            names.filter_map(|name| name.rsplit('.').next()).collect()
        }
    };
    // peft's own writes whole numbers so.
    let alpha = match config.alpha.fract() == 0.0 && config.alpha < 1e15 {
        true => json!(config.alpha as u64),
        false => json!(config.alpha),
    };
    let file = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model,
        "inference_mode": true,
        "init_lora_weights": true,
        "bias": "none",
        "fan_in_fan_out": false,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.use_rslora,
        "use_dora": false,
        "modules_to_save": null,
        "target_modules": targets,
    });
    let mut text = serde_json::to_vec_pretty(&file).map_err(Error::wrap)?;
    text.push(b'\n');
    Ok(text)
}
