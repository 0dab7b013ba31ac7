#!/usr/bin/env python3
"""Load a checkpoint folder with transformers, as a user would, and report what transformers makes of it.

Prints missing, unexpected and mismatched keys, the number of parameters, the stored type and, with --text, the mean
next-token loss in f32. --against compares every parameter with another checkpoint folder or one .safetensors file,
and the tokenizer with that of the folder. --adapter puts a low-rank adapter on the model with peft, and folds it in before
anything is compared or computed. --logits compares the logits of the last of some tokens with a file's. Exits with
1 if a key is missing, unexpected or mismatched, a value is not finite, or a comparison fails.

All fixtures, trained and saved:
    CANDLE_TRAIN_SAVED=$PWD/saved cargo test -p candle-train-tests --test end_to_end -- trained_checkpoints_are_saved
    for d in saved/*; do for m in model written; do python3 scripts/reference/load_check.py $d/$m --logits $d/logits.safetensors; done; done
"""
import argparse, pathlib, sys
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(path):
    """Returns the model in its stored type and the list of problems with its keys."""
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="eager", output_loading_info=True)
    return model, [f"{kind}: {sorted(map(str, info[kind]))}" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]]


def mean_loss(model, ids, seq_len):
    """Mean cross-entropy over consecutive windows of seq_len tokens; a last shorter window is left out."""
    windows = torch.tensor(ids).unfold(0, seq_len + 1, seq_len)
    with torch.no_grad():
        logits = torch.cat([model(input_ids=w[:, :-1], use_cache=False).logits for w in windows.split(16)])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten()).item()


def compare(ours, theirs, tolerance):
    """Returns the differences in names, shapes, types (at tolerance 0 only) and values of two dicts of tensors."""
    problems = [f"only in one: {name}" for name in sorted(ours.keys() ^ theirs.keys())]
    worst = 0.0
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if a.shape != b.shape or (tolerance == 0 and a.dtype != b.dtype):
            problems.append(f"{name}: {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}")
            continue
        diff = (a.double() - b.double()).abs().max().item()
        worst = max(worst, diff)
        if not diff <= tolerance:
            problems.append(f"{name}: differs by up to {diff:.3e}")
    print(f"compared {len(ours.keys() & theirs.keys())} tensors, largest difference {worst:.3e}, allowed {tolerance:.1e}")
    return problems


def with_adapter(model, path):
    """Returns the model with the adapter folded in by peft, and what peft did not take of the adapter's file."""
    from peft import PeftModel, get_peft_model_state_dict
    adapted = PeftModel.from_pretrained(model, path)
    stored, taken = load_file(path / "adapter_model.safetensors"), get_peft_model_state_dict(adapted)
    config = adapted.peft_config["default"]
    print(f"adapter of {len(stored)} tensors, rank {config.r}, alpha {config.lora_alpha:g}, layers {', '.join(sorted(config.target_modules))}")
    return adapted.merge_and_unload(), compare({n: w.float() for n, w in taken.items()}, {n: w.float() for n, w in stored.items()}, 0.0)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir", type=pathlib.Path)
    p.add_argument("--against", type=pathlib.Path, help="checkpoint folder or .safetensors file with the same tensors")
    p.add_argument("--tolerance", type=float, default=0.0, help="largest absolute difference allowed by --against")
    p.add_argument("--logits", type=pathlib.Path, help="safetensors file with ids (t) and the logits (vocab) of the last of them, in f32")
    p.add_argument("--adapter", type=pathlib.Path, help="folder of an adapter as peft saves it")
    p.add_argument("--text", type=pathlib.Path, help="text file to compute the loss on")
    p.add_argument("--seq-len", type=int, default=64)
    a = p.parse_args()

    model, problems = load(a.dir)
    if a.adapter:
        model, of_adapter = with_adapter(model, a.adapter)
        problems += of_adapter
    tok = AutoTokenizer.from_pretrained(a.dir)
    params = dict(model.named_parameters())
    problems += [f"{name}: not finite" for name, w in params.items() if not w.isfinite().all()]
    types = sorted({str(w.dtype).removeprefix("torch.") for w in params.values()})
    print(f"{len(params)} tensors, {sum(w.numel() for w in params.values())} parameters, {', '.join(types)}, "
          f"tied {model.config.tie_word_embeddings}, tokenizer of {len(tok)} tokens, bos {tok.bos_token!r}, eos {tok.eos_token!r}")
    if len(tok) > model.config.vocab_size:
        problems.append(f"tokenizer has {len(tok)} tokens, the model {model.config.vocab_size}")
    text = a.text.read_text(encoding="utf-8") if a.text else "One, two — three’s a crowd.\n"
    ids = tok(text, add_special_tokens=False)["input_ids"]
    if a.against and a.against.is_dir():
        other, other_problems = load(a.against)
        problems += [f"{a.against}: {line}" for line in other_problems]
        problems += compare(params, dict(other.named_parameters()), a.tolerance)
        if AutoTokenizer.from_pretrained(a.against)(text, add_special_tokens=False)["input_ids"] != ids:
            problems.append("the tokenizers give different ids")
    elif a.against:
        problems += compare(params, load_file(a.against), a.tolerance)
    if a.text:
        print(f"loss {mean_loss(model.float(), ids, a.seq_len):.6f} on {len(ids)} tokens, windows of {a.seq_len}")
    if a.logits:
        expected = load_file(a.logits)
        with torch.no_grad():
            logits = model.float()(input_ids=expected["ids"][None], use_cache=False).logits[0, -1]
        error = ((logits - expected["logits"]).norm() / logits.norm()).item()
        print(f"logits of {type(model).__name__} after {len(expected['ids'])} tokens: off by {error:.1e} (relative L2)")
        if not error <= 1e-5:
            problems.append("the logits differ by more than 1e-5")
    print("\n".join(problems) if problems else "ok")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
