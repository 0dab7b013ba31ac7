"""What scripts/gpu-check.sh runs: each program is a process of its own with a deadline; what one part does cannot stop the next."""
import argparse
import datetime
import itertools
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time

import rows
from plan import CALL_SECS, CALLS, PARTS, chosen, run_part
from runner import BUNDLE, ROOT, Runner

def commit():
    """Of the bundle."""
    noted = BUNDLE / "commit"
    if noted.exists():
        return noted.read_text().strip()
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def gpu_of(parts):
    """What the programs called the GPU."""
    found = [parts.get("preflight", {}).get("opened", {}), parts.get("step", {}).get("run", {})]
    found += [row.get("runs", {}).get("ours", {}) for row in parts.values()]
    return next((line["device"] for line in found if "device" in line), None)


def name_of_gpu():
    try:
        done = subprocess.run(["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True,
                              timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/gpu-check.sh", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: tries the script, measures nothing")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("target/gpu-check"), metavar="FOLDER")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"of this run [default: {CALL_SECS} a call; none for single parts]")
    parser.add_argument("--rows", type=pathlib.Path, nargs="+", metavar="FILE", help="print the table of docs/gpu/RESULTS.md from the JSON of earlier runs, and run nothing")
    words = [*CALLS, *PARTS]
    parser.add_argument("parts", nargs="*", choices=[[], *words], metavar="CALL|PART", help=", ".join(words))
    return parser.parse_args()


def new_report(smoke):
    variables = {name: value for name, value in os.environ.items() if name.startswith("CANDLE_TRAIN_")}
    return {"began": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "commit": commit(),
            "machine": platform.node(), "variables": variables, "gpu": name_of_gpu(), "smoke": smoke, "secs": 0, "parts": {}}


def new_label(folder, words):
    """For the files of a run: no earlier run loses its own."""
    label = "-".join(words) or "all"
    numbered = (f"{label}{suffix}" for suffix in itertools.chain([""], (f"-{number}" for number in itertools.count(2))))
    return next(label for label in numbered if not (folder / f"{label}.json").exists())


def print_row(name, row, smoke):
    reached = {True: "yes", False: "no", None: ""}[row.get("reached")]
    if smoke and "goal" in row:
        reached = "not measured"
    print(f"| {name} | {row['result']} | {row['secs']} | {row.get('goal', '')} | {reached} |", flush=True)


def main():
    a = arguments()
    if a.rows:
        print(rows.table(rows.merged(a.rows)))
        return
    # Ends as Ctrl-C does, with what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    is_a_call = len(a.parts) == 1 and a.parts[0] in CALLS
    budget = a.budget or (CALL_SECS if is_a_call and not a.smoke else float("inf"))
    a.output.mkdir(parents=True, exist_ok=True)
    label = new_label(a.output, a.parts)
    report, began = new_report(a.smoke), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Runner(a.smoke, folder, budget)
        if a.smoke:
            print("a smoke run: sizes are tiny, no number below measures anything")
        print("| part | result | seconds | goal | reached |\n|---|---|---|---|---|", flush=True)
        for name in chosen(a.parts):
            row = report["parts"][name] = run_part(run, name)
            print_row(name, row, a.smoke)
            # After each part: whoever ends this run early has what was measured.
            report |= {"secs": round(time.monotonic() - began, 1), "gpu": report["gpu"] or gpu_of(report["parts"])}
            (a.output / f"{label}.json").write_text(json.dumps(report, indent=1) + "\n")
            run.pack_logs(a.output / f"{label}-logs.tar.xz")
    print(f"{report['secs']:.0f} s in all; {a.output / label}.json has all numbers, {label}-logs.tar.xz what the programs said")
    failed = [name for name, row in report["parts"].items() if row["result"].startswith(("FAILED", "SKIPPED: "))]
    sys.exit(f"failed or skipped: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
