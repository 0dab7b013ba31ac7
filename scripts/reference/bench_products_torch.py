#!/usr/bin/env python3
"""PyTorch's half of crates/ops/examples/bench_product: reads a product from each line of stdin and answers with its fewest seconds.

A line is `PASS DTYPE ROWS IN OUT RUNS`, PASS one of forward, input_grad and weight_grad of a linear layer, DTYPE f32 or bf16.
"""
import functools
import sys
import time

import torch

# Seconds until threads of the other program no longer spin, as there.
PAUSE = 0.005
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


@functools.lru_cache(1)
def passes(dtype, rows, num_in, num_out):
    xs, weight, dy = (torch.randn(*dims).to(DTYPES[dtype]) for dims in ((rows, num_in), (num_out, num_in), (rows, num_out)))
    return {"forward": lambda: torch.nn.functional.linear(xs, weight), "input_grad": lambda: dy @ weight, "weight_grad": lambda: dy.t() @ xs}


def secs(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


for line in sys.stdin:
    name, dtype, *numbers = line.split()
    *sizes, runs = map(int, numbers)
    call = passes(dtype, *sizes)[name]
    start = time.perf_counter()
    while time.perf_counter() - start < PAUSE:
        pass
    print(min(secs(call) for _ in range(runs)), flush=True)
