//! Each family's `config.json`: read as `transformers` reads it, written so that it can be read again, refused by name.

use candle_core::Result;
use candle_train_models::{FAMILIES, Family, ModelConfig};
use serde_json::{Value, json};

/// A small file of a family with other fields.
fn read(model_type: &str, fields: &Value) -> Result<ModelConfig> {
    let mut file = json!({
        "model_type": model_type, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2
    });
    for (name, value) in fields.as_object().unwrap() {
        file[name] = value.clone();
    }
    ModelConfig::from_json(&file.to_string())
}

#[track_caller]
fn assert_refused(model_type: &str, fields: &Value, parts: &[&str]) {
    let message = match read(model_type, fields) {
        Ok(config) => panic!("{model_type} with {fields}: not refused: {config:?}"),
        Err(err) => err.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn files_mean_what_transformers_makes_of_them() {
    let cases = include_str!("../../../tests/fixtures/config_defaults.jsonl");
    for family in FAMILIES {
        let name = format!("\"model_type\": {:?}", family.model_type);
        assert!(cases.contains(&name), "no case of {name}");
    }
    for line in cases.lines() {
        let mut case: Value = serde_json::from_str(line).unwrap();
        let config = ModelConfig::from_json(&case["file"].to_string()).expect(line);
        let windows: Vec<_> = (0..config.num_hidden_layers)
            .map(|i| config.window(i))
            .collect();
        let ours = json!({
            "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
            "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.rms_norm_eps,
            "tie_word_embeddings": config.tie_word_embeddings, "rope_theta": config.rope_theta, "windows": windows
        });
        assert_eq!(ours, case["read"].take(), "{line}");
    }
}

#[test]
fn a_written_configuration_is_read_again_and_has_the_familys_fields() {
    let windows = json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 2});
    let types = json!(["full_attention", "full_attention", "sliding_attention"]);
    for (model_type, fields, expected) in [
        (
            "llama",
            json!({"attention_bias": true}),
            json!({"architectures": ["LlamaForCausalLM"], "attention_bias": true, "mlp_bias": false}),
        ),
        (
            "llama",
            json!({"mlp_bias": true, "rope_scaling": {"type": "dynamic", "factor": 2}}),
            json!({"mlp_bias": true, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
        ),
        (
            "mistral",
            json!({"sliding_window": 5}),
            json!({"architectures": ["MistralForCausalLM"], "sliding_window": 5}),
        ),
        (
            "mistral",
            json!({"sliding_window": null}),
            json!({"sliding_window": null}),
        ),
        (
            "qwen2",
            windows.clone(),
            json!({
                "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true, "sliding_window": 5,
                "max_window_layers": 2, "layer_types": types
            }),
        ),
        ("qwen2", json!({}), json!({"use_sliding_window": false})),
        (
            "qwen3",
            json!({"attention_bias": true, "head_dim": 6}),
            json!({"architectures": ["Qwen3ForCausalLM"], "attention_bias": true, "head_dim": 6}),
        ),
        ("qwen3", windows, json!({"layer_types": types})),
        (
            "gemma",
            json!({"attention_bias": true, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
            json!({
                "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "attention_bias": true,
                "head_dim": 256, "tie_word_embeddings": true, "bos_token_id": 2, "eos_token_id": 1
            }),
        ),
    ] {
        let config = read(model_type, &fields).unwrap();
        let text = config.to_json().unwrap();
        assert_eq!(ModelConfig::from_json(&text).unwrap(), config);
        let file: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(file["model_type"], model_type);
        for (name, value) in expected.as_object().unwrap() {
            assert_eq!(file[name], *value, "{name} in {text}");
        }
    }
}

#[test]
fn what_a_familys_file_cannot_say_is_not_written() {
    let config = ModelConfig {
        qk_norm: true,
        ..read("llama", &json!({})).unwrap()
    };
    let message = config.to_json().unwrap_err().to_string();
    for part in ["\"llama\" cannot say", "qk_norm: true"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (name, value, supported) in [
        ("hidden_act", json!("relu"), "supported"),
        ("dtype", json!("float64"), "\"bfloat16\""),
        ("attention_dropout", json!(0.1), "supported: 0"),
        ("partial_rotary_factor", json!(0.25), "supported: 1"),
        ("final_logit_softcapping", json!(30.0), "null"),
        ("attn_logit_softcapping", json!(50.0), "null"),
        ("num_local_experts", json!(8), "supported: 0"),
        ("num_experts", json!(128), "supported: 0"),
        (
            "quantization_config",
            json!({"quant_method": "gptq"}),
            "null",
        ),
        ("is_causal", json!(false), "supported: true"),
        ("use_mrope", json!(true), "supported: false"),
        ("per_layer_config", json!({"0": {"head_dim": 4}}), "null"),
    ] {
        for family in FAMILIES {
            let fields = json!({ name: value });
            assert_refused(
                family.model_type,
                &fields,
                &[&format!("{name} is "), supported],
            );
            assert!(read(family.model_type, &json!({ name: null })).is_ok());
        }
    }
    for (model_type, name, value) in [
        ("llama", "sliding_window", json!(4)),
        ("llama", "layer_types", json!(["full_attention"])),
        ("mistral", "attention_bias", json!(true)),
        ("mistral", "layer_types", json!(["full_attention"])),
        ("mistral", "hidden_act", json!("gelu_pytorch_tanh")),
        ("qwen2", "mlp_bias", json!(true)),
        ("qwen3", "mlp_bias", json!(true)),
        ("gemma", "mlp_bias", json!(true)),
        ("gemma", "hidden_act", json!("silu")),
        ("gemma", "hidden_activation", json!("gelu")),
    ] {
        assert_refused(
            model_type,
            &json!({ name: value }),
            &[&format!("{name} is "), "supported"],
        );
    }
    let rope = |fields: Value| json!({ "rope_parameters": fields });
    for (fields, parts) in [
        (
            json!({"rope_type": "longrope"}),
            [
                "rope_type is \"longrope\"",
                "\"dynamic\", \"llama3\", \"yarn\"",
            ],
        ),
        (
            json!({"mrope_section": [2, 1, 1]}),
            ["rope_parameters.mrope_section", "one rope_type"],
        ),
        (
            json!({"full_attention": {"rope_type": "default"}}),
            ["rope_parameters.full_attention", "one rope_type"],
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            ["rope_parameters.partial_rotary_factor is 0.5", "1"],
        ),
        (
            json!({"rope_type": "yarn", "factor": -1}),
            ["factor is -1", "positive"],
        ),
    ] {
        assert_refused("qwen3", &rope(fields), &parts);
    }
}

#[test]
fn numbers_that_make_no_sense_are_named_by_every_family() {
    let rope = |fields: Value| json!({ "rope_scaling": fields });
    let llama3 = |low: f64, high: f64| {
        rope(
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high}),
        )
    };
    for (fields, parts) in [
        (
            json!({"num_hidden_layers": 1_000_000_000_000_000_000_u64}),
            ["num_hidden_layers is 1000000000000000000", "at most"],
        ),
        (
            json!({"pad_token_id": 64}),
            ["pad_token_id is 64", "vocab_size(64)"],
        ),
        (
            json!({"pad_token_id": -65}),
            ["pad_token_id is -65", "vocab_size(64)"],
        ),
        (llama3(4.0, 1.0), ["low_freq_factor is 4", "smaller"]),
        (llama3(4.0, 4.0), ["low_freq_factor is 4", "smaller"]),
        (
            rope(json!(["yarn"])),
            ["rope_scaling: invalid type: sequence", "an object"],
        ),
        (
            rope(json!({"rope_type": "linear", "factor": 1e-320})),
            ["frequency of pair 0", "finite"],
        ),
    ] {
        for family in FAMILIES {
            assert_refused(family.model_type, &fields, &parts);
        }
    }
}

#[test]
fn the_padding_token_counts_from_the_end_if_negative_and_the_last_bits_of_numbers_are_written() {
    for (id, row) in [
        (json!(null), None),
        (json!(3), Some(3)),
        (json!(-1), Some(63)),
    ] {
        let config = read("llama", &json!({"pad_token_id": id})).unwrap();
        assert_eq!(config.pad_token_id, row);
    }
    for step in 0..400 {
        let number = 1.0 + f64::from(step) * 0.25;
        let rope = json!({"rope_type": "yarn", "factor": number});
        let fields = json!({"rope_parameters": rope, "rms_norm_eps": 1e-6 * number / 3.0});
        let config = read("qwen2", &fields).unwrap();
        let windows = vec![None; config.num_hidden_layers];
        let config = ModelConfig { windows, ..config };
        let text = config.to_json().unwrap();
        assert_eq!(ModelConfig::from_json(&text).unwrap().rope, config.rope);
    }
}

#[test]
fn linear_frequencies_reach_as_far_as_their_factor_says() {
    let fields =
        json!({"max_position_embeddings": 8, "rope_scaling": {"type": "linear", "factor": 4.0}});
    assert_eq!(read("llama", &fields).unwrap().max_seq_len(), 32);
}

#[test]
fn windows_that_make_no_sense_are_named() {
    let types = |kinds: [&str; 3]| json!({"use_sliding_window": true, "sliding_window": 4, "layer_types": kinds});
    let full = "full_attention";
    assert_refused(
        "qwen2",
        &types([full, "chunked_attention", full]),
        &["layer_types[1] is \"chunked_attention\""],
    );
    let mut off = types([full, full, "sliding_attention"]);
    off["use_sliding_window"] = json!(false);
    assert_refused(
        "qwen2",
        &off,
        &["layer_types[2]", "use_sliding_window is false"],
    );
    let few = json!({"layer_types": [full]});
    assert_refused(
        "qwen3",
        &few,
        &["layer_types has 1 entries", "num_hidden_layers(3)"],
    );
    assert_refused(
        "mistral",
        &json!({"sliding_window": 0}),
        &["sliding_window is 0"],
    );
}

#[test]
fn another_model_type_is_named_with_what_is_supported() {
    let all = &Family::names();
    for other in ["none", "Llama", "mixtral", "qwen3_moe", ""] {
        assert_refused(
            other,
            &json!({}),
            &[&format!("model_type is {other:?}"), all],
        );
    }
    let nothing = json!({"model_type": null});
    assert_refused("", &nothing, &["neither model_type nor architectures", all]);
    let class = json!({"model_type": null, "architectures": ["NoneForCausalLM"]});
    assert_refused("", &class, &["NoneForCausalLM", "no model_type", all]);
    let other = json!({"architectures": ["MistralForCausalLM"]});
    assert_refused(
        "llama",
        &other,
        &["\"MistralForCausalLM\"", "\"LlamaForCausalLM\""],
    );
    let class = json!({"model_type": null, "architectures": ["Qwen3ForCausalLM"]});
    assert_eq!(read("", &class).unwrap().family.model_type, "qwen3");
}
