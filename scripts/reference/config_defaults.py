#!/usr/bin/env python3
"""Print what transformers makes of short config.json files, one JSON line each:

    python3 scripts/reference/config_defaults.py > tests/fixtures/config_defaults.jsonl
"""
import json
from transformers import AutoConfig

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 32}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES = [(family, fields) for family in ("llama", "mistral", "qwen2", "qwen3", "gemma") for fields in (
    {}, {"num_key_value_heads": 4, "head_dim": 10}, {"sliding_window": None},
    {"max_position_embeddings": 99, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "rope_theta": 70.0})]
CASES += [(family, {"num_key_value_heads": None}) for family in ("llama", "qwen2", "qwen3")]
CASES += [("mistral", {"sliding_window": 7})]
CASES += [(family, WINDOWS | fields) for family in ("qwen2", "qwen3") for fields in (
    {}, {"max_window_layers": 0}, {"max_window_layers": 3}, {"max_window_layers": 4}, {"layer_types": TYPES},
    {"layer_types": TYPES, "max_window_layers": 0}, {"sliding_window": None}, {"use_sliding_window": False})]


def main():
    for family, fields in CASES:
        file = SIZES | fields
        c = AutoConfig.for_model(family, **file)
        # As the family's attention reads them.
        types = getattr(c, "layer_types", None) or ["sliding_attention" if family == "mistral" else "full_attention"] * 4
        print(json.dumps({"file": {"model_type": family} | file, "read": {
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            "max_position_embeddings": c.max_position_embeddings,
            "rms_norm_eps": c.rms_norm_eps,
            "tie_word_embeddings": c.tie_word_embeddings,
            "rope_theta": c.rope_parameters["rope_theta"],
            "windows": [c.sliding_window if kind == "sliding_attention" else None for kind in types]}}))


if __name__ == "__main__":
    main()
