#!/usr/bin/env bash
# Remakes every folder of tests/fixtures (text.txt excepted, which is an input) with PyTorch, or those named and
# config_defaults.jsonl; see tests/fixtures/README.md.
# Usage: [PYTHON=python3] scripts/reference/make_fixtures.sh [NAME ...]
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
export TQDM_DISABLE=1
fixtures="$(cd "$here/../../tests/fixtures" && pwd)"
python="${PYTHON:-python3}"
only=" $* "

# fixture NAME CHECKPOINT_OPTION... -- TRAINING_OPTION...
fixture() {
    local name="$1" dir="$fixtures/$1" checkpoint=()
    shift
    [[ "$only" == "  " || "$only" == *" $name "* ]] || return 0
    while [[ "$1" != "--" ]]; do checkpoint+=("$1"); shift; done
    shift
    rm -rf "$dir"
    mkdir -p "$dir"
    echo "== $name"
    "$python" "$here/make_checkpoint.py" --out "$dir/model" --text "$fixtures/text.txt" --init-std 0.15 "${checkpoint[@]}"
    "$python" "$here/train_reference.py" --model "$dir/model" --data "$fixtures/text.txt" --out "$dir/reference" \
        --dump-grads --steps 10 --lr 1e-3 --warmup-steps 2 --weight-decay 0.1 "$@"
    mv "$dir/reference/run.json" "$dir/run.json"
    "$python" "$here/check_fixture.py" "$dir"
}

# A bias of keys changes nothing where keys do not turn (softmax), so with the usual `rope-theta` its gradient at these lengths is what
# rounding leaves of numbers that add up to 0. Models with such a bias turn faster here.
fixture gqa --seed 1 --vocab-size 307 --hidden-size 32 --intermediate-size 56 --layers 4 --heads 4 --kv-heads 2 \
    -- --seq-len 32 --global-batch-size 8 --micro-batch-size 2 --max-grad-norm 1.0
fixture wide --seed 2 --vocab-size 301 --hidden-size 32 --intermediate-size 44 --layers 8 --heads 8 --kv-heads 2 \
    -- --seq-len 16 --global-batch-size 24 --micro-batch-size 3 --max-grad-norm 0.5
fixture tied_bias --seed 3 --vocab-size 303 --hidden-size 36 --head-dim 8 --intermediate-size 45 --layers 5 --heads 6 --kv-heads 1 \
    --tie --set attention_bias true --set mlp_bias true --rms-norm-eps 1e-5 --rope-theta 100 \
    --rope '{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}' \
    -- --seq-len 32 --global-batch-size 8 --micro-batch-size 2 --max-grad-norm 1.0
fixture bf16_sharded --seed 4 --vocab-size 300 --hidden-size 32 --intermediate-size 64 --layers 3 --heads 4 --kv-heads 4 \
    --dtype bf16 --rope '{"rope_type": "linear", "factor": 4.0}' --old-config --shard-size 24KB \
    -- --seq-len 32 --global-batch-size 8 --micro-batch-size 4 --max-grad-norm 0.25
fixture f16_tied --seed 5 --vocab-size 320 --hidden-size 48 --intermediate-size 96 --layers 2 --heads 4 --kv-heads 2 \
    --dtype f16 --tie --rope-theta 500000 \
    -- --seq-len 32 --global-batch-size 8 --micro-batch-size 1 --max-grad-norm 100

# family NAME CHECKPOINT_OPTION...: a narrow model with a vocabulary of 80, of the family that its name begins with. Windows, and
# the length from which on `dynamic` changes anything, are shorter than the sequences of all tests; the padding token is one of the text.
family() {
    local name="$1"
    shift
    fixture "$name" --model-type "${name%%_*}" --vocab-size 80 --layers 3 --heads 4 --kv-heads 2 "$@" \
        -- --seq-len 32 --global-batch-size 8 --micro-batch-size 2 --max-grad-norm 1.0
}

# Two sequences, as long as the text allows, with positions that YaRN makes possible.
fixture long --model-type llama --seed 11 --vocab-size 80 --hidden-size 16 --intermediate-size 24 --layers 2 --heads 4 --kv-heads 2 \
    --set max_position_embeddings 4437 --rope '{"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 1479}' \
    -- --steps 3 --seq-len 4437 --global-batch-size 2 --micro-batch-size 1 --max-grad-norm 1.0

family mistral --seed 6 --hidden-size 16 --intermediate-size 24 --set sliding_window 5 \
    --set pad_token_id 62
family mistral_dynamic --seed 7 --hidden-size 16 --intermediate-size 24 --set sliding_window null \
    --set max_position_embeddings 6 --rope '{"rope_type": "dynamic", "factor": 4.0}'
family qwen2 --seed 8 --hidden-size 24 --intermediate-size 24 --tie --old-config --set vocab_size 83 --set pad_token_id 62 \
    --set use_sliding_window true --set sliding_window 6 --set max_window_layers 1 \
    --rope-theta 1000 --rope '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}'
family qwen3 --seed 9 --hidden-size 16 --intermediate-size 24 --head-dim 8 --rope-theta 1000000 \
    --set use_sliding_window true --set sliding_window 4 --set layer_types '["sliding_attention", "full_attention", "sliding_attention"]'
family gemma --seed 10 --hidden-size 24 --intermediate-size 24 --head-dim 8 --tie --set attention_bias true --rope-theta 100

# adapter NAME OPTION...: low-rank adapters of the model of that fixture, which is there already.
adapter() {
    local name="$1"
    shift
    [[ "$only" == "  " || "$only" == *" lora/$name "* ]] || return 0
    rm -rf "$fixtures/lora/$name"
    echo "== lora/$name"
    "$python" "$here/lora_reference.py" --model "$fixtures/$name/model" --data "$fixtures/text.txt" --out "$fixtures/lora/$name" "$@"
}

adapter qwen3 --merged
adapter tied_bias --targets q_proj,v_proj,down_proj --rslora --rank 4 --alpha 3

(($#)) || "$python" "$here/rope_tables.py" >"$fixtures/rope_tables.jsonl"
"$python" "$here/config_defaults.py" >"$fixtures/config_defaults.jsonl"

bytes="$(find "$fixtures" -type f -printf '%s\n' | awk '{ n += $1 } END { print n }')"
echo "== $bytes bytes in all"
((bytes <= 5000000)) || { echo "tests/fixtures is over 5 MB"; exit 1; }
