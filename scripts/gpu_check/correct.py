"""Parts that say whether results are right."""
import json
import pathlib
import shutil
import sys

from runner import ROOT, Failed, json_lines
from shapes import FORMS, ONE_RANK, TINY, WIDE, attention_must_be_cudnn, bench_train, flags

MODEL = ["--model", "examples/assets/shakespeare-llama", "--data", "examples/assets/alice.txt"]
# Loading everything at once: a kernel that is loaded at its first use may wait for a GPU on which another rank waits for this one.
NCCL = {"CUDA_MODULE_LOADING": "EAGER"}
# Says which file and version of each library our programs would load.
LIBRARIES = """
import ctypes, json, os
versions = {"libcuda.so.1": "cuDriverGetVersion", "libcudnn.so.9": "cudnnGetVersion", "libnccl.so.2": "ncclGetVersion"}
found = {}
for name in ["libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libcudnn.so.9", "libnccl.so.2", "libnvrtc.so.13"]:
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        found[name] = f"missing: {error}"
        continue
    path = next((line.split()[-1] for line in open("/proc/self/maps") if name.split(".so")[0] + ".so" in line), "loaded")
    found[name] = os.path.realpath(path)
    if name == "libcudnn.so.9":
        found[name] += f", version {library.cudnnGetVersion()}"
    elif name in versions:
        version = ctypes.c_int()
        getattr(library, versions[name])(ctypes.byref(version))
        found[name] += f", version {version.value}"
print(json.dumps(found))
"""
NEEDED = ["libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libcudnn.so.9", "libnccl.so.2", "libnvrtc.so.13"]
# Seconds for the first look at libraries of gigabytes, on a disk that has not read them yet.
COLD = 120
# Relative L2 distance to what PyTorch computes in f64: results are rounded to bf16, by 2^-9 at most, and within attention the
# probabilities are, too.
PRODUCT_BOUND, ATTENTION_BOUND = 4e-3, 1.2e-2
# Our own kernels, one test each.
SANITIZED = ["rms_norm::matches", "layer_norm::matches", "linear::", "half_precision::", "quantized::", "elementwise::", "cross_entropy::matches", "embedding::looks_up", "optimizer::adamw_is_its_equation",
             "optimizer::sums_of_squares", "optimizer::values_are", "attention::matches"]
# Those that share memory within a block: racecheck takes many times as long.
RACES = ["rms_norm::matches", "layer_norm::matches", "cross_entropy::matches", "quantized::", "optimizer::sums_of_squares", "attention::matches"]


def preflight(run):
    """Driver, libraries, kernels, one product, one attention: what all else needs."""
    row = {"libraries": json_lines(run.run("libraries", [sys.executable, "-c", LIBRARIES], COLD))[0]}
    if shutil.which("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem"
        row["nvidia_smi"] = run.run("nvidia-smi", ["nvidia-smi", query, "--format=csv,noheader"], COLD).strip()
    missing = [f"{name} ({row['libraries'][name]})" for name in NEEDED if row["libraries"][name].startswith("missing")]
    if missing and not run.smoke:
        raise Failed(f"libraries that cannot be loaded: {', '.join(missing)}")
    row |= compared_operations(run, "check", [])
    return row | {"result": f"{row['opened']['device']}, open in {row['opened']['open_secs']:.1f} s, {row['result']}"}


def window(run):
    """Attention that sees a sliding window, by cuDNN: no multiple of its tiles."""
    return compared_operations(run, "window", ["70"])


def packed(run):
    """Attention within documents of up to so many tokens, by cuDNN, all that come before and a window, in both forms of the backward pass."""
    rows = {}
    for name, variables in FORMS.items():
        for seen in ("200", "30"):
            what = f"packed {name} {seen}"
            rows[what] = compared_operations(run, what, [seen, "90"], variables)
    errors = {f"{what} {name}": error for what, row in rows.items() for name, error in row["errors"].items()}
    worst = max((name for name in errors if not name.endswith((" y", " dx"))), key=errors.get)
    return {"errors": errors, "result": f"farthest from f64: {worst} {errors[worst]:.1e}"}


def compared_operations(run, what, arguments, variables=None):
    """A product and an attention against PyTorch's."""
    file = run.folder / f"{what.replace(' ', '-')}.safetensors"
    variables = attention_must_be_cudnn(run) | (variables or {})
    opened = json_lines(run.ours(what, "bench_gpu", ["cuda:0", "check", file, *arguments], COLD, variables))[-1]
    check_attention(run, opened)
    errors = json_lines(run.torch(f"{what} torch", "bench_ops_torch.py", [torch_device(run), "check", file], COLD))[-1]
    bounds = {name: PRODUCT_BOUND if name in ("y", "dx") else ATTENTION_BOUND for name in errors}
    wrong = [f"{name} by {errors[name]:.1e}" for name in errors if not errors[name] <= bounds[name]]
    if wrong:
        raise Failed(f"not what PyTorch computes: {', '.join(wrong)}")
    worst = max(errors, key=lambda name: errors[name] / bounds[name])
    return {"opened": opened, "errors": errors,
            "result": f"attention by {opened['attention']}, farthest from PyTorch: {worst} {errors[worst]:.1e}"}


def check_attention(run, line):
    if not run.smoke and line["attention"] != "cudnn":
        raise Failed(f"attention was computed by {line['attention']}, expected cudnn")


def torch_device(run):
    return "cpu" if run.smoke else "cuda"


def one_step(run):
    """Losses and gradient norms of a few steps from the same weights and tokens, in f32 and bf16, here and there."""
    shape, folder = TINY if run.smoke else WIDE, run.folder / "checkpoint"
    sizes = {name: shape[name] for name in ("seq-len", "batch-size", "steps")}
    rest = {name: shape[name] for name in shape if name not in sizes}
    device = ["--device", torch_device(run), "--loss", "chunked"]
    lines = {}
    for dtype in ("f32", "bf16"):
        weights = [*flags(rest), "--tie", "--save", folder] if dtype == "f32" else ["--load", folder]
        lines[f"torch {dtype}"] = json_lines(run.torch(
            f"one step torch {dtype}", "bench_torch.py", [*device, *weights, *flags(sizes), "--dtype", dtype], 90))[-1]
        variables = attention_must_be_cudnn(run) if dtype == "bf16" else None
        lines[f"ours {dtype}"] = bench_train(
            run, f"one step ours {dtype}", ["--model", folder, *flags(sizes), "--dtype", dtype], 60, variables)
    check_attention(run, lines["ours bf16"])
    steps = {name: {"losses": line["losses"], "grad_norms": line["grad_norms"]} for name, line in lines.items()}
    return compared_steps(steps)


def compared_steps(steps):
    """In f32 all losses and the exact norms, those of the first two steps, must agree; in bf16, whose roundings differ, the first
    step must be as near to f32 as PyTorch's, which rounds gradients as well, or within its last digit."""
    far = lambda a, b: abs(a - b) / abs(b)
    ours, truth = steps["ours f32"], steps["torch f32"]
    count = len(ours["losses"])
    if len(truth["losses"]) < count:
        raise Failed(f"PyTorch made {len(truth['losses'])} steps, expected {count}")
    in_f32 = max([far(a, b) for a, b in zip(ours["losses"], truth["losses"])]
                 + [far(a, b) for a, b in zip(ours["grad_norms"][:2], truth["grad_norms"][:2])])
    in_bf16, theirs = ({what: far(steps[f"{who} bf16"][what][0], truth[what][0]) for what in ("losses", "grad_norms")}
                       for who in ("ours", "torch"))
    checks = [in_f32 <= 1e-4] + [in_bf16[what] <= max(2 * theirs[what], 2e-3) for what in in_bf16]
    result = (f"f32: losses and norms within {in_f32:.1e}; bf16, first step: loss off by {in_bf16['losses']:.1e} (PyTorch "
              f"{theirs['losses']:.1e}), norm by {in_bf16['grad_norms']:.1e} ({theirs['grad_norms']:.1e})")
    if not all(checks):
        raise Failed(f"{result}; expected 1e-4 in f32, and in bf16 twice PyTorch's distance or 2e-3: {json.dumps(steps)}")
    return {"result": result, "steps": steps}


def operations(run):
    return run.tests("operations", "test_ops", 180)


def communication(run):
    return run.tests("communication", "test_comm", 60, "cuda")


def sanitizer(run):
    """Our kernels' tests, and a tiny training step, under compute-sanitizer."""
    homes = [pathlib.Path("/usr/local/cuda/bin"), *sorted(pathlib.Path("/usr/local").glob("cuda-*/bin"))]
    found = shutil.which("compute-sanitizer", path=":".join([run.environment["PATH"], *map(str, homes)]))
    if not found and not run.smoke:
        raise Failed("compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin")
    said, failed = [], []
    for tool, tests in (("memcheck", SANITIZED), ("racecheck", RACES)):
        launcher = [found, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"] if found else []
        try:
            said.append(f"{tool}: {run.tests(f'sanitizer {tool}', 'test_ops', 120, '--test-threads=1', *tests, launcher=launcher)['result']}")
            if tool == "memcheck":
                arguments = ["--device", "cuda:0", "--dtype", "bf16", *flags(TINY)]
                run.ours("sanitizer step", "bench_train", arguments, 60, launcher=launcher)
        except Failed as error:  # what one tool finds is told beside what the other found
            failed.append(f"{tool}: {error}")
    if failed:
        raise Failed("; ".join(said + failed))
    return {"result": "; ".join(said) + ("" if found else "; without compute-sanitizer, which is not here")}


def nccl(run):
    names = ["a_world_of_one", "ranks_that_cannot_join", "two_ranks_on_one_gpu_are_refused"]
    names = [f"nccl_{kind}::{name}" for kind in ("ranks", "failures") for name in names]
    return run.tests("nccl", "test_comm", 60, *names, variables=NCCL)


def nccl_shared(run):
    """Several ranks on one GPU. With two ranks every order of a sum has the same bits."""
    library = json_lines(run.run("nccl version", [sys.executable, "-c", LIBRARIES], 30))[0]["libnccl.so.2"]
    version = library.split()[-1]
    if not version.isdigit() or int(version) < 23000:
        return {"result": f"skipped: NCCL {version} refuses several ranks on one GPU, 2.30 allows them (docs/gpu/README.md)"}
    # Each rank's kernels must find room beside those of the others, which they wait for.
    sharing = {**NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    names = ["nccl::all_", "nccl::reduce_scatter", "nccl::broadcast", "nccl::batch_send_recv", "nccl::message_order",
             "nccl_ranks::streams", "nccl_failures::a_missing_rank", "nccl_failures::groups"]
    return run.tests("nccl shared", "test_comm", 120, *names, variables=sharing)


def parity(run):
    names = ["reference"] if run.smoke else ["reference", "layouts", "half_precision", "frozen", "determinism"]
    return run.tests("parity", "test_end_to_end", 400, *names)


def fine_tuned(run, what, extra):
    """Losses of the bundled model's fine-tuning."""
    metrics = run.folder / f"{what.replace(' ', '-')}.jsonl"
    sizes = ["--seq-len", "8", "--micro-batch-size", "1", "--global-batch-size", "2"] if run.smoke else []
    run.ours(what, "finetune_llama", [*MODEL, "--device", "cuda:0", "--metrics", metrics, "--sample-tokens", "0", "--output",
                                      run.folder / what.replace(" ", "-"), *sizes, *extra], 90)
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def finetune(run):
    layout = ["--tp", "2", "--pp", "2", "--dp", "1"] if run.smoke else []
    losses = fine_tuned(run, "finetune", ["--steps", "2" if run.smoke else "99", *layout])
    return {"result": f"loss {losses[0]:.4f} to {losses[-1]:.4f}", "goal": "falls", "value": losses[-1],
            "reached": losses[-1] < losses[0] or run.smoke}


def half_precision(run):
    steps = ["--steps", "2" if run.smoke else "200", *ONE_RANK]
    last = {dtype: fine_tuned(run, f"200 steps in {dtype}", [*steps, "--dtype", dtype])[-1] for dtype in ("f32", "bf16", "f16")}
    gap = max(abs(loss - last["f32"]) / last["f32"] for loss in last.values())
    return {"result": "last losses " + ", ".join(f"{loss:.4f} ({dtype})" for dtype, loss in last.items()), "value": gap,
            "goal": "within 1%", "reached": gap <= 0.01}
