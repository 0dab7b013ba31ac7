#!/usr/bin/env python3
"""How long a token takes that `candle-train generate` makes, beside transformers, as a Markdown table.

    cargo build --release --bin candle-train
    PYTHON scripts/bench_generate.py MODEL [--forms bf16 f32 q8_0 q4k] [--turns N]

MODEL is a checkpoint folder, PYTHON an interpreter that has torch and transformers. Time of a token: that of a long text less that of a short one, over the
tokens between them, of the fastest turn each. Weights in blocks (q8_0, q4k) are used in bf16, and compared with transformers in bf16. Both programs have as many threads as there are cores.
"""
import argparse
import os
import pathlib
import subprocess
import time

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/candle-train"
SHORT, LONG = 4, 68
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def per_token(turns, generate):
    def fewest(num_tokens):
        times = []
        for _ in range(turns):
            start = time.perf_counter()
            generate(num_tokens)
            times.append(time.perf_counter() - start)
        return min(times)

    generate(SHORT)
    return (fewest(LONG) - fewest(SHORT)) / (LONG - SHORT)


def ours(model, form):
    dtype = form if form in DTYPES else "bf16"
    flags = ["generate", "--model", model, "--prompt", "The", "--temperature", "0", "--dtype", dtype, "--base-dtype", form, "--max-new-tokens"]
    return lambda num_tokens: subprocess.run([PROGRAM, *flags, str(num_tokens)], check=True, stdout=subprocess.DEVNULL)


def reference(model, form):
    dtype = DTYPES.get(form, torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    ids = torch.tensor([[1, 2, 3]])

    def generate(num_tokens):
        with torch.inference_mode():
            model.generate(ids, min_new_tokens=num_tokens, max_new_tokens=num_tokens, do_sample=False)

    return generate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--forms", nargs="*", default=["bf16", "f32", "q8_0", "q4k"], choices=[*DTYPES, "q8_0", "q4k"])
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count())
    print("| weights | candle-train, ms a token | transformers | ratio of tokens/s |\n|---|---|---|---|")
    for form in args.forms:
        own, other = [per_token(args.turns, of(args.model, form)) for of in (ours, reference)]
        print(f"| {form} | {own * 1e3:.1f} | {other * 1e3:.1f} | {other / own:.2f} |", flush=True)


if __name__ == "__main__":
    main()
