//! Values as Python prints them, and limits of what a template makes.

use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Object, ObjectRepr, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// Bytes of a text that a template makes.
pub(super) const MAX_TEXT: usize = 64 << 20;

/// Lists and objects in one another, of a template or of a record.
pub(super) const MAX_DEPTH: usize = 200;

/// Items of a list that are looked at in the time of one step.
const ITEMS_PER_STEP: usize = 16;

/// An error of this message.
pub(super) fn refused(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

pub(super) fn too_long() -> Error {
    over_limit(format!(
        "it makes a text of more than {} MB",
        MAX_TEXT >> 20
    ))
}

pub(super) fn too_deep() -> Error {
    over_limit(format!(
        "it has lists or objects that are more than {MAX_DEPTH} deep"
    ))
}

/// The kind of error that steps beyond their number are, too.
fn over_limit(message: String) -> Error {
    Error::new(ErrorKind::OutOfFuel, message)
}

/// Arguments by position or by name; one that is `None` is none.
pub(super) fn arguments<const N: usize>(
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (by_position, by_name) = match args.split_last() {
        Some((last, rest)) if last.is_kwargs() => (rest, Kwargs::try_from(last.clone())?),
        _ => (args, no_names()),
    };
    if by_position.len() > N {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let mut all = names.map(|_| None);
    for (index, (name, argument)) in names.into_iter().zip(&mut all).enumerate() {
        let named: Option<Value> = by_name.get(name)?;
        let given = by_position.get(index).cloned().or(named);
        *argument = given.filter(|given| !given.is_none() && !given.is_undefined());
    }
    by_name.assert_all_used()?;
    Ok(all)
}

/// Arguments by name, none.
pub(super) fn no_names() -> Kwargs {
    Kwargs::from_iter::<[(String, Value); 0]>([])
}

/// An integer that the engine has no type for, in its digits.
#[derive(Debug)]
pub(crate) struct LongInteger(pub String);

impl Object for LongInteger {
    fn repr(self: &std::sync::Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &std::sync::Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A text that may not become too long.
#[derive(Default)]
pub(super) struct LimitedText(String);

impl LimitedText {
    pub fn push(&mut self, text: &str) -> Result<(), Error> {
        if self.0.len() + text.len() > MAX_TEXT {
            return Err(too_long());
        }
        self.0.push_str(text);
        Ok(())
    }

    /// `str(value)`.
    pub fn push_str_of(&mut self, value: &Value) -> Result<(), Error> {
        match (value.as_str(), value.kind()) {
            (Some(text), _) => self.push(text),
            (None, ValueKind::Undefined) => Ok(()),
            _ => self.push_repr_of(value, 0),
        }
    }

    /// `repr(value)`.
    fn push_repr_of(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        if let Some(text) = value.as_str() {
            return self.push(&quoted(text));
        }
        match value.kind() {
            ValueKind::Undefined => self.push("Undefined"),
            ValueKind::Number => self.push(&number(value)),
            ValueKind::Seq | ValueKind::Iterable => {
                let [begin, end] = if value.is_tuple() {
                    ["(", ")"]
                } else {
                    ["[", "]"]
                };
                self.push(begin)?;
                let mut num_items = 0;
                for item in value.try_iter()?.checked() {
                    if num_items > 0 {
                        self.push(", ")?;
                    }
                    num_items += 1;
                    self.push_repr_of(&item?, depth + 1)?;
                }
                if value.is_tuple() && num_items == 1 {
                    self.push(",")?;
                }
                self.push(end)
            }
            ValueKind::Map if !is_of_engine(value) => {
                self.push("{")?;
                for (index, key) in value.try_iter()?.checked().enumerate() {
                    let key = key?;
                    if index > 0 {
                        self.push(", ")?;
                    }
                    self.push_repr_of(&key, depth + 1)?;
                    self.push(": ")?;
                    self.push_repr_of(&value.get_item(&key)?, depth + 1)?;
                }
                self.push("}")
            }
            _ => self.push(&value.to_string()),
        }
    }

    pub fn into_text(self) -> String {
        self.0
    }
}

/// `str(value)`.
pub(super) fn text_of(value: &Value) -> Result<String, Error> {
    let mut text = LimitedText::default();
    text.push_str_of(value)?;
    Ok(text.into_text())
}

/// Whether it is a macro or a loop, which look like objects.
fn is_of_engine(value: &Value) -> bool {
    let object = value.as_object();
    object.is_some_and(|object| object.type_name().contains("::vm::"))
}

fn is_namespace(value: &Value) -> bool {
    let object = value.as_object();
    object.is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// A number.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(number) if !value.is_integer() => float(number),
        _ => value.to_string(),
    }
}

/// `repr` of a float: as few digits as tell it from others, with an exponent below 1e-4 and from 1e16.
pub(super) fn float(number: f64) -> String {
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        -4..=15 => format!("{number:?}"),
        exponent if exponent < 0 => format!("{digits}e-{:02}", -exponent),
        exponent => format!("{digits}e+{exponent:02}"),
    }
}

/// `repr` of a text.
fn quoted(text: &str) -> String {
    let is_double = text.contains('\'') && !text.contains('"');
    let quote = if is_double { '"' } else { '\'' };
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push(quote);
    for c in text.chars() {
        match c {
            '\\' => quoted += "\\\\",
            '\n' => quoted += "\\n",
            '\r' => quoted += "\\r",
            '\t' => quoted += "\\t",
            c if c == quote => {
                quoted.push('\\');
                quoted.push(c);
            }
            c if is_printable(c) => quoted.push(c),
            c => {
                let code = u32::from(c);
                let written = match code {
                    0..=0xFF => write!(quoted, "\\x{code:02x}"),
                    0x100..=0xFFFF => write!(quoted, "\\u{code:04x}"),
                    _ => write!(quoted, "\\U{code:08x}"),
                };
                // A String takes everything.
                debug_assert!(written.is_ok());
            }
        }
    }
    quoted.push(quote);
    quoted
}

/// `str.isprintable`. Rust's `escape_debug` goes by the same categories; marks it escapes at the beginning of a text only.
pub(super) fn is_printable(c: char) -> bool {
    match c {
        ' '..='~' => true,
        c if c.is_alphanumeric() => true,
        c => !format!("a{c}").escape_debug().any(|c| c == '\\'),
    }
}

/// The filter that `{% set %}` ends with: texts, depths and sizes stay in their limits, and what is computed only once it is read is a list, as
/// in Python. Otherwise loops could nest without an end what the engine prints, compares and frees by recursion.
pub(super) fn kept(
    state: &mut State<'_, '_>,
    value: Value,
    in_namespace: bool,
) -> Result<Value, Error> {
    if is_namespace(&value) && !in_namespace {
        return Ok(value);
    }
    Ok(materialized(state, &value, 0)?.unwrap_or(value))
}

/// The same value without anything that is computed only once it is read; `None` if there is nothing of that kind.
fn materialized(
    state: &State<'_, '_>,
    value: &Value,
    depth: usize,
) -> Result<Option<Value>, Error> {
    if value.as_str().is_some_and(|text| text.len() > MAX_TEXT) {
        return Err(too_long());
    }
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    let (is_map, is_lazy) = match value.kind() {
        ValueKind::Seq => (false, false),
        ValueKind::Iterable => (false, true),
        ValueKind::Map if is_of_engine(value) => return Ok(None),
        ValueKind::Map if is_namespace(value) => {
            return Err(refused("a namespace cannot be inside of something else"));
        }
        ValueKind::Map => (true, false),
        _ => return Ok(None),
    };
    state.consume_fuel(1)?;
    let (mut keys, mut items, mut is_changed) = (Vec::new(), Vec::new(), is_lazy);
    for item in value.try_iter()?.checked() {
        if !is_map && items.len() % ITEMS_PER_STEP == 0 {
            state.consume_fuel(1)?;
        }
        let mut item = item?;
        if is_map {
            let value = value.get_item(&item)?;
            keys.push(std::mem::replace(&mut item, value));
        }
        let changed = materialized(state, &item, depth + 1)?;
        is_changed |= changed.is_some();
        items.push(changed.unwrap_or(item));
    }
    Ok(is_changed.then(|| {
        if is_map {
            Value::from_pairs(keys.into_iter().zip(items))
        } else if value.is_tuple() {
            Value::from(Tuple::from(items))
        } else {
            Value::from(items)
        }
    }))
}
