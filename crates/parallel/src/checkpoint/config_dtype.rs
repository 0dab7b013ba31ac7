//! The storage type that a `config.json` names.

use candle_core::{DType, Result};
use serde_json::{Value, json};

/// The files with the type in `config.json` set to `dtype`, in the spellings of transformers 4 and 5; unchanged for `None`.
///
/// # Errors
/// A `config.json` that is not JSON.
pub fn with_config_dtype(
    mut files: Vec<(String, Vec<u8>)>,
    dtype: Option<DType>,
) -> Result<Vec<(String, Vec<u8>)>> {
    let name = match dtype {
        None => return Ok(files),
        Some(DType::F16) => "float16",
        Some(DType::BF16) => "bfloat16",
        Some(_) => "float32",
    };
    for (file, content) in &mut files {
        if file == "config.json" {
            let mut config: Value =
                serde_json::from_slice(content).map_err(candle_core::Error::msg)?;
            // A file may have both spellings: neither may be left with the old type.
            let old = config.get("torch_dtype").is_some();
            if old {
                config["torch_dtype"] = json!(name);
            }
            if !old || config.get("dtype").is_some() {
                config["dtype"] = json!(name);
            }
            *content = serde_json::to_vec_pretty(&config).map_err(candle_core::Error::msg)?;
        }
    }
    Ok(files)
}
