#!/usr/bin/env python3
"""What ranks that share sequences gain and cost, by their number, how they attend and the length of a sequence, as Markdown tables.

    cargo build --release --locked --example bench_train
    scripts/bench_contexts.py [--lengths 2048 8192 32768] [--steps N] [--replicas-length 8192] [--turns N]

All ranks are threads of one machine. Activations are those of the first rank at their peak, and bytes what it sends to the ranks that share
its sequences in a step; the ranks of a row have about the same. A second table compares four ranks that share each of four sequences with four
replicas that have one each: the same tokens and the same arithmetic. These take turns, and the medians of their steps are compared.
"""
import argparse
import statistics

from bench_train import OURS, header, processor, row, run

SHAPE = ["--hidden-size", "256", "--intermediate-size", "688", "--layers", "2", "--heads", "8", "--kv-heads", "4", "--vocab-size", "2048"]
RANKS = [2, 4]
METHODS = ["ring", "all-gather", "ulysses"]
NUM_REPLICAS = 4


def bench(a, length, *flags):
    return run([a.program, *SHAPE, "--seq-len", str(length), "--dtype", a.dtype, "--micro-batch-size", "1", "--steps", str(a.steps), *flags])


def of_contexts(cp, method):
    return ["--cp", str(cp)] + (["--cp-method", method] if cp > 1 else [])


def print_contexts(a):
    header("tokens of a sequence", "ranks", "method", "tokens/s", "of one rank's", "activations, MiB", "of one rank's", "sent in a step, MiB")
    for length in a.lengths:
        one = None
        for cp, method in [(1, "one rank"), *((cp, method) for cp in RANKS for method in METHODS)]:
            line = bench(a, length, "--batch-size", "1", *of_contexts(cp, method))
            one = one or line
            activations = [it["memory"]["activations_peak_bytes"] for it in (line, one)]
            row(str(length), str(cp), method, f"{line['tokens_per_sec']:.0f}", f"{line['tokens_per_sec'] / one['tokens_per_sec']:.2f}",
                f"{activations[0] / 2**20:.1f}", f"{activations[0] / activations[1]:.3f}", f"{line['context_bytes_per_step'] / 2**20:.1f}")
    print()


def print_beside_replicas(a):
    layouts = {"replicas": ["--dp", str(NUM_REPLICAS)], **{method: of_contexts(NUM_REPLICAS, method) for method in METHODS}}
    turns = [{name: bench(a, a.replicas_length, "--batch-size", str(NUM_REPLICAS), *flags) for name, flags in layouts.items()}
             for _ in range(a.turns)]
    secs = {name: statistics.median(turn[name]["step_secs"] for turn in turns) for name in layouts}
    header(f"{NUM_REPLICAS} ranks, {NUM_REPLICAS} sequences of {a.replicas_length} tokens", "step, s", "model FLOP/s, of the replicas'")
    for name in layouts:
        # The same operations for each token.
        pairs = [turn["replicas"]["step_secs"] / turn[name]["step_secs"] for turn in turns]
        row(name, f"{secs[name]:.2f}", f"{secs['replicas'] / secs[name]:.2f} ({min(pairs):.2f} to {max(pairs):.2f})")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", default=str(OURS))
    p.add_argument("--dtype", default="f32")
    p.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192, 32768])
    p.add_argument("--replicas-length", type=int, default=8192, help="0: no second table")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--steps", type=int, default=2)
    a = p.parse_args()
    print(f"{processor()}; {' '.join(SHAPE)}, {a.dtype}\n")
    if a.lengths:
        print_contexts(a)
    if a.replicas_length:
        print_beside_replicas(a)


if __name__ == "__main__":
    main()
