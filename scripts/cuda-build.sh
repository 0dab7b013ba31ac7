#!/bin/bash
# Builds the examples and what scripts/gpu-check.sh runs with CUDA, on a machine that needs neither a GPU nor a driver, and packs
# them to be carried to one that has both. The programs load NVIDIA's libraries when they first use them, so they start anywhere.
# usage: scripts/cuda-build.sh [EXAMPLE...]        these examples alone; default: those that gpu-check.sh runs, and the tests
# leaves target/cuda/bundle/PROGRAM.xz; needs rustup's cargo, gcc, g++, python3 with pip, xz
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

bundle_bytes=0
printf '%-16s %12s %12s\n' program bytes 'as xz'
for source in "${programs[@]}"; do
    name=${source##*:}
    program=$target/bundle/$name
    strip -o "$program" "${source%:*}"
    program_bytes=$(stat -c %s "$program")
    xz --force --threads=0 "$program"
    packed_bytes=$(stat -c %s "$program.xz")
    bundle_bytes=$((bundle_bytes + packed_bytes))
    printf '%-16s %12d %12d\n' "$name" "$program_bytes" "$packed_bytes"
done
printf '%-16s %12s %12d\n' bundle '' "$bundle_bytes"
echo "built in $((built - began)) s, packed in $((SECONDS - built)) s: $target/bundle"
if [ "$bundle_bytes" -ge "$max_bundle_bytes" ]; then
    echo "the bundle is larger than $max_bundle_bytes bytes" >&2
    exit 1
fi
