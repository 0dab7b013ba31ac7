//! Where a checkpoint has its chat template.

use std::path::Path;

use candle_core::{Result, bail};
use serde_json::Value;

use crate::json_file::read_json;

/// The templates of a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct TemplateSource {
    /// For conversations.
    pub default: String,
    /// For those with tools, where it is another one.
    pub with_tools: Option<String>,
}

impl TemplateSource {
    /// That of `dir`: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, one or a list of named ones, else that of
    /// `chat_template.json`; `None` if there is none.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        if let Some(default) = read_text(&dir.join("chat_template.jinja"))? {
            let with_tools = read_text(&dir.join("additional_chat_templates/tool_use.jinja"))?;
            return Ok(Some(Self {
                default,
                with_tools,
            }));
        }
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = dir.join(name);
            let Some(file) = read_json(&path)? else {
                continue;
            };
            match &file["chat_template"] {
                Value::Null => {}
                Value::String(default) => {
                    return Ok(Some(Self {
                        default: default.clone(),
                        with_tools: None,
                    }));
                }
                Value::Array(named) => return Self::of_list(named, &path).map(Some),
                other => bail!(
                    "chat_template of {path:?} is {other}, expected a text or a list of named ones"
                ),
            }
        }
        Ok(None)
    }

    fn of_list(named: &[Value], path: &Path) -> Result<Self> {
        let find = |name: &str| {
            let template = named.iter().find(|template| template["name"] == name);
            template.and_then(|template| template["template"].as_str())
        };
        let Some(default) = find("default") else {
            bail!("chat_template of {path:?} is a list without a template of the name \"default\"");
        };
        Ok(Self {
            default: default.to_string(),
            with_tools: find("tool_use").map(str::to_string),
        })
    }
}

fn read_text(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(err) => bail!("cannot read the chat template {path:?}: {err}"),
    }
}
