//! JSON as Python's `json.dumps` writes it, which templates call as the filter `tojson`.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::Formatter;

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson expects two separators",
            ));
        }
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
    };
    let style = Style {
        indent,
        item,
        key,
        level: 0,
        is_empty: true,
    };
    let mut json = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(&mut json, style);
    let written = match sort_keys {
        // The maps of serde_json are sorted.
        Some(true) => serde_json::to_value(value).and_then(|value| value.serialize(&mut writer)),
        _ => value.serialize(&mut writer),
    };
    let fail = |err: String| Error::new(ErrorKind::BadSerialization, err);
    written.map_err(|err| fail(err.to_string()))?;
    let json = String::from_utf8(json).map_err(|err| fail(err.to_string()))?;
    Ok(Value::from(match ensure_ascii {
        Some(true) => escaped(&json),
        _ => json,
    }))
}

/// With `\uXXXX` in place of what is not ASCII.
fn escaped(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match c.is_ascii() {
            true => escaped.push(c),
            false => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    escaped += &format!("\\u{unit:04x}");
                }
            }
        }
    }
    escaped
}

struct Style {
    indent: Option<usize>,
    item: String,
    key: String,
    level: usize,
    /// Whether the innermost list or object has no item yet.
    is_empty: bool,
}

impl Style {
    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.is_empty = true;
        writer.write_all(bracket)
    }

    fn item<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.break_line(writer)
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if !std::mem::take(&mut self.is_empty) {
            self.break_line(writer)?;
        }
        writer.write_all(bracket)
    }

    fn break_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => {
                writer.write_all(b"\n")?;
                writer.write_all(" ".repeat(indent * self.level).as_bytes())
            }
            None => Ok(()),
        }
    }
}

impl Formatter for Style {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.item(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }
}
