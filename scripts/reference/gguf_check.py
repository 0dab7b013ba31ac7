#!/usr/bin/env python3
"""Reads a GGUF file with the gguf package and compares it with the folder of the model that it was exported from.

    pip install gguf==0.19.0 numpy safetensors torch
    gguf_check.py DIR FILE

Every weight must be there under llama.cpp's name and in its shape; values of f32, f16 and bf16 must be those of the folder, rounded, and those of blocks, which
the package decodes, within a part of their root mean square. Metadata without which llama.cpp does not load a model must be there.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file

# How far decoded values may be from the model's, as a part of their root mean square.
MOST = {"F32": 0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01, "Q6_K": 0.03, "Q5_0": 0.06, "Q5_1": 0.05, "Q5_K": 0.06, "Q4_0": 0.12, "Q4_K": 0.12}
NAMES = [
    ("model.layers.", "blk."), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
    ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"), ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
]


def expected(folder, config):
    """Names in the file, and values as they should be there."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"]}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            values = tensor.float().numpy()
            for projection, number in heads.items():
                if config["model_type"] in ["llama", "mistral"] and projection in name:
                    halves = values.reshape(number, 2, -1, *values.shape[1:])
                    values = halves.swapaxes(1, 2).reshape(values.shape)
            if config["model_type"] == "gemma" and name.endswith("norm.weight"):
                values = values + 1
            for own, other in NAMES:
                name = name.replace(own, other)
            yield name, values


def main():
    folder, file = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    reader = GGUFReader(file)
    found = {tensor.name: tensor for tensor in reader.tensors}
    architecture = reader.fields["general.architecture"].contents()
    needed = ["general.file_type", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.eos_token_id"]
    needed += [f"{architecture}.{key}" for key in [
        "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "vocab_size",
    ]]
    missing = [key for key in needed if key not in reader.fields]
    assert not missing, f"metadata lack {missing}"
    number = 0
    for name, values in expected(folder, config):
        tensor = found.pop(name)
        decoded = dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        shape = [int(dim) for dim in tensor.shape]
        assert shape == list(values.shape)[::-1], f"{name}: {shape}, expected {values.shape} backwards"
        scale = np.sqrt(np.mean(values**2))
        error = np.sqrt(np.mean((decoded - values) ** 2)) / max(scale, 1e-30)
        assert error <= MOST[tensor.tensor_type.name], f"{name} of {tensor.tensor_type.name}: {error}"
        number += 1
    found.pop("rope_freqs.weight", None)
    assert not found, f"more than the model has: {list(found)}"
    print(f"{file}: {number} tensors, {len(reader.fields)} metadata, as in {folder}")


main()
