#!/usr/bin/env python3
"""Training speed of this project, on its own layouts and against PyTorch, as a Markdown table.

    cargo build --release --example bench_train
    scripts/bench_train.py [--python PYTHON] [--turns N] [--steps N]

PYTHON is an interpreter with torch and transformers; without it the columns about PyTorch are left out. The programs run in
turns, so that what else the machine does hits both, and the best median step of each is taken.
"""
import argparse
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = ROOT / "target/release/examples/bench_train"
TORCH = ROOT / "scripts/reference/bench_torch.py"
CASES = {
    "default: 31.6M parameters, 4 x 256 tokens": [],
    "long: 31.6M parameters, 1 x 1024 tokens": ["--seq-len", "1024", "--batch-size", "1"],
    "large: 12 layers of 768, vocabulary 32000, 2 x 256 tokens": [
        "--hidden-size", "768", "--intermediate-size", "2048", "--layers", "12", "--heads", "12", "--kv-heads", "12",
        "--vocab-size", "32000", "--batch-size", "2"],
    "small: 6 layers of 256, 2 x 128 tokens": [
        "--hidden-size", "256", "--intermediate-size", "688", "--layers", "6", "--heads", "4", "--kv-heads", "4",
        "--seq-len", "128", "--batch-size", "2"],
}
LAYOUTS = {"one rank": [], "tp = 2": ["--tp", "2"], "pp = 2": ["--pp", "2"], "dp = 2": ["--dp", "2"]}


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def best_of(turns, commands):
    """The fastest run of each command; the commands take turns."""
    runs = {name: [] for name in commands}
    for _ in range(turns):
        for name, command in commands.items():
            runs[name].append(run(command))
    return {name: min(results, key=lambda result: result["step_secs"]) for name, results in runs.items()}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--python", help="an interpreter with torch and transformers")
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--steps", type=int, default=6)
    a = p.parse_args()
    steps = ["--steps", str(a.steps)]
    torch = [a.python, TORCH] if a.python else None

    print("| case | tokens/s | step / products alone | page faults a step |" + (" PyTorch | ratio | memory, ratio |" if torch else ""))
    print("|---|---|---|---|" + ("---|---|---|" if torch else ""))
    for name, flags in CASES.items():
        commands = {"ours": [OURS, *flags, *steps]}
        if torch:
            commands["torch"] = [*torch, *flags, *steps]
        best = best_of(a.turns, commands)
        ours = best["ours"]
        above_floor = ours["step_secs"] / ours["product_floor_secs"]
        row = f"| {name} | {ours['tokens_per_sec']:.0f} | {above_floor:.2f} | {ours['page_faults_per_step']} |"
        if torch:
            theirs = best["torch"]
            speed = ours["tokens_per_sec"] / theirs["tokens_per_sec"]
            memory = ours["peak_rss_bytes"] / theirs["peak_rss_bytes"]
            row += f" {theirs['tokens_per_sec']:.0f} | **{speed:.2f}** | {memory:.2f} |"
        print(row, flush=True)

    print("\n| layout, default case | tokens/s | ratio to one rank | forward | backward | communication | optimizer |")
    print("|---|---|---|---|---|---|---|")
    best = best_of(a.turns, {name: [OURS, *flags, *steps] for name, flags in LAYOUTS.items()})
    for name, result in best.items():
        ratio = result["tokens_per_sec"] / best["one rank"]["tokens_per_sec"]
        parts = [f"{result[part + '_secs']:.3f} s" for part in ("forward", "backward", "communication", "optimizer")]
        print(f"| {name} | {result['tokens_per_sec']:.0f} | {ratio:.2f} | " + " | ".join(parts) + " |", flush=True)


if __name__ == "__main__":
    main()
