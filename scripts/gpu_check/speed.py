"""Parts that measure."""
from clocks import sampled
from correct import check_attention, torch_device
from runner import Failed, json_lines
from shapes import ALL_BUT_NORMS, FORMS, LARGE, SMALL, TINY, attention_must_be_cudnn, flags, ours

# Dense bf16 operations a second of an H100 or H200 (SXM), in 10^12, by NVIDIA's datasheets.
PEAK_TFLOPS = 989
# Rows, in, out: the products of both models; those of gate and up, and of q, k and v, also as one.
PRODUCTS = ["32768x2048x2048", "32768x2048x512", "32768x2048x3072", "32768x2048x8192", "32768x2048x16384", "32768x8192x2048",
            "4096x2048x128256", "4096x4096x4096", "4096x4096x1024", "4096x4096x14336", "4096x14336x4096"]


def cases(run):
    """Flags of ours and of PyTorch's for each model."""
    small, large = (TINY, TINY) if run.smoke else (SMALL, LARGE)
    return {"full": (small, ["--tie"], ["--tie"]), "frozen": (large, ["--freeze", ALL_BUT_NORMS], ["--freeze"])}


def our_run(run, what, case, deadline):
    shape, extra, _ = cases(run)[case]
    clocks = {}
    with sampled(clocks):
        line = ours(run, what, [*flags(shape), *extra, "--profile"], shape["batch-size"], deadline)
    return line | clocks


def longest(line):
    """The three longest rows of a profile, of which the first line is the header."""
    rows = [row for row in line["profile"][1:] if not row.startswith(("all ", "everything else"))]
    cells = [row.rsplit(None, 3) for row in rows[:3]]
    return ", ".join(f"{name} {percent}%" for name, _calls, _ms, percent in cells)


def step(run):
    """Our step of the 1B shape, with its profile."""
    line = our_run(run, "step", "full", 120)
    mfu = line["mfu"] or 0
    losses = f"loss {line['losses'][0]:.3f} to {line['losses'][-1]:.3f}"
    result = f"{line['tokens_per_sec']:.0f} tokens/s, MFU {mfu:.1%}, {losses}, longest: {longest(line)}"
    return {"result": result, "goal": "MFU >= 50%", "value": mfu, "reached": mfu >= 0.5, "run": line}


def torch_run(run, case, name, extra, deadline):
    shape, _, torch_extra = cases(run)[case]
    clocks = {}
    with sampled(clocks):
        text = run.torch(f"{case} {name}", "bench_torch.py", [
            "--device", torch_device(run), "--dtype", "bf16", "--loss", "chunked", *flags(shape), *torch_extra, *extra], deadline)
    return json_lines(text)[-1] | clocks


def in_turns(run, case, deadline=150):
    """Our measurement, then PyTorch's that came to an end: eager with its best micro-batch, the others with the same."""
    results, failures = {"ours": our_run(run, f"{case} ours", case, deadline)}, {}
    batch_size = cases(run)[case][0]["batch-size"]
    sizes = ",".join(str(size) for size in (1, 2, 4, 8) if batch_size % size == 0)
    commands = {"eager": ["--micro-batch-sizes", sizes]}
    if not run.smoke:
        commands |= {"compiled": ["--compile"], "compiled cudnn": ["--compile", "--sdpa", "cudnn"]}
    if case == "full":
        commands["autocast"] = ["--autocast", "--steps", "8"]
    for name, extra in commands.items():
        # Masters in f32 may leave less room, so these try all sizes.
        if name == "autocast":
            extra = [*extra, "--micro-batch-sizes", sizes]
        elif name != "eager" and "eager" in results:
            extra = [*extra, "--micro-batch-sizes", str(results["eager"]["micro_batch_size"])]
        try:
            results[name] = torch_run(run, case, name, extra, deadline)
        except Failed as error:
            failures[name] = str(error)
    return results, failures


def full(run):
    return compared(*in_turns(run, "full"), 1.1, mfu_goal=0.5)


def frozen(run):
    return compared(*in_turns(run, "frozen"), 1.1, speed_goal=14000)


def compared(results, failures, goal, mfu_goal=None, speed_goal=None):
    line = results["ours"]
    theirs = {name: results[name] for name in results if name not in ("ours", "autocast")}
    best = max(theirs, key=lambda name: theirs[name]["tokens_per_sec"], default=None)
    ratio = line["tokens_per_sec"] / theirs[best]["tokens_per_sec"] if best else None
    checks, parts = [ratio is not None and ratio >= goal], [f"{line['tokens_per_sec']:.0f} tokens/s"]
    parts.append("PyTorch failed" if ratio is None else
                 f"{ratio:.2f} of PyTorch ({best}, micro-batch {theirs[best]['micro_batch_size']}, "
                 f"{'+'.join(theirs[best]['attention'])})")
    goals = [f">= {goal} of PyTorch"]
    if mfu_goal:
        mfu = line["mfu"] or 0
        parts.append(f"MFU {mfu:.1%}")
        goals.append(f"MFU >= {mfu_goal:.0%}")
        checks.append(mfu >= mfu_goal)
    if speed_goal:
        goals.append(f">= {speed_goal} tokens/s")
        checks.append(line["tokens_per_sec"] >= speed_goal)
    row = {"goal": ", ".join(goals), "value": ratio, "runs": results, "failed": failures}
    if "peak_device_bytes" in results.get("autocast", {}):
        row["memory"] = line["peak_device_bytes"] / results["autocast"]["peak_device_bytes"]
        parts.append(f"memory {row['memory']:.2f} of autocast")
    parts.append(f"longest: {longest(line)}")
    return row | {"result": ", ".join(parts), "reached": all(checks)}


def torch_lines(run, what, arguments):
    """What PyTorch measured, and why not: ours is kept without it."""
    try:
        return json_lines(run.torch(what, "bench_ops_torch.py", arguments, 90)), None
    except Failed as error:
        return [], str(error)


def attention(run):
    """Forward and backward apart, both forms of the backward pass, against PyTorch's flash attention and cuDNN."""
    shapes = {16: [1, 16, 4, 2, 16]} if run.smoke else {64: [8, 4096, 32, 8, 64], 128: [4, 4096, 32, 8, 128]}
    table = {}
    for d, sizes in shapes.items():
        for form, chosen in FORMS.items():
            variables = attention_must_be_cudnn(run) | chosen
            lines = json_lines(run.ours(f"attention {d} {form}", "bench_gpu", ["cuda:0", "attention", *sizes], 40, variables))
            check_attention(run, lines[-1])
            table |= {f"d {d} {form} {line['op']}": line for line in lines[:-1]}
    arguments = [",".join(map(str, sizes)) for sizes in shapes.values()]
    theirs, failed = torch_lines(run, "attention torch", [torch_device(run), "attention", *arguments])
    table |= {f"d {line['head_dim']} PyTorch {line['backend']} {line['op']}": line for line in theirs}
    last = max(shapes)
    secs = {name: line["secs"] for name, line in table.items() if name.startswith(f"d {last} ") and "secs" in line}
    both = secs[f"d {last} accumulating forward"] + secs[f"d {last} accumulating backward"]
    b, t, heads, _, d = shapes[last]
    share = 3.5 * 2 * b * heads * t * t * d / both / 1e12 / PEAK_TFLOPS
    said = ", ".join(f"{name.removeprefix(f'd {last} ')} {value * 1e3:.2f} ms" for name, value in secs.items())
    return {"result": f"d {last}: {share:.1%} of {PEAK_TFLOPS} TFLOP/s; {said}", "goal": f">= 55% of {PEAK_TFLOPS} TFLOP/s",
            "value": share, "reached": share >= 0.55, "table": table, "failed": failed}


def packed_attention(run):
    """Attention within documents beside that of whole sequences of as many tokens, and of rows of one document each, as --no-packing has
    them: padded to the longest, of which there are about twice as many tokens."""
    b, t, heads, kv_heads, d, longest = (2, 16, 4, 2, 16, 5) if run.smoke else (8, 4096, 32, 8, 64, 1024)
    cases = {"packed": [b, t, heads, kv_heads, d, t, longest], "whole": [b, t, heads, kv_heads, d],
             "padded": [2 * b * t // longest, longest, heads, kv_heads, d]}
    table = {}
    for name, sizes in cases.items():
        lines = json_lines(run.ours(f"attention {name}", "bench_gpu", ["cuda:0", "attention", *sizes], 40, attention_must_be_cudnn(run)))
        check_attention(run, lines[-1])
        table |= {f"{name} {line['op'].removeprefix('packed ')}": line for line in lines[:-1]}
    secs = {name: table[f"{name} forward"]["secs"] + table[f"{name} backward"]["secs"] for name in cases}
    said = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in secs.items())
    return {"result": f"documents of up to {longest} tokens, {b} sequences of {t}, forward and backward: {said}",
            "goal": "faster than whole sequences", "value": secs["packed"] / secs["whole"],
            "reached": run.smoke or secs["packed"] < secs["whole"], "table": table}


def products(run):
    """Each product of a step against torch.matmul."""
    shapes = ["16x8x24", "16x24x8"] if run.smoke else PRODUCTS
    lines = json_lines(run.ours("products", "bench_gpu", ["cuda:0", "products", *shapes], 90))[:-1]
    theirs, failed = torch_lines(run, "products torch", [torch_device(run), "products", *shapes])
    theirs = {line["op"]: line["secs"] for line in theirs}
    if failed:
        return {"result": f"PyTorch failed: {failed}", "table": {line["op"]: line for line in lines}, "failed": failed}
    table = {line["op"]: line | {"of_torch": theirs[line["op"]] / line["secs"]} for line in lines}
    slowest = sorted(table, key=lambda op: table[op]["of_torch"])[:3]
    ratio = sum(theirs.values()) / sum(line["secs"] for line in lines)
    said = ", ".join(f"{op} {table[op]['of_torch']:.2f} ({table[op]['tflops']:.0f} TFLOP/s)" for op in slowest)
    return {"result": f"{ratio:.2f} of torch.matmul's speed over all; slowest beside it: {said}", "value": ratio, "table": table}


def kernels(run):
    """Bandwidth of each kernel beside a copy's."""
    sizes = [16, 32, 48, 97, 4] if run.smoke else [32768, 2048, 8192, 128256, 32]
    lines = json_lines(run.ours("kernels", "bench_gpu", ["cuda:0", "kernels", *sizes], 60))[:-1]
    table = {line["op"]: line for line in lines}
    slowest = sorted((op for op in table if op != "copy"), key=lambda op: table[op]["of_copy"])[:4]
    said = ", ".join(f"{op} {table[op]['of_copy']:.2f}" for op in slowest)
    return {"result": f"a copy moves {table['copy']['gb_per_sec']:.0f} GB/s; slowest beside it: {said}", "table": table}
