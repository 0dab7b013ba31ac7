#!/usr/bin/env python3
"""Reference numbers for low-rank adapters, by PyTorch, transformers and peft: the training run of train_reference.py, of which
only an adapter's matrices are trained.

Writes to --out
  adapter/               the adapter before training, as peft saves it; its B is random instead of zero, so that A has a gradient
  run.json               the hyper-parameters
  reference/             metrics.jsonl, and by the names that peft's file has, the unclipped gradients of the first step
                         (grads.safetensors) and the matrices after the last step (weights.safetensors)
  reference/merged.safetensors   with --merged: the weights that merge_and_unload makes of the adapter before training
The forward pass of training has no dropout here: its random numbers are nobody else's.
"""
import argparse, json, math, pathlib
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--rank", type=int, default=3)
    p.add_argument("--alpha", type=float, default=5)
    p.add_argument("--targets", default="all-linear", help="all-linear, or names with commas between")
    p.add_argument("--rslora", action="store_true")
    p.add_argument("--merged", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--seq-len", type=int, default=16)
    p.add_argument("--global-batch-size", type=int, default=8)
    p.add_argument("--micro-batch-size", type=int, default=2)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--min-lr-ratio", type=float, default=0.1)
    p.add_argument("--warmup-steps", type=int, default=2)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    a = p.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(a.seed)
    tok = AutoTokenizer.from_pretrained(a.model)
    load = lambda: AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="eager")
    targets = a.targets if a.targets == "all-linear" else a.targets.split(",")
    config = LoraConfig(r=a.rank, lora_alpha=a.alpha, target_modules=targets, use_rslora=a.rslora, task_type="CAUSAL_LM",
                        base_model_name_or_path="a-model")
    model = get_peft_model(load(), config)
    trained = {n: w for n, w in model.named_parameters() if w.requires_grad}
    with torch.no_grad():
        for n, w in trained.items():
            if ".lora_B." in n:
                w.normal_(std=0.1)
    out = pathlib.Path(a.out)
    reference = out / "reference"
    reference.mkdir(parents=True, exist_ok=True)
    # Names of a model of the hub, and of nothing on this machine.
    model.peft_config["default"].base_model_name_or_path = "a-model"
    model.save_pretrained(out / "adapter")
    (out / "adapter" / "README.md").unlink(missing_ok=True)
    by_file_name = lambda tensors: {n.replace(".default.", "."): w.detach().contiguous().clone() for n, w in tensors.items()}
    assert by_file_name(trained).keys() == get_peft_model_state_dict(model).keys()
    if a.merged:
        import copy
        merged = copy.deepcopy(model).merge_and_unload()
        names = [n for n, _ in merged.named_parameters() if "proj" in n]
        save_file({n: merged.get_parameter(n).detach().contiguous() for n in names}, reference / "merged.safetensors")
    run = {k: v for k, v in vars(a).items() if k in ("seq_len", "global_batch_size", "micro_batch_size", "steps", "lr", "min_lr_ratio",
                                                   "warmup_steps", "weight_decay", "max_grad_norm")}
    (out / "run.json").write_text(json.dumps(run, indent=2) + "\n")

    ids = tok(open(a.data, encoding="utf-8").read(), add_special_tokens=False)["input_ids"] + [tok.eos_token_id]
    t, g = a.seq_len, a.global_batch_size
    n = (len(ids) - 1) // t
    sample = lambda i: torch.tensor(ids[(i % n) * t : (i % n) * t + t + 1])
    opt = torch.optim.AdamW(list(trained.values()), lr=a.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=a.weight_decay)
    with open(reference / "metrics.jsonl", "w") as log:
        for s in range(a.steps):
            w, lo = a.warmup_steps, a.min_lr_ratio * a.lr
            lr = a.lr * (s + 1) / w if s < w else lo + (a.lr - lo) * (1 + math.cos(math.pi * (s - w) / max(1, a.steps - w))) / 2
            for group in opt.param_groups:
                group["lr"] = lr
            total, num_tokens = 0.0, g * t
            for first in range(0, g, a.micro_batch_size):
                batch = torch.stack([sample(s * g + i) for i in range(first, min(first + a.micro_batch_size, g))])
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum") / num_tokens
                loss.backward()
                total += loss.item()
            if s == 0:
                save_file(by_file_name({n_: w_.grad for n_, w_ in trained.items()}), reference / "grads.safetensors")
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), a.max_grad_norm).item()
            opt.step()
            opt.zero_grad()
            log.write(json.dumps({"step": s, "loss": total, "grad_norm": norm, "learning_rate": lr, "num_tokens": num_tokens}) + "\n")
    save_file(by_file_name(trained), reference / "weights.safetensors")


if __name__ == "__main__":
    main()
