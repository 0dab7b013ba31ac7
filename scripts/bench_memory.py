#!/usr/bin/env python3
"""Memory of activations and speed of training, by what is recomputed, as a Markdown table.

    cargo build --release --example bench_train
    scripts/bench_memory.py [--turns N]

Bytes per layer and token are measured by four runs, of two numbers of layers and two of tokens: what the peak of allocated
memory grows by with both together belongs to layers and tokens alone. "Formula" is what docs/design.md says that a decoder
layer keeps. The programs run in turns, and the best median step of each is taken.
"""
import argparse
import json
import pathlib
import subprocess

PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "target/release/examples/bench_train"
MODES = ["none", "selective", "full"]
# The default shape of bench_train.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 512, 1376, 8, 4
LAYERS = [4, 8]
SEQUENCES = [4, 8]
SEQ_LEN = 256


def run(mode, *flags):
    shape = ["--hidden-size", HIDDEN, "--intermediate-size", INTERMEDIATE, "--heads", HEADS, "--kv-heads", KV_HEADS]
    command = [PROGRAM, *shape, "--seq-len", SEQ_LEN, "--recompute", mode, *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def formula(mode):
    """Bytes in f32 that a layer keeps for a token, on one tensor-parallel rank."""
    query, key = HIDDEN, HIDDEN // HEADS * KV_HEADS
    kept = 2 * HIDDEN + 2 * query + 2 * key + 2 * INTERMEDIATE + HEADS
    values = {"none": kept, "selective": kept, "full": HIDDEN}
    return 4 * values[mode]


def bytes_per_layer_and_token(mode):
    def peak(layers, sequences):
        return run(mode, "--layers", layers, "--batch-size", sequences, "--steps", 1)["peak_allocated_bytes"]

    (few, many), (short, long) = LAYERS, SEQUENCES
    grown = peak(many, long) - peak(few, long) - peak(many, short) + peak(few, short)
    return grown / (many - few) / ((long - short) * SEQ_LEN)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--turns", type=int, default=3)
    a = p.parse_args()
    runs = [{mode: run(mode, "--steps", 6) for mode in MODES} for _ in range(a.turns)]
    speed = {mode: max(turn[mode]["tokens_per_sec"] for turn in runs) for mode in MODES}
    print("| recompute | tokens/s | ratio to none | bytes per layer and token | formula | measured / formula |")
    print("|---|---|---|---|---|---|")
    for mode in MODES:
        measured, expected = bytes_per_layer_and_token(mode), formula(mode)
        print(f"| {mode} | {speed[mode]:.0f} | {speed[mode] / speed['none']:.2f} | {measured:.0f} | {expected} | "
              f"{measured / expected:.2f} |", flush=True)


if __name__ == "__main__":
    main()
