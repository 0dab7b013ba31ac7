#!/bin/bash
# Trains candle-transformers' Qwen2 as it is, in two replicas with ZeRO: examples/candle_transformers_qwen2.
# candle-nn's fast RMS norm, layer norm, softmax and rotary embedding have no backward pass, and candle-transformers calls them. This copies
# the candle-nn that cargo has fetched into a folder outside of the repository, where four lines call candle-nn's slow ones instead, and
# builds the example there. The first build takes some minutes.
# usage: scripts/candle-transformers-qwen2.sh [--folder FOLDER] [ARGUMENT...]      --check compares all ZeRO stages with one rank;
#   --help names the arguments of the example. Default FOLDER: candle-train/qwen2 in the user's cache
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd -P)
version=0.11.1

folder=${XDG_CACHE_HOME:-$HOME/.cache}/candle-train/qwen2
if [ "${1:-}" = --folder ]; then
    if [ -z "${2:-}" ]; then
        echo "--folder names no folder; expected one outside of the repository" >&2
        exit 1
    fi
    folder=$2
    shift 2
fi
folder=$(realpath -m -- "$folder")
case $folder/ in
    "$root"/*)
        printf '%s\n' "$folder is in the repository, where nothing of candle's is to be" "hint: --folder names one outside" >&2
        exit 1 ;;
esac
if [ -e "$folder" ] && [ -n "$(ls -A -- "$folder")" ] &&
    ! grep -qs '^# Written by scripts/candle-transformers-qwen2.sh' "$folder/Cargo.toml"; then
    printf '%s\n' "$folder has something else in it" "hint: --folder names one that is empty, or not there" >&2
    exit 1
fi
mkdir -p -- "$folder"

cat > "$folder/Cargo.toml" << MANIFEST
# Written by scripts/candle-transformers-qwen2.sh of candle-train.
[package]
name = "candle-transformers-qwen2"
edition = "2024"
publish = false

[[bin]]
name = "candle-transformers-qwen2"
path = '$root/examples/candle_transformers_qwen2/main.rs'

[dependencies]
candle-comm = { path = '$root/crates/comm' }
candle-parallel = { path = '$root/crates/parallel' }
candle-trainer = { path = '$root/crates/trainer' }
candle-core = "=$version"
candle-nn = "=$version"
candle-transformers = "=$version"
clap = { version = "4", features = ["derive", "wrap_help"] }
serde_json = "1"

[patch.crates-io]
candle-nn = { path = 'candle-nn-$version' }

[profile.release.package]
candle-nn.opt-level = 0
candle-transformers.opt-level = 0

[workspace]
MANIFEST

if [ ! -e "$folder/candle-nn-$version" ]; then
    part=$(mktemp -d -- "$folder/part.XXXXXX")
    trap 'rm -rf -- "$part"' EXIT
    cargo metadata --format-version 1 --locked --manifest-path "$root/Cargo.toml" > "$part/metadata"
    python3 - "$version" "$part" << 'PATCH'
import json, pathlib, shutil, sys

version, part = sys.argv[1], pathlib.Path(sys.argv[2])
packages = json.loads((part / "metadata").read_text())["packages"]
found = {p["version"]: p["manifest_path"] for p in packages if p["name"] == "candle-nn"}
if list(found) != [version]:
    sys.exit(f"the workspace has candle-nn {', '.join(found) or 'nowhere'}; expected {version}, whose lines this script knows")
source = pathlib.Path(found[version]).parent
shutil.copytree(source, part / "candle-nn")
for file, fast, slow in [
    ("ops.rs", "xs.apply_op2_no_bwd(alpha, &RmsNorm { eps })", "rms_norm_slow(xs, alpha, eps)"),
    ("ops.rs", "xs.apply_op3_no_bwd(alpha, beta, &LayerNorm { eps })", "layer_norm_slow(xs, alpha, beta, eps)"),
    ("ops.rs", "xs.apply_op1_no_bwd(&SoftmaxLastDim)", "softmax(xs, D::Minus1)"),
    ("rotary_emb.rs", "xs.apply_op3_no_bwd(cos, sin, &RotaryEmb)", "rope_slow(xs, cos, sin)"),
]:
    path = part / "candle-nn" / "src" / file
    text = path.read_text()
    if text.count(fast) != 1:
        sys.exit(f"{source / 'src' / file} has {fast!r} {text.count(fast)} times; expected it once\n"
                 f"hint: this script knows candle-nn {version} as it is on crates.io")
    path.write_text(text.replace(fast, slow))
# What the four lines called is unused now.
with open(part / "candle-nn" / "Cargo.toml", "a") as manifest:
    manifest.write('\n[lints.rust]\ndead_code = "allow"\n')
PATCH
    mv -- "$part/candle-nn" "$folder/candle-nn-$version"
    rm -r -- "$part"
fi

# The versions of everything are the repository's.
cp -- "$root/Cargo.lock" "$folder/Cargo.lock"
exec cargo run --release --manifest-path "$folder/Cargo.toml" -- "$@"
