#!/usr/bin/env python3
"""What training holds in memory beside the formulas of docs/design.md, and what recomputing costs, as Markdown tables.

    cargo build --release --example bench_train
    scripts/bench_memory.py [--turns N] [--replicas N] [--stages 0 1 2 3] [--dtype f32] [-- FLAGS OF bench_train]

First what a decoder layer keeps for the backward pass, by what is recomputed: what the peak of activations grows by with the
number of layers. The programs run in turns, and the best median step of each is taken.

Then what a rank of N replicas holds at most, by stage of ZeRO, in MiB, and over the formula: measured / formula. Of the weights
gathered at a time the formula is a bound, the two largest neighbouring blocks. Last the resident size of the process in which all
of these ranks are threads. And what is gathered at a time if ZeRO-3 gathers weights in tiles.

With `-- --device cuda` activations are counted by the GPU's memory pool: take as many replicas as there are GPUs.
"""
import argparse

from bench_train import OURS, run

MODES = ["none", "selective", "full"]
# The default shape of bench_train.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB, LAYERS = 512, 1376, 8, 4, 8192, 8
SEQ_LEN, SEQUENCES = 256, 4
MIB = 1 << 20


def bench(a, *flags):
    shape = ["--hidden-size", HIDDEN, "--intermediate-size", INTERMEDIATE, "--heads", HEADS, "--kv-heads", KV_HEADS,
             "--vocab-size", VOCAB, "--seq-len", SEQ_LEN, "--batch-size", SEQUENCES]
    return run(list(map(str, [OURS, *shape, "--dtype", a.dtype, *flags, *a.flags])))


def bytes_per_layer_and_token(a, mode):
    """What a layer keeps for a token, on one tensor-parallel rank."""
    query, key = HIDDEN, HIDDEN // HEADS * KV_HEADS
    if mode == "full":
        return a.value_bytes * HIDDEN
    return a.value_bytes * (2 * HIDDEN + 2 * query + 2 * key + 2 * INTERMEDIATE) + 4 * HEADS


def recompute_table(a):
    def activations(mode, layers):
        return bench(a, "--recompute", mode, "--steps", 1, "--layers", layers)["memory"]["activations_peak_bytes"]

    runs = [{mode: bench(a, "--recompute", mode, "--steps", 6) for mode in MODES} for _ in range(a.turns)]
    speed = {mode: max(turn[mode]["tokens_per_sec"] for turn in runs) for mode in MODES}
    print("| recompute | tokens/s | ratio to none | bytes per layer and token | formula | measured / formula |")
    print("|---|---|---|---|---|---|")
    for mode in MODES:
        grown = activations(mode, LAYERS) - activations(mode, LAYERS // 2)
        measured, expected = grown / (LAYERS - LAYERS // 2) / (SEQUENCES * SEQ_LEN), bytes_per_layer_and_token(a, mode)
        print(f"| {mode} | {speed[mode]:.0f} | {speed[mode] / speed['none']:.2f} | {measured:.0f} | {expected} | "
              f"{measured / expected:.2f} |", flush=True)


def formulas(a, stage, mode, parameters):
    """Bytes that a rank of `replicas` holds, by category."""
    def over(first_stage):
        return a.replicas if stage >= first_stage else 1

    table = VOCAB * HIDDEN
    tokens = SEQUENCES * SEQ_LEN // a.replicas
    layer = (parameters - 2 * table - HIDDEN) // LAYERS
    two_blocks = max(table + layer, 2 * layer, layer + table + HIDDEN)
    return {
        "weights": a.value_bytes * parameters / over(3),
        "gradients": 4 * parameters / over(2),
        "optimizer": (8 if a.dtype == "f32" else 12) * parameters / over(1),
        "gathered": a.value_bytes * two_blocks if stage == 3 else 0,
        # The layers', and of the head its input and the gradient of that.
        "activations": tokens * (LAYERS * bytes_per_layer_and_token(a, mode) + 2 * a.value_bytes * HIDDEN),
    }


def stage_table(a):
    resident = {}
    columns = ["ZeRO", "recompute", "weights", "gradients", "optimizer", "gathered", "activations", "buffers"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for stage in a.stages:
        for mode in ["none", "full"]:
            line = bench(a, "--dp", a.replicas, "--zero", stage, "--recompute", mode, "--steps", 1)
            resident[stage, mode] = line["peak_rss_bytes"]
            cells = []
            for category, expected in formulas(a, stage, mode, line["parameters"]).items():
                measured = line["memory"][f"{category}_peak_bytes"]
                ratio = f", {measured / expected:.2f}" if expected else ""
                cells.append(f"{measured / MIB:.1f}{ratio}")
            cells.append(f"{line['memory']['buffers_peak_bytes'] / MIB:.1f}")
            print(f"| {stage} | {mode} | " + " | ".join(cells) + " |", flush=True)
    first = a.stages[0]
    print(f"\n| ZeRO | resident size of {a.replicas} ranks, MiB | over stage {first} |\n|---|---|---|")
    for stage in a.stages:
        size = resident[stage, "none"]
        print(f"| {stage} | {size / MIB:.0f} | {size / resident[first, 'none']:.2f} |")


def tile_table(a):
    print("\n| --tile-linears | gathered, MiB | over 1 tile | tokens/s over 1 tile |\n|---|---|---|---|")
    whole = None
    for tiles in [1, 2, 4, 8]:
        flags = ["--dp", a.replicas, "--zero", 3, "--tile-linears", tiles, "--steps", 3]
        runs = [bench(a, *flags) for _ in range(max(a.turns, 1))]
        gathered = runs[0]["memory"]["gathered_peak_bytes"]
        speed = max(run["tokens_per_sec"] for run in runs)
        whole = whole or (gathered, speed)
        print(f"| {tiles} | {gathered / MIB:.1f} | {gathered / whole[0]:.2f} | {speed / whole[1]:.2f} |", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--turns", type=int, default=3, help="0: no table of what recomputing costs")
    p.add_argument("--replicas", type=int, default=4)
    p.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    p.add_argument("--dtype", default="f32")
    p.add_argument("flags", nargs="*", help="of bench_train, after --")
    a = p.parse_args()
    a.value_bytes = 4 if a.dtype == "f32" else 2
    if a.turns:
        recompute_table(a)
        print()
    stage_table(a)
    if 3 in a.stages:
        tile_table(a)


if __name__ == "__main__":
    main()
