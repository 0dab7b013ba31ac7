#!/usr/bin/env python3
"""What the sums of a training step cost on 8 to 16,384 ranks by the model of docs/scaling.md, and the model beside measurements, as
Markdown tables.

    sudo scripts/bench_mpi.py --json measured.json
    scripts/scaling.py measured.json [--parameters 1e9] [--ranks-per-host 8] [--bandwidth-gbit 100 --latency-us 2]

The constants are those of the measurements: ping_pong between two ranks of one host and of two, and our small sums. --bandwidth-gbit and
--latency-us put a better network between the hosts of the tables without measurements.
"""
import argparse
import json
import math
import os
import pathlib
from dataclasses import dataclass, replace

# Of a rank's first message of an operation, about: what is called, from where.
HEADER_BYTES = 200


@dataclass
class Machine:
    """Seconds per message and per byte."""
    alpha_in: float  # a message inside a host
    beta_in: float  # a byte of it
    alpha_out: float  # a message between hosts
    beta_out: float  # a byte through a host's card
    start: float  # what one of our operations takes besides
    o: float  # a rank's own work for one of our messages
    gamma: float  # a byte added to another
    cores: int | None  # of all hosts together; None: one for each rank

    def turns(self, n):
        """How many ranks take turns on a core."""
        return max(1, n / self.cores) if self.cores else 1


def adding(m, s, n):
    return (n - 1) / n * s * m.gamma * m.turns(n)


def flat(m, s, n, r):
    """Each rank reduces one part: all send it theirs, and it sends all the sum."""
    bytes_in, bytes_out = (r - 1) * s / n * m.turns(n), r * (n - r) * s / n
    alpha = m.alpha_out if n > r else m.alpha_in
    return 2 * ((n - 1) * m.o * m.turns(n) + alpha + bytes_in * m.beta_in + bytes_out * m.beta_out) + adding(m, s, n)


def ring(m, s, n, r):
    """Parts go round the ranks in order: one pair of neighbours for each two hosts."""
    inside = m.alpha_in + s / n * m.beta_in * m.turns(n)
    across = m.alpha_out + s / n * m.beta_out
    return 2 * (n - 1) * (max(inside, across) if n > r else inside) + adding(m, s, n)


def halving(m, s, n, r):
    """Recursive halving, then doubling, neighbours first: a host's ranks pass each other half, a quarter, .., then each its part to other hosts."""
    h = n // r
    inside = math.log2(r) * m.alpha_in + (r - 1) / r * s * m.beta_in * m.turns(n)
    across = math.log2(h) * m.alpha_out + (h - 1) / h * s * m.beta_out
    return 2 * (inside + across) + adding(m, s, n)


def tree(m, s, n, r):
    """Whole tensors up a binary tree of ranks, one to a host at its top, and down again."""
    h = n // r
    inside = math.log2(r) * (m.alpha_in + s * m.beta_in * min(m.turns(n), max(1, h)))
    across = math.log2(h) * (m.alpha_out + s * m.beta_out)
    return 2 * (inside + across) + math.log2(n) * s * m.gamma


def hierarchical(m, s, n, r):
    """What ours do: inside a host first, then each part directly to the host whose rank reduces it, and back."""
    h = n // r
    if h == 1:
        return flat(m, s, n, r)
    inside = (r - 1) * m.o * m.turns(n) + m.alpha_in + (r - 1) / r * s * m.beta_in * m.turns(n)
    across = (h - 1) * m.o * m.turns(n) + m.alpha_out + (h - 1) / h * s * m.beta_out
    return 2 * (inside + across) + adding(m, s, n)


ALGORITHMS = {"flat": flat, "ring": ring, "halving": halving, "tree": tree, "hierarchical": hierarchical}


def meeting(m, n, r):
    """Before: each of our ranks tells all others what it calls."""
    alpha, bytes_out = (m.alpha_out, r * (n - r) * HEADER_BYTES) if n > r else (m.alpha_in, 0)
    return m.start + (n - 1) * m.o * m.turns(n) + alpha + bytes_out * m.beta_out


def fit(cases, cores):
    """The constants, from what bench_mpi measured."""
    def line(hosts):
        points = sorted((c["bytes"], c["best_bare_us"] * 1e-6) for c in cases if c["op"] == "ping_pong" and (c["hosts"], c["ranks"]) == (hosts, 2))
        (few, short), (many, long) = points[0], points[-1]
        return short, (long - short) / (many - few)

    alpha_in, beta_in = line(1)
    alpha_out, beta_out = line(2)
    smallest = min(c["bytes"] for c in cases)
    # start + alpha + o (N - 1) N / cores, from the fewest and the most ranks of a host.
    small = sorted((c["ranks"] * (c["ranks"] - 1) / min(cores, c["ranks"]), c["best_ours_us"] * 1e-6)
                   for c in cases if c["op"] == "all_reduce" and c["hosts"] == 1 and c["bytes"] == smallest)
    (few, least), (many, most) = small[0], small[-1]
    o = max(0, (most - least) / (many - few))
    start = max(0, least - few * o - alpha_in)
    largest, secs = max((c["bytes"], c["best_ours_us"] * 1e-6) for c in cases
                        if c["op"] == "reduce_scatter" and (c["hosts"], c["ranks"]) == (1, 2))
    return Machine(alpha_in, beta_in, alpha_out, beta_out, start, o, max(0, 2 * secs / largest - beta_in), cores)


def duration(secs):
    return f"{secs * 1e6:.3g} µs" if secs < 1e-3 else f"{secs * 1e3:.3g} ms" if secs < 1 else f"{secs:.3g} s"


def size(num_bytes):
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.0f} GiB"


def print_constants(m):
    print("| | a message | a byte |\n|---|---|---|")
    print(f"| inside a host: α', β' | {duration(m.alpha_in)} | {m.beta_in * 1e9:.3g} ns |")
    print(f"| between hosts: α, β | {duration(m.alpha_out)} | {m.beta_out * 1e9:.3g} ns |")
    print(f"| an operation of ours besides: s | {duration(m.start)} | |")
    print(f"| a rank's own work: o, γ | {duration(m.o)} | {m.gamma * 1e9:.3g} ns |")


def print_check(cases, m, ours):
    print("\n| hosts, ranks, bytes | ours: model | measured | measured / model | MPI's: ring | halving | measured | measured / nearer |")
    print("|---|---|---|---|---|---|---|---|")
    for c in cases:
        n, r, s = c["ranks"], c["ranks"] // c["hosts"], c["bytes"]
        if c["op"] != "all_reduce" or s < 1 << 20:
            continue
        own, measured, bare = ALGORITHMS[ours](m, s, n, r) + meeting(m, n, r), c["best_ours_us"] * 1e-6, c["best_bare_us"] * 1e-6
        mpi = [ring(m, s, n, r), halving(m, s, n, r)]
        nearer = min(mpi, key=lambda secs: abs(math.log(bare / secs)))
        print(f"| {c['hosts']}, {n}, {size(s)} | {duration(own)} | {duration(measured)} | {measured / own:.2f} | "
              f"{duration(mpi[0])} | {duration(mpi[1])} | {duration(bare)} | {bare / nearer:.2f} |")


def ranks_of(a):
    return [n for n in (8 << i for i in range(12)) if n >= a.ranks_per_host]


def print_steps(m, a):
    s = 4 * a.parameters
    print(f"\n| ranks, {a.ranks_per_host} on a host; {size(s)} of gradients | " + " | ".join(ALGORITHMS) + " | our meeting, for each operation |")
    print("|---|" + "---|" * (len(ALGORITHMS) + 1))
    for n in ranks_of(a):
        secs = [algorithm(m, s, n, a.ranks_per_host) for algorithm in ALGORITHMS.values()]
        cells = [f"**{duration(t)}**" if t == min(secs) else duration(t) for t in secs]
        print(f"| {n:,} | {' | '.join(cells)} | {duration(meeting(m, n, a.ranks_per_host))} |")


def print_winners(m, a):
    print("\n| ranks | fastest, from which size on | ours within 1.2 of it, with the meeting, from |\n|---|---|---|")
    for n in ranks_of(a):
        best, near = [], None
        for s in (1 << i for i in range(8, 37)):
            secs = {name: algorithm(m, s, n, a.ranks_per_host) for name, algorithm in ALGORITHMS.items()}
            fastest = min(secs, key=secs.get)
            if not best or best[-1][0] != fastest:
                best.append((fastest, s))
            is_near = secs["hierarchical"] + meeting(m, n, a.ranks_per_host) <= 1.2 * secs[fastest]
            near = (near or s) if is_near else None
        print(f"| {n:,} | " + ", ".join(f"{name} from {size(s)}" if index else name for index, (name, s) in enumerate(best)) +
              f" | {size(near) if near else 'nowhere below 64 GiB'} |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("measured", type=pathlib.Path, help="what bench_mpi.py --json wrote")
    p.add_argument("--ours", choices=["flat", "hierarchical"], default="hierarchical", help="what our operations did when they were measured")
    p.add_argument("--cores", type=int, default=os.cpu_count(), help="that all simulated hosts shared")
    p.add_argument("--parameters", type=float, default=1e9, help="whose gradients a step sums, 4 bytes each, all at once")
    p.add_argument("--ranks-per-host", type=int, default=8)
    p.add_argument("--bandwidth-gbit", type=float, help="of a host's card, in place of the measured one")
    p.add_argument("--latency-us", type=float, help="between hosts, in place of the measured one")
    a = p.parse_args()
    cases = [json.loads(line) for line in a.measured.read_text().splitlines()]
    m = fit(cases, a.cores)
    print_constants(m)
    print_check(cases, m, a.ours)
    # From here on a rank has a core of its own.
    cluster = replace(m, cores=None)
    if a.bandwidth_gbit:
        cluster = replace(cluster, beta_out=8e-9 / a.bandwidth_gbit)
    if a.latency_us:
        cluster = replace(cluster, alpha_out=a.latency_us * 1e-6)
    print_steps(cluster, a)
    print_winners(cluster, a)


if __name__ == "__main__":
    main()
