#!/usr/bin/env python3
"""Where an asynchronous parameter server ends beside a synchronous one after the same samples: the bundled example, as a Markdown table.

    cargo build --release --bin candle-train
    scripts/parameter_server.py [--program PROGRAM] [--steps N] [--workers N]

Each run fine-tunes the same weights on all of the text but a tenth that is held out, with servers and workers as processes. The losses are
the mean of the last 20 steps and that of the held-out sequences after the last step. A slow worker is one that signals stop for half of the
time. It fails if an asynchronous run ends more than 5% above the synchronous one.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ASSETS = ROOT / "examples/assets"
SETTINGS = ["--micro-batch-size", "4", "--lr", "1e-3", "--warmup-steps", "5", "--weight-decay", "0.1", "--epochs", "3",
            "--eval-fraction", "0.1", "--model", ASSETS / "shakespeare-llama", "--data", ASSETS / "alice.txt"]
# What each run is called, its flags, and whether its last worker is slow.
RUNS = [
    ("synchronous", [], False),
    ("staleness at most 0", ["--async", "--max-staleness", "0"], False),
    ("staleness at most 1", ["--async", "--max-staleness", "1"], False),
    ("staleness at most 1, one slow worker", ["--async", "--max-staleness", "1"], True),
    ("staleness at most 4, one slow worker", ["--async", "--max-staleness", "4"], True),
]
LAST_STEPS, TOLERANCE = 20, 0.05
PAUSE_SECS = 0.05


def process_of_rank(rank, folder):
    """The process of a rank of the run that writes to this folder, once there is one."""
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and any(folder.encode() in word for word in words) and b"launch" not in words:
            return int(entry.name)
    return None


def slow_down(rank, folder, is_over):
    """Stops the process of a rank for half of the time, until the run is over or the process ends."""
    pid = None
    while pid is None and not is_over.wait(PAUSE_SECS):
        pid = process_of_rank(rank, folder)
    try:
        while not is_over.wait(PAUSE_SECS):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_SECS)
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def run(program, num_ranks, flags, has_slow_worker):
    """The losses, and the mean and the largest staleness."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        command = [program, "launch", "--nproc-per-node", str(num_ranks), program, "finetune", *SETTINGS, *flags,
                   "--metrics", metrics, "--output", pathlib.Path(folder) / "model"]
        is_over = threading.Event()
        slow = threading.Thread(target=slow_down, args=(num_ranks - 1, folder, is_over))
        if has_slow_worker:
            slow.start()
        done = subprocess.run(command, capture_output=True, text=True)
        is_over.set()
        if has_slow_worker:
            slow.join()
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    last = [step["loss"] for step in steps[-LAST_STEPS:]]
    staleness = [step["staleness"] for step in steps if "staleness" in step]
    mean = sum(s["mean"] for s in staleness) / max(len(staleness), 1)
    losses = [sum(last) / len(last), [line["eval_loss"] for line in lines if "eval_loss" in line][-1]]
    return losses, mean, max([s["max"] for s in staleness], default=0)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", default=ROOT / "target/release/candle-train")
    p.add_argument("--steps", type=int, help="in place of 3 epochs")
    p.add_argument("--seq-len", type=int, default=128)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--servers", type=int, default=1)
    a = p.parse_args()
    common = ["--seq-len", str(a.seq_len), "--strategy", "parameter-server", "--servers", str(a.servers)]
    if a.steps:
        at = SETTINGS.index("--epochs")
        SETTINGS[at:at + 2] = ["--steps", str(a.steps)]
    print(f"| {a.servers} servers, {a.workers} workers | last {LAST_STEPS} steps | over synchronous | held out | over synchronous | staleness |")
    print("|---|---|---|---|---|---|")
    reference, worst = None, 0.0
    for name, flags, has_slow_worker in RUNS:
        found, mean, largest = run(a.program, a.servers + a.workers, common + flags, has_slow_worker)
        reference = reference or found
        ratios = [loss / of_first for loss, of_first in zip(found, reference)]
        worst = max([worst, *(ratio - 1 for ratio in ratios)])
        cells = [f"{loss:.4f} | {ratio:.4f}" for loss, ratio in zip(found, ratios)]
        print(f"| {name} | {' | '.join(cells)} | {mean:.2f} on average, at most {largest} |", flush=True)
    if worst > TOLERANCE:
        raise SystemExit(f"a loss is {100 * worst:.2f}% above the synchronous one; expected at most {100 * TOLERANCE:.0f}%")


if __name__ == "__main__":
    main()
