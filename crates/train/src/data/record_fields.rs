//! The fields of a record, and which of them have been read.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::chat::has_content;

/// The fields of an object.
pub(super) struct RecordFields<'a> {
    object: &'a Value,
    read: Vec<&'static str>,
}

impl<'a> RecordFields<'a> {
    pub fn of(object: &'a Value) -> Self {
        Self {
            object,
            read: Vec::new(),
        }
    }

    /// All names.
    pub fn names(&self) -> Vec<String> {
        let names = self.object.try_iter().into_iter().flatten();
        names.map(|name| name.to_string()).collect()
    }

    /// Names of the fields that say something and have not been read.
    pub fn unread(&self) -> Vec<String> {
        let mut names = self.names();
        names.retain(|name| {
            let value = self.object.get_attr(name).unwrap_or_default();
            has_content(&value) && !self.read.contains(&name.as_str())
        });
        names
    }

    /// Whether a field is there and not null.
    pub fn has(&self, name: &str) -> bool {
        let value = self.object.get_attr(name).unwrap_or_default();
        !value.is_undefined() && !value.is_none()
    }

    /// Whether a field is neither 0, false, null nor empty.
    pub fn is_true(&self, name: &str) -> bool {
        let value = self.object.get_attr(name).unwrap_or_default();
        value.is_true()
    }

    /// Whether a field is 1 or true.
    pub fn is_one(&self, name: &str) -> bool {
        let value = self.object.get_attr(name).unwrap_or_default();
        value == Value::from(true) || value == Value::from(1)
    }

    /// A field that is there and not null.
    pub fn value(&mut self, name: &'static str) -> Option<Value> {
        self.read.push(name);
        let value = self.object.get_attr(name).ok()?;
        self.has(name).then_some(value)
    }

    pub fn text(&mut self, name: &'static str) -> Result<String, String> {
        match self.value(name) {
            Some(value) => match value.as_str() {
                Some(text) => Ok(text.to_string()),
                None => Err(format!("its {name} is {}, expected a text", value.kind())),
            },
            None => Err(format!("it has no {name}")),
        }
    }

    /// A text that may be missing, which is as good as empty.
    pub fn optional_text(&mut self, name: &'static str) -> Result<Option<String>, String> {
        let text = match self.has(name) {
            true => Some(self.text(name)?),
            false => None,
        };
        Ok(text.filter(|text| !text.is_empty()))
    }

    pub fn list(&mut self, name: &'static str) -> Result<Vec<Value>, String> {
        let value = self.value(name).unwrap_or_default();
        match value.kind() {
            ValueKind::Seq => Ok(value.try_iter().into_iter().flatten().collect()),
            kind => Err(format!("its {name} is {kind}, expected a list")),
        }
    }
}
