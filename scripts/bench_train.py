#!/usr/bin/env python3
"""Training speed of this project, on its own layouts and against PyTorch, as a Markdown table.

    cargo build --release --example bench_train
    scripts/bench_train.py [--python PYTHON] [--before PROGRAM] [--turns N] [--steps N]

PYTHON is an interpreter with torch and transformers, PROGRAM this benchmark built from another commit; the columns about
what is not given are left out. The programs run in turns, so that what else the machine does hits both, and the best median step of each is taken.
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


def beside(ours, others):
    """For each of the other programs: its tokens/s, and ours over it in speed and in memory."""
    cells = ""
    for other in others:
        speed = ours["tokens_per_sec"] / other["tokens_per_sec"]
        memory = ours["peak_rss_bytes"] / other["peak_rss_bytes"]
        cells += f" {other['tokens_per_sec']:.0f} | **{speed:.2f}** | {memory:.2f} |"
    return cells


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--python", help="an interpreter with torch and transformers")
    p.add_argument("--before", metavar="PROGRAM", help="bench_train of another commit, to compare with")
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--steps", type=int, default=6)
    a = p.parse_args()
    steps = ["--steps", str(a.steps)]
    others = {"PyTorch": [a.python, TORCH] if a.python else None, "before": [a.before] if a.before else None}
    others = {name: command for name, command in others.items() if command}

    def header(columns, others):
        columns = columns + [column for name in others for column in (name, "ratio", "memory, ratio")]
        print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")

    header(["case", "tokens/s", "step / products alone", "page faults a step"], others)
    for name, flags in CASES.items():
        commands = {other: [*command, *flags, *steps] for other, command in others.items()}
        best = best_of(a.turns, {"ours": [OURS, *flags, *steps], **commands})
        ours = best.pop("ours")
        above_floor = ours["step_secs"] / ours["product_floor_secs"]
        row = f"| {name} | {ours['tokens_per_sec']:.0f} | {above_floor:.2f} | {ours['page_faults_per_step']} |"
        print(row + beside(ours, best.values()), flush=True)

    print()
    others.pop("PyTorch", None)
    header(["layout, default case", "tokens/s", "ratio to one rank", "forward", "backward", "communication", "optimizer"], others)
    programs = {"ours": [OURS], **others}
    best = best_of(a.turns, {(name, program): [*command, *flags, *steps]
                             for name, flags in LAYOUTS.items() for program, command in programs.items()})
    for name in LAYOUTS:
        ours = best[name, "ours"]
        ratio = ours["tokens_per_sec"] / best["one rank", "ours"]["tokens_per_sec"]
        parts = [f"{ours[part + '_secs']:.3f} s" for part in ("forward", "backward", "communication", "optimizer")]
        row = f"| {name} | {ours['tokens_per_sec']:.0f} | {ratio:.2f} | " + " | ".join(parts) + " |"
        print(row + beside(ours, [best[name, other] for other in others]), flush=True)


if __name__ == "__main__":
    main()
