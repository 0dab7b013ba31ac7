#!/bin/bash
# Builds the examples and what scripts/gpu-check.sh runs with CUDA, on a machine that needs neither a GPU nor a driver, and packs
# them to be carried to one that has both. The programs load NVIDIA's libraries when they first use them, so they start anywhere.
# usage: scripts/cuda-build.sh [EXAMPLE...]        these examples alone; default: those that gpu-check.sh runs, and the tests
# leaves target/cuda/bundle/programs.tar.xz; needs rustup's cargo, gcc, g++, python3 with pip, xz
# environment: CUDA_HOME, a toolkit to use instead of one from PyPI (its own libraries are then linked as usual);
#   CUDA_COMPUTE_CAP, the oldest GPU that candle's own kernels run on (80)
set -euo pipefail
cd "$(dirname "$0")/.."
examples=("${@:-finetune_llama}")
[ $# -gt 0 ] || examples+=(bench_train bench_gpu)
target=$PWD/target/cuda
# 64 MiB are carried, of which the repository takes 11.
max_bundle_bytes=$((50 << 20))
began=$SECONDS

. scripts/cuda-env.sh
mkdir -p "$target/bundle"
rm -f "$target"/bundle/*
for example in "${examples[@]}"; do
    options+=(--example "$example")
    programs+=("$target/release/examples/$example:$example")
done
# One set of packages for both, so that nothing is compiled twice.
build=(--release --locked --features cuda,cudnn,nccl --target-dir "$target")
packages=(--package candle-ops --package candle-comm --package candle-parallel --package candle-train-tests)
packages+=(--package candle-train-examples)
cargo build "${build[@]}" "${packages[@]}" "${options[@]}"
if [ $# -eq 0 ]; then
    tests=(--test ops --test comm --test parallel --test end_to_end)
    while IFS= read -r program; do
        programs+=("$program")
    done < <(cargo test "${build[@]}" "${packages[@]}" "${tests[@]}" --no-run --message-format json | python3 -c '
import json, sys
for line in sys.stdin:
    built = json.loads(line)
    if built.get("executable") and built["target"]["kind"] == ["test"]:
        print(built["executable"] + ":test_" + built["target"]["name"])')
fi
built=$SECONDS
git rev-parse HEAD > "$target/bundle/commit" || rm "$target/bundle/commit"

programs_folder=$(mktemp -d)
trap 'rm -rf "$programs_folder"' EXIT
printf '%-16s %12s\n' program bytes
for source in "${programs[@]}"; do
    name=${source##*:}
    strip -o "$programs_folder/$name" "${source%:*}"
    printf '%-16s %12d\n' "$name" "$(stat -c %s "$programs_folder/$name")"
done
# Most of each program is kernels that all of them have: a window of more than one program finds them in the one before.
tar --create --directory "$programs_folder" . | xz --threads=1 --lzma2=preset=2,dict=128MiB > "$target/bundle/programs.tar.xz"
bundle_bytes=$(stat -c %s "$target/bundle/programs.tar.xz")
printf '%-16s %12d\n' 'together as xz' "$bundle_bytes"
echo "built in $((built - began)) s, packed in $((SECONDS - built)) s: $target/bundle"
if [ "$bundle_bytes" -ge "$max_bundle_bytes" ]; then
    echo "the bundle is larger than $max_bundle_bytes bytes" >&2
    exit 1
fi
