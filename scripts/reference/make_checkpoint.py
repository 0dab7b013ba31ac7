#!/usr/bin/env python3
"""Write a small, randomly initialised Hugging Face checkpoint of any family with a real BPE tokenizer.

Needs PyTorch (the CPU is enough): pip install torch==2.11.0 transformers==5.23.0 tokenizers safetensors numpy
The files are written by transformers' own save_pretrained, so their layout is what a user downloads.
"""
import argparse, json, pathlib
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", required=True)
    p.add_argument("--text", required=True, help="text file the BPE tokenizer is trained on")
    p.add_argument("--model-type", default="llama", help="the family, by its model_type in transformers")
    p.add_argument("--vocab-size", type=int, default=512, help="below 261 the tokenizer knows the bytes of the text only")
    p.add_argument("--hidden-size", type=int, default=64)
    p.add_argument("--intermediate-size", type=int, default=172)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=None)
    p.add_argument("--rope-theta", type=float, default=10000.0)
    p.add_argument("--rms-norm-eps", type=float, default=1e-6)
    p.add_argument("--tie", action="store_true", help="tie_word_embeddings")
    p.add_argument("--set", nargs=2, action="append", default=[], metavar=("FIELD", "JSON"), help="any other field of config.json")
    p.add_argument("--rope", type=json.loads, default={}, metavar="JSON", help="what rope_parameters has besides rope_theta")
    p.add_argument("--old-config", action="store_true", help="config.json in the spelling of transformers 4: rope_theta, rope_scaling, torch_dtype, no layer_types, no head_dim unless it was given")
    p.add_argument("--shard-size", default="50GB", help="max_shard_size, e.g. 200KB for several files and an index")
    p.add_argument("--dtype", choices=["f32", "bf16", "f16"], default="f32", help="type of the stored weights")
    p.add_argument("--init-std", type=float, default=0.02, help="standard deviation of the initial weights; at 0.02 a very narrow model attends almost uniformly and hides mistakes")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()

    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train([a.text], trainers.BpeTrainer(
        vocab_size=a.vocab_size, special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if a.vocab_size >= 261 else [], show_progress=False))
    vocab = tok.get_vocab_size()
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=specials[0], eos_token=specials[1])
    fast.chat_template = CHAT_TEMPLATE

    torch.manual_seed(a.seed)
    fields = {
        "vocab_size": vocab, "hidden_size": a.hidden_size, "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.layers, "num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads,
        "max_position_embeddings": 2048, "tie_word_embeddings": a.tie, "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta} | a.rope,
        "initializer_range": a.init_std, "rms_norm_eps": a.rms_norm_eps}
    if a.head_dim is not None:
        fields["head_dim"] = a.head_dim
    fields |= {name: json.loads(value) for name, value in a.set}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(a.model_type, **fields))
    with torch.no_grad():  # norms away from 1 and biases from 0, so that an ignored one shows
        for n, w in model.named_parameters():
            if "norm" in n or n.endswith("bias"):
                w.add_(0.1 * torch.randn_like(w))
    model = model.to({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[a.dtype])
    out = pathlib.Path(a.out)
    model.save_pretrained(out, max_shard_size=a.shard_size)
    fast.save_pretrained(out)
    if a.old_config:
        path = out / "config.json"
        c = json.loads(path.read_text())
        r = c.pop("rope_parameters")
        c["rope_theta"] = r.pop("rope_theta")
        c["rope_scaling"] = None if r["rope_type"] == "default" else r
        c["torch_dtype"] = c.pop("dtype")
        c.pop("layer_types", None)
        if a.head_dim is None:
            c.pop("head_dim", None)
        path.write_text(json.dumps(c, indent=2) + "\n")
    print(json.dumps({"vocab_size": vocab, "parameters": sum(w.numel() for w in model.parameters()),
                      "files": sorted(f.name for f in out.iterdir())}))


if __name__ == "__main__":
    main()
