#!/usr/bin/env python3
"""How fast `candle-train export` writes GGUF files, beside a plain copy of the same bytes, and in how much memory.

    scripts/bench_export.py [--layers 4] [--types f16 q8_0 q4_k_m] [--turns 3] [--folder DIR] [--sparse]

A model of Llama 3 8B's shape with so many layers (32 are the whole) is written to DIR, in bf16: random values, or with --sparse a file of zeros that takes
no room. In each turn the weights are copied (read, written, flushed to the disk), and exported as each type. Printed are medians over the turns: GB/s of
what is read and written together, and the largest anonymous memory of the process (RssAnon), which maps of files do not count in. Linux only; the
release binary must be built (cargo build --release -p candle-train-cli). Only the standard library of Python is needed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS = 4096, 14336, 128256, 32, 8


def shapes(layers):
    """Names and shapes of the weights."""
    kv = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    yield "lm_head.weight", [VOCAB, HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", [HIDDEN]
        yield f"{prefix}.post_attention_layernorm.weight", [HIDDEN]
        yield f"{prefix}.self_attn.q_proj.weight", [HIDDEN, HIDDEN]
        yield f"{prefix}.self_attn.k_proj.weight", [kv, HIDDEN]
        yield f"{prefix}.self_attn.v_proj.weight", [kv, HIDDEN]
        yield f"{prefix}.self_attn.o_proj.weight", [HIDDEN, HIDDEN]
        yield f"{prefix}.mlp.gate_proj.weight", [INTERMEDIATE, HIDDEN]
        yield f"{prefix}.mlp.up_proj.weight", [INTERMEDIATE, HIDDEN]
        yield f"{prefix}.mlp.down_proj.weight", [HIDDEN, INTERMEDIATE]


def random_block(num_values):
    """So many bf16 values between 0.008 and 0.06 in size, of both signs."""
    high = bytes([0x3C, 0x3D, 0xBC, 0xBD][byte % 4] for byte in range(256))
    block = bytearray(2 * num_values)
    block[0::2] = os.urandom(num_values)
    block[1::2] = os.urandom(num_values).translate(high)
    return bytes(block)


def make_model(folder, layers, sparse):
    """Writes the model; the file of its weights."""
    folder.mkdir()
    tokens = ROOT / "tests/fixtures/gqa/model"
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(tokens / name, folder / name)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes(layers):
        start, size = end, 2
        for dim in shape:
            size *= dim
        end += size
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            file.truncate(8 + len(text) + end)
        else:
            block = random_block(8 << 20)
            while end > 0:
                file.write(block[:end])
                end -= len(block)
    return path


def copy(source, target):
    """Seconds of a plain copy that ends on the disk."""
    start = time.perf_counter()
    with open(source, "rb") as read, open(target, "wb") as write:
        while chunk := read.read(8 << 20):
            write.write(chunk)
        write.flush()
        os.fsync(write.fileno())
    return time.perf_counter() - start


def export(model, target, kind):
    """Seconds of an export, and the most anonymous memory that it had, in bytes."""
    binary = ROOT / "target/release/candle-train"
    words = [binary, "export", model, target, "--type", kind, "--overwrite"]
    start = time.perf_counter()
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    most, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.005):
            try:
                status = Path(f"/proc/{child.pid}/status").read_text()
            except OSError:
                return
            lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
            most[0] = max([most[0]] + [int(line.split()[1]) * 1024 for line in lines])

    watcher = threading.Thread(target=watch)
    watcher.start()
    child.communicate()
    ended.set()
    watcher.join()
    if child.returncode != 0:
        raise SystemExit(f"export failed with exit code {child.returncode}")
    return time.perf_counter() - start, most[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0", "q4_k_m"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        folder = Path(folder)
        weights = make_model(folder / "model", args.layers, args.sparse)
        size = weights.stat().st_size
        rates = {kind: [] for kind in ["copy", *args.types]}
        memory = {kind: 0 for kind in args.types}
        for _ in range(args.turns):
            target = folder / "copy"
            rates["copy"].append(2 * size / copy(weights, target) / 1e9)
            target.unlink()
            for kind in args.types:
                target = folder / "model.gguf"
                secs, most = export(folder / "model", target, kind)
                rates[kind].append((size + target.stat().st_size) / secs / 1e9)
                memory[kind] = max(memory[kind], most)
                target.unlink()
        print(f"{size / 1e9:.2f} GB of weights in bf16, {os.cpu_count()} cores")
        plain = statistics.median(rates["copy"])
        print(f"plain copy: {plain:.2f} GB/s")
        for kind in args.types:
            rate = statistics.median(rates[kind])
            print(f"{kind}: {rate:.2f} GB/s, {rate / plain:.2f} of the copy, {memory[kind] / 1e6:.0f} MB of anonymous memory")


main()
