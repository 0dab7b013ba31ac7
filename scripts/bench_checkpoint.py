#!/usr/bin/env python3
"""What a checkpoint costs: the step that copies it, and the step beside which it is written, over a plain step, as a Markdown table.

    cargo build --release --example bench_train
    scripts/bench_checkpoint.py [--dir DIR] [--turns N] [--steps N]

Checkpoints of the default shape (31.6M parameters, 12 bytes each) are written into DIR, a folder of a disk, not of memory. All
three kinds of steps are of one run, a checkpoint after every fourth; the run whose copy cost least of each layout is shown.
"""
import argparse
import tempfile

from bench_train import LAYOUTS, OURS, run


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dir", default=".", help="where the checkpoints go; they are removed again")
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--steps", type=int, default=18)
    a = p.parse_args()
    print("| ranks | plain step, s | with the copy / plain | while it is written / plain |\n|---|---|---|---|")
    for name, flags in LAYOUTS.items():
        ratios = []
        for _ in range(a.turns):
            with tempfile.TemporaryDirectory(dir=a.dir) as folder:
                measured = run([OURS, *flags, "--steps", str(a.steps), "--save-dir", folder])
            plain = measured["step_secs"]
            ratios.append((measured["saving_step_secs"] / plain, measured["writing_step_secs"] / plain, plain))
        saving, writing, plain = min(ratios)
        print(f"| {name} | {plain:.2f} | {saving:.2f} | {writing:.2f} |", flush=True)


main()
