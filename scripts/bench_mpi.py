#!/usr/bin/env python3
"""Our operations over MPI beside MPI's own calls, on one host and on simulated ones, as Markdown tables of ratios.

    cargo build --release -p candle-comm --features mpi --example bench_mpi
    sudo scripts/bench_mpi.py [--bandwidth 1gbit] [--latency 200us] [--sizes 1K,32K,1M,16M] [--ops NAMES] [--layouts 1x4,2x8] \\
        [--nonblocking] [--json FILE]

A layout HOSTSxRANKS is so many network namespaces of this machine as hosts, joined by a switch, and so many ranks in all, as many on each
host. Those of a host share its memory; between hosts Open MPI's messages go by TCP over links of limited bandwidth. Ours and MPI's take turns in one run;
a number is the ratio of the medians, ours to MPI's, below 1 where ours is faster, and what ours takes. Idle ranks give up
their core to others (mpi_yield_when_idle), as there are more ranks than cores. --json also writes what bench_mpi printed.

Needs root, and `ip` and `tc` from iproute2; --latency needs /dev/net/tun.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

from simulated_hosts import simulated_hosts

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCH = ROOT / "target/release/examples/bench_mpi"
OPS = "all_reduce,all_reduce_in_place,all_gather,reduce_scatter,broadcast,all_to_all,ping_pong"
LAYOUTS = "1x2,1x4,1x8,1x16,2x2,2x4,2x8,2x16,4x4,4x8,4x16"


def num_bytes(size):
    return int(size.rstrip("KMG")) << 10 * " KMG".index((size[-1:] if size[-1:] in "KMG" else " "))


def cases(layout, a):
    """What bench_mpi prints for a layout, as dicts."""
    hosts, ranks = map(int, layout.split("x"))
    # A rank has about five tensors of a case's size.
    sizes = [size for size in a.sizes.split(",") if 5 * ranks * num_bytes(size) <= a.memory << 30]
    with simulated_hosts(hosts, a.bandwidth, a.latency) as simulated:
        command = [*simulated.mpirun(ranks), BENCH, "--ops", a.ops, "--sizes", ",".join(sizes), "--secs", str(a.secs),
                   *(["--nonblocking"] if a.nonblocking else [])]
        try:
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=a.timeout)
            printed, failed = ran.stdout, ran.returncode != 0
        except subprocess.TimeoutExpired as expired:
            printed, failed = (expired.stdout or b"").decode(), True
    if failed:
        print(f"{layout} has failed or taken more than {a.timeout} s; what it printed before counts", file=sys.stderr)
    lines = [line for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    return [{"hosts": hosts, **json.loads(line)} for line in lines]


def duration(us):
    return f"{us:.0f} µs" if us < 1000 else f"{us / 1000:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def print_tables(measured, a):
    sizes = a.sizes.split(",")
    for op in a.ops.split(","):
        rows = {}
        for case in (case for case in measured if case["op"] == op):
            # Sizes are rounded up to whole elements for each rank.
            size = next(size for size in reversed(sizes) if num_bytes(size) <= case["bytes"])
            rows.setdefault((case["hosts"], case["ranks"]), {})[size] = f"**{case['ratio']:.2f}** ({duration(case['ours_us'])})"
        print(f"\n| {op}: hosts, ranks | " + " | ".join(f"{size}iB" for size in sizes) + " |\n|---|" + "---|" * len(sizes))
        for (hosts, ranks), row in rows.items():
            print(f"| {hosts}, {ranks} | " + " | ".join(row.get(size, "") for size in sizes) + " |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bandwidth", default="1gbit", help="of each host's link each way, as tc writes it")
    p.add_argument("--latency", help="that a packet takes more between hosts, as tc writes it")
    p.add_argument("--sizes", default="1K,32K,1M,16M")
    p.add_argument("--ops", default=OPS)
    p.add_argument("--layouts", default=LAYOUTS)
    p.add_argument("--secs", type=float, default=1.0, help="for the samples of a case, if that makes at least 3")
    p.add_argument("--timeout", type=float, default=300, help="seconds for a layout")
    p.add_argument("--memory", type=int, default=8, help="GiB for all ranks; larger sizes are left out")
    p.add_argument("--nonblocking", action="store_true", help="compare with MPI's nonblocking calls")
    p.add_argument("--json", type=pathlib.Path, help="also write what was measured, layout by layout")
    p.add_argument("--print", type=pathlib.Path, metavar="JSON", help="measure nothing, print the tables of what --json wrote")
    a = p.parse_args()
    if a.print:
        return print_tables([json.loads(line) for line in a.print.read_text().splitlines()], a)
    if os.geteuid() != 0:
        sys.exit("bench_mpi.py makes network namespaces, which takes root\nhint: sudo")
    measured = []
    for layout in a.layouts.split(","):
        measured += cases(layout, a)
        if a.json:
            a.json.write_text("".join(json.dumps(case) + "\n" for case in measured))
    against = "nonblocking" if a.nonblocking else "blocking"
    print(f"Links of {a.bandwidth}, {a.latency or 'no'} added latency, {os.cpu_count()} cores for all hosts; against MPI's {against} calls.")
    print_tables(measured, a)


if __name__ == "__main__":
    main()
