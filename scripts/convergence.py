#!/usr/bin/env python3
"""Where training in each precision ends: the bundled example for 300 steps, as a Markdown table.

    cargo build --release --example finetune_llama
    scripts/convergence.py [--steps N]

Each run fine-tunes the same weights on the same batches, all of the text but a twentieth that is held out. The losses are the
mean of the last 20 steps and that of the held-out sequences after the last step. It fails if one ends more than 1% from f32.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/examples/finetune_llama"
PRECISIONS = {
    "f32": ["--dtype", "f32"],
    "f32 high": ["--dtype", "f32", "--matmul-precision", "high"],
    "bf16": ["--dtype", "bf16"],
}
LAST_STEPS, TOLERANCE = 20, 0.01


def losses(steps, flags):
    """The mean loss of the last steps, and that of the held-out sequences."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        command = [PROGRAM, *flags, "--steps", str(steps), "--eval-fraction", "0.05", "--eval-every", str(steps), "--sample-tokens", "0",
                   "--metrics", metrics, "--output", pathlib.Path(folder) / "model"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    of_steps = [line["loss"] for line in lines if "loss" in line][-LAST_STEPS:]
    return [sum(of_steps) / len(of_steps), [line["eval_loss"] for line in lines if "eval_loss" in line][-1]]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=300)
    a = p.parse_args()
    print(f"| precision, {a.steps} steps | last {LAST_STEPS} steps | over f32 | held out | over f32 |\n|---|---|---|---|---|")
    reference, worst = None, 0.0
    for name, flags in PRECISIONS.items():
        found = losses(a.steps, flags)
        reference = reference or found
        ratios = [loss / of_f32 for loss, of_f32 in zip(found, reference)]
        worst = max([worst, *(abs(ratio - 1) for ratio in ratios)])
        cells = [f"{loss:.4f} | {ratio:.5f}" for loss, ratio in zip(found, ratios)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if worst > TOLERANCE:
        raise SystemExit(f"a loss is {100 * worst:.2f}% from that of f32; expected at most {100 * TOLERANCE:.0f}%")


if __name__ == "__main__":
    main()
