//! Where a checkpoint has its chat template.

use std::path::{Path, PathBuf};

use candle_core::{Result, bail};
use candle_parallel::checkpoint::read_text_file;
use serde_json::Value;

use crate::json_file::read_json;

/// The file of a checkpoint's template.
pub(super) const TEMPLATE_FILE: &str = "chat_template.jinja";

/// The file of its template for conversations with tools, where that is another one.
pub(super) const TOOLS_FILE: &str = "additional_chat_templates/tool_use.jinja";

/// The templates of a checkpoint. Line endings are `\n`, whether the file has them, `\r\n` or `\r`: Jinja2 reads templates so.
#[derive(Clone, Debug)]
pub(super) struct TemplateSource {
    /// The file that they are in.
    pub path: PathBuf,
    /// For conversations.
    pub default: String,
    /// For those with tools, where it is another one.
    pub with_tools: Option<String>,
}

impl TemplateSource {
    /// That of `dir`: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, one or a list of named ones, else that of
    /// `chat_template.json`; `None` if there is none.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(TEMPLATE_FILE);
        if let Some(default) = read_text(&path)? {
            let with_tools = read_text(&dir.join(TOOLS_FILE))?;
            return Ok(Some(Self::new(path, &default, with_tools.as_deref())));
        }
        for name in ["tokenizer_config.json", "chat_template.json"] {
            let path = dir.join(name);
            let Some(file) = read_json(&path)? else {
                continue;
            };
            match &file["chat_template"] {
                Value::Null => {}
                Value::String(default) => return Ok(Some(Self::new(path, default, None))),
                Value::Array(named) => return Self::of_list(named, path).map(Some),
                other => bail!(
                    "chat_template of {path:?} is {other}, expected a text or a list of named ones"
                ),
            }
        }
        Ok(None)
    }

    /// The texts of the templates.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.default.as_str()).chain(self.with_tools.as_deref())
    }

    /// These texts, of which errors say that they are in `path`.
    pub fn new(path: PathBuf, default: &str, with_tools: Option<&str>) -> Self {
        let with_line_feeds = |text: &str| text.replace("\r\n", "\n").replace('\r', "\n");
        Self {
            path,
            default: with_line_feeds(default),
            with_tools: with_tools.map(with_line_feeds),
        }
    }

    fn of_list(named: &[Value], path: PathBuf) -> Result<Self> {
        let find = |name: &str| {
            let template = named.iter().find(|template| template["name"] == name);
            template.and_then(|template| template["template"].as_str())
        };
        let Some(default) = find("default") else {
            bail!("chat_template of {path:?} is a list without a template of the name \"default\"");
        };
        Ok(Self::new(path, default, find("tool_use")))
    }
}

fn read_text(path: &Path) -> Result<Option<String>> {
    match read_text_file(path) {
        Ok(text) => Ok(Some(text)),
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(err) => bail!("cannot read the chat template {path:?}: {err}"),
    }
}
