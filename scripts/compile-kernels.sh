#!/bin/bash
# Compiles every kernel for the architectures they must run on, warnings as errors, and prints what each one needs.
# A kernel that spills registers is an error. Needs no GPU.
# usage: scripts/compile-kernels.sh        nvcc from CUDA_HOME or PATH; scripts/cuda-toolkit.sh makes one
set -euo pipefail
cd "$(dirname "$0")/../crates/ops/kernels"
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc
if ! command -v "$nvcc" > /dev/null; then
    printf '%s\n' "$nvcc is not there" "hint: scripts/cuda-toolkit.sh DEST, then CUDA_HOME=DEST $0" >&2
    exit 1
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

summary='
/Compiling entry function/ { split($0, quoted, "\x27"); name = quoted[2] }
/bytes stack frame/        { stack = $1; spilled = $5 + $9 }
/Used [0-9]+ registers/    { match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
                             printf "%-32s %s %9d %6d %7d\n", name, arch, registers, stack, spilled
                             bad += spilled > 0; kernels++ }
END                        { exit bad > 0 || kernels == 0 }'

printf '%-32s %s %9s %6s %7s\n' kernel arch registers stack spilled
failed=0
for source in *.cu; do
    for arch in sm_80 sm_90; do
        if ! "$nvcc" -std=c++17 -cubin -arch=$arch -Werror all-warnings -Xptxas -v -o "$out/kernel.cubin" "$source" \
            > "$out/log" 2>&1; then
            cat "$out/log" >&2
            failed=1
        elif ! awk -v arch=$arch "$summary" "$out/log"; then
            echo "$source: registers spilled for $arch, or no kernel in it" >&2
            failed=1
        fi
    done
done
exit $failed
