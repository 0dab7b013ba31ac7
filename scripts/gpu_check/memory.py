"""Parts about what replicas divide, where the optimizer's state is, and what the GPU holds."""
import statistics
import sys

from correct import check_attention
from runner import ROOT, Failed, json_lines
from shapes import OFFLOADED, TINY, attention_must_be_cudnn, bench_train, flags

# Fields of a run that must not depend on where the state is.
SAME = ["losses", "grad_norms", "loss_scale", "skipped_steps"]
# f16 begins with a scale that overflows, and tries it again after every other good step.
CASES = {"f32": ["--dtype", "f32"],
         "bf16": ["--dtype", "bf16"],
         "f16": ["--dtype", "f16", "--loss-scale-init", "131072", "--loss-scale-window", "2"],
         "bf16, 2 replicas, ZeRO-3": ["--dtype", "bf16", "--dp", "2", "--zero", "3"]}
# What the GPU may hold between steps beside what the meter counts: ids, and buffers that operations use again.
MOST_OVER_METERS = 1.05


def replicas(run):
    """Tests of ZeRO, tiles, offload, the meter and loss scaling, all ranks on one GPU."""
    return run.tests("replicas", "test_parallel", 180, "sharded::", "tiles::", "offload::", "memory::", "loss_scaling::")


def offload(run):
    """The same steps with the optimizer's state on the GPU, in the host's memory and in files."""
    shape, folder = TINY | {"steps": 6} if run.smoke else OFFLOADED, run.folder / "state"
    folder.mkdir()
    places = {"GPU": [], "host": ["--offload", "optimizer"], "files": ["--offload", f"nvme:{folder}"]}
    runs = {}
    for case, extra in CASES.items():
        variables = None if case == "f32" else attention_must_be_cudnn(run)
        for place, where in places.items():
            arguments = [*flags(shape), "--deterministic", *extra, *where]
            runs[case, place] = line = bench_train(run, f"offload {case} {place}", arguments, 60, variables)
            if variables:
                check_attention(run, line)
    left = [path.name for path in folder.iterdir()]
    if left:
        raise Failed(f"files of the optimizer's state are left after the runs: {', '.join(left)}")
    return compared_places(runs)


def compared_places(runs):
    """Losses, norms and loss scales must be those of the run with the state on the GPU; memory of the GPU must be less."""
    for (case, place), line in runs.items():
        want = runs[case, "GPU"]
        for field in SAME:
            if line[field] != want[field]:
                raise Failed(f"{case}, state in {place}: {field} {line[field]}, expected {want[field]} as with the state on the GPU")
    skipped, steps = runs["f16", "GPU"]["skipped_steps"], len(runs["f16", "GPU"]["losses"])
    if not 0 < skipped < steps:
        raise Failed(f"f16 skipped {skipped} of {steps} steps, expected some that overflow and some that do not")
    of_device = {place: max(runs[case, place]["peak_device_bytes"] / runs[case, "GPU"]["peak_device_bytes"] for case in CASES)
                 for place in ("host", "files")}
    slower = {place: statistics.median(runs[case, place]["step_secs"] / runs[case, "GPU"]["step_secs"] for case in CASES)
              for place in ("host", "files")}
    said = "; ".join(f"{place}: at most {of_device[place]:.2f} of the GPU's memory, {slower[place]:.2f} of a step's time"
                     for place in of_device)
    value = max(of_device.values())
    return {"result": f"{len(runs)} runs, the same losses and norms to the bit, {skipped} of {steps} steps of f16 skipped; {said}",
            "goal": "the same bits, less memory", "value": value, "reached": value < 1,
            "runs": {f"{case}, {place}": line for (case, place), line in runs.items()}}


def held(run):
    """The table of bench_memory.py for replicas that share the GPU, in f32 and bf16."""
    sizes = flags({name: value for name, value in (TINY | {"batch-size": 4}).items() if name != "steps"}) if run.smoke else []
    lines = {}
    for dtype in ("f32", "bf16"):
        variables = None if dtype == "f32" else attention_must_be_cudnn(run)
        text = run.run(f"memory {dtype}", [
            sys.executable, ROOT / "scripts/bench_memory.py", "--program", run.program("bench_train"), "--turns", "0", "--dtype", dtype,
            *sizes, "--json", "--", "--device", "cuda:0"], 120, variables)
        lines[dtype] = json_lines(text)
    return compared_counts(lines)


def compared_counts(lines):
    """What the GPU holds between steps by its own count, over what meters count and over the formulas."""
    table = {f"{dtype} ZeRO-{line['zero']} {line['recompute']}": line | {"of_meters": line["device_bytes"] / line["kept_by_replicas"]}
             for dtype, runs in lines.items() for line in runs}
    under = [f"{name} {row['of_meters']:.3f}" for name, row in table.items() if row["of_meters"] < 1]
    if under:
        raise Failed(f"the GPU holds less than the meters count: {', '.join(under)}")
    worst = max(table, key=lambda name: table[name]["of_meters"])
    value = table[worst]["of_meters"]
    shrunk = (table[f"{dtype} ZeRO-3 none"]["device_bytes"] / table[f"{dtype} ZeRO-0 none"]["device_bytes"] for dtype in lines)
    said = ", ".join(f"{ratio:.2f} in {dtype}" for dtype, ratio in zip(lines, shrunk))
    return {"result": f"between steps the GPU holds at most {value:.3f} of what the meters count ({worst}); ZeRO-3 over ZeRO-0: {said}",
            "goal": f"<= {MOST_OVER_METERS} of the meters", "value": value, "reached": value <= MOST_OVER_METERS, "table": table}
