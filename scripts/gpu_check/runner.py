"""Runs the programs of the bundle and PyTorch's, each as a process with a deadline, and keeps what they say."""
import contextlib
import json
import os
import pathlib
import signal
import site
import subprocess
import sys
import tarfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "target/cuda/bundle"
# Less is not worth starting a process for.
MIN_SECS = 5


class Failed(RuntimeError):
    """What a part could not do, in a sentence."""


class OutOfTime(Failed):
    """The call's time is over."""


def wheels():
    """The folders of NVIDIA's libraries that came with PyTorch."""
    roots = [pathlib.Path(root) / "nvidia" for root in [*site.getsitepackages(), site.getusersitepackages()]]
    return [str(folder) for root in roots for folder in sorted(root.glob("*/lib"))]


class Runner:
    """One call of the script: its time, its folder for files that go again, and its logs."""

    def __init__(self, smoke, folder, budget, bundle=BUNDLE):
        self.smoke, self.folder, self.bundle = smoke, pathlib.Path(folder), bundle
        self.ends = time.monotonic() + budget
        self.programs = self.folder / "programs"
        self.logs = self.folder / "logs"
        self.logs.mkdir()
        named = os.environ.get("LD_LIBRARY_PATH", "")
        # The folders that are named already come first: a newer NCCL. An emulated GPU must not meet real libraries.
        folders = [named] if smoke else [named, *wheels()]
        self.environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders).strip(":"),
                            "CANDLE_TRAIN_REQUIRE_CUDA": "1", "CANDLE_TRAIN_TEST_DEVICE": "cuda:0", "RUST_BACKTRACE": "0"}
        # PyTorch finds its own libraries, and must not find emulated ones.
        self.torch_environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if smoke:
            self.torch_environment.pop("LD_LIBRARY_PATH", None)

    def left(self):
        """Seconds of the call."""
        return self.ends - time.monotonic()

    def program(self, name):
        """A program of the bundle. The first one that is asked for unpacks them all."""
        if not self.programs.exists():
            packed = self.bundle / "programs.tar.xz"
            if not packed.exists():
                raise Failed(f"{packed} is not there: scripts/cuda-build.sh makes it")
            with tarfile.open(packed) as programs:
                programs.extractall(self.programs)
        program = self.programs / name
        if not program.exists():
            raise Failed(f"{name} is not in {self.bundle / 'programs.tar.xz'}: scripts/cuda-build.sh without arguments packs it")
        return program

    def run(self, what, command, deadline, variables=None, environment=None):
        """The output of a command, which must succeed before its deadline and the call's; all of it is kept in a log."""
        # An emulated GPU takes its time.
        deadline = 4 * deadline if self.smoke else deadline
        secs = min(deadline, self.left())
        if secs < MIN_SECS:
            raise OutOfTime(f"{what}: not started, the call's time is over")
        log = self.logs / f"{what.replace(' ', '-')}.log"
        environment = {**(environment or self.environment), **(variables or {})}
        with open(log, "w") as out:
            process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, stdout=out,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(timeout=secs)
                how = f"exit code {code}"
            except subprocess.TimeoutExpired:
                code = None
                how = f"not finished within {secs:.0f} s" + (", when the call's time was over" if secs < deadline else "")
            finally:
                # What it has started goes with it: a process that stays would keep memory of the GPU.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(errors="replace")
        if code != 0:
            raise Failed(f"{what}: {how}: " + " | ".join(text.strip().splitlines()[-6:]))
        return text

    def ours(self, what, name, arguments, deadline, variables=None, launcher=()):
        return self.run(what, [*launcher, self.program(name), *arguments], deadline, variables)

    def torch(self, what, script, arguments, deadline):
        """A script of scripts/reference, under this Python."""
        command = [sys.executable, ROOT / "scripts/reference" / script, *arguments]
        return self.run(what, command, deadline, environment=self.torch_environment)

    def tests(self, what, name, deadline, *filters, variables=None, launcher=()):
        text = self.ours(what, name, filters, deadline, variables, launcher)
        passed = [line.split()[3] for line in text.splitlines() if line.startswith("test result: ok.")]
        if not passed or passed[0] == "0":
            raise Failed(f"{what}: no test ran")
        return {"result": f"{passed[0]} tests passed"}

    def pack_logs(self, target):
        with tarfile.open(target, "w:xz") as packed:
            packed.add(self.logs, arcname="logs")


def json_lines(text):
    """The lines of an output that are JSON objects."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    if not found:
        raise Failed("the program printed no JSON")
    return found
