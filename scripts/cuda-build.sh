#!/bin/bash
# Builds the examples with CUDA on a machine that needs neither a GPU nor a driver, and packs them to be carried to one that
# has both. The programs load NVIDIA's libraries when they first use them, so they start anywhere.
# usage: scripts/cuda-build.sh [EXAMPLE...]        default: finetune_llama pretrain_llama bench_train
# leaves target/cuda/bundle/EXAMPLE.xz; needs rustup's cargo, gcc, g++, python3 with pip, xz
# environment: CUDA_HOME, a toolkit to use instead of one from PyPI (its own libraries are then linked as usual);
#   CUDA_COMPUTE_CAP, the oldest GPU that candle's own kernels run on (80)
set -euo pipefail
cd "$(dirname "$0")/.."
examples=("${@:-finetune_llama}")
[ $# -gt 0 ] || examples+=(pretrain_llama bench_train)
target=$PWD/target/cuda
max_bundle_bytes=$((64 << 20))
began=$SECONDS

. scripts/cuda-env.sh
mkdir -p "$target/bundle"
rm -f "$target"/bundle/*
for example in "${examples[@]}"; do
    options+=(--example "$example")
done
cargo build --release --locked --features cuda --target-dir "$target" --package candle-train-examples "${options[@]}"
built=$SECONDS

bundle_bytes=0
printf '%-16s %12s %12s\n' program bytes 'as xz'
for example in "${examples[@]}"; do
    program=$target/bundle/$example
    strip -o "$program" "$target/release/examples/$example"
    program_bytes=$(stat -c %s "$program")
    xz --force --threads=0 "$program"
    packed_bytes=$(stat -c %s "$program.xz")
    bundle_bytes=$((bundle_bytes + packed_bytes))
    printf '%-16s %12d %12d\n' "$example" "$program_bytes" "$packed_bytes"
done
printf '%-16s %12s %12d\n' bundle '' "$bundle_bytes"
echo "built in $((built - began)) s, packed in $((SECONDS - built)) s: $target/bundle"
if [ "$bundle_bytes" -ge "$max_bundle_bytes" ]; then
    echo "the bundle is larger than $max_bundle_bytes bytes" >&2
    exit 1
fi
