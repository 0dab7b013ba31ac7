//! A chat template that a user chooses for a model without one, or in place of its own: what fits the tokenizer, and what is saved.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::read_text_file;
use minijinja::Value as Message;
use regex::Regex;
use serde_json::{Map, Value};

use super::chat_template::ChatTemplate;
use super::conversation::Chat;
use super::template_source::{TEMPLATE_FILE, TOOLS_FILE, TemplateSource};
use crate::vocabulary::Tokenizer;
use crate::words::few;

/// The templates that come with this library: how families of models write conversations.
const NAMED: [(&str, &str); 6] = [
    ("chatml", include_str!("templates/chatml.jinja")),
    ("llama3", include_str!("templates/llama3.jinja")),
    ("qwen", include_str!("templates/qwen.jinja")),
    ("mistral", include_str!("templates/mistral.jinja")),
    ("gemma", include_str!("templates/gemma.jinja")),
    ("zephyr", include_str!("templates/zephyr.jinja")),
];

/// What looks like a token of its own in a rendered conversation: `<|im_start|>`, `</s>`, `[INST]`.
static MARKER: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"<\|[^<>|\s]+\|>|</?[A-Za-z_]\w*>|\[/?[A-Z_]+\]").ok());

/// What stands for messages where only a template's own text is of interest.
const QUESTION: &str = "question";
const ANSWER: &str = "answer";

/// How a template and a tokenizer go together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TemplateFit {
    /// What the template writes after what the assistant says, without white space around it.
    pub end_of_turn: Option<String>,
    /// The same, if it is one token: with it generation stops.
    pub end_of_turn_id: Option<u32>,
    /// What looks like a token in the template's text, and is several in the tokenizer's.
    pub split_markers: Vec<String>,
}

impl ChatTemplate {
    /// The template that `choice` names, for the tokens of `tokenizer`: one of chatml, llama3, qwen, mistral, gemma and zephyr, or a file
    /// of Jinja, as `chat_template.jinja` in a model's folder is one.
    ///
    /// # Errors
    /// There is neither such a template nor such a file; a file that is no Jinja.
    pub fn chosen(choice: &str, tokenizer: &Tokenizer) -> Result<Self> {
        let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
        let path = Path::new(choice);
        let text = match NAMED.iter().find(|(name, _)| *name == choice) {
            Some((_, text)) => text.to_string(),
            None => match read_text_file(path) {
                Ok(text) => text,
                Err(err) => bail!(
                    "cannot read the chat template {choice}: {err}\nhint: expected a file of Jinja, or one of {}",
                    names.join(", ")
                ),
            },
        };
        let source = TemplateSource::new(path.to_path_buf(), &text, None);
        Self::of_source(source, tokenizer.named_special_tokens().clone())
    }

    /// The name of a template of which all markers are tokens of `tokenizer`, else zephyr, whose turns end with any tokenizer's end of a text.
    pub(crate) fn suggested(tokenizer: &Tokenizer) -> &'static str {
        let fits = |name: &&str| {
            let fit = Self::chosen(name, tokenizer).map(|template| template.fit(tokenizer));
            fit.is_ok_and(|fit| fit.end_of_turn_id.is_some() && fit.split_markers.is_empty())
        };
        let mut names = NAMED.iter().map(|(name, _)| *name);
        names.find(fits).unwrap_or("zephyr")
    }

    /// The template in place of that of the model in `model`: the one that `choice` names, else the one in the folder of an adapter, if it is
    /// another than the model's, as it was chosen when the adapter was trained.
    ///
    /// # Errors
    /// As [`Self::chosen`] and [`Self::from_dir`].
    pub fn in_place_of_own(
        model: Option<&Path>,
        choice: Option<&str>,
        adapter: Option<&Path>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Self>> {
        if let Some(choice) = choice {
            return Self::chosen(choice, tokenizer).map(Some);
        }
        let Some(adapter) = adapter else {
            return Ok(None);
        };
        let tokens = tokenizer.named_special_tokens();
        let Some(of_adapter) = Self::from_dir(adapter, tokens.clone())? else {
            return Ok(None);
        };
        let own = model.map(|model| Self::from_dir(model, tokens.clone()));
        let own = own.transpose()?.flatten();
        let is_own = own.is_some_and(|own| own.identity() == of_adapter.identity());
        Ok((!is_own).then_some(of_adapter))
    }

    /// How the template goes together with the tokenizer, from what it makes of a short conversation.
    pub fn fit(&self, tokenizer: &Tokenizer) -> TemplateFit {
        let message = |role: &str, content: &str| -> Message {
            minijinja::context! { role => role, content => content }
        };
        let turns = [message("user", QUESTION), message("assistant", ANSWER)];
        let special = tokenizer.special_tokens();
        let Some((text, answer)) = Chat::new(turns.to_vec(), None)
            .ok()
            .and_then(|chat| self.render(&chat, &special).ok())
            .and_then(|rendered| {
                let answer = rendered.assistant.last()?.clone();
                Some((rendered.text, answer))
            })
        else {
            // What it refuses it refuses of the data, too, and says why.
            return TemplateFit::default();
        };
        let written = text.get(answer).unwrap_or_default();
        let end = written.rsplit_once(ANSWER).map(|(_, end)| end.trim());
        let end_of_turn = end.filter(|end| !end.is_empty()).map(str::to_string);
        let markers = MARKER.iter().flat_map(|marker| marker.find_iter(&text));
        let markers: BTreeSet<&str> = markers.map(|found| found.as_str()).collect();
        let is_split = |marker: &&str| tokenizer.token_id(marker).is_none();
        TemplateFit {
            end_of_turn_id: end_of_turn
                .as_deref()
                .and_then(|end| tokenizer.token_id(end)),
            end_of_turn,
            split_markers: markers
                .into_iter()
                .filter(is_split)
                .map(str::to_string)
                .collect(),
        }
    }

    /// Puts the template among the files beside a model's weights, in place of the one that is there, and what ends its turns among the ends of
    /// texts in `generation_config.json`.
    ///
    /// # Errors
    /// One of these files is no JSON.
    pub fn save_among(
        &self,
        sidecars: &mut Vec<(String, Vec<u8>)>,
        tokenizer: &Tokenizer,
    ) -> Result<()> {
        let is_of_another = |name: &str| {
            let is_named = name.starts_with("additional_chat_templates/");
            is_named || ["chat_template.json", TEMPLATE_FILE].contains(&name)
        };
        sidecars.retain(|(name, _)| !is_of_another(name));
        let mut write = |name: &str, text: &str| {
            sidecars.push((name.to_string(), text.as_bytes().to_vec()));
        };
        write(TEMPLATE_FILE, self.text_of_template());
        if let Some(text) = &self.source.with_tools {
            write(TOOLS_FILE, text);
        }
        let tokenizer_config = "tokenizer_config.json";
        if let Some(mut config) = object(sidecars, tokenizer_config)?
            && config.contains_key("chat_template")
        {
            config.insert("chat_template".into(), self.text_of_template().into());
            put(sidecars, tokenizer_config, config)?;
        }
        let Some(id) = self.fit(tokenizer).end_of_turn_id else {
            return Ok(());
        };
        let of_model = object(sidecars, "config.json")?.unwrap_or_default();
        let name = "generation_config.json";
        let mut generation = object(sidecars, name)?.unwrap_or_default();
        let key = "eos_token_id";
        let ids = |config: &Map<String, Value>| match config.get(key) {
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) if id.is_u64() => vec![id.clone()],
            _ => Vec::new(),
        };
        let mut ends = match ids(&generation) {
            ends if ends.is_empty() => ids(&of_model),
            ends => ends,
        };
        if ends.is_empty() {
            ends.push(tokenizer.eos_id().into());
        }
        if !ends.contains(&id.into()) {
            ends.push(id.into());
        }
        generation.insert(key.into(), ends.into());
        put(sidecars, name, generation)
    }
}

impl TemplateFit {
    /// What of it a user should know, as one warning.
    pub fn warning(&self) -> Option<String> {
        if self.split_markers.is_empty() {
            return None;
        }
        let mut warning = format!(
            "of the chat template these are no single tokens of this tokenizer: {}",
            few(&self.split_markers)
        );
        if self.end_of_turn_id.is_none() {
            warning += ", and what ends a turn is among them, so that answers do not end by themselves\nhint: mistral and zephyr end a turn \
                        with the tokenizer's own end of a text";
        }
        Some(warning)
    }
}

/// The content of a JSON file among these, if it is there.
fn object(sidecars: &[(String, Vec<u8>)], name: &str) -> Result<Option<Map<String, Value>>> {
    let Some((_, content)) = sidecars.iter().find(|(other, _)| other == name) else {
        return Ok(None);
    };
    match serde_json::from_slice(content) {
        Ok(object) => Ok(Some(object)),
        Err(err) => bail!("{name} beside the model's weights is no JSON object: {err}"),
    }
}

fn put(
    sidecars: &mut Vec<(String, Vec<u8>)>,
    name: &str,
    object: Map<String, Value>,
) -> Result<()> {
    let content = serde_json::to_vec_pretty(&object).map_err(Error::wrap)?;
    sidecars.retain(|(other, _)| other != name);
    sidecars.push((name.to_string(), content));
    Ok(())
}
