#!/usr/bin/env python3
"""PyTorch's half of crates/ops/examples/bench_gpu: the same shapes, a JSON line each.

usage: bench_ops_torch.py DEVICE products ROWSxINxOUT...
       bench_ops_torch.py DEVICE attention SEQUENCES,TOKENS,HEADS,KV_HEADS,HEAD_DIM...
       bench_ops_torch.py DEVICE check FILE       relative L2 distances of what FILE holds from what f64 gives
Inputs are bf16. Times are medians, on a GPU by events around several calls.
"""
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

WARM_UP, ROUNDS, CALLS = 3, 5, 4
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def secs_of_call(device, call):
    for _ in range(WARM_UP):
        call()
    rounds = []
    for _ in range(ROUNDS):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        secs = time.perf_counter() - began
        if device == "cuda":
            end.record()
            end.synchronize()
            secs = start.elapsed_time(end) / 1e3
        rounds.append(secs / CALLS)
    return sorted(rounds)[ROUNDS // 2]


def products(device, shapes):
    for shape in shapes:
        rows, num_in, num_out = map(int, shape.split("x"))
        x, dy, w = (torch.randn(dims, device=device, dtype=torch.bfloat16)
                    for dims in ((rows, num_in), (rows, num_out), (num_out, num_in)))
        # What autograd computes for a linear layer; the gradient of the weight is bf16, ours is f32.
        for op, call in [("forward", lambda: torch.matmul(x, w.t())), ("input gradient", lambda: torch.matmul(dy, w)),
                         ("weight gradient", lambda: torch.matmul(dy.t(), x))]:
            secs = secs_of_call(device, call)
            print(json.dumps({"op": f"{shape} {op}", "secs": secs, "tflops": 2 * rows * num_in * num_out / secs / 1e12}))


def passes(device, backend, inputs, grad):
    """Seconds of the forward and the backward pass."""
    with sdpa_kernel(backend):
        run = lambda: F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=inputs[0].shape[1] != inputs[1].shape[1])
        out = run()
        return (secs_of_call(device, run),
                secs_of_call(device, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)))


def attention(device, shapes):
    for shape in shapes:
        b, t, heads, kv_heads, d = map(int, shape.split(","))
        q, k, v, grad = (torch.randn((b, t, h, d), device=device, dtype=torch.bfloat16).transpose(1, 2)
                         for h in (heads, kv_heads, kv_heads, heads))
        repeated = [tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (k, v)]
        for name, backend in BACKENDS.items():
            line = {"backend": name, "head_dim": d}
            # What does not know of groups of heads gets each key and value as often as they are read.
            for kv in ((k, v), repeated):
                line["kv_heads"] = kv[0].shape[1]
                inputs = [tensor.detach().requires_grad_() for tensor in (q, *kv)]
                try:
                    secs = passes(device, backend, inputs, grad)
                    break
                except RuntimeError as error:
                    secs, failed = None, str(error).splitlines()[0]
            if not secs:
                print(json.dumps({**line, "op": "forward", "failed": failed}))
                continue
            flops = 2 * b * heads * t * t * d
            for op, secs, flops in (("forward", secs[0], flops), ("backward", secs[1], 2.5 * flops)):
                print(json.dumps({**line, "op": op, "secs": secs, "tflops": flops / secs / 1e12}))


def check(device, file):
    from safetensors.torch import load_file
    held = {name: tensor.to(device).double() for name, tensor in load_file(file).items()}
    expected = {"y": held["x"] @ held["weight"].t(), "dx": held["y"] @ held["weight"]}
    q, k, v, grad = (held[name].transpose(1, 2).requires_grad_() for name in ("q", "k", "v", "grad"))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / q.shape[-1] ** 0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=device).tril().triu(1 - int(held["window"]))
    # A document's tokens have the same start.
    seen = seen & (held["starts"][:, None, :, None] == held["starts"][:, None, None, :])
    out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.repeat_interleave(group, 1)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
    expected |= {name: tensor.detach().transpose(1, 2) for name, tensor in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    print(json.dumps({name: float((held[name] - want).norm() / want.norm()) for name, want in expected.items()}))


def main():
    if len(sys.argv) < 4 or sys.argv[2] not in ("products", "attention", "check"):
        sys.exit(__doc__)
    _, device, part, *arguments = sys.argv
    if part == "check":
        check(device, *arguments)
    else:
        {"products": products, "attention": attention}[part](device, arguments)


if __name__ == "__main__":
    main()
