//! The table that launch functions are made from names the arguments that the kernels' sources have.

#[path = "../../src/cuda/kernel_table.rs"]
mod kernel_table;

use std::collections::BTreeMap;
use std::path::Path;

/// Arguments of each kernel as C declares them, by file and name.
type Signatures = BTreeMap<(String, String), Vec<String>>;

struct Entry {
    file: &'static str,
    name: &'static str,
    generic: bool,
    arguments: &'static [(&'static str, &'static str)],
}

macro_rules! entries {
    ($($file:literal { $($name:ident $([$t:ident])? ($($argument:ident: $type:ty),* $(,)?);)* })*) => {
        &[$($(Entry {
            file: $file,
            name: stringify!($name),
            generic: !<[&str]>::is_empty(&[$(stringify!($t))?]),
            arguments: &[$((stringify!($type), stringify!($argument))),*],
        }),*),*]
    };
}

const ENTRIES: &[Entry] = kernel_table::for_each_kernel!(entries);

fn scalar(rust: &str, t: &str) -> String {
    match rust {
        "T" => t,
        "f32" => "float",
        "f64" => "double",
        "i16" => "short",
        "i32" => "int",
        other => other,
    }
    .to_string()
}

/// `const float* x` for `x: In<f32>`.
fn c_argument(rust: &str, name: &str, t: &str) -> String {
    let rust = rust.replace(' ', "");
    let Some((pointer, pointee)) = rust.strip_suffix('>').and_then(|r| r.split_once('<')) else {
        return format!("{} {name}", scalar(&rust, t));
    };
    let constant = match pointer {
        "In" | "OptIn" => "const ",
        "Out" | "OptOut" => "",
        other => panic!("{other} is not a kind of pointer"),
    };
    format!("{constant}{}* {name}", scalar(pointee, t))
}

/// The end of a kernel's name, and the type `T` in it, for each type.
const TYPES: &[(&str, &str)] = &[("_f32", "float"), ("_bf16", "bf16"), ("_f16", "f16")];

fn declared() -> Signatures {
    let mut all = Signatures::new();
    for entry in ENTRIES {
        let instances = if entry.generic { TYPES } else { &[("", "")] };
        for (suffix, t) in instances {
            let key = (entry.file.to_string(), format!("{}{suffix}", entry.name));
            let arguments = entry.arguments.iter();
            let arguments = arguments.map(|(rust, name)| c_argument(rust, name, t));
            assert!(
                all.insert(key, arguments.collect()).is_none(),
                "{} twice",
                entry.name
            );
        }
    }
    all
}

fn in_sources() -> Signatures {
    let mut all = Signatures::new();
    // The test may have been carried to another machine: then from the root of the repository.
    let compiled = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let folder = match compiled.is_dir() {
        true => compiled,
        false => Path::new("crates/ops/kernels").to_path_buf(),
    };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        let file = path.file_stem().unwrap().to_str().unwrap();
        let source = std::fs::read_to_string(&path).unwrap();
        let kernels = source.split("extern \"C\" __global__ void ").skip(1);
        assert_eq!(
            source.matches("__global__").count(),
            kernels.clone().count(),
            "{file}: a kernel is not declared as the others are"
        );
        let by_macro = kernels
            .clone()
            .filter(|kernel| kernel.contains("##SUFFIX("));
        assert_eq!(
            source.matches("FOR_EACH_TYPE(KERNEL)").count(),
            by_macro.count(),
            "{file}: a macro that declares a kernel is not used, or used twice"
        );
        for kernel in kernels {
            let (name, rest) = kernel.split_once('(').unwrap();
            let (arguments, _) = rest.split_once(')').unwrap();
            // Of a macro that declares it for each type.
            let (name, instances) = match name.strip_suffix("##SUFFIX") {
                Some(name) => (name, TYPES),
                None => (name, &[("", "")][..]),
            };
            for (suffix, t) in instances {
                let words = |argument: &str| {
                    let words = argument.split_whitespace().filter(|word| *word != "\\");
                    let words = words.map(|word| {
                        if word == "T*" {
                            format!("{t}*")
                        } else {
                            word.to_string()
                        }
                    });
                    words.collect::<Vec<_>>().join(" ")
                };
                let arguments = arguments.split(',').map(words).collect();
                all.insert((file.to_string(), format!("{name}{suffix}")), arguments);
            }
        }
    }
    all
}

#[test]
fn launch_functions_pass_what_kernels_take() {
    let (declared, in_sources) = (declared(), in_sources());
    assert!(!in_sources.is_empty());
    for (kernel, arguments) in &in_sources {
        assert_eq!(declared.get(kernel), Some(arguments), "{kernel:?}");
    }
    for kernel in declared.keys() {
        assert!(
            in_sources.contains_key(kernel),
            "{kernel:?} is not in the sources"
        );
    }
}
