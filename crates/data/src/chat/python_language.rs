//! What templates may call and test, as Jinja2 and Python have it where the engine has it otherwise or not.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, filters};
use minijinja_contrib::{filters as more_filters, globals, pycompat};

use super::jinja_source::{CONCAT, KEPT, MOD};
use super::python_json::tojson;
use super::python_values::{
    LimitedText, LongInteger, MAX_TEXT, arguments, is_printable, kept, no_names, refused, text_of,
    too_long,
};

/// Bytes that a template may write in all: what it makes in a macro it writes there and where it is called.
const MAX_WRITTEN: usize = 4 * MAX_TEXT;

/// Gives templates of `environment` the language.
pub(super) fn add_language(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, state, value| match value.as_str() {
        Some(text) => write(out, state, text),
        None => write(out, state, &text_of(value)?),
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("joiner", globals::joiner);
    environment.add_function(CONCAT, concat);
    environment.add_filter(MOD, modulo);
    environment.add_filter(KEPT, kept);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => text_of(value).map(Value::from),
    });
    environment.add_filter("join", join);
    environment.add_filter("int", int);
    environment.add_filter("float", to_float);
    environment.add_filter("format", |text: &str, args: Rest<ValueOrKwargs>| {
        formatted(FormatStyle::Printf, text, &args.into_values())
    });
    for name in ["e", "escape", "forceescape"] {
        environment.add_filter(name, move |value: &Value| escape(name, value));
    }
    environment.add_filter("truncate", truncate);
    environment.add_filter("striptags", more_filters::striptags);
    environment.add_filter("filesizeformat", more_filters::filesizeformat);
    environment.add_filter("wordcount", |text: &str| {
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.filter(|word| !word.is_empty()).count()
    });
    environment.add_filter("center", |text: &str, width: Option<usize>| {
        padded(text, width.unwrap_or(80), ' ', Side::Both)
    });
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_test("sequence", |value: &Value| match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    });
    environment.add_test("number", |value: &Value| {
        let is_long = value.downcast_object_ref::<LongInteger>().is_some();
        is_long || [ValueKind::Number, ValueKind::Bool].contains(&value.kind())
    });
    environment.add_test("integer", |value: &Value| {
        value.is_integer() || value.downcast_object_ref::<LongInteger>().is_some()
    });
    environment.add_test("callable", |value: &Value| {
        let object = value.as_object();
        let name = object.map_or("", |object| object.type_name());
        value.is_undefined() || name.contains("Macro") || name.contains("Function")
    });
}

/// Bytes that `{{ }}` wrote, into texts that `{% set %}` and macros make, too.
struct Written(usize);

fn write(out: &mut Output<'_>, state: &mut State<'_, '_>, text: &str) -> Result<(), Error> {
    let Written(written) = state.get_or_insert_extension(Written(0));
    *written += text.len();
    if *written > MAX_WRITTEN {
        return Err(too_long());
    }
    out.write_str(text).map_err(Error::from)
}

fn raise_exception(message: Rest<Value>) -> Result<Value, Error> {
    let message: Vec<String> = message.iter().map(text_of).collect::<Result<_, _>>()?;
    Err(refused(message.join(" ")))
}

/// `a ~ b ~ ..`.
fn concat(values: Rest<Value>) -> Result<String, Error> {
    let mut text = LimitedText::default();
    for value in values.iter() {
        text.push_str_of(value)?;
    }
    Ok(text.into_text())
}

/// `left % right`.
fn modulo(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        let args = if right.is_tuple() {
            right.try_iter()?.collect()
        } else {
            vec![right.clone()]
        };
        if right.kind() != ValueKind::Map && num_fields(text) < args.len() {
            return Err(refused(
                "not all arguments are converted by the text before %",
            ));
        }
        return formatted(FormatStyle::Printf, text, &args).map(Value::from);
    }
    let is_number = |value: &&Value| [ValueKind::Number, ValueKind::Bool].contains(&value.kind());
    if ![left, right].iter().all(is_number) {
        let [left, right] = [left.kind(), right.kind()];
        return Err(refused(format!("% of {left} and {right}")));
    }
    if !right.is_true() {
        return Err(refused("% by zero"));
    }
    let is_float = |value: &&Value| value.kind() == ValueKind::Number && !value.is_integer();
    if [left, right].iter().any(is_float) {
        let (left, right) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
        let rest = left % right;
        return Ok(Value::from(match rest {
            0.0 => 0.0_f64.copysign(right),
            rest if rest.is_sign_negative() != right.is_sign_negative() => rest + right,
            rest => rest,
        }));
    }
    let (left, right) = (
        i128::try_from(left.clone())?,
        i128::try_from(right.clone())?,
    );
    let rest = left.checked_rem(right).unwrap_or(0);
    Ok(Value::from(if rest != 0 && (rest < 0) != (right < 0) {
        rest + right
    } else {
        rest
    }))
}

/// Arguments that a text before `%` takes.
fn num_fields(text: &str) -> usize {
    let fields = text.replace("%%", "");
    let fields = fields.split('%').skip(1);
    fields
        .map(|field| {
            let is_of_type = |c: char| c.is_alphabetic();
            let spec = field.split(is_of_type).next().unwrap_or_default();
            1 + spec.matches('*').count()
        })
        .sum()
}

/// `text % args` or `text.format(args)`.
fn formatted(style: FormatStyle, text: &str, args: &[Value]) -> Result<String, Error> {
    // The engine looks for the end of a key byte by byte.
    let (field, key, end) = match style {
        FormatStyle::Printf => ("%", "(", ")"),
        FormatStyle::StrFormat => ("{", "[", "}"),
    };
    let fields = text.replace(&field.repeat(2), "");
    let mut keys = fields.split(field).skip(1).filter_map(|field| {
        let field = field.split(end).next().unwrap_or_default();
        field.split_once(key)
    });
    if keys.any(|(_, key)| !key.is_ascii()) {
        return Err(refused(
            "a key in a format is not ASCII, which is not supported",
        ));
    }
    // Widths and precisions of the text, and those that it takes from the arguments.
    let numbers = text.split(|c: char| !c.is_ascii_digit());
    let takes_widths = match style {
        FormatStyle::Printf => text.contains('*'),
        FormatStyle::StrFormat => text.matches(':').count() > 0 && text.contains(":{"),
    };
    let widths = numbers
        .filter(|digits| !digits.is_empty())
        .map(|digits| digits.parse().unwrap_or(usize::MAX));
    let widths_in_args = args
        .iter()
        .filter(|_| takes_widths)
        .filter_map(|arg| arg.as_usize());
    let room = widths
        .chain(widths_in_args)
        .fold(text.len(), usize::saturating_add);
    if room > MAX_TEXT {
        return Err(too_long());
    }
    let printed = |arg: &Value| match arg.kind() {
        ValueKind::Map if style == FormatStyle::Printf || arg.is_kwargs() => Ok(arg.clone()),
        ValueKind::None | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
            if style == FormatStyle::Printf || !text.contains('[') =>
        {
            text_of(arg).map(Value::from)
        }
        _ => Ok(arg.clone()),
    };
    let args: Vec<Value> = args.iter().map(printed).collect::<Result<_, _>>()?;
    let formatted = format(style, text, &args)?;
    if formatted.len() > MAX_TEXT {
        return Err(too_long());
    }
    Ok(formatted)
}

/// The filter `join(value, d='', attribute=None)`.
fn join(
    state: &mut State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<String, Error> {
    let [separator, attribute] = arguments(&args.into_values(), ["d", "attribute"])?;
    let items = match attribute {
        None => value.clone(),
        Some(attribute) => {
            let options = Kwargs::from_iter([("attribute", attribute)]);
            state.apply_filter("map", &[value.clone(), options.into()])?
        }
    };
    joined(state, &text_of(&separator.unwrap_or_default())?, &items)
}

fn joined(state: &State<'_, '_>, separator: &str, items: &Value) -> Result<String, Error> {
    let mut text = LimitedText::default();
    for (index, item) in items.try_iter()?.checked().enumerate() {
        state.consume_fuel(1)?;
        if index > 0 {
            text.push(separator)?;
        }
        text.push_str_of(&item?)?;
    }
    Ok(text.into_text())
}

/// The filters `escape` and `forceescape`.
fn escape(name: &str, value: &Value) -> Result<Value, Error> {
    if value.is_safe() && name != "forceescape" {
        return Ok(value.clone());
    }
    let mut escaped = LimitedText::default();
    for part in text_of(value)?.split_inclusive(['&', '<', '>', '"', '\'']) {
        let plain = part.trim_end_matches(['&', '<', '>', '"', '\'']);
        escaped.push(plain)?;
        escaped.push(match &part[plain.len()..] {
            "&" => "&amp;",
            "<" => "&lt;",
            ">" => "&gt;",
            "\"" => "&#34;",
            "'" => "&#39;",
            _ => "",
        })?;
    }
    Ok(Value::from_safe_string(escaped.into_text()))
}

/// The filter `int(value, default=0, base=10)`.
fn int(state: &State<'_, '_>, value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [default, base] = arguments(&args.into_values(), ["default", "base"])?;
    let default = default.unwrap_or(Value::from(0));
    let base: Option<u32> = base.map(u32::try_from).transpose()?;
    let number = number_of(value)?;
    let is_finite = match (number.as_str(), f64::try_from(number.clone())) {
        (Some(text), _) => text.parse().is_ok_and(f64::is_finite) || text.parse::<f64>().is_err(),
        (None, Ok(number)) => number.is_finite(),
        (None, Err(_)) => true,
    };
    if !is_finite {
        return Ok(default);
    }
    filters::int(state, &number, Some(default), base, no_names())
}

/// The filter `float(value, default=0.0)`.
fn to_float(
    state: &State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let [default] = arguments(&args.into_values(), ["default"])?;
    let default = default.unwrap_or(Value::from(0.0));
    filters::float(state, &number_of(value)?, Some(default), no_names())
}

/// A number, whose text is as Rust reads it: Python takes white space around it, and `_` between digits.
fn number_of(value: &Value) -> Result<Value, Error> {
    let undefined = || Error::new(ErrorKind::UndefinedError, "a number is undefined");
    match value.as_str() {
        None if value.is_undefined() => Err(undefined()),
        None => Ok(value.clone()),
        Some(text) => Ok(Value::from(text.trim().replace('_', ""))),
    }
}

/// The filter `truncate(value, length=255, killwords=False, end='...', leeway=5)`.
fn truncate(
    state: &mut State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let names = ["length", "killwords", "end", "leeway"];
    let given = names
        .into_iter()
        .zip(arguments(&args.into_values(), names)?);
    let given = given.filter_map(|(name, value)| Some((name, value?)));
    more_filters::truncate(state, value, Kwargs::from_iter(given))
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Left,
    Right,
    Both,
}

/// With this in front, behind or on both sides up to a width.
fn padded(text: &str, width: usize, fill: char, side: Side) -> Result<String, Error> {
    if width > MAX_TEXT / 4 {
        return Err(too_long());
    }
    let num_chars = text.chars().count();
    let missing = width.saturating_sub(num_chars);
    let left = match side {
        Side::Left => missing,
        Side::Right => 0,
        // As CPython rounds.
        Side::Both => missing / 2 + (missing & width & 1),
    };
    let fill = |count: usize| fill.to_string().repeat(count);
    Ok(fill(left) + text + &fill(missing - left))
}

/// White space of Python.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// What ends a line for `str.splitlines`.
fn is_line_end(c: char) -> bool {
    matches!(
        c,
        '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
    )
}

/// Methods of Python's values: of texts those that the engine's own collection lacks or has otherwise, else that.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), value.kind(), name) {
        (Some(text), _, "startswith" | "endswith") if args.len() > 1 => {
            let (what, start, end): (Value, Option<i64>, Option<i64>) = from_args(args)?;
            let Some((part, _)) = part(text, start, end) else {
                return Ok(Value::from(false));
            };
            pycompat::unknown_method_callback(state, &Value::from(part), name, &[what])
        }
        (Some(text), ..) => text_method(state, text, name, args)
            .unwrap_or_else(|| pycompat::unknown_method_callback(state, value, name, args)),
        (None, ValueKind::Seq, "index") => {
            let (item,): (&Value,) = from_args(args)?;
            let mut items = value.try_iter()?;
            let place = items.position(|other| other == *item);
            let place = place.ok_or_else(|| refused(format!("{item} is not in list")));
            place.map(Value::from)
        }
        (None, ValueKind::Seq | ValueKind::Map, "copy") => {
            let () = from_args(args)?;
            Ok(value.clone())
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// What a method of a text gives; `None` if it is not among these.
fn text_method(
    state: &State<'_, '_>,
    text: &str,
    name: &str,
    args: &[Value],
) -> Option<Result<Value, Error>> {
    // As many bytes are read for a step.
    if let Err(err) = state.consume_fuel(text.len() as u64 / 64) {
        return Some(Err(err));
    }
    let all = |is: fn(char) -> bool| -> Result<Value, Error> {
        let () = from_args(args)?;
        Ok(Value::from(!text.is_empty() && text.chars().all(is)))
    };
    Some(match name {
        "split" | "rsplit" => split(state, text, name == "rsplit", args),
        "splitlines" => splitlines(state, text, args),
        "partition" | "rpartition" => partition(text, name == "rpartition", args),
        "strip" | "lstrip" | "rstrip" => strip(text, name, args),
        "removeprefix" | "removesuffix" => from_args(args).map(|(part,): (&str,)| {
            let rest = if name == "removeprefix" {
                text.strip_prefix(part)
            } else {
                text.strip_suffix(part)
            };
            Value::from(rest.unwrap_or(text))
        }),
        "replace" => replace(state, text, args),
        "join" => from_args(args)
            .and_then(|(items,): (&Value,)| joined(state, text, items))
            .map(Value::from),
        "format" => formatted(FormatStyle::StrFormat, text, args).map(Value::from),
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, args),
        "zfill" => from_args(args).and_then(|(width,): (usize,)| {
            let sign = usize::from(text.starts_with(['-', '+']));
            let padded = padded(&text[sign..], width.saturating_sub(sign), '0', Side::Left)?;
            Ok(Value::from(text[..sign].to_string() + &padded))
        }),
        "ljust" | "rjust" | "center" => {
            from_args(args).and_then(|(width, fill): (usize, Option<char>)| {
                let side = match name {
                    "ljust" => Side::Right,
                    "rjust" => Side::Left,
                    _ => Side::Both,
                };
                padded(text, width, fill.unwrap_or(' '), side).map(Value::from)
            })
        }
        "title" => from_args(args).map(|()| Value::from(title(text))),
        "swapcase" => from_args(args).map(|()| {
            let swapped = text.chars().flat_map(|c| -> Vec<char> {
                if c.is_uppercase() {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect()
                }
            });
            Value::from(swapped.collect::<String>())
        }),
        "casefold" => from_args(args).map(|()| Value::from(text.to_lowercase().replace('ß', "ss"))),
        "expandtabs" => expand_tabs(text, args),
        "istitle" => from_args(args).map(|()| {
            let has_letter = text.chars().any(|c| c.is_uppercase());
            Value::from(has_letter && title(text) == text)
        }),
        "isspace" => all(is_space),
        "isdecimal" => all(|c| c.is_ascii_digit()),
        "isprintable" => from_args(args).map(|()| Value::from(text.chars().all(is_printable))),
        "isidentifier" => from_args(args).map(|()| {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            let is_begin = |c: char| is_part(c) && !c.is_numeric();
            Value::from(text.starts_with(is_begin) && text.chars().all(is_part))
        }),
        _ => return None,
    })
}

/// `split(sep=None, maxsplit=-1)`, from the end if `is_right`.
fn split(
    state: &State<'_, '_>,
    text: &str,
    is_right: bool,
    args: &[Value],
) -> Result<Value, Error> {
    let [separator, max] = arguments(args, ["sep", "maxsplit"])?;
    let max = max.map_or(Ok(-1), i64::try_from)?;
    let max = usize::try_from(max).unwrap_or(usize::MAX);
    let Some(separator) = separator else {
        return charged(state, split_at_spaces(text, max, is_right));
    };
    let Some(separator) = separator.as_str().filter(|separator| !separator.is_empty()) else {
        return Err(refused(
            "split expects a separator that is a text, and not empty",
        ));
    };
    let pieces = max.saturating_add(1);
    if is_right {
        let mut pieces: Vec<&str> = text.rsplitn(pieces, separator).collect();
        pieces.reverse();
        return charged(state, pieces.into_iter());
    }
    charged(state, text.splitn(pieces, separator))
}

/// The words of a text, of which the last or, from the right, the first holds what is left.
fn split_at_spaces(text: &str, max: usize, is_right: bool) -> std::vec::IntoIter<&str> {
    let (mut words, mut rest) = (Vec::new(), text);
    loop {
        rest = if is_right {
            rest.trim_end_matches(is_space)
        } else {
            rest.trim_start_matches(is_space)
        };
        let place = if is_right {
            rest.rfind(is_space)
        } else {
            rest.find(is_space)
        };
        match place.filter(|_| words.len() < max) {
            _ if rest.is_empty() => break,
            None => {
                words.push(rest);
                break;
            }
            Some(place) => {
                let space = rest[place..].chars().next().map_or(0, char::len_utf8);
                let (before, after) = (&rest[..place], &rest[place + space..]);
                words.push(if is_right { after } else { before });
                rest = if is_right { before } else { &rest[place..] };
            }
        }
    }
    if is_right {
        words.reverse();
    }
    words.into_iter()
}

/// These as a list, each of which counts as a step.
fn charged<'a>(
    state: &State<'_, '_>,
    pieces: impl Iterator<Item = &'a str>,
) -> Result<Value, Error> {
    let mut list = Vec::new();
    for piece in pieces {
        state.consume_fuel(1)?;
        list.push(Value::from(piece));
    }
    Ok(Value::from(list))
}

fn splitlines(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<Value, Error> {
    let [keep] = arguments(args, ["keepends"])?;
    let keep = keep.is_some_and(|keep| keep.is_true());
    let mut rest = text;
    let lines = std::iter::from_fn(|| {
        if rest.is_empty() {
            return None;
        }
        let line = rest.find(is_line_end).unwrap_or(rest.len());
        let end = &rest[line..];
        let end_len = if end.starts_with("\r\n") {
            2
        } else {
            end.chars().next().map_or(0, char::len_utf8)
        };
        let (whole, after) = rest.split_at(line + end_len);
        rest = after;
        Some(if keep { whole } else { &whole[..line] })
    });
    charged(state, lines)
}

fn partition(text: &str, is_right: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(refused("partition expects a separator that is not empty"));
    }
    let found = if is_right {
        text.rsplit_once(separator)
    } else {
        text.split_once(separator)
    };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if is_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

fn strip(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let is_stripped = |c: char| match chars {
        Some(chars) => chars.contains(c),
        None => is_space(c),
    };
    Ok(Value::from(match name {
        "lstrip" => text.trim_start_matches(is_stripped),
        "rstrip" => text.trim_end_matches(is_stripped),
        _ => text.trim_matches(is_stripped),
    }))
}

fn replace(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<Value, Error> {
    let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
    let count = usize::try_from(count.unwrap_or(-1)).unwrap_or(usize::MAX);
    let num_found = text.matches(old).count().min(count);
    state.consume_fuel(num_found as u64)?;
    let added = num_found.saturating_mul(new.len().saturating_sub(old.len()));
    if text.len().saturating_add(added) > MAX_TEXT {
        return Err(too_long());
    }
    Ok(Value::from(text.replacen(old, new, count)))
}

/// The part of a text that a slice is, with the characters before it; `None` if it begins after the text.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(&str, usize)> {
    let len = text.chars().count();
    let place = |index: i64| {
        let from_end = len.saturating_sub(usize::try_from(index.unsigned_abs()).unwrap_or(len));
        usize::try_from(index).unwrap_or(from_end)
    };
    let start = start.map_or(0, place);
    let end = end.map_or(len, place).min(len);
    if start > end {
        return None;
    }
    let byte = |index: usize| {
        let found = text.char_indices().nth(index);
        found.map_or(text.len(), |(place, _)| place)
    };
    Some((&text[byte(start)..byte(end)], start))
}

fn search(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let part = part(text, start, end);
    if name == "count" {
        return Ok(Value::from(
            part.map_or(0, |(part, _)| part.matches(what).count()),
        ));
    }
    let found = part.and_then(|(part, num_before)| {
        let place = if name.starts_with('r') {
            part.rfind(what)
        } else {
            part.find(what)
        };
        Some(num_before + part[..place?].chars().count())
    });
    match found {
        Some(place) => Ok(Value::from(place)),
        None if name.ends_with("find") => Ok(Value::from(-1)),
        None => Err(refused("substring not found")),
    }
}

/// `str.title`: letters after what is no letter are large, others small.
fn title(text: &str) -> String {
    let mut title = String::with_capacity(text.len());
    let mut follows_letter = false;
    for c in text.chars() {
        if follows_letter {
            title.extend(c.to_lowercase());
        } else {
            title.extend(c.to_uppercase());
        }
        follows_letter = c.is_lowercase() || c.is_uppercase();
    }
    title
}

fn expand_tabs(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (width,): (Option<usize>,) = from_args(args)?;
    let width = width.unwrap_or(8);
    let mut expanded = LimitedText::default();
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' if width > 0 => {
                let missing = width - column % width;
                expanded.push(&padded("", missing, ' ', Side::Left)?)?;
                column += missing;
            }
            '\t' => {}
            c => {
                expanded.push(c.encode_utf8(&mut [0; 4]))?;
                column = if matches!(c, '\n' | '\r') {
                    0
                } else {
                    column + 1
                };
            }
        }
    }
    Ok(Value::from(expanded.into_text()))
}
