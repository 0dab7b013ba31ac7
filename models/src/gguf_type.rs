//! The types of a GGUF file's tensors, as llama.cpp mixes them.

use std::collections::BTreeMap;
use std::fmt;

use candle_parallel::gguf::{GgmlDType, GgufTensor, type_name};

use crate::config::ModelConfig;

/// What most tensors of a file have. Vectors are in f32 always.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum GgufType {
    /// 32-bit floats.
    #[cfg_attr(feature = "clap", value(aliases = ["fp32", "float32", "float"]))]
    F32,
    /// 16-bit floats of a small range and three bits more.
    #[cfg_attr(feature = "clap", value(aliases = ["fp16", "float16", "half"]))]
    F16,
    /// 16-bit floats with the range of f32.
    #[cfg_attr(feature = "clap", value(alias = "bfloat16"))]
    Bf16,
    /// 8.5 bits a value.
    #[cfg_attr(feature = "clap", value(name = "q8_0"))]
    Q8_0,
    /// 6.6 bits a value.
    #[cfg_attr(feature = "clap", value(name = "q6_k"))]
    Q6K,
    /// 5.5 bits a value, and 6.6 in the head and in half of the layers' v and down.
    #[cfg_attr(feature = "clap", value(name = "q5_k_m"))]
    Q5KM,
    /// 4.5 bits a value, and 6.6 as with q5_k_m: what most people run.
    #[cfg_attr(feature = "clap", value(name = "q4_k_m"))]
    Q4KM,
    /// 4.5 bits a value, of blocks of 32.
    #[cfg_attr(feature = "clap", value(name = "q4_0"))]
    Q4_0,
}

/// All types: name, number by which a file names it, and what most tensors have.
const TYPES: [(GgufType, &str, usize, GgmlDType); 8] = [
    (GgufType::F32, "f32", 0, GgmlDType::F32),
    (GgufType::F16, "f16", 1, GgmlDType::F16),
    (GgufType::Bf16, "bf16", 32, GgmlDType::BF16),
    (GgufType::Q8_0, "q8_0", 7, GgmlDType::Q8_0),
    (GgufType::Q6K, "q6_k", 18, GgmlDType::Q6K),
    (GgufType::Q5KM, "q5_k_m", 17, GgmlDType::Q5K),
    (GgufType::Q4KM, "q4_k_m", 15, GgmlDType::Q4K),
    (GgufType::Q4_0, "q4_0", 2, GgmlDType::Q4_0),
];

impl GgufType {
    fn row(self) -> &'static (Self, &'static str, usize, GgmlDType) {
        let row = TYPES.iter().find(|(own, ..)| *own == self);
        row.unwrap_or(&TYPES[0])
    }

    /// As a flag names it.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The number by which a file names it: `general.file_type`.
    pub(crate) fn file_type(self) -> usize {
        self.row().2
    }

    /// The types of `tensors`, and lines that say which of them have another one than usual, as their rows are no whole blocks.
    pub(crate) fn mix(self, config: &ModelConfig, tensors: &mut [GgufTensor]) -> Vec<String> {
        let mut others: BTreeMap<(String, String, usize), Vec<String>> = BTreeMap::new();
        for tensor in tensors {
            let &[_, width] = tensor.shape.as_slice() else {
                tensor.dtype = GgmlDType::F32;
                continue;
            };
            let wanted = self.of_tensor(config, &tensor.name, width);
            tensor.dtype = fitting(wanted, width);
            if tensor.dtype != wanted {
                let key = (type_name(wanted), type_name(tensor.dtype), width);
                let names = others.entry(key).or_default();
                let name = without_layer(&tensor.name);
                if !names.contains(&name) {
                    names.push(name);
                }
            }
        }
        let line = |((wanted, found, width), names): (&(String, String, usize), &Vec<String>)| {
            format!(
                "{found} in place of {wanted}, as rows of {width} values are no whole blocks: {}",
                names.join(", ")
            )
        };
        others.iter().map(line).collect()
    }

    /// What llama.cpp gives a tensor of this name, if its rows are whole blocks.
    fn of_tensor(self, config: &ModelConfig, name: &str, width: usize) -> GgmlDType {
        let usual = self.row().3;
        let is_head = match config.tie_word_embeddings {
            true => name == "token_embd.weight",
            false => name == "output.weight",
        };
        if usual.block_size() == 1 || self == Self::Q8_0 {
            return usual;
        }
        if is_head {
            return match width.is_multiple_of(usual.block_size()) {
                true => GgmlDType::Q6K,
                false => GgmlDType::Q8_0,
            };
        }
        let num_layers = config.num_hidden_layers;
        let layer = name.split('.').nth(1).and_then(|it| it.parse().ok());
        let has_more = layer.is_some_and(|layer| has_more_bits(layer, num_layers));
        let is_value = name.ends_with("attn_v.weight");
        let is_70b = num_layers == 80 && config.num_attention_heads != config.num_key_value_heads;
        let is_mixed = matches!(self, Self::Q4KM | Self::Q5KM);
        match is_mixed && (is_value || name.ends_with("ffn_down.weight")) {
            true if has_more => GgmlDType::Q6K,
            // Many heads share its v.
            true if is_value && is_70b && usual == GgmlDType::Q4K => GgmlDType::Q5K,
            _ => usual,
        }
    }
}

/// The first and last eighth of the layers, and every third between.
fn has_more_bits(layer: usize, num_layers: usize) -> bool {
    let eighth = num_layers / 8;
    layer < eighth || layer >= 7 * num_layers / 8 || (layer - eighth) % 3 == 2
}

/// The type itself if rows are whole blocks of it, else the next better one with smaller blocks.
fn fitting(dtype: GgmlDType, width: usize) -> GgmlDType {
    let smaller = match dtype {
        GgmlDType::Q4K => GgmlDType::Q5_0,
        GgmlDType::Q5K => GgmlDType::Q5_1,
        GgmlDType::Q6K => GgmlDType::Q8_0,
        other => other,
    };
    let fits = |dtype: &GgmlDType| width.is_multiple_of(dtype.block_size());
    let fitting = [dtype, smaller].into_iter().find(fits);
    fitting.unwrap_or(GgmlDType::F16)
}

/// A tensor's name with `*` for the layer.
fn without_layer(name: &str) -> String {
    let parts = name.split('.').enumerate();
    let parts = parts.map(
        |(index, part)| match index == 1 && name.starts_with("blk.") {
            true => "*",
            false => part,
        },
    );
    parts.collect::<Vec<_>>().join(".")
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::has_more_bits;

    /// Of 32 layers those that llama.cpp gives more bits.
    #[test]
    fn layers_with_more_bits() {
        let layers: Vec<usize> = (0..32).filter(|layer| has_more_bits(*layer, 32)).collect();
        assert_eq!(
            layers,
            [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
        );
    }
}
