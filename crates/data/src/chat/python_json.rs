//! JSON as Python's `json.dumps` writes it, which templates call as the filter `tojson`.

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, Value};

use super::python_values::{
    LimitedText, LongInteger, MAX_DEPTH, arguments, float, number, refused, text_of, too_deep,
};

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ensure_ascii, indent, separators, sort_keys] = arguments(&args.into_values(), names)?;
    let indent = match indent {
        None => None,
        Some(indent) => match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => Some(text.to_string()),
            (None, Some(width @ 0..=1000)) => Some(" ".repeat(width)),
            _ => return Err(refused("tojson expects an indent of up to 1000 or a text")),
        },
    };
    let separators = separators.map(|separators| -> Result<Vec<String>, Error> {
        let separators = separators.try_iter()?.checked();
        separators.map(|separator| text_of(&separator?)).collect()
    });
    let [item, key] = match separators.transpose()? {
        Some(separators) => <[String; 2]>::try_from(separators)
            .map_err(|_| refused("tojson expects two separators"))?,
        None if indent.is_some() => [",", ": "].map(str::to_string),
        None => [", ", ": "].map(str::to_string),
    };
    let mut writer = JsonWriter {
        json: LimitedText::default(),
        ensure_ascii: ensure_ascii.is_some_and(|is| is.is_true()),
        sort_keys: sort_keys.is_some_and(|is| is.is_true()),
        indent,
        item,
        key,
    };
    writer.value(value, 0)?;
    Ok(Value::from(writer.json.into_text()))
}

struct JsonWriter {
    json: LimitedText,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl JsonWriter {
    fn value(&mut self, value: &Value, level: usize) -> Result<(), Error> {
        if level > MAX_DEPTH {
            return Err(too_deep());
        }
        if let Some(text) = value.as_str() {
            return self.text(text);
        }
        match value.kind() {
            ValueKind::None | ValueKind::Bool | ValueKind::Number => self.json.push(&scalar(value)),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                self.list(["[", "]"], &items, level, |writer, item| {
                    writer.value(item, level + 1)
                })
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.checked().collect::<Result<_, _>>()?;
                if self.sort_keys {
                    keys.sort();
                }
                self.list(["{", "}"], &keys, level, |writer, key| {
                    match key.as_str() {
                        Some(text) => writer.text(text)?,
                        None => writer.text(&scalar(key))?,
                    }
                    let separator = std::mem::take(&mut writer.key);
                    writer.json.push(&separator)?;
                    writer.key = separator;
                    writer.value(&value.get_item(key)?, level + 1)
                })
            }
            _ if value.downcast_object_ref::<LongInteger>().is_some() => {
                self.json.push(&value.to_string())
            }
            kind => Err(Error::new(
                ErrorKind::BadSerialization,
                format!("tojson gets {kind}, which is no JSON"),
            )),
        }
    }

    fn list(
        &mut self,
        [begin, end]: [&str; 2],
        items: &[Value],
        level: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.json.push(begin)?;
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.json.push(&self.item)?;
            }
            self.break_line(level + 1)?;
            write(self, item)?;
        }
        if !items.is_empty() {
            self.break_line(level)?;
        }
        self.json.push(end)
    }

    fn break_line(&mut self, level: usize) -> Result<(), Error> {
        let Some(indent) = &self.indent else {
            return Ok(());
        };
        self.json.push("\n")?;
        for _ in 0..level {
            self.json.push(indent)?;
        }
        Ok(())
    }

    fn text(&mut self, text: &str) -> Result<(), Error> {
        let json = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            return self.json.push(&json);
        }
        for c in json.chars() {
            if matches!(c, ' '..='~') {
                self.json.push(c.encode_utf8(&mut [0; 4]))?;
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                self.json.push(&format!("\\u{unit:04x}"))?;
            }
        }
        Ok(())
    }
}

/// A null, a truth value or a number.
fn scalar(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        _ if value.is_none() => "null".to_string(),
        _ if value.kind() == ValueKind::Bool => value.is_true().to_string(),
        Ok(number) if number.is_nan() => "NaN".to_string(),
        Ok(number) if number.is_infinite() => float(number).replace("inf", "Infinity"),
        _ => number(value),
    }
}
