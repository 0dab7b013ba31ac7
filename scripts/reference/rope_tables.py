#!/usr/bin/env python3
"""Print cosines and sines of rotary embeddings as transformers computes them, one JSON line per case:

    python3 scripts/reference/rope_tables.py > tests/fixtures/rope_tables.jsonl

A case has the fields of config.json that it is about, a number of tokens and, for the second and the last position, the
cosines and sines of a head's first half; the second half repeats them.
"""
import copy, json
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 48}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}


def new(rope, theta=10000.0, **other):
    """Fields as transformers 5 writes them."""
    return {"rope_parameters": rope | {"rope_theta": theta}} | other


def old(rope, **other):
    """Fields as transformers 4 wrote them."""
    return {"rope_scaling": rope} | other


CASES = [
    ({}, 48),
    ({"rope_theta": 500.0}, 48),
    (new({"rope_type": "default"}, 500.0, rope_theta=70.0), 48),
    (new({"rope_type": "linear", "factor": 2.5}), 48),
    (old({"type": "linear", "factor": 2.5}, rope_theta=70.0), 48),
    (old({"type": "linear", "factor": 2.5, "rope_theta": 9.0}, rope_theta=70.0), 48),
    (old({"type": "linear", "factor": 2.5}) | new({"rope_type": "linear", "factor": 4.0}, 500.0), 48),
    (old({"type": "linear", "factor": 2.5}, rope_theta=70.0) | new({"rope_type": "default"}, 500.0), 48),
    (old({}) | new({"rope_type": "linear", "factor": 4.0}, 500.0), 48),
    (old(None) | new({"rope_type": "linear", "factor": 4.0}, 500.0), 48),
    (new(LLAMA3 | {"original_max_position_embeddings": 16}), 48),
    (old(LLAMA3 | {"original_max_position_embeddings": 16}, rope_theta=500.0, original_max_position_embeddings=32), 48),
    (old(LLAMA3, rope_theta=500.0), 48),
    (new({"rope_type": "dynamic", "factor": 3.0}), 20),
    (new({"rope_type": "dynamic", "factor": 3.0}), 48),
    (new({"rope_type": "dynamic", "factor": 3.0}), 49),
    (new({"rope_type": "dynamic", "factor": 3.0}), 64),
    (old({"type": "dynamic", "factor": 1.5}, rope_theta=500.0), 64),
    (new(YARN), 48),
    (new(YARN), 64),
    (new(YARN | {"truncate": False}), 48),
    (new(YARN | {"truncate": False}, 100.0), 48),
    (new(YARN | {"attention_factor": 0.75}), 48),
    (new(YARN | {"mscale": 0.7}), 48),
    (new(YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}), 48),
    (new(YARN | {"mscale": 0.7, "mscale_all_dim": 0.0}), 48),
    (new(YARN | {"beta_fast": 4.0, "beta_slow": 0.5}), 48),
    (new(YARN | {"beta_fast": 2, "beta_slow": 2, "truncate": False}), 48),
    (new(YARN | {"factor": 0.5}), 20),
    (new(YARN | {"factor": None}), 48),
    (new({"rope_type": "yarn", "factor": 4.0}, 100.0), 48),
    (old({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}, rope_theta=1000000.0), 48),
]


def main():
    for fields, t in CASES:
        config = LlamaConfig(**SIZES, **copy.deepcopy(fields))
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(t)[None])
        rows = lambda table: [[round(x, 8) for x in table[0, p, : config.head_dim // 2].tolist()] for p in (1, t - 1)]
        print(json.dumps({"fields": SIZES | fields, "t": t, "cos": rows(cos), "sin": rows(sin)}))


if __name__ == "__main__":
    main()
