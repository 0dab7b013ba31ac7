#!/usr/bin/env bash
# Runs a command with emulated GPUs: a libcuda, libcublas and libcurand that run the kernels on the CPU, from the same source.
# usage: scripts/emulated-gpu.sh COMMAND...        from the root of the repository
# EMULATED_GPUS: how many (default 1); EMULATED_GPU_BYTES: memory of each (default 2 GiB); EMULATED_GPU_SEED: of the order in
# which work runs (default 1; 0: at once); EMULATED_GPU_WAITS: set, each wait of the host is told. tests/emulator/README.md says what it shows.
set -euo pipefail
. scripts/cuda-env.sh >&2
mkdir -p target/cuda/emulator
candle_kernels=$(cargo metadata --format-version 1 --locked --features candle-train-examples/cuda | python3 -c '
import json, pathlib, sys
packages = json.load(sys.stdin)["packages"]
print(*(pathlib.Path(p["manifest_path"]).parent / "src" for p in packages if p["name"] == "candle-kernels"))')
flock target/cuda/emulator make --quiet --jobs=2 --file tests/emulator/Makefile \
    CUDA_HOME="$CUDA_HOME" CANDLE_KERNELS="$candle_kernels" >&2
# Tests that would pass without a GPU fail here if it does not answer.
export CANDLE_TRAIN_REQUIRE_CUDA=1
export LD_LIBRARY_PATH=$PWD/target/cuda/emulator${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Programs that have thread-local values of their own leave too little room for the emulator's, which must be in that room.
export GLIBC_TUNABLES=glibc.rtld.optional_static_tls=1048576${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}
exec "$@"
