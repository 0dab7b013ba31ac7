#!/usr/bin/env bash
# Compares every pipeline schedule with 1f1b, bit by bit, in all combinations of families, types, tensor and data parallelism, stages of ZeRO,
# recomputation, packed data, adapters, frozen weights and unequal stages; CI has a sample of them. It takes about an hour on two cores.
# usage: scripts/all-schedules.sh [NUMBER]    NUMBER: go on after so many cases, as an earlier run has counted them
set -euo pipefail
cd "$(dirname "$0")/.."
CANDLE_TRAIN_ALL_SCHEDULES="${1:-0}" cargo test --workspace --locked --test end_to_end -- --nocapture schedules::every_schedule
