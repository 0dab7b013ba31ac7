#!/usr/bin/env python3
"""Where an asynchronous parameter server ends beside a synchronous one after the same samples: the bundled example, as a Markdown table.

    cargo build --release --bin candle-train
    scripts/parameter_server.py [--program PROGRAM] [--steps N] [--workers N]

Each run fine-tunes the same weights on all of the text but a tenth that is held out. The losses are the mean of the last 20 steps and
that of the held-out sequences after the last step. It fails if an asynchronous one is more than 5% from the synchronous one.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
ASSETS = ROOT / "examples/assets"
SETTINGS = ["--micro-batch-size", "4", "--lr", "1e-3", "--warmup-steps", "5", "--weight-decay", "0.1", "--epochs", "3",
            "--eval-fraction", "0.1", "--model", ASSETS / "shakespeare-llama", "--data", ASSETS / "alice.txt"]
RUNS = {
    "synchronous": [],
    "staleness at most 0": ["--async", "--max-staleness", "0"],
    "staleness at most 1": ["--async", "--max-staleness", "1"],
}
LAST_STEPS, TOLERANCE = 20, 0.05


def run(program, flags):
    """The losses, and the mean and the largest staleness."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        command = [program, "finetune", *SETTINGS, *flags, "--metrics", metrics, "--output", pathlib.Path(folder) / "model"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    last = [step["loss"] for step in steps[-LAST_STEPS:]]
    staleness = [step["staleness"] for step in steps if "staleness" in step]
    mean = sum(s["mean"] for s in staleness) / max(len(staleness), 1)
    losses = [sum(last) / len(last), [line["eval_loss"] for line in lines if "eval_loss" in line][-1]]
    return losses, mean, max([s["max"] for s in staleness], default=0)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", default=ROOT / "target/release/candle-train")
    p.add_argument("--steps", type=int, help="in place of 3 epochs")
    p.add_argument("--seq-len", type=int, default=128)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--servers", type=int, default=1)
    a = p.parse_args()
    common = ["--seq-len", str(a.seq_len), "--strategy", "parameter-server", "--servers", str(a.servers), "--dp", str(a.workers)]
    if a.steps:
        at = SETTINGS.index("--epochs")
        SETTINGS[at:at + 2] = ["--steps", str(a.steps)]
    print(f"| {a.servers} servers, {a.workers} workers | last {LAST_STEPS} steps | over synchronous | held out | over synchronous | staleness |")
    print("|---|---|---|---|---|---|")
    reference, worst = None, 0.0
    for name, flags in RUNS.items():
        found, mean, largest = run(a.program, common + flags)
        reference = reference or found
        ratios = [loss / of_first for loss, of_first in zip(found, reference)]
        worst = max([worst, *(abs(ratio - 1) for ratio in ratios)])
        cells = [f"{loss:.4f} | {ratio:.4f}" for loss, ratio in zip(found, ratios)]
        print(f"| {name} | {' | '.join(cells)} | {mean:.2f} on average, at most {largest} |", flush=True)
    if worst > TOLERANCE:
        raise SystemExit(f"a loss is {100 * worst:.2f}% from the synchronous one; expected at most {100 * TOLERANCE:.0f}%")


if __name__ == "__main__":
    main()
