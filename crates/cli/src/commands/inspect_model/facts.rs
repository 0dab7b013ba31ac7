//! What is known of a model without reading its weights.

use std::collections::BTreeMap;
use std::path::Path;

use candle_comm::message_of;
use candle_core::{Error, Result};
use candle_parallel::checkpoint::{Checkpoint, TensorEntry, read_text_file, size_in_words};
use candle_train_models::ModelConfig;
use candle_trainer::{ChatTemplate, Tokenizer, counted};
use serde_json::Value;

/// Names and values of facts about the model in `dir`, from its `config.json`, also if it is none that can be trained,
/// its weights and its tokenizer.
///
/// # Errors
/// `config.json` cannot be read, or is no JSON.
pub(super) fn facts_of(
    dir: &Path,
    config: Option<&ModelConfig>,
    weights: Option<&Checkpoint>,
) -> Result<Vec<(&'static str, String)>> {
    let path = dir.join("config.json");
    let fail =
        |err: &dyn std::fmt::Display| Error::msg(format!("cannot read {}: {err}", path.display()));
    let text = read_text_file(&path).map_err(|err| fail(&err))?;
    let file: Value = serde_json::from_str(&text).map_err(|err| fail(&err))?;
    let mut facts = vec![("family", family(&file))];
    if let Some(weights) = weights {
        facts.push(("parameters", parameters(weights, config)));
    }
    facts.extend(sizes(&file).map(|sizes| ("layers", sizes)));
    let context = config.map(ModelConfig::max_seq_len);
    let context = context.or(number(&file, "max_position_embeddings"));
    facts.extend(context.map(|context| ("context", counted(context, "token"))));
    facts.extend(weights.map(|weights| ("weights", stored(weights))));
    let is_tied = match config {
        Some(config) => Some(config.tie_word_embeddings),
        None => field(&file, "tie_word_embeddings").as_bool(),
    };
    facts.extend(is_tied.map(|is_tied| {
        let said = if is_tied {
            "tied: the head uses the embedding's weight"
        } else {
            "not tied: the head has a weight of its own"
        };
        ("embeddings", said.to_string())
    }));
    facts.extend(of_tokenizer(dir, number(&file, "vocab_size")));
    Ok(facts)
}

/// A field of `config.json`, or of the language model in one of several.
fn field<'a>(file: &'a Value, name: &str) -> &'a Value {
    match &file[name] {
        Value::Null => &file["text_config"][name],
        value => value,
    }
}

fn number(file: &Value, name: &str) -> Option<usize> {
    field(file, name)
        .as_u64()
        .and_then(|it| usize::try_from(it).ok())
}

fn family(file: &Value) -> String {
    let class = file["architectures"][0].as_str();
    let class = class.map_or(String::new(), |class| format!(" ({class})"));
    match file["model_type"].as_str() {
        Some(family) => format!("{family}{class}"),
        None => format!("not named{class}"),
    }
}

/// `16, hidden size 2048, 32 heads and 8 of keys and values`, of what the file tells.
fn sizes(file: &Value) -> Option<String> {
    let mut sizes = vec![number(file, "num_hidden_layers")?.to_string()];
    let hidden = number(file, "hidden_size");
    sizes.extend(hidden.map(|hidden| format!("hidden size {hidden}")));
    let heads = number(file, "num_attention_heads");
    sizes.extend(
        heads.map(|heads| match number(file, "num_key_value_heads") {
            Some(shared) if shared != heads => {
                format!("{heads} heads and {shared} of keys and values")
            }
            _ => counted(heads, "head"),
        }),
    );
    Some(sizes.join(", "))
}

/// How many values the weights have, in words.
fn parameters(weights: &Checkpoint, config: Option<&ModelConfig>) -> String {
    let tensors = parameters_of(weights, config);
    let num_values: usize = tensors.map(|(_, tensor)| tensor.num_values()).sum();
    in_words(num_values)
}

/// The tensors that are parameters: no constants, and no second names.
pub(super) fn parameters_of<'a>(
    weights: &'a Checkpoint,
    config: Option<&ModelConfig>,
) -> impl Iterator<Item = (&'a String, &'a TensorEntry)> {
    let is_tied = config.is_some_and(|config| config.tie_word_embeddings);
    weights.tensors().iter().filter(move |(name, _)| {
        // Of a pair that was saved under this name alone it is the first one.
        let has_both = || weights.tensors().contains_key("model.embed_tokens.weight");
        let is_second_name = is_tied && *name == "lm_head.weight" && has_both();
        !(is_second_name || name.ends_with(".rotary_emb.inv_freq"))
    })
}

/// `1.24 billion (1235814400)`.
fn in_words(count: usize) -> String {
    let units = [(1e12, "trillion"), (1e9, "billion"), (1e6, "million")];
    let unit = units.iter().find(|(unit, _)| count as f64 >= *unit);
    match unit {
        Some((unit, name)) => format!("{:.2} {name} ({count})", count as f64 / unit),
        None => count.to_string(),
    }
}

/// `bf16, 2.5 GB in 1 file, 146 tensors`.
fn stored(weights: &Checkpoint) -> String {
    let mut of_type: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in weights.tensors().values() {
        let dtype = format!("{:?}", tensor.dtype).to_lowercase();
        *of_type.entry(dtype).or_default() += tensor.num_bytes();
    }
    let mut types: Vec<(String, usize)> = of_type.into_iter().collect();
    types.sort_by_key(|(_, num_bytes)| std::cmp::Reverse(*num_bytes));
    let total: usize = types.iter().map(|(_, num_bytes)| num_bytes).sum();
    let types: Vec<String> = types.into_iter().map(|(dtype, _)| dtype).collect();
    format!(
        "{}, {} in {}, {}",
        types.join(" and "),
        size_in_words(total as u64),
        counted(weights.num_files(), "file"),
        counted(weights.tensors().len(), "tensor")
    )
}

/// The tokenizer's size and the chat template's file, or why they are not known.
fn of_tokenizer(dir: &Path, vocab_size: Option<usize>) -> Vec<(&'static str, String)> {
    // What is missing is told with a hint, which is for who needs it.
    let why = |err: Error| {
        message_of(&err)
            .lines()
            .next()
            .unwrap_or_default()
            .to_string()
    };
    let tokenizer = Tokenizer::from_dir(dir);
    let named = match &tokenizer {
        Ok(tokenizer) => tokenizer.named_special_tokens().clone(),
        Err(_) => BTreeMap::new(),
    };
    let tokens = match (tokenizer, vocab_size) {
        (Ok(tokenizer), Some(rows)) if rows != tokenizer.vocab_size() => {
            format!(
                "{}, and {rows} rows of the embedding",
                counted(tokenizer.vocab_size(), "token")
            )
        }
        (Ok(tokenizer), _) => counted(tokenizer.vocab_size(), "token"),
        (Err(err), _) => format!("none that can be read: {}", why(err)),
    };
    let template = match ChatTemplate::from_dir(dir, named) {
        Ok(Some(template)) => {
            let name = template.path().file_name().unwrap_or_default();
            format!("in {}", name.to_string_lossy())
        }
        Ok(None) => "none".to_string(),
        Err(err) => format!("none that can be used: {}", why(err)),
    };
    vec![("tokenizer", tokens), ("chat template", template)]
}

#[cfg(test)]
mod tests {
    use super::in_words;

    #[test]
    fn large_numbers_are_in_words() {
        assert_eq!(in_words(53_728), "53728");
        assert_eq!(in_words(1_771_200), "1.77 million (1771200)");
        assert_eq!(in_words(1_235_814_400), "1.24 billion (1235814400)");
        assert_eq!(in_words(405_853_388_800), "405.85 billion (405853388800)");
    }
}
