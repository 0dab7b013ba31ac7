#!/usr/bin/env python3
"""Kills a run that saves after each step at random moments, resumes it, and compares its end with that of a run that was left alone.

    cargo build --release -p candle-train-cli [--features mpi]
    scripts/kill_runs.py [--kills 50] [--mpi RANKS] [--seed 0] [--some-with "FLAGS"]

`kill -9` goes to the process, or with --mpi to one of the ranks or to mpirun, during writes too: the moments are drawn from half the
length of a run, so that the attempts of a run, each of which resumes, reach all of its steps and its end. In the end weights and metrics
must be the same bits, but for times. Every other attempt, by chance, has the FLAGS, which are to change no bit, as "--offload all --offload-dir DIR".
"""
import argparse
import collections
import hashlib
import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/candle-train"
# What differs between two runs of the same: times, bytes, and the run's name.
TIMES = {"tokens_per_sec", "positions_per_sec", "step_secs", "gflops_per_sec", "memory", "pipeline", "run"}


def command(folder, ranks, program, more=()):
    """A run in `folder`, with more flags."""
    flags = ["--model", ROOT / "tests/fixtures/gqa/model", "--data", ROOT / "tests/fixtures/text.txt", "--output", folder / "output",
             "--metrics", folder / "metrics.jsonl", "--save-dir", folder / "saves", "--save-every", "1", "--resume", "latest",
             "--steps", "40", "--seq-len", "16", "--global-batch-size", "4", "--micro-batch-size", "1", "--sample-tokens", "0", *more]
    if not ranks:
        return [program, "finetune", *flags, "--pp", "2", "--tp", "2", "--dp", "2"]
    launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    flags += ["--backend", "mpi", "--pp", "1", "--tp", "2", "--dp", str(ranks // 2)]
    return [*launcher, program, "finetune", *flags]


def result(folder):
    """Weights and numbers of a run that ended."""
    weights = hashlib.sha256((folder / "output/model.safetensors").read_bytes()).hexdigest()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [{name: value for name, value in json.loads(line).items() if name not in TIMES} for line in lines]
    return weights, steps


def processes(session):
    """Processes of a session that are alive, by their commands: mpirun puts each rank into a group of its own."""
    found = subprocess.run(["pgrep", "-s", str(session), "-l"], capture_output=True, text=True).stdout.split("\n")
    return [(int(line.split()[0]), line.split()[1]) for line in found if line]


def kill(pid):
    """Whether the process was still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def attempt(words, moment):
    """Runs until `moment`, then kills a process: the name of that one, or None if the run had ended well before."""
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    killed = None
    try:
        _, said = child.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        pid, name = random.choice(processes(child.pid) or [(child.pid, "")])
        killed = name if kill(pid) else None
        try:
            _, said = child.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            for pid, _ in processes(child.pid):
                kill(pid)
            _, said = child.communicate()
        while left := processes(child.pid):
            for pid, _ in left:
                kill(pid)
            time.sleep(0.01)
    if child.returncode == 0:
        return None
    if not killed:
        raise SystemExit(f"the run failed by itself:\n{said.decode()}")
    return killed


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=50)
    p.add_argument("--mpi", type=int, metavar="RANKS", help="processes over MPI in place of threads")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--some-with", type=shlex.split, default=[], metavar="FLAGS", help="flags that an attempt has or has not")
    p.add_argument("--program", type=pathlib.Path, default=PROGRAM)
    a = p.parse_args()
    random.seed(a.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        whole = folder / "whole"
        whole.mkdir()
        start = time.monotonic()
        subprocess.run(command(whole, a.mpi, a.program), check=True, capture_output=True)
        length, want = time.monotonic() - start, result(whole)
        kills, runs, interrupted = collections.Counter(), 0, None
        while kills.total() < a.kills or interrupted:
            if not interrupted:
                runs += 1
                interrupted = folder / f"run{runs}"
                interrupted.mkdir()
            # After the last kill the run may end.
            moment = random.uniform(0, 0.5 * length) if kills.total() < a.kills else 100 * length
            more = random.choice([a.some_with, []])
            if killed := attempt(command(interrupted, a.mpi, a.program, more), moment):
                kills[killed] += 1
                continue
            if result(interrupted) != want:
                raise SystemExit(f"run {runs} ended with other weights or metrics after {kills.total()} kills")
            interrupted = None
        whom = ", ".join(f"{count} of {name}" for name, count in kills.items())
        print(f"{kills.total()} kills ({whom}) in {runs} runs of {length:.1f} s: weights and metrics of every run are those of the one left alone")


main()
