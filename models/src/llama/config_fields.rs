//! Typed reading of JSON fields, with errors that name the field.

use candle_core::{Result, bail};
use serde_json::{Map, Value};

/// The fields of a JSON object. `null` counts as absent, as in `transformers`.
pub(super) struct ConfigFields {
    fields: Map<String, Value>,
}

impl ConfigFields {
    pub fn new(fields: Map<String, Value>) -> Self {
        Self { fields }
    }

    pub fn value(&self, name: &str) -> Option<&Value> {
        self.fields.get(name).filter(|value| !value.is_null())
    }

    pub fn required_size(&self, name: &str) -> Result<usize> {
        match self.size(name)? {
            Some(size) => Ok(size),
            None => bail!("{name} is missing; expected a whole number"),
        }
    }

    pub fn size(&self, name: &str) -> Result<Option<usize>> {
        self.read(name, "a whole number", |value| {
            value.as_u64().and_then(|size| usize::try_from(size).ok())
        })
    }

    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        self.read(name, "a number", Value::as_f64)
    }

    pub fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.read(name, "true or false", Value::as_bool)
    }

    pub fn text(&self, name: &str) -> Result<Option<String>> {
        self.read(name, "a text", |value| value.as_str().map(String::from))
    }

    pub fn texts(&self, name: &str) -> Result<Option<Vec<String>>> {
        self.read(name, "a list of texts", |value| {
            let texts = value.as_array()?.iter();
            texts.map(|text| text.as_str().map(String::from)).collect()
        })
    }

    pub fn object(&self, name: &str) -> Result<Option<Map<String, Value>>> {
        self.read(name, "an object", |value| value.as_object().cloned())
    }

    pub fn token_id(&self, name: &str) -> Result<Option<u32>> {
        self.read(name, "a token id (a whole number below 2^32)", token_id)
    }

    /// One id or a list of them; empty if there are none.
    pub fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        let expected = "a token id (a whole number below 2^32) or a list of them";
        let ids = self.read(name, expected, |value| match value {
            Value::Array(ids) => ids.iter().map(token_id).collect(),
            id => Some(vec![token_id(id)?]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    fn read<'a, T>(
        &'a self,
        name: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => bail!("{name} is {value}; expected {expected}"),
        }
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
