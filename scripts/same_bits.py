#!/usr/bin/env python3
"""Whether two builds of bench_train train alike, on random layouts: losses and gradient norms of ten steps, to the last bit, and in three more
the operations that each rank starts, in their order.
usage: scripts/same_bits.py --before PROGRAM [--after PROGRAM] [--cases N] [--seed N] [--any-bytes-of 'OPERATION AXIS']"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

MODEL = "--hidden-size 64 --intermediate-size 96 --layers 4 --heads 4 --kv-heads 2 --vocab-size 128 --seq-len 16 --batch-size 16 --steps 8 --threads 2"


def case(rng, folder):
    """The flags of a random layout."""
    pp, dp, tp = rng.choice([1, 2]), rng.choice([1, 2, 4]), rng.choice([1, 2])
    zero = rng.choice([0, 1, 2, 3])
    flags = f"--pp {pp} --dp {dp} --tp {tp} --zero {zero} --micro-batch-size 1".split()
    if pp > 1:
        flags += rng.choice(["", "--schedule gpipe", "--schedule zb-h1", "--schedule zbv", "--virtual-stages 2"]).split()
    if dp > 1 and zero > 0:
        flags += rng.choice(["", "", "--quantize-gradients int8", "--grad-reduce-dtype bf16", "--no-overlap"]).split()
    if zero == 3 and dp == 4:
        flags += rng.choice(["", "--zero-secondary 2", "--zero-group 2", "--quantize-weights int8"]).split()
    if zero == 3 and dp > 1 and "--zero-secondary" not in flags:
        flags += rng.choice(["", "--tile-linears 3"]).split()
    away = rng.choice(["", "", "--offload all", "--offload gradients", "--offload params,optimizer"]).split()
    flags += away + (["--offload-dir", folder] if away else [])
    flags += rng.choice(["", "--recompute full"]).split()
    flags += rng.choice(["", "--dtype bf16", "--dtype f16"]).split()
    flags += rng.choice(["", "--tie"]).split()
    flags += rng.choice(["", "--freeze embed_tokens|layers.0"]).split() if "--tie" not in flags else []
    return flags


def trained(program, flags, folder, any_bytes_of):
    """Losses, norms and the list of operations, or the last line of an error."""
    operations = pathlib.Path(folder, "operations")
    run = subprocess.run([program, *MODEL.split(), *flags, "--operations", operations], capture_output=True, text=True)
    if run.returncode != 0:
        return run.stderr.strip().splitlines()[-1:]
    line = json.loads(run.stdout.splitlines()[-1])
    operations = [line.split() for line in operations.read_text().splitlines()]
    compared = [line[:4] if line[1:3] == any_bytes_of.split() else line for line in operations]
    return [line["losses"], line["grad_norms"], [" ".join(words) for words in compared]]


def show(flags, before, after):
    """Prints what differs."""
    print(" ".join(flags))
    if len(before) == 1 or len(after) == 1:
        print("  before", before[-1:], "\n  after", after[-1:], flush=True)
        return
    if before[:2] != after[:2]:
        print("  before", before[:2], "\n  after", after[:2])
    of_ranks = zip(*(sorted(side[2], key=lambda line: int(line.split()[0])) for side in (before, after)))
    first = next(((old, new) for old, new in of_ranks if old != new), None)
    print(f"  operations {len(before[2])} and {len(after[2])}, the first that differs: {first}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", default="target/release/examples/bench_train")
    parser.add_argument("--cases", type=int, default=242)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--any-bytes-of", default="", help="such as 'all_reduce world': what may move more or less than before")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    differ = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.cases):
            flags = case(rng, folder)
            before, after = (trained(program, flags, folder, args.any_bytes_of) for program in (args.before, args.after))
            refused += len(before) == 1
            if before != after:
                differ += 1
                show(flags, before, after)
    print(f"{args.cases} layouts, of which both refuse {refused}: {differ} differ")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main())
