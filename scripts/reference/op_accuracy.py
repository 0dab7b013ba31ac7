#!/usr/bin/env python3
"""Compare each operation of candle-ops, and PyTorch's of the same type, with PyTorch's f64; print a Markdown table.

    cargo run --release -p candle-ops --example op_accuracy -- --output FOLDER
    python3 scripts/reference/op_accuracy.py FOLDER

The folder holds inputs and results, one file per seed. Errors: the L2 norm of the difference over that of the f64
result, root of the mean square over the seeds; in brackets the largest difference over the root mean square of the f64
result, the largest over the seeds.
"""
import pathlib, sys
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

NORM_EPS = 1e-5  # that of the example


def back(y, dy, inputs):
    return torch.autograd.grad(y, inputs, dy)


def tracked(tensors, *names):
    return [tensors[name].requires_grad_() for name in names]


def rms_norm(a):
    xs, weight = tracked(a, "xs", "weight")
    y = F.rms_norm(xs, weight.shape, weight, NORM_EPS)
    dx, dweight = back(y, a["dy"], [xs, weight])
    return {"y": y, "dx": dx, "dx + residual": dx + a["residual"], "dweight": dweight}


def layer_norm(a):
    xs, weight, bias = tracked(a, "xs", "weight", "bias")
    y = F.layer_norm(xs, weight.shape, weight, bias, NORM_EPS)
    dx, dweight, dbias = back(y, a["dy"], [xs, weight, bias])
    return {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}


def rope(a):
    (xs,) = tracked(a, "xs")
    cos, sin = (torch.cat([a[name]] * 2, -1)[:, None] for name in ("cos", "sin"))
    first, second = xs.chunk(2, -1)
    y = xs * cos + torch.cat((-second, first), -1) * sin
    return {"y": y, "dx": back(y, a["dy"], [xs])[0]}


def swiglu(a):
    gate, up = tracked(a, "gate", "up")
    y = F.silu(gate) * up
    dgate, dup = back(y, a["dy"], [gate, up])
    return {"y": y, "dgate": dgate, "dup": dup}


def causal_attention(a):
    q, k, v = tracked(a, "q", "k", "v")
    heads = (x.transpose(1, 2) for x in (q, k, v))
    scale = float(a["scale"])
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril().triu(1 - int(a["window"]))
    mask = {"is_causal": True} if seen[-1, 0] else {"attn_mask": seen}
    y = F.scaled_dot_product_attention(*heads, **mask, scale=scale, enable_gqa=True).transpose(1, 2)
    dq, dk, dv = back(y, a["dy"], [q, k, v])
    scores = q.transpose(1, 2) @ k.repeat_interleave(q.shape[2] // k.shape[2], 2).permute(0, 2, 3, 1) * scale
    lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    return {"y": y, "log-sum-exp": lse, "dq": dq, "dk": dk, "dv": dv}


def linear(a):
    xs, weight, bias, weight2 = tracked(a, "xs", "weight", "bias", "weight2")
    y, y_bias, y2 = F.linear(xs, weight), F.linear(xs, weight, bias), F.linear(xs, weight2)
    dx, dweight, dbias = back(y_bias, a["dy"], [xs, weight, bias])
    two = torch.autograd.grad([y, y2], [xs], [a["dy"], a["dy2"]])[0]
    return {"y": y, "y + bias": y_bias, "y + residual": y + a["residual"], "dx": dx, "dx of two": two,
            "dweight": dweight, "dweight added": a["start"] + dweight, "dbias": dbias}


def embedding(a):
    (weight,) = tracked(a, "weight")
    y = F.embedding(a["ids"], weight)
    return {"y": y, "dweight": back(y, a["dy"], [weight])[0]}


def cross_entropy(a):
    (logits,) = tracked(a, "logits")
    loss = F.cross_entropy(logits, a["targets"], reduction="none").to(a["grad"].dtype)
    peak = logits.amax(-1)
    sum_exp = (logits - peak[:, None]).exp().sum(-1)
    return {"maximum": peak, "sum_exp": sum_exp, "loss": loss, "dlogits": back(loss, a["grad"], [logits])[0]}


OPS = [rms_norm, rope, swiglu, causal_attention, linear, embedding, cross_entropy, layer_norm]


def errors(got, want):
    """Relative L2 error, and largest error over the root mean square."""
    want = want.detach()
    difference, norm = got.detach().double() - want, want.norm()
    assert got.shape == want.shape, f"{got.shape} instead of {want.shape}"
    return float(difference.norm() / norm), float(difference.abs().max() / norm * want.numel() ** 0.5)


def compare(path):
    """{(operation and shape, output): (errors of candle-ops, errors of PyTorch)} of one seed."""
    calls = {}
    for key, tensor in sorted(load_file(path).items()):
        _number, call, side, name = key.split("/")
        calls.setdefault(call, {"in": {}, "out": {}})[side][name] = tensor
    rows = {}
    for call, tensors in calls.items():
        op = next(op for op in OPS if op.__name__ == call.split()[0])
        double = {name: x.double() if x.is_floating_point() else x for name, x in tensors["in"].items()}
        want, torch_result = op(double), op(tensors["in"])
        assert want.keys() == tensors["out"].keys(), f"{call}: {want.keys()} and {tensors['out'].keys()}"
        for name, value in want.items():
            rows[call, name] = errors(tensors["out"][name], value), errors(torch_result[name], value)
    return rows


def main():
    seeds = [compare(path) for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors"))]
    print(f"{len(seeds)} seeds, PyTorch {torch.__version__.split('+')[0]} on the CPU.\n")
    print("| operation and shape | output | candle-ops | PyTorch | ratio |\n|---|---|---|---|---|")
    for call, name in seeds[0]:
        columns = []
        for side in (0, 1):
            all_seeds = [seed[call, name][side] for seed in seeds]
            rms = (sum(l2 ** 2 for l2, _ in all_seeds) / len(seeds)) ** 0.5
            columns.append((rms, max(largest for _, largest in all_seeds)))
        ours, theirs = (l2 for l2, _ in columns)
        text = [f"{l2:.2e} ({largest:.1e})" if l2 else "exact" for l2, largest in columns]
        ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
        print(f"| {call} | {name} | {text[0]} | {text[1]} | {ratio} |")


if __name__ == "__main__":
    main()
