//! Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): biases on q, k and v; windows in the layers that the file names.

use candle_core::{Result, bail};
use serde_json::{Value, json};

use crate::config::ModelConfig;
use crate::config_file::ConfigFile;
use crate::family::Family;

/// The family of Qwen2 and Qwen2.5.
pub static QWEN2: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    gguf_architecture: "qwen2",
    defaults,
    read: |file, config| {
        config.qkv_bias = true;
        read_windows(file, config)
    },
    write: write_windows,
};

pub(crate) fn defaults() -> Value {
    json!({
        "max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": false,
        "sliding_window": 4096, "max_window_layers": 28, "layer_types": null,
        "attention_bias": null
    })
}

/// The layers' windows: `layer_types` names those that have one, else all from `max_window_layers` on have.
pub(crate) fn read_windows(file: &ConfigFile, config: &mut ModelConfig) -> Result<()> {
    let num_layers = config.num_hidden_layers;
    let size = file.sliding_window.filter(|_| file.use_sliding_window);
    let Some(types) = &file.layer_types else {
        let first = file.max_window_layers.unwrap_or(num_layers);
        if size.is_some() && first < num_layers {
            let windows = (0..num_layers).map(|layer| size.filter(|_| layer >= first));
            config.windows = windows.collect();
        }
        return Ok(());
    };
    if types.len() != num_layers {
        bail!(
            "layer_types has {} entries; expected num_hidden_layers({num_layers})",
            types.len()
        );
    }
    let window = |(layer, name): (usize, &String)| match (name.as_str(), size) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", Some(size)) => Ok(Some(size)),
        ("sliding_attention", None) => bail!(
            "layer_types[{layer}] is \"sliding_attention\", but there is no sliding_window or use_sliding_window is false"
        ),
        (other, _) => bail!(
            "layer_types[{layer}] is {other:?}; supported: \"full_attention\", \"sliding_attention\""
        ),
    };
    let windows: Vec<_> = types
        .iter()
        .enumerate()
        .map(window)
        .collect::<Result<_>>()?;
    if windows.iter().any(Option::is_some) {
        config.windows = windows;
    }
    Ok(())
}

pub(crate) fn write_windows(config: &ModelConfig) -> Value {
    let windows: Vec<_> = (0..config.num_hidden_layers)
        .map(|i| config.window(i))
        .collect();
    let size = windows.iter().flatten().next();
    let types = windows.iter().map(|window| match window {
        None => "full_attention",
        Some(_) => "sliding_attention",
    });
    json!({
        "use_sliding_window": size.is_some(), "sliding_window": size,
        "max_window_layers": windows.iter().take_while(|window| window.is_none()).count(),
        "layer_types": types.collect::<Vec<_>>()
    })
}
