//! Tests of the emulated GPU; `README.md` says what it is. They need the feature `cuda` and `scripts/emulated-gpu.sh`.
