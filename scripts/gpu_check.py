"""The parts of scripts/gpu-check.sh. Each is a process of its own with a deadline; what one does cannot stop the next."""
import argparse
import datetime
import json
import lzma
import os
import pathlib
import platform
import shutil
import site
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "target/cuda/bundle"
TORCH = [sys.executable, ROOT / "scripts/reference/bench_torch.py"]
MODEL = ["--model", "examples/assets/shakespeare-llama", "--data", "examples/assets/alice.txt"]
ONE_RANK = ["--tp", "1", "--pp", "1", "--dp", "1"]
# Llama-3.2-1B and Llama-3.1-8B
SMALL = {"hidden-size": 2048, "intermediate-size": 8192, "layers": 16, "heads": 32, "kv-heads": 8, "vocab-size": 128256,
         "seq-len": 4096, "batch-size": 8, "steps": 5}
LARGE = {"hidden-size": 4096, "intermediate-size": 14336, "layers": 32, "heads": 32, "kv-heads": 8, "vocab-size": 128256,
         "seq-len": 4096, "batch-size": 1, "steps": 5}
TINY = {"hidden-size": 32, "intermediate-size": 48, "layers": 2, "heads": 4, "kv-heads": 2, "vocab-size": 97, "seq-len": 8,
        "batch-size": 2, "steps": 2}
ALL_BUT_NORMS = "proj|embed_tokens|lm_head"
# Says the version of the library that our programs would load.
NCCL_VERSION = """
import ctypes
version = ctypes.c_int()
ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
print(version.value)
"""


def flags(shape):
    return [text for name, value in shape.items() for text in ("--" + name, str(value))]


def unpacked(folder):
    """The programs of the bundle, by name."""
    programs = {}
    for packed in sorted(BUNDLE.glob("*.xz")):
        program = pathlib.Path(folder) / packed.stem
        with lzma.open(packed) as source, open(program, "wb") as target:
            shutil.copyfileobj(source, target)
        program.chmod(0o755)
        programs[packed.stem] = program
    if not programs:
        sys.exit(f"no programs in {BUNDLE}: scripts/cuda-build.sh makes them")
    return programs


def library_path():
    """The folders that are named already, then those of NVIDIA's wheels."""
    roots = [pathlib.Path(root) / "nvidia" for root in [*site.getsitepackages(), site.getusersitepackages()]]
    found = [str(folder) for root in roots for folder in sorted(root.glob("*/lib"))]
    return ":".join([os.environ.get("LD_LIBRARY_PATH", ""), *found]).strip(":")


class Check:
    def __init__(self, smoke, folder, logs):
        self.smoke, self.folder, self.programs = smoke, pathlib.Path(folder), unpacked(folder)
        self.logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self.environment = {**os.environ, "LD_LIBRARY_PATH": library_path(), "CANDLE_TRAIN_REQUIRE_CUDA": "1",
                            "CANDLE_TRAIN_TEST_DEVICE": "cuda:0", "RUST_BACKTRACE": "0"}

    def run(self, what, command, deadline):
        """The output of a command, which must succeed; all of it is kept in a log."""
        log = self.logs / f"{what.replace(' ', '-')}.log"
        with open(log, "w") as out:
            try:
                code = subprocess.run(list(map(str, command)), cwd=ROOT, env=self.environment, stdout=out,
                                      stderr=subprocess.STDOUT, timeout=deadline).returncode
            except subprocess.TimeoutExpired:
                code = f"none within {deadline} s"
        text = log.read_text()
        if code != 0:
            raise RuntimeError(f"{what}: exit code {code}: " + " | ".join(text.strip().splitlines()[-6:]))
        return text

    def tests(self, what, program, deadline, *filters, way=()):
        text = self.run(what, [*way, self.programs[program], *filters], deadline)
        passed = [line.split()[3] for line in text.splitlines() if line.startswith("test result: ok.")]
        if not passed or passed[0] == "0":
            raise RuntimeError(f"{what}: no test ran")
        return {"result": f"{passed[0]} tests passed"}

    def operations(self):
        return self.tests("operations", "test_ops", 90)

    def communication(self):
        return self.tests("communication", "test_comm", 60, "cuda")

    def nccl(self):
        names = ["a_world_of_one", "ranks_that_cannot_join", "two_ranks_on_one_gpu_are_refused"]
        return self.tests("nccl", "test_comm", 60, *(f"nccl_{kind}::{name}" for kind in ("ranks", "failures") for name in names))

    def nccl_shared(self):
        """Several ranks on one GPU. With two ranks every order of a sum has the same bits."""
        version = self.run("nccl version", [sys.executable, "-c", NCCL_VERSION], 30).split()[-1]
        if int(version) < 23000:
            return {"result": f"skipped: NCCL {version} refuses several ranks on one GPU, 2.30 allows them (docs/gpu/README.md)"}
        # Each rank's kernels must find room beside those of the others, which they wait for.
        sharing = ["env", "NCCL_MULTI_RANK_GPU_ENABLE=1", "NCCL_NVLS_ENABLE=0", "NCCL_MAX_CTAS=2"]
        names = ["nccl::all_", "nccl::reduce_scatter", "nccl::broadcast", "nccl::batch_send_recv", "nccl::message_order",
                 "nccl_ranks::streams", "nccl_failures::a_missing_rank", "nccl_failures::groups"]
        return self.tests("nccl shared", "test_comm", 120, *names, way=sharing)

    def parity(self):
        names = ["reference"] if self.smoke else ["reference", "layouts", "brain_float", "frozen", "determinism"]
        return self.tests("parity", "test_end_to_end", 150, *names)

    def losses(self, what, extra):
        metrics = self.folder / f"{what.replace(' ', '-')}.jsonl"
        sizes = ["--seq-len", "8", "--micro-batch-size", "1", "--global-batch-size", "2"] if self.smoke else []
        self.run(what, [self.programs["finetune_llama"], *MODEL, "--device", "cuda:0", "--metrics", metrics, "--sample-tokens", "0",
                        "--output", self.folder / what.replace(" ", "-"), *sizes, *extra], 90)
        return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]

    def finetune(self):
        layout = ["--tp", "2", "--pp", "2", "--dp", "1"] if self.smoke else []
        losses = self.losses("finetune", ["--steps", "2" if self.smoke else "99", *layout])
        return {"result": f"loss {losses[0]:.4f} to {losses[-1]:.4f}", "goal": "falls", "value": losses[-1],
                "reached": losses[-1] < losses[0] or self.smoke}

    def bf16(self):
        steps = ["--steps", "2" if self.smoke else "200", *ONE_RANK]
        wide, narrow = (self.losses(f"200 steps in {dtype}", [*steps, "--dtype", dtype])[-1] for dtype in ("f32", "bf16"))
        gap = abs(narrow - wide) / wide
        return {"result": f"last losses {wide:.4f} (f32), {narrow:.4f} (bf16)", "value": gap, "goal": "within 1%",
                "reached": gap <= 0.01}

    def attention(self):
        sizes = [1, 16, 4, 2, 16] if self.smoke else [2, 4096, 32, 8, 128]
        # Where cuDNN cannot do it our own kernels would, slowly and unnoticed.
        way = ["env"] if self.smoke else ["env", "CANDLE_TRAIN_ATTENTION=cudnn"]
        self.run("attention against our kernels", [*way, self.programs["test_ops"], "bf16_is_f32"], 90)
        line = json.loads(self.run("attention", [*way, self.programs["bench_attention"], "cuda:0", *sizes], 60).splitlines()[-1])
        share = line["tflops"] / 989
        return {"result": f"{line['tflops']:.0f} TFLOP/s", "value": share, "goal": ">= 55% of 989 TFLOP/s",
                "reached": share >= 0.55}

    def in_turns(self, what, ours, torch):
        """Our measurement, and those of PyTorch that came to an end; eager first, then compiled."""
        commands = {"ours": [self.programs["bench_train"], "--device", "cuda:0", "--dtype", "bf16", *ours]}
        device = "cpu" if self.smoke else "cuda"
        for name, extra in torch.items():
            commands[name] = [*TORCH, "--device", device, "--dtype", "bf16", *extra]
        results, failures = {}, {}
        for name, command in commands.items():
            try:
                results[name] = json.loads(self.run(f"{what} {name}", command, 150).splitlines()[-1])
            except (RuntimeError, ValueError) as error:
                failures[name] = str(error)
        if "ours" not in results:
            raise RuntimeError(failures["ours"])
        return results, failures

    def full(self):
        shape = flags(TINY if self.smoke else SMALL) + ["--tie"]
        torch = {"eager": shape, "compiled": [*shape, "--compile"], "autocast": [*shape, "--autocast"]}
        if self.smoke:
            del torch["compiled"]
        results, failures = self.in_turns("full", shape, torch)
        return self.compared(results, failures, 1.1, mfu_goal=0.45)

    def frozen(self):
        shape = flags(TINY if self.smoke else LARGE)
        torch = {"eager": [*shape, "--freeze"]}
        if not self.smoke:
            torch["compiled"] = [*shape, "--freeze", "--compile"]
        results, failures = self.in_turns("frozen", [*shape, "--freeze", ALL_BUT_NORMS], torch)
        return self.compared(results, failures, 1.1, speed_goal=14000)

    def profile(self):
        """GPU time of each operation in the steps of `full` and `frozen`, in runs of their own: events take time too."""
        tables = {}
        for case, shape in (("full", flags(TINY if self.smoke else SMALL) + ["--tie"]),
                            ("frozen", flags(TINY if self.smoke else LARGE) + ["--freeze", ALL_BUT_NORMS])):
            command = [self.programs["bench_train"], "--device", "cuda:0", "--dtype", "bf16", *shape, "--profile"]
            lines = self.run(f"profile {case}", command, 60).splitlines()
            header = next(i for i, line in enumerate(lines) if line.startswith("operation "))
            tables[case] = [line for line in lines[header:] if not line.startswith("{")]
        longest = [f"{case}: {table[1].split()[0]} {table[1].split()[-1]}%" for case, table in tables.items()]
        return {"result": "longest in " + ", in ".join(longest), "tables": tables}

    @staticmethod
    def compared(results, failures, goal, mfu_goal=None, speed_goal=None):
        ours = results["ours"]
        theirs = [results[name]["tokens_per_sec"] for name in ("eager", "compiled") if name in results]
        ratio = ours["tokens_per_sec"] / max(theirs) if theirs else None
        checks, parts = [ratio is not None and ratio >= goal], [f"{ours['tokens_per_sec']:.0f} tokens/s"]
        parts.append("PyTorch failed" if ratio is None else f"{ratio:.2f} of PyTorch")
        goals = [f">= {goal} of PyTorch"]
        if mfu_goal:
            mfu = ours["mfu"] or 0
            parts.append(f"MFU {mfu:.1%}")
            goals.append(f"MFU >= {mfu_goal:.0%}")
            checks.append(mfu >= mfu_goal)
        if speed_goal:
            goals.append(f">= {speed_goal} tokens/s")
            checks.append(ours["tokens_per_sec"] >= speed_goal)
        if "peak_device_bytes" in results.get("autocast", {}):
            memory = ours["peak_device_bytes"] / results["autocast"]["peak_device_bytes"]
            parts.append(f"memory {memory:.2f} of autocast")
            goals.append("memory <= autocast's")
            checks.append(memory <= 1)
        return {"result": ", ".join(parts), "goal": ", ".join(goals), "reached": all(checks), "value": ratio, "runs": results,
                "failed": failures}


PARTS = ["operations", "communication", "nccl", "nccl_shared", "parity", "finetune", "full", "frozen", "bf16", "attention", "profile"]


def commit():
    """Of the bundle."""
    noted = BUNDLE / "commit"
    if noted.exists():
        return noted.read_text().strip()
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def main():
    parser = argparse.ArgumentParser(prog="scripts/gpu-check.sh", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: tries the script, measures nothing")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("gpu-check.json"), metavar="FILE")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    began, report = time.time(), {}
    with tempfile.TemporaryDirectory() as folder:
        check = Check(arguments.smoke, folder, arguments.output.with_suffix(".logs").absolute())
        if arguments.smoke:
            print("a smoke run: sizes are tiny, no number below measures anything")
        print("| part | result | seconds | goal | reached |\n|---|---|---|---|---|")
        for part in arguments.parts or PARTS:
            start = time.time()
            try:
                row = getattr(check, part)()
            except Exception as error:  # whatever one part does, the next one runs
                row = {"result": f"FAILED: {error}", "reached": False}
            row["secs"] = round(time.time() - start, 1)
            report[part] = row
            reached = {True: "yes", False: "no", None: ""}[row.get("reached")]
            if arguments.smoke and "goal" in row:
                reached = "not measured"
            print(f"| {part} | {row['result']} | {row['secs']} | {row.get('goal', '')} | {reached} |", flush=True)
    arguments.output.write_text(json.dumps({
        "date": datetime.date.today().isoformat(), "commit": commit(), "machine": platform.node(), "smoke": arguments.smoke,
        "secs": round(time.time() - began, 1), "parts": report}, indent=1) + "\n")
    print(f"{time.time() - began:.0f} s in all; written to {arguments.output}, what the programs said to {check.logs}")
    failed = [part for part, row in report.items() if row["result"].startswith("FAILED")]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
