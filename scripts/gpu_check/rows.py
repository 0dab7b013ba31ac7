"""The table of docs/gpu/RESULTS.md from the JSON of calls."""
import json

GPUS = ["H100", "H200"]


def speed_of(case):
    def cell(parts):
        row = parts[case]
        line = row["runs"]["ours"]
        text = f"{line['tokens_per_sec']:,.0f} tokens/s"
        if row["value"] is not None:
            text += f", {row['value']:.2f} of PyTorch"
        return text + (f", MFU {line['mfu']:.1%}" if line.get("mfu") else "")
    return cell


def memory(parts):
    row = parts["full"]
    bytes_, ratio = row["runs"]["ours"]["peak_device_bytes"], row.get("memory")
    return f"{bytes_ / 2**30:.1f} GiB" + ("" if ratio is None else f", {ratio:.2f} of PyTorch's")


def result_of(part):
    def cell(parts):
        result = parts[part]["result"]
        return "failed or not finished" if result.startswith(("FAILED", "SKIPPED")) else result
    return cell


# Case, goal, what the cell of a GPU says.
ROWS = [
    ("Llama-3.2-1B's shape, bf16, full fine-tune, 8 sequences of 4096 tokens",
     "tokens/s at least 1.1 times PyTorch's, MFU at least 50%", speed_of("full")),
    ("the same, peak memory", "at most PyTorch's with f32 master weights (autocast)", memory),
    ("Llama-3.1-8B's shape, everything frozen but the norms, sequences of 4096 tokens",
     "at least 14,000 tokens/s and 1.1 times PyTorch's", speed_of("frozen")),
    ("1B's width, 2 layers, a few steps from the same weights as PyTorch",
     "losses and norms within 1e-4 in f32; in bf16 as near to f32 as PyTorch", result_of("one_step")),
    ("attention forward + backward alone, head_dim 128, 4096 tokens, causal", "at least 55% of 989 TFLOP/s",
     lambda parts: f"{parts['attention']['value']:.1%}"),
    ("products of a step against `torch.matmul`", "none: it shows what is left", lambda parts: f"{parts['products']['value']:.2f} of its speed"),
    ("bf16 and f16 against f32 on the bundled checkpoint, 200 steps", "last losses within 1%",
     lambda parts: f"{parts['half_precision']['value']:.2%}"),
    ("every operation, forward and backward, against f64 (`operations`)", "all pass", result_of("operations")),
    ("attention that sees a sliding window, by cuDNN (`window`)", "as PyTorch computes it, to the roundings of bf16", result_of("window")),
    ("attention within packed documents, by cuDNN, with a window and without (`packed`)", "as f64 has it, to the roundings of bf16",
     result_of("packed")),
    ("the same, timed beside whole sequences and padded rows (`packed_attention`)", "faster than whole sequences",
     result_of("packed_attention")),
    ("training against PyTorch's numbers, and layouts against one rank (`parity`)", "all pass", result_of("parity")),
    ("our kernels under memcheck and racecheck (`sanitizer`)", "nothing found", result_of("sanitizer")),
    ("NCCL, every operation with one rank (`nccl`)", "as on the CPU, to the bit", result_of("nccl")),
    ("NCCL 2.30 or later, two ranks on the GPU (`nccl_shared`)", "the conformance suite, deadline and abort",
     result_of("nccl_shared")),
    ("ZeRO, offload, loss scaling and the meter, ranks that share the GPU (`replicas`)", "all pass", result_of("replicas")),
    ("the optimizer's state in the host's memory and in files: f32, bf16, f16 with overflows, ZeRO-3 (`offload`)",
     "losses and norms the same to the bit, less of the GPU's memory", result_of("offload")),
    ("what the GPU holds between steps by its own count, ZeRO-0 to 3 of 4 replicas (`memory`)",
     "at most 1.05 of what the meters count", result_of("memory")),
]


def merged(files):
    """Parts of each GPU; of a part that ran twice, the later run."""
    by_gpu = {gpu: {} for gpu in GPUS}
    reports = sorted((json.loads(file.read_text()) for file in files), key=lambda report: report["began"])
    for report in reports:
        gpu = next((gpu for gpu in GPUS if gpu in (report["gpu"] or "")), None)
        if gpu and not report["smoke"]:
            by_gpu[gpu] |= report["parts"]
    return by_gpu


def table(by_gpu):
    lines = ["| case | goal | " + " | ".join(GPUS) + " |", "|---" * (2 + len(GPUS)) + "|"]
    for case, goal, cell in ROWS:
        cells = []
        for parts in by_gpu.values():
            try:
                cells.append(cell(parts))
            except (KeyError, TypeError):
                # The part has not run, or not far enough.
                cells.append("open")
        lines.append(f"| {case} | {goal} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
