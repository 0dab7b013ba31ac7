#!/usr/bin/env python3
"""What training holds in memory beside the formulas of docs/design.md, and what recomputing costs, as Markdown tables.

    cargo build --release --example bench_train
    scripts/bench_memory.py [--turns N] [--replicas N] [--stages 0 1 2 3] [--dtype f32] [-- FLAGS OF bench_train]

First what a decoder layer keeps for the backward pass, by what is recomputed: what the peak of activations grows by with the
number of layers. The programs run in turns, and the best median step of each is taken.

Then what a rank of N replicas holds at most, by stage of ZeRO, in MiB, and over the formula: measured / formula. Of the weights
gathered at a time the formula is a bound, the two largest neighbouring blocks. Last the resident size of the process in which all
of these ranks are threads. And what is gathered at a time if ZeRO-3 gathers weights in tiles.

With `-- --device cuda` activations are counted by the GPU's memory pool: take as many replicas as there are GPUs. With
`-- --device cuda:0` all replicas share a GPU, and count each other's activations; a table tells what the GPU holds between steps
by its own count, and that over what the meters of all replicas count.
"""
import argparse
import json
import pathlib

from bench_train import OURS, run

MODES = ["none", "full"]
# The default of bench_train.
SHAPE = {"hidden-size": 512, "intermediate-size": 1376, "heads": 8, "kv-heads": 4, "vocab-size": 8192, "layers": 8, "seq-len": 256,
         "batch-size": 4}
MIB = 1 << 20


def bench(a, *extra):
    shape = [word for name in SHAPE for word in ("--" + name, getattr(a, name.replace("-", "_")))]
    return run(list(map(str, [a.program, *shape, "--dtype", a.dtype, *extra, *a.flags])))


def bytes_per_layer_and_token(a, mode):
    """What a layer keeps for a token, on one tensor-parallel rank."""
    query, key = a.hidden_size, a.hidden_size // a.heads * a.kv_heads
    if mode == "full":
        return a.value_bytes * a.hidden_size
    return a.value_bytes * (2 * a.hidden_size + 2 * query + 2 * key + 2 * a.intermediate_size) + 4 * a.heads


def recompute_table(a):
    def activations(mode, layers):
        fewer = argparse.Namespace(**{**vars(a), "layers": layers})
        return bench(fewer, "--recompute", mode, "--steps", 1)["memory"]["activations_peak_bytes"]

    runs = [{mode: bench(a, "--recompute", mode, "--steps", 6) for mode in MODES} for _ in range(a.turns)]
    speed = {mode: max(turn[mode]["tokens_per_sec"] for turn in runs) for mode in MODES}
    print("| recompute | tokens/s | ratio to none | bytes per layer and token | formula | measured / formula |")
    print("|---|---|---|---|---|---|")
    for mode in MODES:
        grown = activations(mode, a.layers) - activations(mode, a.layers // 2)
        measured, expected = grown / (a.layers - a.layers // 2) / (a.batch_size * a.seq_len), bytes_per_layer_and_token(a, mode)
        print(f"| {mode} | {speed[mode]:.0f} | {speed[mode] / speed['none']:.2f} | {measured:.0f} | {expected} | "
              f"{measured / expected:.2f} |", flush=True)


def formulas(a, stage, mode, parameters):
    """Bytes that a rank of `replicas` holds, by category."""
    def over(first_stage):
        return a.replicas if stage >= first_stage else 1

    table = a.vocab_size * a.hidden_size
    tokens = a.batch_size * a.seq_len // a.replicas
    layer = (parameters - 2 * table - a.hidden_size) // a.layers
    two_blocks = max(table + layer, 2 * layer, layer + table + a.hidden_size)
    return {
        "weights": a.value_bytes * parameters / over(3),
        "gradients": 4 * parameters / over(2),
        "optimizer": (8 if a.dtype == "f32" else 12) * parameters / over(1),
        "gathered": a.value_bytes * two_blocks if stage == 3 else 0,
        # The layers', and of the head its input and the gradient of that.
        "activations": tokens * (a.layers * bytes_per_layer_and_token(a, mode) + 2 * a.value_bytes * a.hidden_size),
    }


def kept_by_replicas(a, line):
    """Bytes that all replicas hold between steps, by the meter of the first one: they hold the same."""
    return a.replicas * sum(bytes_ for name, bytes_ in line["memory"].items() if not name.endswith("_peak_bytes"))


def stage_table(a):
    """Prints the table and returns the line of each run."""
    lines = []
    columns = ["ZeRO", "recompute", "weights", "gradients", "optimizer", "gathered", "activations", "buffers"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for stage in a.stages:
        for mode in ["none", "full"]:
            line = bench(a, "--dp", a.replicas, "--zero", stage, "--recompute", mode, "--steps", 1)
            expected = formulas(a, stage, mode, line["parameters"])
            lines.append({"zero": stage, "recompute": mode, "formulas": expected, "kept_by_replicas": kept_by_replicas(a, line), **line})
            cells = []
            for category, bytes_ in expected.items():
                measured = line["memory"][f"{category}_peak_bytes"]
                ratio = f", {measured / bytes_:.2f}" if bytes_ else ""
                cells.append(f"{measured / MIB:.1f}{ratio}")
            cells.append(f"{line['memory']['buffers_peak_bytes'] / MIB:.1f}")
            print(f"| {stage} | {mode} | " + " | ".join(cells) + " |", flush=True)
    return lines


def resident_table(a, lines):
    resident = {line["zero"]: line["peak_rss_bytes"] for line in lines if line["recompute"] == "none"}
    first = a.stages[0]
    print(f"\n| ZeRO | resident size of {a.replicas} ranks, MiB | over stage {first} |\n|---|---|---|")
    for stage, size in resident.items():
        print(f"| {stage} | {size / MIB:.0f} | {size / resident[first]:.2f} |")


def device_table(lines):
    print("\n| ZeRO | recompute | meters, MiB | device, MiB | device / meters | device's peak, MiB | of the device in use, MiB |")
    print("|---|---|---|---|---|---|---|")
    for line in lines:
        meters, device = line["kept_by_replicas"], line["device_bytes"]
        print(f"| {line['zero']} | {line['recompute']} | {meters / MIB:.1f} | {device / MIB:.1f} | {device / meters:.2f} | "
              f"{line['peak_device_bytes'] / MIB:.1f} | {line['device_in_use_bytes'] / MIB:.0f} |")


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
    p.add_argument("--program", type=pathlib.Path, default=OURS, help="another bench_train than this repository's")
    p.add_argument("--turns", type=int, default=3, help="0: no table of what recomputing costs")
    p.add_argument("--replicas", type=int, default=4)
    p.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    p.add_argument("--dtype", default="f32")
    for name, value in SHAPE.items():
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--json", action="store_true", help="print all numbers of each run with replicas, too, a line each")
    p.add_argument("flags", nargs="*", help="of bench_train, after --")
    a = p.parse_args()
    a.value_bytes = 4 if a.dtype == "f32" else 2
    if a.turns:
        recompute_table(a)
        print()
    lines = stage_table(a)
    if lines[0]["device_bytes"] is None:
        resident_table(a, lines)
    else:
        device_table(lines)
    if 3 in a.stages:
        tile_table(a)
    if a.json:
        print(*map(json.dumps, lines), sep="\n")


if __name__ == "__main__":
    main()
