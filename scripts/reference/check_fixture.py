#!/usr/bin/env python3
"""Check one fixture folder: every parameter has a gradient and a trained weight, all finite, and the loss went down."""
import json, pathlib, sys
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main():
    fixture = pathlib.Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(fixture / "model")
    shapes = {name: w.shape for name, w in model.named_parameters()}
    grads = load_file(fixture / "reference/grads.safetensors")
    weights = load_file(fixture / "reference/weights.safetensors")
    for what, tensors in [("gradient", grads), ("trained weight", weights)]:
        found = {name: w.shape for name, w in tensors.items()}
        assert found == shapes, f"{what}s differ from the parameters: {sorted(found.items() ^ shapes.items())}"
        bad = [name for name, w in tensors.items() if not w.isfinite().all()]
        assert not bad, f"{what} not finite: {bad}"
    zero = [name for name, g in grads.items() if g.norm() == 0]
    assert not zero, f"gradient is all zero: {zero}"
    run = json.loads((fixture / "run.json").read_text())
    steps = [json.loads(line) for line in (fixture / "reference/metrics.jsonl").open()]
    assert len(steps) == run["steps"], f"{len(steps)} steps logged, {run['steps']} asked for"
    assert steps[-1]["loss"] < steps[0]["loss"], "the loss did not go down"
    norms = [s["grad_norm"] for s in steps]
    clipped = sum(n > run["max_grad_norm"] for n in norms)
    size = sum(f.stat().st_size for f in fixture.rglob("*") if f.is_file())
    print(f"loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}, gradient norm {min(norms):.3f} to {max(norms):.3f}, "
          f"clipped in {clipped} of {len(steps)} steps, smallest tensor gradient norm {min(g.norm() for g in grads.values()):.1e}, {size} bytes")


if __name__ == "__main__":
    main()
