#!/usr/bin/env python3
"""How much of the communication of data-parallel ranks hides under computation, over a link of limited speed, as a Markdown table.

    cargo build --release --example bench_train --features mpi
    sudo scripts/bench_overlap.py [--turns N] [--steps N] [--mbit 1000] [-- FLAGS OF bench_train]

Two "hosts" are network namespaces of this machine, joined by one link that carries so many megabits a second each way; Open MPI
starts half of the ranks on each. With and without --no-overlap run in turns, and of each the turn with the median step is taken. Needs
root, and `ip` and `tc` from iproute2.
"""
import argparse

from bench_train import OURS, medians
from simulated_hosts import simulated_hosts

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--mbit", type=int, default=1000)
    p.add_argument("flags", nargs="*", help="of bench_train, after --")
    a = p.parse_args()
    print(f"| replicas, {a.mbit} Mbit/s | step, overlapping | step, not | ratio | waited, overlapping | waited, not | waits hidden |")
    print("|---|---|---|---|---|---|---|")
    with simulated_hosts(2, f"{a.mbit}mbit") as hosts:
        for dp in (2, 4):
            command = [*hosts.mpirun(dp, btl="tcp,self"), OURS, "--backend", "mpi", "--dp", str(dp), "--steps", str(a.steps), *a.flags]
            best = medians(a.turns, {"with": command, "without": [*command, "--no-overlap"]})
            step, waited = ({name: result[field] for name, result in best.items()} for field in ("step_secs", "communication_secs"))
            hidden = 1 - waited["with"] / waited["without"]
            print(f"| {dp} | {step['with']:.3f} s | {step['without']:.3f} s | {step['without'] / step['with']:.2f} | "
                  f"{waited['with']:.3f} s | {waited['without']:.3f} s | {hidden:.0%} |", flush=True)


if __name__ == "__main__":
    main()
