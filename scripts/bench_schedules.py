#!/usr/bin/env python3
"""Compares pipeline schedules: idle time and memory of 16 equal layers on 4 ranks, 8 micro-batches.

The times of each stage's passes are measured with one micro-batch, which one rank after the other works on. Blocks that sleep for these times
show how long ranks wait, as four ranks on two cores lend each other their cores; where there is a core for each rank, `bench_train` itself does.
Activations are those that the meter of `bench_train` counts on the fullest rank. It prints a table in Markdown.

    cargo build --release --locked --example bench_train --example bench_pipeline
    scripts/bench_schedules.py
"""

import argparse
import json
import os
import statistics
import subprocess

RANKS = 4
MICRO_BATCHES = 8
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("1f1b", 2),
    ("zb-h1", 1),
    ("zb-h1", 2),
    ("zb-2p", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]
# Equal layers, and next to no embedding and head.
MODEL = {
    "--hidden-size": 256,
    "--intermediate-size": 704,
    "--layers": 16,
    "--heads": 4,
    "--kv-heads": 4,
    "--vocab-size": 512,
    "--seq-len": 256,
}


def run(example, flags, launcher=()):
    command = [*launcher, f"target/release/examples/{example}"]
    for flag, value in flags.items():
        command += [flag] + ([str(part) for part in value] if isinstance(value, list) else [str(value)])
    done = subprocess.run([part for part in command if part != ""], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def layout(schedule, virtual_stages):
    num_stages = RANKS * virtual_stages
    layers = ",".join([str(MODEL["--layers"] // num_stages)] * num_stages)
    return {"--schedule": schedule, "--virtual-stages": virtual_stages, "--pipeline-layout": layers}


def stage_secs(schedule, virtual_stages):
    """Forward pass, input gradient and weight gradient of a stage, with one micro-batch and a schedule that has both halves: medians of stages."""
    flags = MODEL | layout(schedule, virtual_stages)
    flags |= {"--pp": RANKS, "--batch-size": 1, "--micro-batch-size": 1, "--threads": RANKS, "--steps": 8, "--stage-secs": ""}
    stages = run("bench_train", flags)["stage_secs"]
    # A rank that nobody waits for does both halves at once.
    return [statistics.median(it["secs"] for it in stages if it["pass"] == name) for name in ("forward", "input gradient", "weight gradient")]


def percent(share):
    return f"{100 * share:.1f}%"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps to measure (%(default)s)")
    parser.add_argument("--mpi", action="store_true", help="count activations of ranks that are processes, which needs --features mpi")
    args = parser.parse_args()
    launcher = ["mpirun", "--oversubscribe", "-n", str(RANKS), "-x", "RAYON_NUM_THREADS=1"] if args.mpi else []
    of_ranks = {"--backend": "mpi"} if args.mpi else {"--threads": RANKS}
    has_cores = (os.cpu_count() or 1) >= RANKS
    # zb-h1 computes some gradients of weights with those of inputs.
    of_halves = {("zb-h1", 1): "zb-h1", ("zb-h1", 2): "zb-h1", ("others", 1): "zb-2p", ("others", 2): "zbv"}
    times = {key: stage_secs(schedule, key[1]) for key, schedule in of_halves.items()}
    times_of = lambda schedule, virtual_stages: times["zb-h1" if schedule == "zb-h1" else "others", virtual_stages]
    for (name, virtual_stages), secs in times.items():
        forward, input_grad, weight_grad = (1000 * virtual_stages * part for part in secs)
        print(f"{name}, stages of a rank: {virtual_stages}: a micro-batch takes {forward:.1f} ms forward, {input_grad:.1f} ms for its input's "
              f"gradient, {weight_grad:.1f} ms for its weights' on each rank")
    print()
    columns = ["schedule", "stages a rank", "idle, simulated", "idle, measured", "of 1f1b's", "fullest rank, activations", "of 1f1b's"]
    if has_cores:
        columns.insert(4, "idle, bench_train")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    rows = []
    for schedule, virtual_stages in SCHEDULES:
        flags = {"--schedule": schedule, "--virtual-stages": virtual_stages, "--pp": RANKS, "--micro-batches": MICRO_BATCHES}
        flags |= {"--steps": args.steps, "--stage-secs": ",".join(f"{secs:.6f}" for secs in times_of(schedule, virtual_stages))}
        sleeping = run("bench_pipeline", flags)
        flags = MODEL | layout(schedule, virtual_stages)
        flags |= {"--pp": RANKS, "--batch-size": MICRO_BATCHES, "--micro-batch-size": 1, "--steps": 2} | of_ranks
        trained = run("bench_train", flags, launcher)
        mean = lambda shares: sum(shares) / len(shares)
        rows.append({
            "name": (schedule, virtual_stages),
            "simulated": mean(sleeping["simulated_idle_share"]),
            "measured": mean(sleeping["idle_share"]),
            "trained": mean([rank["idle_share"] for rank in trained["pipeline"]]),
            "bytes": max(rank["peak_activations_bytes"] for rank in trained["pipeline"]),
        })
    plain = next(row for row in rows if row["name"] == ("1f1b", 1))
    # Of the time that ranks wait, not of its share: a step with fewer waits is shorter.
    waits = lambda row: row["measured"] / (1 - row["measured"])
    for row in rows:
        cells = [row["name"][0], row["name"][1], percent(row["simulated"]), percent(row["measured"])]
        if has_cores:
            cells.append(percent(row["trained"]))
        cells += [f"{waits(row) / waits(plain):.2f}", f"{row['bytes'] / 1e6:.1f} MB", f"{row['bytes'] / plain['bytes']:.2f}"]
        print("| " + " | ".join(str(cell) for cell in cells) + " |")


if __name__ == "__main__":
    main()
