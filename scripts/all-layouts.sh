#!/usr/bin/env bash
# Compares every layout of up to eight ranks with one rank, with each stage of ZeRO, two schedules and each of six families; CI has a third of the
# families for each. It takes about five minutes on two cores.
# usage: scripts/all-layouts.sh
set -euo pipefail
cd "$(dirname "$0")/.."
CANDLE_TRAIN_ALL_LAYOUTS=1 cargo test --workspace --locked --test end_to_end -- every_layout
