//! What a file says beside its tensors.

use super::GgufValue;

/// Keys and values, in the order of the file.
#[derive(Clone, Debug, Default)]
pub struct GgufMetadata(Vec<(String, GgufValue)>);

impl GgufMetadata {
    /// Adds a value.
    pub fn set(&mut self, key: impl Into<String>, value: GgufValue) {
        self.0.push((key.into(), value));
    }

    /// Adds a count, of 32 bits as all of them are.
    pub fn set_count(&mut self, key: impl Into<String>, count: usize) {
        self.set(
            key,
            GgufValue::U32(u32::try_from(count).unwrap_or(u32::MAX)),
        );
    }

    /// Adds a number.
    pub fn set_number(&mut self, key: impl Into<String>, number: f64) {
        self.set(key, GgufValue::F32(number as f32));
    }

    /// Adds a text.
    pub fn set_text(&mut self, key: impl Into<String>, text: impl Into<String>) {
        self.set(key, GgufValue::String(text.into()));
    }

    /// Adds those of another part.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&GgufValue> {
        self.0
            .iter()
            .find(|(own, _)| own == key)
            .map(|(_, value)| value)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &GgufValue)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// As they are in a file.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (key, value) in &self.0 {
            put_text(&mut bytes, key);
            bytes.extend(type_id(value).to_le_bytes());
            put(&mut bytes, value);
        }
        bytes
    }
}

/// The length of a text and its bytes.
pub(super) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn type_id(value: &GgufValue) -> u32 {
    match value {
        GgufValue::U8(_) => 0,
        GgufValue::I8(_) => 1,
        GgufValue::U16(_) => 2,
        GgufValue::I16(_) => 3,
        GgufValue::U32(_) => 4,
        GgufValue::I32(_) => 5,
        GgufValue::F32(_) => 6,
        GgufValue::Bool(_) => 7,
        GgufValue::String(_) => 8,
        GgufValue::Array(_) => 9,
        GgufValue::U64(_) => 10,
        GgufValue::I64(_) => 11,
        GgufValue::F64(_) => 12,
    }
}

fn put(bytes: &mut Vec<u8>, value: &GgufValue) {
    match value {
        GgufValue::U8(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::I8(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::U16(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::I16(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::U32(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::I32(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::U64(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::I64(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::F32(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::F64(number) => bytes.extend(number.to_le_bytes()),
        GgufValue::Bool(is_true) => bytes.push(u8::from(*is_true)),
        GgufValue::String(text) => put_text(bytes, text),
        GgufValue::Array(values) => {
            // An empty one is that of merges, which are texts.
            let of_first = values.first().map_or(8, type_id);
            bytes.extend(of_first.to_le_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put(bytes, value));
        }
    }
}
