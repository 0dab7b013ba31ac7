//! The public face of the crate is the text `public-api.txt`: what changes it is seen in a diff.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use quote::{ToTokens, quote};
use syn::punctuated::Punctuated;
use syn::{
    Attribute, Field, Fields, ImplItem, Item, ItemImpl, Token, TraitItem, Type, TypePath, UseTree,
    Visibility,
};

/// The crates that the facade has, and under which names.
const CRATES: [(&str, &str); 8] = [
    ("comm", "crates/comm"),
    ("data", "crates/data"),
    ("gguf", "crates/gguf"),
    ("ops", "crates/ops"),
    ("parallel", "crates/parallel"),
    ("models", "models"),
    ("run", "crates/run"),
    ("trainer", "crates/trainer"),
];

/// The source of a crate.
struct Source {
    dir: PathBuf,
    /// Methods and traits of its types, by their names.
    impls: BTreeMap<String, BTreeSet<String>>,
}

/// A module: its items, and its path from the crate's root.
#[derive(Clone)]
struct Module {
    path: Vec<String>,
    items: Vec<Item>,
}

/// Tokens with a space between two of them where people write one, more or less.
fn written(tokens: &impl ToTokens) -> String {
    let text = tokens.to_token_stream().to_string();
    let mut text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for (from, to) in [
        (" :: ", "::"),
        (":: ", "::"),
        (" <", "<"),
        ("< ", "<"),
        (" >", ">"),
        (" ,", ","),
        (" :", ":"),
        ("& ", "&"),
        (" (", "("),
        ("( ", "("),
        (" )", ")"),
        (" ;", ";"),
        ("[ ", "["),
        (" ]", "]"),
        ("# [", "#["),
        (",)", ")"),
    ] {
        text = text.replace(from, to);
    }
    text
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn is_of_tests(attributes: &[Attribute]) -> bool {
    let mut attributes = attributes.iter().map(written);
    attributes.any(|attribute| attribute.contains("cfg(test)"))
}

impl Source {
    fn new(dir: PathBuf) -> Self {
        let mut paths = vec![dir.clone()];
        let mut impls: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        while let Some(path) = paths.pop() {
            if path.is_dir() {
                let entries = fs::read_dir(&path).unwrap();
                paths.extend(entries.map(|entry| entry.unwrap().path()));
            } else if path.extension().is_some_and(|end| end == "rs") {
                for item in items_of(&path) {
                    if let Item::Impl(item) = &item
                        && let Type::Path(of) = &*item.self_ty
                        && let Some(name) = of.path.segments.last()
                    {
                        let all = impls.entry(name.ident.to_string()).or_default();
                        all.extend(of_impl(item));
                    } else if let Item::Macro(item) = item
                        && item.mac.path.is_ident("with_defaults_of_flags")
                    {
                        let list = Punctuated::<TypePath, Token![,]>::parse_terminated;
                        for of in item.mac.parse_body_with(list).unwrap() {
                            let name = of.path.segments.last().unwrap().ident.to_string();
                            let all = impls.entry(name).or_default();
                            all.insert("impl Default".to_string());
                        }
                    }
                }
            }
        }
        Self { dir, impls }
    }

    fn module(&self, path: &[String]) -> Option<Module> {
        let place = path
            .iter()
            .fold(self.dir.clone(), |dir, name| dir.join(name));
        let files = match path {
            [] => vec![place.join("lib.rs")],
            _ => vec![place.with_extension("rs"), place.join("mod.rs")],
        };
        let file = files.iter().find(|file| file.is_file())?;
        Some(Module {
            path: path.to_vec(),
            items: items_of(file),
        })
    }

    /// What a module gives to others, in lines that begin with `prefix`.
    fn tell_module(&self, module: &Module, prefix: &str, lines: &mut BTreeSet<String>) {
        for item in &module.items {
            match item {
                Item::Use(item) if is_public(&item.vis) => {
                    for (path, name) in leaves(&item.tree, &[]) {
                        let shown = format!("{prefix}::{name}");
                        match self.find(module, &path) {
                            Some((owner, item)) => self.tell(&owner, &item, &shown, lines),
                            // Of another crate.
                            None => drop(lines.insert(format!("{shown} = {}", path.join("::")))),
                        }
                    }
                }
                Item::Impl(_) | Item::Use(_) => {}
                item if is_public(visibility(item)) => {
                    let name = name_of(item).unwrap_or_default();
                    self.tell(module, item, &format!("{prefix}::{name}"), lines);
                }
                _ => {}
            }
        }
    }

    /// An item of the module `owner`, which is known as `shown`, in a line, with its methods and traits in others.
    fn tell(&self, owner: &Module, item: &Item, shown: &str, lines: &mut BTreeSet<String>) {
        let name = name_of(item).unwrap_or_default();
        if let Item::Mod(item) = item {
            let path = [&owner.path[..], &[name]].concat();
            let inner = match &item.content {
                Some((_, items)) => Some(Module {
                    path,
                    items: items.clone(),
                }),
                None => self.module(&path),
            };
            let inner = inner.unwrap_or_else(|| panic!("{shown} has no file"));
            return self.tell_module(&inner, shown, lines);
        }
        lines.insert(format!("{shown}: {}", in_words(item)));
        if matches!(item, Item::Struct(_) | Item::Enum(_)) {
            for of_type in self.impls.get(&name).into_iter().flatten() {
                lines.insert(format!("{shown} {of_type}"));
            }
        }
    }

    /// The item of this crate that a path means in a module, and the module that it is in.
    fn find(&self, module: &Module, path: &[String]) -> Option<(Module, Item)> {
        let (mut at, mut rest) = match path {
            [first, rest @ ..] if first == "crate" => (Vec::new(), rest),
            [first, rest @ ..] if first == "self" => (module.path.clone(), rest),
            [first, rest @ ..] if first == "super" => {
                (module.path[..module.path.len() - 1].to_vec(), rest)
            }
            _ => (module.path.clone(), path),
        };
        while let [next, _, ..] = rest {
            at.push(next.clone());
            rest = &rest[1..];
        }
        let owner = match at == module.path {
            true => module.clone(),
            false => self.module(&at)?,
        };
        let wanted = rest.first()?;
        if let Some(item) = (owner.items.iter()).find(|item| name_of(item).as_ref() == Some(wanted))
        {
            let item = item.clone();
            return Some((owner, item));
        }
        // What is there is from elsewhere.
        let uses = owner.items.iter().filter_map(|item| match item {
            Item::Use(item) => Some(leaves(&item.tree, &[])),
            _ => None,
        });
        let mut uses = uses.flatten();
        let is_same = |found: &[String]| owner.path == module.path && found == path;
        let (path, _) = uses.find(|(found, name)| name == wanted && !is_same(found))?;
        self.find(&owner, &path)
    }
}

fn items_of(file: &Path) -> Vec<Item> {
    let text = fs::read_to_string(file).unwrap();
    let parsed = syn::parse_file(&text);
    let parsed = parsed.unwrap_or_else(|err| panic!("{}: {err}", file.display()));
    parsed.items
}

/// Paths and names of a `use`.
fn leaves(tree: &UseTree, before: &[String]) -> Vec<(Vec<String>, String)> {
    let with = |name: &dyn ToString| [before, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &with(&path.ident)),
        UseTree::Name(name) => vec![(with(&name.ident), name.ident.to_string())],
        UseTree::Rename(name) => vec![(with(&name.ident), name.rename.to_string())],
        UseTree::Group(group) => {
            let trees = group.items.iter();
            trees.flat_map(|tree| leaves(tree, before)).collect()
        }
        _ => vec![(with(&"*"), "*".to_string())],
    }
}

fn visibility(item: &Item) -> &Visibility {
    match item {
        Item::Struct(item) => &item.vis,
        Item::Enum(item) => &item.vis,
        Item::Trait(item) => &item.vis,
        Item::Type(item) => &item.vis,
        Item::Const(item) => &item.vis,
        Item::Static(item) => &item.vis,
        Item::Fn(item) => &item.vis,
        Item::Mod(item) if !is_of_tests(&item.attrs) => &item.vis,
        _ => &Visibility::Inherited,
    }
}

fn name_of(item: &Item) -> Option<String> {
    Some(match item {
        Item::Struct(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        Item::Const(item) => item.ident.to_string(),
        Item::Static(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        Item::Mod(item) => item.ident.to_string(),
        _ => return None,
    })
}

/// What of an item's attributes a user sees: derived traits, and whether it may have more fields or variants later.
fn seen(attributes: &[Attribute]) -> String {
    let attributes = attributes.iter().map(written);
    let is_seen = |attribute: &String| {
        attribute.starts_with("#[derive") || attribute.starts_with("#[non_exhaustive")
    };
    attributes.filter(is_seen).map(|it| it + " ").collect()
}

/// An item as a user sees it.
fn in_words(item: &Item) -> String {
    match item {
        Item::Struct(item) => {
            let mut shown = item.clone();
            shown.attrs.clear();
            let is_seen = |field: &&Field| is_public(&field.vis);
            match &mut shown.fields {
                Fields::Named(fields) => {
                    fields.named = fields.named.iter().filter(is_seen).cloned().collect();
                }
                Fields::Unnamed(fields) => {
                    fields.unnamed = fields.unnamed.iter().filter(is_seen).cloned().collect();
                }
                Fields::Unit => {}
            }
            let num_private = item.fields.len() - shown.fields.len();
            shown
                .fields
                .iter_mut()
                .for_each(|field| field.attrs.clear());
            let private = if num_private > 0 {
                " and private fields"
            } else {
                ""
            };
            format!("{}{}{private}", seen(&item.attrs), written(&shown))
        }
        Item::Enum(item) => {
            let mut shown = item.clone();
            shown.attrs.clear();
            for variant in &mut shown.variants {
                variant.attrs.clear();
                variant.fields.iter_mut().for_each(|it| it.attrs.clear());
            }
            format!("{}{}", seen(&item.attrs), written(&shown))
        }
        Item::Trait(item) => {
            let (name, generics, bounds) = (&item.ident, &item.generics, &item.supertraits);
            let items = item.items.iter().map(|item| match item {
                TraitItem::Fn(item) if item.default.is_some() => {
                    format!("{} by default", written(&item.sig))
                }
                TraitItem::Fn(item) => written(&item.sig),
                TraitItem::Const(item) => {
                    let (name, of) = (&item.ident, &item.ty);
                    written(&quote!(const #name: #of))
                }
                TraitItem::Type(item) => format!("type {}", item.ident),
                _ => String::new(),
            });
            let items: Vec<String> = items.collect();
            let head = written(&quote!(pub trait #name #generics: #bounds));
            format!("{head} {{ {} }}", items.join("; "))
        }
        Item::Type(item) => {
            let (name, generics, of) = (&item.ident, &item.generics, &item.ty);
            written(&quote!(pub type #name #generics = #of))
        }
        Item::Const(item) => {
            let (name, of) = (&item.ident, &item.ty);
            written(&quote!(pub const #name: #of))
        }
        Item::Static(item) => {
            let (name, of) = (&item.ident, &item.ty);
            written(&quote!(pub static #name: #of))
        }
        Item::Fn(item) => format!("pub {}", written(&item.sig)),
        _ => String::new(),
    }
}

/// Public methods and constants, or the trait.
fn of_impl(item: &ItemImpl) -> Vec<String> {
    if let Some((of, _)) = &item.trait_ {
        return vec![format!("impl {}", written(of))];
    }
    let items = item.items.iter().filter_map(|item| match item {
        ImplItem::Fn(item) if is_public(&item.vis) => Some(format!("pub {}", written(&item.sig))),
        ImplItem::Const(item) if is_public(&item.vis) => {
            let (name, of) = (&item.ident, &item.ty);
            Some(written(&quote!(pub const #name: #of)))
        }
        _ => None,
    });
    items.collect()
}

#[test]
fn the_public_face_is_that_of_the_text() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut lines = BTreeSet::new();
    let mut tell = |dir: PathBuf, prefix: &str| {
        let source = Source::new(dir);
        let module = source.module(&[]).unwrap();
        source.tell_module(&module, prefix, &mut lines);
    };
    for (name, dir) in CRATES {
        let dir = root.join("../..").join(dir).join("src");
        tell(dir, &format!("candle_train::{name}"));
    }
    tell(root.join("src"), "candle_train");
    let face: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let path = root.join("public-api.txt");
    if std::env::var_os("CANDLE_TRAIN_WRITE_REFERENCE").is_some() {
        fs::write(&path, &face).unwrap();
    }
    let noted = fs::read_to_string(&path).unwrap_or_default();
    let noted: BTreeSet<&str> = noted.lines().collect();
    let now: BTreeSet<&str> = face.lines().collect();
    let gone: Vec<&&str> = noted.difference(&now).collect();
    let new: Vec<&&str> = now.difference(&noted).collect();
    assert!(
        gone.is_empty() && new.is_empty(),
        "the public face is not that of public-api.txt\ngone: {gone:#?}\nnew: {new:#?}\nhint: CANDLE_TRAIN_WRITE_REFERENCE=1 cargo test \
         --workspace --test face writes it"
    );
}
