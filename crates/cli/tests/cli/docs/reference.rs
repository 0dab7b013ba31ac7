//! `docs/reference.md` is made from the definition of the command line, and is what that says now.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use clap::{Arg, Command};

use super::pages::{read, root};

/// Set, the test writes the page instead of comparing it.
const WRITE: &str = "CANDLE_TRAIN_WRITE_REFERENCE";

const BEGINNING: &str = "# All commands and flags

What `candle-train --help` and `candle-train COMMAND --help` say, on one page, made from the same definitions. In the file of `--config` a
flag is written without its dashes: `lr = 1e-4`.

";

/// Heading of flags that have none.
const OWN: &str = "";

#[test]
fn the_reference_is_that_of_the_flags() {
    let page = reference();
    if std::env::var_os(WRITE).is_some() {
        fs::write(root().join("docs/reference.md"), &page).unwrap();
    }
    let written = read("docs/reference.md");
    let differ = written
        .lines()
        .zip(page.lines())
        .find(|(old, new)| old != new);
    assert!(
        written == page,
        "docs/reference.md is not what the flags say now, first in {differ:?}\nhint: {WRITE}=1 cargo test --workspace --test cli -- \
         reference writes it"
    );
}

fn reference() -> String {
    let mut command = candle_train_cli::command();
    command.build();
    let mut page = BEGINNING.to_string();
    let subcommands = command.get_subcommands();
    let mut subcommands: Vec<&Command> = subcommands
        .filter(|subcommand| !subcommand.is_hide_set() && subcommand.get_name() != "help")
        .collect();
    // Others take some of their flags.
    subcommands.sort_by_key(|subcommand| !matches!(subcommand.get_name(), "finetune" | "pretrain"));
    page += "| command | what it does |\n|---|---|\n";
    for subcommand in &subcommands {
        let name = subcommand.get_name();
        writeln!(page, "| [`{name}`](#{name}) | {} |", about(subcommand)).unwrap();
    }
    // What is said of flags, with the place where it is said first.
    let mut said = BTreeMap::new();
    for subcommand in subcommands {
        page += &about_subcommand(subcommand, &mut said);
    }
    page
}

/// The section of a subcommand. Of flags that an earlier one has, too, only the names are listed, with a link.
fn about_subcommand(command: &Command, said: &mut BTreeMap<String, Place>) -> String {
    let name = command.get_name();
    let mut text = format!("\n## {name}\n\n{}.\n", about(command));
    let aliases: Vec<String> = command.get_visible_aliases().map(code).collect();
    if !aliases.is_empty() {
        write!(text, "\nAlso called {}.\n", aliases.join(", ")).unwrap();
    }
    if let Some(example) = command.get_after_long_help() {
        write!(text, "\n```text\n{example}\n```\n").unwrap();
    }
    let groups = flags_by_heading(command);
    let place = |heading: &str| Place {
        command: name.to_string(),
        heading: heading.to_lowercase(),
    };
    let headings = groups.iter().map(|(heading, _)| *heading);
    let links = headings.filter(|heading| *heading != OWN).map(|heading| {
        let place = place(heading);
        place.link(&place.heading)
    });
    let links: Vec<String> = links.collect();
    if !links.is_empty() {
        write!(text, "\nGroups of flags: {}.\n", links.join(", ")).unwrap();
    }
    for (heading, flags) in groups {
        let place = place(heading);
        if heading != OWN {
            write!(text, "\n### {name}: {}\n", place.heading).unwrap();
        }
        let mut as_elsewhere: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for arg in flags {
            let about_flag = described(arg);
            match said
                .get(&about_flag)
                .filter(|first| heading != OWN && first.heading == place.heading)
            {
                Some(first) => {
                    let link = first.link(&first.command);
                    as_elsewhere
                        .entry(link)
                        .or_default()
                        .push(code(&name_of(arg)));
                }
                None => {
                    text += &about_flag;
                    said.entry(about_flag).or_insert_with(|| place.clone());
                }
            }
        }
        for (link, names) in as_elsewhere {
            write!(text, "\nAs for {link}: {}.\n", names.join(", ")).unwrap();
        }
    }
    text
}

/// Where on the page something is said.
#[derive(Clone)]
struct Place {
    command: String,
    heading: String,
}

impl Place {
    fn link(&self, text: &str) -> String {
        let heading = self.heading.replace(' ', "-");
        format!("[{text}](#{}-{heading})", self.command)
    }
}

/// The flags of each group, those without a heading first, the others in the order in which they begin.
fn flags_by_heading(command: &Command) -> Vec<(&str, Vec<&Arg>)> {
    let mut groups: Vec<(&str, Vec<&Arg>)> = vec![(OWN, Vec::new())];
    for arg in command.get_arguments() {
        if arg.is_hide_set() || matches!(arg.get_id().as_str(), "help" | "version") {
            continue;
        }
        let heading = arg.get_help_heading().unwrap_or(OWN);
        let known = groups.iter().position(|(other, _)| *other == heading);
        let index = known.unwrap_or_else(|| {
            groups.push((heading, Vec::new()));
            groups.len() - 1
        });
        groups[index].1.push(arg);
    }
    groups.retain(|(_, flags)| !flags.is_empty());
    groups
}

fn about(command: &Command) -> String {
    in_markdown(&command.get_about().unwrap_or_default().to_string())
}

/// A paragraph about a flag, and a list of its values if they are names.
fn described(arg: &Arg) -> String {
    let help = arg.get_help().unwrap_or_default().to_string();
    let (help, default) = match help.rsplit_once(" [default: ") {
        Some((help, default)) => (help, default.strip_suffix(']').map(in_markdown)),
        None => (help.as_str(), None),
    };
    let details = arg.get_long_help().unwrap_or_default().to_string();
    // It begins with the short help.
    let details = details.split("\n\n").skip(1).map(in_markdown);
    let takes_values = arg.get_action().takes_values();
    let given = arg.get_default_values().iter();
    let given: Vec<String> = given.map(|value| code(&value.to_string_lossy())).collect();
    let given = (takes_values && !given.is_empty()).then(|| given.join(" "));
    let others = arg.get_visible_aliases().unwrap_or_default();
    let others = others.iter().map(|alias| code(&format!("--{alias}")));
    let others: Vec<String> = others.collect();
    let mut sentences = vec![format!("{}: {}", code(&name_of(arg)), in_markdown(help))];
    sentences.extend(details);
    if arg.is_required_set() {
        sentences.push("*Required.*".to_string());
    }
    let default = default.or(given);
    sentences.extend(default.map(|default| format!("*Default:* {default}")));
    if !others.is_empty() {
        sentences.push(format!("*Also:* {}", others.join(", ")));
    }
    let sentences = sentences
        .iter()
        .map(|sentence| match sentence.ends_with(['.', '*']) {
            true => sentence.clone(),
            false => format!("{sentence}."),
        });
    let sentences: Vec<String> = sentences.collect();
    format!("\n{}\n{}", sentences.join(" "), values_of(arg))
}

/// A list of the values of a flag that takes names.
fn values_of(arg: &Arg) -> String {
    let values = arg.get_possible_values();
    let is_named = arg.get_action().takes_values() && !values.is_empty();
    let values = values
        .iter()
        .filter(|value| is_named && !value.is_hide_set());
    let lines = values.map(|value| {
        let help = value.get_help().map(|help| in_markdown(&help.to_string()));
        let help = help.map_or(String::new(), |help| format!(": {help}"));
        format!("- {}{help}\n", code(value.get_name()))
    });
    let lines: String = lines.collect();
    match lines.is_empty() {
        true => lines,
        false => format!("\n{lines}"),
    }
}

/// The flag with its value, as `--help` spells it.
fn name_of(arg: &Arg) -> String {
    let text = arg.to_string();
    match arg.get_short() {
        Some(short) => format!("-{short}, {text}"),
        None => text,
    }
}

fn code(text: &str) -> String {
    format!("`{text}`")
}

/// With what Markdown would take for markup escaped, but for code.
fn in_markdown(help: &str) -> String {
    let mut parts: Vec<String> = help.split('`').map(String::from).collect();
    for text in parts.iter_mut().step_by(2) {
        *text = text
            .replace('*', "\\*")
            .replace('<', "\\<")
            .replace('|', "\\|");
    }
    parts.join("`")
}
