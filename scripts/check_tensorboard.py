#!/usr/bin/env python3
"""Reads the curves of a run and of its continuation with TensorBoard itself, and compares them with the metrics file.

    pip install tensorboard
    cargo build --release -p candle-train-cli
    scripts/check_tensorboard.py
"""
import argparse
import json
import pathlib
import subprocess
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = ["loss", "grad_norm", "learning_rate", "tokens_per_sec", "num_tokens"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/candle-train")
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        command = [a.program, "finetune", "--model", ROOT / "tests/fixtures/gqa/model", "--data", ROOT / "tests/fixtures/text.txt",
                   "--output", folder / "output", "--save-dir", folder / "saves", "--save-every", "3", "--steps", "8", "--seq-len", "16",
                   "--global-batch-size", "4", "--micro-batch-size", "1", "--sample-tokens", "0", "--metrics", folder / "metrics.jsonl",
                   "--tensorboard", folder / "curves"]
        subprocess.run(command, check=True, capture_output=True)
        # Steps 6 and 7 once more, in a file of their own.
        subprocess.run([*command, "--resume", "latest"], check=True, capture_output=True)
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        events = EventAccumulator(str(folder / "curves")).Reload()
        for name in NAMES:
            points = events.Scalars(f"train/{name}")
            assert [point.step for point in points] == [step["step"] for step in steps] == list(range(8)), points
            for point, step in zip(points, steps):
                assert abs(point.value - step[name]) <= 1e-6 * abs(step[name]), (name, point, step)
        print(f"{len(events.Tags()['scalars'])} curves, {len(NAMES)} of them compared: the numbers of the metrics file")


main()
