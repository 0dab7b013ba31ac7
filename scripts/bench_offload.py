#!/usr/bin/env python3
"""What offloaded training reads, writes, holds and takes, as Markdown tables.

    cargo build --release --example bench_train
    scripts/bench_offload.py DIR [--steps N] [--cases NAME ..]

DIR is a folder on the disk to be measured, with room for 16 bytes for each parameter. A case runs with weights, gradients and state in files of DIR, and but
for the largest one also without. Bytes are those that the process reads and writes in a step, as Linux counts them, beside those that
follow from the model; the bound of a step is the larger one of the step without offload and of a plain copy of these bytes by the same calls.
Memory is the most anonymous memory of the process (RssAnon, looked at a hundred times a second) beside what its allocator counted.
"""
import argparse
import json
import pathlib
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/examples/bench_train"


class Model:
    def __init__(self, hidden, intermediate, layers, heads, kv_heads, vocabulary):
        self.hidden, self.intermediate, self.layers = hidden, intermediate, layers
        self.heads, self.kv_heads, self.vocabulary = heads, kv_heads, vocabulary

    def flags(self):
        return ["--hidden-size", self.hidden, "--intermediate-size", self.intermediate, "--layers", self.layers,
                "--heads", self.heads, "--kv-heads", self.kv_heads, "--vocab-size", self.vocabulary]

    def head(self):
        return self.vocabulary * self.hidden + self.hidden


# What computes longer than it copies, what copies longer than it computes, and a model of 24 GB by 20 bytes a parameter.
CASES = {
    "computing": (Model(1024, 2816, 4, 16, 8, 8192), 48, 512, 4, True),
    "disk": (Model(1024, 2816, 8, 16, 8, 8192), 2, 64, 1, True),
    "large": (Model(2048, 8192, 20, 32, 8, 4096), 4, 64, 1, False),
}
# Bytes a value in bf16: of weights, gradients, and of moments with remainders.
WEIGHT, GRADIENT, STATE = 2, 4, 10


def expected(model, num_values):
    """What a step reads and writes where all micro-batches go through a layer before the next: weights for the forward pass, which the head does
    not need, the backward pass and the update, gradients and state for the update; each written once."""
    read = num_values * (3 * WEIGHT + GRADIENT + STATE) - model.head() * WEIGHT
    return read, num_values * (WEIGHT + GRADIENT + STATE)


def run(flags):
    process = subprocess.Popen([str(PROGRAM), *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    most, status = [0], pathlib.Path(f"/proc/{process.pid}/status")

    def sample():
        while process.poll() is None:
            try:
                lines = status.read_text().splitlines()
            except OSError:
                break
            anonymous = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
            most[0] = max([most[0]] + [1024 * int(kib) for kib in anonymous])
            time.sleep(0.01)

    sampler = threading.Thread(target=sample)
    sampler.start()
    out, err = process.communicate()
    sampler.join()
    if process.returncode != 0:
        raise SystemExit(f"{PROGRAM} {' '.join(map(str, flags))} failed:\n{err}")
    return json.loads(out.strip().splitlines()[-1]), most[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", metavar="DIR", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME")
    args = parser.parse_args()
    print("| case | parameters | tokens a step | GB read / expected | GB written / expected | step | without offload | plain copy | step / bound "
          "| RssAnon | allocated | RssAnon / allocated |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name in args.cases:
        model, batch, seq_len, micro_batch, runs_without = CASES[name]
        flags = [*model.flags(), "--batch-size", batch, "--micro-batch-size", micro_batch, "--seq-len", seq_len, "--dtype", "bf16",
                 "--recompute", "full", "--schedule", "gpipe", "--virtual-stages", model.layers + 2, "--pipeline-layout", ",".join(["0", *["1"] * model.layers, "0"]), "--steps", args.steps]
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            away, anonymous = run([*flags, "--offload", "optimizer,gradients,params", "--offload-dir", folder])
        here = run(flags)[0] if runs_without else None
        if here is not None and here["losses"] != away["losses"]:
            raise SystemExit(f"the losses of {name} are {away['losses']} with offload, {here['losses']} without")
        read, written = expected(model, away["parameters"])
        bound = max(away["plain_copy_secs"], here["step_secs"] if here else 0)
        without = f"{here['step_secs']:.2f} s" if here else ""
        print(f"| {name} | {away['parameters'] / 1e6:.0f}M | {batch} x {seq_len} "
              f"| {away['read_bytes_per_step'] / 1e9:.3f} / {read / 1e9:.3f} | {away['written_bytes_per_step'] / 1e9:.3f} / {written / 1e9:.3f} "
              f"| {away['step_secs']:.2f} s | {without} | {away['plain_copy_secs']:.2f} s | {away['step_secs'] / bound:.2f} "
              f"| {anonymous / 1e6:.0f} MB | {away['peak_allocated_bytes'] / 1e6:.0f} MB | {anonymous / away['peak_allocated_bytes']:.2f} |",
              flush=True)


if __name__ == "__main__":
    main()
