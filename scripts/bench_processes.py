#!/usr/bin/env python3
"""Training speed of ranks as processes under MPI against threads, the cost of --check-collectives, and that of the stages of ZeRO on
two replicas, as Markdown tables.

    cargo build --release --example bench_train --features mpi
    scripts/bench_processes.py [--turns N] [--steps N] [--mpirun "mpirun --bind-to none"]

What a table compares runs in turns, so that what else the machine does hits all of it, and of each the turn with the median step is taken.
"""
import argparse

from bench_train import LAYOUTS, OURS, medians


def zero_table(a, processes):
    print("\n| default shape, dp 2 | as threads, ratio to stage 0 | under MPI, ratio to stage 0 |\n|---|---|---|")

    def speeds(program, *flags):
        stage = ["--dp", "2", "--steps", str(a.steps), *flags, "--zero"]
        return medians(a.turns, {str(zero): [*program, *stage, str(zero)] for zero in range(4)})

    threads, mpi = speeds([OURS]), speeds(processes, "--backend", "mpi")
    for zero in map(str, range(1, 4)):
        ratio, mpi_ratio = (runs[zero]["tokens_per_sec"] / runs["0"]["tokens_per_sec"] for runs in (threads, mpi))
        print(f"| stage {zero} | {ratio:.2f} | {mpi_ratio:.2f} |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--mpirun", default="mpirun --bind-to none --allow-run-as-root --oversubscribe")
    a = p.parse_args()
    processes = [*a.mpirun.split(), "-n", "2", OURS]
    # Small steps show what an operation costs by itself.
    small = ["--hidden-size", "256", "--intermediate-size", "688", "--layers", "6", "--heads", "4", "--kv-heads", "4",
             "--seq-len", "128", "--batch-size", "2"]
    print("| step, 2 ranks | tokens/s as threads | MPI, ratio to threads | MPI with --check-collectives, ratio to MPI |")
    print("|---|---|---|---|")
    for size, shape in {"default shape": [], "small": small}.items():
        for layout, flags in LAYOUTS.items():
            # ZeRO's stages have a table of their own.
            if not flags or "--zero" in flags:
                continue
            flags = [*shape, *flags, "--steps", str(a.steps)]
            speeds = medians(a.turns, {
                "threads": [OURS, *flags],
                "mpi": [*processes, *flags, "--backend", "mpi"],
                "checked": [*processes, *flags, "--backend", "mpi", "--check-collectives"],
            })
            threads, mpi, checked = (speeds[name]["tokens_per_sec"] for name in ["threads", "mpi", "checked"])
            print(f"| {size}, {layout} | {threads:,.0f} | {mpi / threads:.2f} | {checked / mpi:.2f} |", flush=True)
    zero_table(a, processes)


if __name__ == "__main__":
    main()
