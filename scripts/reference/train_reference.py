#!/usr/bin/env python3
"""Single-process PyTorch + transformers reference for a fine-tuning run: the numbers every layout must reproduce.

Data   a .txt file is one document: its token ids (no special tokens added) and then the EOS id.
       Sample i is ids[i*T : i*T + T + 1]; the first T are inputs, the last T are targets. Samples are taken in
       order (the run being compared passes --no-shuffle) and wrap around at the end of the file.
Step   s uses samples s*G .. s*G + G, G = global batch size in sequences.
Loss   sum of the cross-entropy over all target tokens of the step / their number.
LR     step s (from 0), W warm-up steps, S steps: lr*(s+1)/W for s < W, then
       min + (lr - min) * (1 + cos(pi * (s - W) / max(1, S - W))) / 2 with min = min_lr_ratio * lr.
AdamW  betas (0.9, 0.95), eps 1e-8, decoupled weight decay on tensors with two or more dims only;
       gradient clipping by global L2 norm: scale = min(1, max_norm / (norm + 1e-6)).
Weights, gradients and optimizer state are f32, whatever type the checkpoint is stored in; attention is the eager one.
One thread and deterministic algorithms: the same machine gives the same bytes again.
Writes run.json (the hyper-parameters), metrics.jsonl (step, loss, grad_norm before clipping, learning_rate, num_tokens)
and the weights after training (weights.safetensors); with --dump-grads also the first step's unclipped gradients
(grads.safetensors). A tied head is not written: its gradient is part of the embedding's.
"""
import argparse, json, math, pathlib
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--data", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--seq-len", type=int, default=64)
    p.add_argument("--global-batch-size", type=int, default=8)
    p.add_argument("--micro-batch-size", type=int, default=8)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--min-lr-ratio", type=float, default=0.1)
    p.add_argument("--warmup-steps", type=int, default=2)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--max-grad-norm", type=float, default=1.0)
    p.add_argument("--dump-grads", action="store_true")
    a = p.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tok = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="eager")
    ids = tok(open(a.data, encoding="utf-8").read(), add_special_tokens=False)["input_ids"] + [tok.eos_token_id]
    t, g = a.seq_len, a.global_batch_size
    n = (len(ids) - 1) // t
    sample = lambda i: torch.tensor(ids[(i % n) * t : (i % n) * t + t + 1])
    decay = [w for w in model.parameters() if w.dim() >= 2]
    other = [w for w in model.parameters() if w.dim() < 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": a.weight_decay}, {"params": other, "weight_decay": 0.0}],
                            lr=a.lr, betas=(0.9, 0.95), eps=1e-8)
    out = pathlib.Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    run = {k: v for k, v in vars(a).items() if k not in ("model", "data", "out", "dump_grads")}
    (out / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    with open(out / "metrics.jsonl", "w") as log:
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
            if s == 0 and a.dump_grads:
                save_file({n_: w_.grad.contiguous() for n_, w_ in model.named_parameters()}, out / "grads.safetensors")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), a.max_grad_norm).item()
            opt.step()
            opt.zero_grad()
            log.write(json.dumps({"step": s, "loss": total, "grad_norm": norm, "learning_rate": lr, "num_tokens": num_tokens}) + "\n")
    save_file({n_: w_.detach().contiguous() for n_, w_ in model.named_parameters()}, out / "weights.safetensors")


if __name__ == "__main__":
    main()
