#!/usr/bin/env python3
"""Training speed and memory of this project, against PyTorch and on its own layouts, as Markdown tables.

    cargo build --release --example bench_train
    scripts/bench_train.py [--python PYTHON] [--before PROGRAM] [--turns N] [--steps N]
                           [--cases NAME ..] [--precisions NAME ..] [--layouts NAME ..] [--packed NAME ..]

PYTHON is an interpreter with torch and transformers, PROGRAM this benchmark built from another commit; the columns about
what is not given are left out. The programs of a case run in turns, so that what else the machine does hits all; of each the turn
with the median step is taken. Memory is the peak of the process's resident size. `--cases`, `--layouts` or `--packed` without a
name leaves a table out.
"""
import argparse
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = ROOT / "target/release/examples/bench_train"
TORCH = ROOT / "scripts/reference/bench_torch.py"
CASES = {
    "default": ("31.6M parameters, 4 x 256 tokens", []),
    "long": ("31.6M parameters, 1 x 1024 tokens", ["--seq-len", "1024", "--batch-size", "1"]),
    "large": ("12 layers of 768, vocabulary 32000, 2 x 256 tokens", [
        "--hidden-size", "768", "--intermediate-size", "2048", "--layers", "12", "--heads", "12", "--kv-heads", "12",
        "--vocab-size", "32000", "--batch-size", "2"]),
    "small": ("6 layers of 256, 2 x 128 tokens", [
        "--hidden-size", "256", "--intermediate-size", "688", "--layers", "6", "--heads", "4", "--kv-heads", "4",
        "--seq-len", "128", "--batch-size", "2"]),
    "wide": ("8 layers of 640, 10 heads on 2, MLP of 1720, vocabulary 12000, 3 x 320 tokens", [
        "--hidden-size", "640", "--intermediate-size", "1720", "--heads", "10", "--kv-heads", "2", "--vocab-size", "12000",
        "--seq-len", "320", "--batch-size", "3"]),
}
# The flags of our programs, and those of the PyTorch program that is the reference.
PRECISIONS = {
    "f32": (["--dtype", "f32"], ["--dtype", "f32"]),
    "f32 high": (["--dtype", "f32", "--matmul-precision", "high"], ["--dtype", "f32"]),
    "bf16": (["--dtype", "bf16"], ["--dtype", "bf16"]),
}
LAYOUTS = {"one rank": [], "tp = 2": ["--tp", "2"], "pp = 2": ["--pp", "2"], "dp = 2": ["--dp", "2"],
           "dp = 2, ZeRO-2": ["--dp", "2", "--zero", "2"], "dp = 2, ZeRO-3": ["--dp", "2", "--zero", "3"]}

# What gains by weights that stay packed: frozen ones, and those of several micro-batches.
FREEZE = ["--freeze", "proj|embed_tokens|lm_head"]
PACKED = {
    "all but norms frozen, default, 1 x 256 tokens": ["--batch-size", "1", *FREEZE],
    "all but norms frozen, large, 1 x 256 tokens": [*CASES["large"][1], "--batch-size", "1", *FREEZE],
    "default, 4 micro-batches of 1 x 256 tokens": ["--batch-size", "4", "--micro-batch-size", "1"],
    "large, 4 micro-batches of 1 x 256 tokens": [*CASES["large"][1], "--batch-size", "4", "--micro-batch-size", "1"],
}


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    has = [f"{name}: {'yes' if flag in flags else 'no'}"
           for name, flag in (("AVX-512", "avx512f"), ("AVX512-BF16", "avx512_bf16"), ("AMX", "amx_bf16"))]
    return f"{fields.get('model name', 'unknown processor')}, {len(os.sched_getaffinity(0))} cores ({', '.join(has)})"


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def medians(turns, commands):
    """The run with the median step of each command; the commands take turns."""
    runs = {name: [] for name in commands}
    for _ in range(turns):
        for name, command in commands.items():
            runs[name].append(run(command))
    return {name: sorted(results, key=lambda result: result["step_secs"])[turns // 2] for name, results in runs.items()}


def header(*columns):
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")


def beside(name):
    return [name, "ratio", "memory, ratio"]


def ratios(ours, other):
    """The other program's tokens/s, and ours over it in speed and in memory."""
    speed, memory = (ours[field] / other[field] for field in ("tokens_per_sec", "peak_rss_bytes"))
    return [f"{other['tokens_per_sec']:.0f}", f"**{speed:.2f}**", f"{memory:.2f}"]


def row(*cells):
    print("| " + " | ".join(cells) + " |", flush=True)


def print_cases(a, others, steps):
    """Each case in each precision beside the other programs, whose flags may be the same for two precisions."""
    columns = [column for name in others for column in beside(name)]
    header("case", "precision", "tokens/s", "step / products alone", "memory, MiB", "memory over our f32", *columns)
    for case in a.cases:
        what, shape = CASES[case]
        commands = {}
        for precision in a.precisions:
            flags, reference = PRECISIONS[precision]
            commands["ours", *flags] = [OURS, *shape, *steps, *flags]
            for name, program in others.items():
                own = reference if name == "PyTorch" else flags
                commands[name, *own] = [*program, *shape, *steps, *own]
        found = medians(a.turns, commands)
        in_f32 = found.get(("ours", *PRECISIONS["f32"][0]))
        for precision in a.precisions:
            flags, reference = PRECISIONS[precision]
            ours, rss = found["ours", *flags], found["ours", *flags]["peak_rss_bytes"]
            cells = [f"{case}: {what}", precision, f"{ours['tokens_per_sec']:.0f}",
                     f"{ours['step_secs'] / ours['product_floor_secs']:.2f}", f"{rss / 2**20:.0f}",
                     f"{rss / in_f32['peak_rss_bytes']:.2f}" if in_f32 else ""]
            for name in others:
                cells += ratios(ours, found[name, *(reference if name == "PyTorch" else flags)])
            row(*cells)
    print()


def print_layouts(a, before, steps):
    """The default case on each layout, beside one rank and beside the same layout of another commit."""
    parts = ["forward", "backward", "communication", "optimizer"]
    header("layout, default case", "precision", "tokens/s", "ratio to one rank", *parts, *(beside("before") if before else []))
    for precision in a.precisions:
        flags = [*PRECISIONS[precision][0], *steps]
        programs = {"ours": OURS} | ({"before": before} if before else {})
        found = medians(a.turns, {(name, layout): [program, *flags, *LAYOUTS[layout]]
                                  for layout in dict.fromkeys(["one rank", *a.layouts]) for name, program in programs.items()})
        for layout in a.layouts:
            ours = found["ours", layout]
            cells = [layout, precision, f"{ours['tokens_per_sec']:.0f}",
                     f"{ours['tokens_per_sec'] / found['ours', 'one rank']['tokens_per_sec']:.2f}"]
            cells += [f"{ours[part + '_secs']:.3f} s" for part in parts]
            row(*cells, *(ratios(ours, found["before", layout]) if before else []))


def print_packed(a, steps):
    """Each case with weights that stay packed beside the same without."""
    header("case", "precision", "tokens/s", "without", "ratio", "memory, ratio")
    for case in a.packed:
        for precision in a.precisions:
            flags = [*PACKED[case], *PRECISIONS[precision][0], *steps]
            found = medians(a.turns, {choice: [OURS, *flags, "--pack-weights", choice] for choice in ("on", "off")})
            cells = [case, precision, f"{found['on']['tokens_per_sec']:.0f}"]
            row(*cells, *ratios(found["on"], found["off"]))
    print()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--python", help="an interpreter with torch and transformers")
    p.add_argument("--before", metavar="PROGRAM", help="bench_train of another commit, to compare with")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--steps", type=int, default=6)
    for name, known in [("cases", CASES), ("precisions", PRECISIONS), ("layouts", LAYOUTS), ("packed", PACKED)]:
        p.add_argument("--" + name, nargs="*", choices=list(known), default=list(known), metavar="NAME", help=f"of {', '.join(known)}")
    a = p.parse_args()
    steps = ["--steps", str(a.steps)]
    others = {"PyTorch": [a.python, TORCH] if a.python else None, "before": [a.before] if a.before else None}
    print(f"{processor()}; medians of {a.turns} turns of {a.steps} steps\n")
    if a.cases:
        print_cases(a, {name: command for name, command in others.items() if command}, steps)
    if a.layouts:
        print_layouts(a, a.before, steps)
    if a.packed:
        print_packed(a, steps)


if __name__ == "__main__":
    main()
