#!/bin/bash
# Everything that only a GPU can show, on a machine that has one and no Rust: correctness, then speed against PyTorch, in four
# calls of at most 9 minutes each, the most important first. Prints a table; after each part FOLDER has what there is so far.
# usage: scripts/gpu-check.sh [--smoke] [--output FOLDER] [first|second|third|fourth|PART...]        default: everything
#        scripts/gpu-check.sh --rows FILE...       prints the table of docs/gpu/RESULTS.md from the JSON files of FOLDER
# FOLDER (target/gpu-check) gets first.json, all numbers, and first-logs.tar.xz, what each program said; parts: --help
# needs target/cuda/bundle (scripts/cuda-build.sh makes it, here or elsewhere) and python3 with torch, transformers and NVIDIA's
# wheels; --smoke runs tiny sizes, to try the script itself where there is no GPU worth measuring
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 scripts/gpu_check "$@"
