#!/usr/bin/env bash
# Runs the modules of candle-parallel's tests in which a GPU does something else than a CPU, on emulated GPUs.
# usage: scripts/all-emulated.sh [THIRD]       from the root of the repository; THIRD: 0, 1 or 2, the part of the modules (default: all)
# FEATURES: what the tests are built with (default: cuda,nccl)
# An emulated kernel takes a hundred times as long as one of the CPU, where all tests run; what is left out here is about files, counters and
# layouts, or is a sum of operations that have tests of their own. CI runs a third for each commit; before a release all are run.
set -euo pipefail
modules=(cross_entropy embedding frozen_format half_precision linear:: lora loss_scaling non_finite offload optimizer overlap reduce_mean
    released save_exact sharded stage tiles training_checkpoint::)
chosen=()
for index in "${!modules[@]}"; do
    if [ -z "${1-}" ] || [ $((index % 3)) = "$1" ]; then
        chosen+=("${modules[index]}")
    fi
done
if [ ${#chosen[@]} = 0 ]; then
    echo "expected 0, 1 or 2, or nothing for all, got: $1"
    exit 2
fi
echo "${chosen[*]}"
. scripts/ci-packages.sh
EMULATED_GPUS=2 CANDLE_TRAIN_TEST_DEVICE=cuda scripts/emulated-gpu.sh cargo test "${packages[@]}" --locked --features "${FEATURES-cuda,nccl}" \
    --test parallel -- "${chosen[@]}" --skip linear_cross_entropy
