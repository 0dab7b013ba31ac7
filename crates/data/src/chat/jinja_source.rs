//! A template's source in the words of the engine that renders it, where Jinja2 has others, and without what is nested too deep.
//!
//! | Jinja2 | here |
//! |---|---|
//! | `a ~ b`, which joins what Python prints | `_concat((a),(b))` |
//! | `a % b`, which also fills in a text | `(a)\|_mod((b))` |
//! | `{% set x = a %}` | `{% set x = (a)\|_kept %}`, whose depth and size have limits |
//! | `{% macro f(a, b=a) %}` | the default of `b` is set inside the macro |
//! | `'\U0001F600'`, `'\v'` | the character |
//! | `{% generation %} .. {% endgeneration %}` | `{% with %} .. {% endwith %}`, and in a second text marks between two of each |
//! | the line break after `{% raw %}`, which stays | `{% raw +%}` |

use std::ops::Range;

use super::generation_marks::{BEGIN, END};

/// Brackets in brackets of one tag.
const MAX_BRACKETS: usize = 50;

/// Operators, brackets and names after dots that stand in or after one another in one expression: the engine goes one call deeper for each.
const MAX_OPERATORS: usize = 1_000;

/// `{% elif %}` tags: the engine goes one call deeper for each.
const MAX_ELIFS: usize = 1_000;

/// Parameters of a macro.
const MAX_PARAMS: usize = 200;

/// Names of what is put in place of operators, and of a variable that no template sets.
pub(super) const CONCAT: &str = "_concat";
pub(super) const MOD: &str = "_mod";
pub(super) const KEPT: &str = "_kept";
const UNSET: &str = "_unset";

/// Words that are no operands.
const KEYWORDS: [&str; 7] = ["and", "or", "not", "in", "is", "if", "else"];

/// Tags whose content can call itself.
const RECURSIVE: [&str; 6] = ["macro", "block", "include", "import", "from", "extends"];

/// A template that the engine can read.
pub(super) struct JinjaSource {
    /// Its text; a line is the line that it was.
    pub text: String,
    /// The text with marks around what the assistant writes, if it has tags that say it.
    pub marked: Option<String>,
    /// Whether it may call itself, for which more stack is needed.
    pub recurses: bool,
}

impl JinjaSource {
    /// Of a template of Jinja2.
    ///
    /// # Errors
    /// What is nested too deep, and in which line.
    pub fn new(source: &str) -> Result<Self, String> {
        let mut text = String::with_capacity(source.len() * 2);
        let (mut marked, mut is_marked, mut recurses) = (text.clone(), false, false);
        let mut place = 0;
        let mut num_elifs = 0;
        while let Some(start) = next_tag(source, place) {
            let before = &source[place..start];
            let in_line = |what: String| {
                let line = source[..start].matches('\n').count() + 1;
                format!("{what} (line {line} of the template)")
            };
            let (plain, with_mark, end) = match Tag::read(source, start).map_err(in_line)? {
                Tag::Verbatim(end) => (source[start..end].to_string(), None, end),
                Tag::Raw { begin, end } => {
                    (raw(&source[start..begin], &source[begin..end]), None, end)
                }
                Tag::Code(code) => {
                    let first = code.word(0);
                    recurses |= RECURSIVE.contains(&first)
                        || (first == "for"
                            && code.word(code.tokens.len().wrapping_sub(1)) == "recursive");
                    num_elifs += usize::from(first == "elif");
                    if num_elifs > MAX_ELIFS {
                        return Err(in_line(format!("it has more than {MAX_ELIFS} elif tags")));
                    }
                    match code.generation() {
                        Some([plain, with_mark]) => (plain, Some(with_mark), code.end),
                        None => (code.rewritten().map_err(in_line)?, None, code.end),
                    }
                }
            };
            is_marked |= with_mark.is_some();
            text.extend([before, &plain]);
            marked.extend([before, with_mark.as_ref().unwrap_or(&plain)]);
            place = end;
        }
        text += &source[place..];
        marked += &source[place..];
        Ok(Self {
            text,
            marked: is_marked.then_some(marked),
            recurses,
        })
    }
}

/// What is raw, whose line break after the begin tag the engine would take.
fn raw(begin: &str, rest: &str) -> String {
    match begin.strip_suffix("%}") {
        Some(tag) if !tag.ends_with(['-', '+']) => format!("{tag}+%}}{rest}"),
        _ => format!("{begin}{rest}"),
    }
}

/// Where the next tag or comment begins.
fn next_tag(source: &str, from: usize) -> Option<usize> {
    let bytes = &source.as_bytes()[from..];
    let is_tag = |pair: &[u8]| matches!(pair, b"{{" | b"{%" | b"{#");
    bytes.windows(2).position(is_tag).map(|place| from + place)
}

enum Tag<'a> {
    /// A comment, or what has no end, up to here.
    Verbatim(usize),
    /// The tag `raw` and all behind it up to the end of the tag `endraw`.
    Raw {
        /// Where the begin tag ends.
        begin: usize,
        end: usize,
    },
    Code(Code<'a>),
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Word,
    Number,
    Text,
    Open,
    Close,
    Operator,
}

struct Token {
    kind: Kind,
    range: Range<usize>,
    /// Brackets around it.
    depth: usize,
}

/// The tokens of a tag.
struct Code<'a> {
    source: &'a str,
    /// Where the tag begins and ends, and where the marker of its end does.
    start: usize,
    end: usize,
    end_marker: usize,
    tokens: Vec<Token>,
}

impl<'a> Tag<'a> {
    fn read(source: &'a str, start: usize) -> Result<Self, String> {
        let verbatim = |end: Option<usize>| Ok(Self::Verbatim(end.unwrap_or(source.len())));
        let after = |place: usize, marker: &str| {
            let found = source[place..].find(marker);
            found.map(|found| place + found + marker.len())
        };
        let (is_block, close) = match &source[start..start + 2] {
            "{#" => return verbatim(after(start + 2, "#}")),
            "{%" => (true, "%}"),
            _ => (false, "}}"),
        };
        let mut code = Code {
            source,
            start,
            end: source.len(),
            end_marker: source.len(),
            tokens: Vec::new(),
        };
        let mut place = start + 2;
        place += usize::from(source[place..].starts_with(['-', '+']));
        let mut depth = 0_usize;
        loop {
            let rest = &source[place..];
            let Some(c) = rest.chars().next() else {
                // The engine says what is missing.
                return verbatim(None);
            };
            let marker = usize::from(rest.starts_with(['-', '+']));
            if depth == 0 && rest[marker..].starts_with(close) {
                (code.end_marker, code.end) = (place, place + marker + close.len());
                break;
            }
            if c.is_whitespace() {
                place += c.len_utf8();
                continue;
            }
            let (kind, len) = token(rest);
            depth = depth.saturating_sub(usize::from(kind == Kind::Close));
            code.tokens.push(Token {
                kind,
                range: place..place + len,
                depth,
            });
            depth += usize::from(kind == Kind::Open);
            if depth > MAX_BRACKETS {
                return Err(format!("its brackets are more than {MAX_BRACKETS} deep"));
            }
            place += len;
        }
        if is_block && code.tokens.len() == 1 && code.word(0) == "raw" {
            let mut place = code.end;
            while let Some(found) = after(place, "{%") {
                let tag = source[found..].trim_start_matches(['-', '+']).trim_start();
                place = found;
                if let Some(rest) = tag.strip_prefix("endraw") {
                    let end = after(source.len() - rest.len(), "%}").unwrap_or(source.len());
                    let begin = code.end;
                    return Ok(Self::Raw { begin, end });
                }
            }
            return verbatim(None);
        }
        Ok(Self::Code(code))
    }
}

/// What a text begins with, and in how many bytes.
fn token(rest: &str) -> (Kind, usize) {
    let c = rest.chars().next().unwrap_or_default();
    let word = |text: &str| {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        end.unwrap_or(text.len())
    };
    match c {
        '\'' | '"' => (Kind::Text, text_len(rest, c)),
        '(' | '[' | '{' => (Kind::Open, 1),
        ')' | ']' | '}' => (Kind::Close, 1),
        c if c.is_ascii_digit() => (Kind::Number, number_len(rest)),
        c if c.is_alphabetic() || c == '_' => (Kind::Word, word(rest)),
        _ => {
            let is_long = ["==", "!=", "<=", ">=", "**", "//"].iter();
            let is_long = is_long.into_iter().any(|long| rest.starts_with(long));
            (Kind::Operator, if is_long { 2 } else { c.len_utf8() })
        }
    }
}

/// Bytes of a text in quotes.
fn text_len(rest: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (place, c) in rest.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return place + 1,
            _ => {}
        }
    }
    rest.len()
}

fn number_len(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut len = 0;
    while let Some(byte) = bytes.get(len) {
        let is_digit = |place: usize| bytes.get(place).is_some_and(u8::is_ascii_digit);
        let is_exponent = |byte: u8| byte.eq_ignore_ascii_case(&b'e') && !rest.starts_with("0x");
        let is_part = byte.is_ascii_alphanumeric()
            || *byte == b'_'
            || (*byte == b'.' && is_digit(len + 1))
            || (matches!(byte, b'+' | b'-') && len > 0 && is_exponent(bytes[len - 1]));
        if !is_part {
            break;
        }
        len += 1;
    }
    len
}

/// A change of the source.
struct Edit {
    /// What it takes the place of; empty where it only adds.
    range: Range<usize>,
    order: Order,
    text: String,
}

/// The order of changes at one place: what ends comes before what begins, the innermost first there and last here.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    EndOfMod,
    EndOfConcat,
    EndOfSet,
    Set,
    Concat,
    Mod,
    Replacement,
}

/// An expression that is being read, or a part of it between commas.
#[derive(Default)]
struct Level {
    /// Where what `~` joins begins, and where the product in it does.
    concat: usize,
    product: usize,
    is_concat: bool,
    is_mod: bool,
    num_operators: usize,
}

impl Code<'_> {
    /// The text of a token, if there is such a one.
    fn word(&self, index: usize) -> &str {
        let token = self.tokens.get(index);
        token.map_or("", |token| &self.source[token.range.clone()])
    }

    /// What stands in place of a tag `generation` or `endgeneration`: without a mark and with one. Its own dashes stay at the outer ends.
    fn generation(&self) -> Option<[String; 2]> {
        let (word, mark) = match self.word(0) {
            "generation" => ("with", BEGIN),
            "endgeneration" => ("endwith", END),
            _ => return None,
        };
        if self.tokens.len() != 1 || !self.source[self.start..].starts_with("{%") {
            return None;
        }
        let begin = self.source[self.start..].find(self.word(0))?;
        let begin = self.source[self.start..self.start + begin].trim_end();
        let end = &self.source[self.end_marker..self.end];
        Some([
            format!("{begin} {word} {end}"),
            format!("{begin} {word} %}}{mark}{{% {word} {end}"),
        ])
    }

    fn rewritten(&self) -> Result<String, String> {
        let mut edits = Vec::new();
        self.operators(&mut edits)?;
        self.set(&mut edits);
        for token in &self.tokens {
            let text = &self.source[token.range.clone()];
            if token.kind == Kind::Text
                && let Some(text) = unescaped(text)
            {
                edits.push(replacement(token.range.clone(), text));
            }
        }
        let defaults = self.defaults(&mut edits)?;
        let head = self.applied(&edits, self.start..self.end_marker);
        let end = &self.source[self.end_marker..self.end];
        if defaults.is_empty() {
            return Ok(head + end);
        }
        let set = |(name, default): &(&str, String)| {
            format!("{{% if {name} is undefined %}}{{% set {name} = {default} %}}{{% endif ")
        };
        let sets: Vec<String> = defaults.iter().map(set).collect();
        Ok(format!("{head}%}}{}{end}", sets.join("%}")))
    }

    /// The changed text of a part.
    fn applied(&self, edits: &[Edit], range: Range<usize>) -> String {
        let is_in = |edit: &&Edit| range.start <= edit.range.start && edit.range.end <= range.end;
        let mut edits: Vec<&Edit> = edits.iter().filter(is_in).collect();
        edits.sort_by_key(|edit| (edit.range.start, edit.order));
        let (mut text, mut place) = (String::new(), range.start);
        for edit in edits {
            text += self.source.get(place..edit.range.start).unwrap_or_default();
            text += &edit.text;
            place = edit.range.end;
        }
        text + &self.source[place..range.end]
    }

    /// Whether a token is a word of the language, not the name of an attribute, a filter or a test.
    fn is_keyword(&self, index: usize) -> bool {
        let before = index.checked_sub(1).map_or("", |before| self.word(before));
        let is_name = ["|", ".", "is"].contains(&before)
            || (before == "not" && index > 1 && self.word(index - 2) == "is");
        let is_negated_test = before == "is" && self.word(index) == "not";
        KEYWORDS.contains(&self.word(index)) && (!is_name || is_negated_test)
    }

    /// Puts functions and filters in place of `~` and `%`.
    fn operators(&self, edits: &mut Vec<Edit>) -> Result<(), String> {
        let from = |place: usize| Level {
            concat: place,
            product: place,
            ..Level::default()
        };
        let begin_of = |index: usize| {
            let token = self.tokens.get(index);
            token.map_or(self.end_marker, |token| token.range.start)
        };
        let mut levels = vec![from(begin_of(0))];
        let mut end = begin_of(0);
        let is_statement = self.source[self.start..].starts_with("{%");
        for (index, Token { kind, range, .. }) in self.tokens.iter().enumerate() {
            let word = self.word(index);
            let before = index.checked_sub(1).map(|before| &self.tokens[before]);
            let follows_operand = before.is_some_and(|token| match token.kind {
                Kind::Word => !(self.is_keyword(index - 1) || is_statement && index == 1),
                Kind::Operator | Kind::Open => false,
                _ => true,
            });
            let Some(level) = levels.last_mut() else {
                return Ok(());
            };
            let is_keyword = *kind == Kind::Word && self.is_keyword(index);
            if is_keyword || [Kind::Operator, Kind::Open].contains(kind) {
                level.num_operators += 1;
            }
            let is_sign = *kind == Kind::Operator && ["+", "-"].contains(&word);
            let begins_operand = ![Kind::Close, Kind::Operator].contains(kind) || is_sign;
            if !begins_operand {
                self.check_operand(index)?;
            }
            match (kind, word) {
                (Kind::Open, _) => levels.push(from(begin_of(index + 1))),
                (Kind::Close, _) => {
                    level.finish(end, edits);
                    // What the engine is left to complain about.
                    if levels.len() > 1 {
                        levels.pop();
                    }
                }
                (Kind::Operator, "~" | "%") if !follows_operand => {}
                (Kind::Operator, "~") => {
                    level.concat(range, end, edits);
                    level.product = begin_of(index + 1);
                }
                (Kind::Operator, "%") => level.modulo(range, end, edits),
                (Kind::Operator, "*" | "/" | "//") => {
                    level.end_mod(end, edits);
                }
                (Kind::Operator, "." | "|" | "**") => {}
                // The engine has no such sign.
                (Kind::Operator, "+") if !follows_operand => {
                    edits.push(replacement(range.clone(), " ".to_string()));
                }
                (Kind::Operator, "-") if !follows_operand => {}
                (Kind::Operator, _) => {
                    level.finish(end, edits);
                    let num_operators = if [",", ":", "="].contains(&word) {
                        0
                    } else {
                        level.num_operators
                    };
                    *level = Level {
                        num_operators,
                        ..from(begin_of(index + 1))
                    };
                }
                // A test is a part of the operand.
                (Kind::Word, "is") if is_keyword => {}
                (Kind::Word, "not") if is_keyword && self.word(index.wrapping_sub(1)) == "is" => {}
                (Kind::Word, _) if is_keyword || (is_statement && index == 0) => {
                    level.finish(end, edits);
                    *level = Level {
                        num_operators: level.num_operators,
                        ..from(begin_of(index + 1))
                    };
                }
                _ => {}
            }
            let num_operators: usize = levels.iter().map(|level| level.num_operators).sum();
            if num_operators > MAX_OPERATORS {
                return Err(format!(
                    "an expression in it has more than {MAX_OPERATORS} operators"
                ));
            }
            end = range.end;
        }
        self.check_operand(self.tokens.len())?;
        if let Some(level) = levels.last_mut() {
            level.finish(end, edits);
        }
        Ok(())
    }

    /// Checks that what comes before a token is not `~` or `%`: in brackets nothing would be an empty list.
    fn check_operand(&self, index: usize) -> Result<(), String> {
        let Some(before) = index.checked_sub(1) else {
            return Ok(());
        };
        let word = self.word(before);
        if self.tokens[before].kind == Kind::Operator && ["~", "%"].contains(&word) {
            return Err(format!("what comes after {word} is missing"));
        }
        Ok(())
    }

    /// Gives what is set limits.
    fn set(&self, edits: &mut Vec<Edit>) {
        let Some(last) = self.tokens.last().filter(|_| self.word(0) == "set") else {
            return;
        };
        let outer = |word: &str| {
            let mut tokens = self.tokens.iter().enumerate();
            let found = tokens.find(|(index, token)| token.depth == 0 && self.word(*index) == word);
            found.map(|(index, _)| index)
        };
        let assignment = outer("=");
        let end = assignment.or(outer("|")).unwrap_or(self.tokens.len());
        let is_of_namespace = (0..end).any(|index| self.word(index) == ".");
        let kept = format!("|{KEPT}({is_of_namespace})");
        match assignment {
            // The engine says that there is nothing to set.
            Some(index) if index + 1 == self.tokens.len() => {}
            Some(index) => {
                edits.push(added(self.tokens[index].range.end, Order::Set, "("));
                let end = format!("){kept}");
                edits.push(added(last.range.end, Order::EndOfSet, &end));
            }
            None if end < self.tokens.len() => {
                edits.push(added(last.range.end, Order::EndOfSet, &kept));
            }
            None => {}
        }
    }

    /// The parameters of a macro whose defaults name earlier ones, which the engine does not know yet there, with these defaults; `edits` leave them unset.
    fn defaults(&self, edits: &mut Vec<Edit>) -> Result<Vec<(&str, String)>, String> {
        let mut defaults = Vec::new();
        if self.word(0) != "macro" {
            return Ok(defaults);
        }
        let mut names: Vec<&str> = Vec::new();
        let params: Vec<usize> = (3..self.tokens.len()).collect();
        let outer_commas = params.split(|&index| {
            let token = &self.tokens[index];
            (token.depth == 1 && self.word(index) == ",") || token.depth == 0
        });
        for param in outer_commas {
            let [name, rest @ ..] = param else {
                continue;
            };
            let is_earlier =
                |index: &usize| names.contains(&self.word(*index)) && self.word(index - 1) != ".";
            if let [_, first, .., last] | [_, first @ last] = rest
                && rest[1..].iter().any(is_earlier)
            {
                let range = self.tokens[*first].range.start..self.tokens[*last].range.end;
                defaults.push((self.word(*name), self.applied(edits, range.clone())));
                edits.retain(|edit| edit.range.end < range.start || edit.range.start > range.end);
                edits.push(replacement(range, UNSET.to_string()));
            }
            names.push(self.word(*name));
            if names.len() > MAX_PARAMS {
                return Err(format!(
                    "a macro in it has more than {MAX_PARAMS} parameters"
                ));
            }
        }
        Ok(defaults)
    }
}

impl Level {
    fn concat(&mut self, operator: &Range<usize>, end: usize, edits: &mut Vec<Edit>) {
        self.end_mod(end, edits);
        if !self.is_concat {
            let begin = format!("{CONCAT}((");
            edits.push(added(self.concat, Order::Concat, &begin));
        }
        edits.push(replacement(operator.clone(), "),(".to_string()));
        self.is_concat = true;
    }

    fn modulo(&mut self, operator: &Range<usize>, end: usize, edits: &mut Vec<Edit>) {
        self.end_mod(end, edits);
        edits.push(added(self.product, Order::Mod, "("));
        edits.push(replacement(operator.clone(), format!(")|{MOD}((")));
        self.is_mod = true;
    }

    fn end_mod(&mut self, end: usize, edits: &mut Vec<Edit>) {
        if std::mem::take(&mut self.is_mod) {
            edits.push(added(end, Order::EndOfMod, "))"));
        }
    }

    /// Ends what is open at `end`.
    fn finish(&mut self, end: usize, edits: &mut Vec<Edit>) {
        self.end_mod(end, edits);
        if std::mem::take(&mut self.is_concat) {
            edits.push(added(end, Order::EndOfConcat, "))"));
        }
    }
}

fn added(place: usize, order: Order, text: &str) -> Edit {
    Edit {
        range: place..place,
        order,
        text: text.to_string(),
    }
}

fn replacement(range: Range<usize>, text: String) -> Edit {
    Edit {
        range,
        order: Order::Replacement,
        text,
    }
}

/// A text in quotes without the escapes that the engine reads otherwise than Python, if it has such.
fn unescaped(quoted: &str) -> Option<String> {
    let (mut text, mut rest) = (String::new(), quoted);
    while let Some(place) = rest.find('\\') {
        text += &rest[..place];
        rest = &rest[place..];
        let escape = rest[1..].chars().next().unwrap_or_default();
        let code = rest.get(2..10).filter(|_| escape == 'U');
        let c = code.and_then(|code| char::from_u32(u32::from_str_radix(code, 16).ok()?));
        let (replaced, len) = match (escape, c) {
            ('U', Some(c @ ('\'' | '"' | '\\'))) => (format!("\\{c}"), 10),
            ('U', Some(c)) => (c.to_string(), 10),
            ('a', _) => ("\\x07".to_string(), 2),
            ('v', _) => ("\\x0b".to_string(), 2),
            ('/', _) => ("\\\\/".to_string(), 2),
            ('\n', _) => (String::new(), 2),
            _ => {
                let len = rest.len().min(1 + escape.len_utf8());
                (rest[..len].to_string(), len)
            }
        };
        text += &replaced;
        rest = &rest[len..];
    }
    text += rest;
    (text != quoted).then_some(text)
}
