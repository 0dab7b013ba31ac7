#!/usr/bin/env bash
# Compares what a rank is planned to hold with what its meter counts, for a sample of all layouts in which each pair of settings occurs; CI has a
# part of it. It takes about ten minutes on two cores.
# usage: scripts/all-memory-plans.sh
set -euo pipefail
cd "$(dirname "$0")/.."
CANDLE_TRAIN_ALL_MEMORY_PLANS=1 cargo test --workspace --locked --test end_to_end -- memory_plan
