#!/bin/bash
# Everything that only a GPU can show, on a machine that has one and no Rust: correctness, then speed against PyTorch. Prints a
# table and writes one JSON file. Under 8 minutes on an H200.
# usage: scripts/gpu-check.sh [--smoke] [--output FILE] [PART...]        default: all parts, gpu-check.json
# what each program said lies beside FILE, in a folder with .logs for .json; parts: --help
# needs target/cuda/bundle (scripts/cuda-build.sh makes it, here or elsewhere) and python3 with torch, transformers and NVIDIA's
# wheels; --smoke runs tiny sizes, to try the script itself where there is no GPU worth measuring
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 scripts/gpu_check.py "$@"
