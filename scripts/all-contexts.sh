#!/usr/bin/env bash
# Compares context-parallel training with that on one rank in all combinations of ranks, methods, tensor, pipeline and data parallelism, stages of ZeRO, packed data,
# windows and lengths of sequences on at most 8 ranks; CI has a sample of them. It takes about an hour on two cores.
# usage: scripts/all-contexts.sh [NUMBER]    NUMBER: go on after so many cases, as an earlier run has counted them
set -euo pipefail
cd "$(dirname "$0")/.."
CANDLE_TRAIN_ALL_CONTEXTS="${1:-0}" cargo test --workspace --locked --test end_to_end -- --nocapture context_parallel::
