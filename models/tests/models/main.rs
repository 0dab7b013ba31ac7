//! Tests of the models' configurations.

mod families;
mod in_graph;
mod rope;

use candle_train_models::ModelConfig;

const SMALL: &str = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4"#;

/// A small configuration with `fields` added; a field that is given twice has its last value.
fn read(fields: &str) -> candle_core::Result<ModelConfig> {
    ModelConfig::from_json(&format!("{SMALL}, {fields}}}"))
}

#[track_caller]
fn assert_error(fields: &str, parts: &[&str]) {
    let message = match read(fields) {
        Ok(config) => panic!("expected an error that mentions {parts:?}, got {config:?}"),
        Err(err) => err.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

#[test]
fn a_written_configuration_is_read_again() {
    let config = read(
        r#""bos_token_id": 0, "eos_token_id": [1, 2], "head_dim": 10, "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
        "high_freq_factor": 4, "original_max_position_embeddings": 128}, "rope_theta": 500000"#,
    )
    .unwrap();
    assert_eq!(config.eos_token_ids, [1, 2]);
    let text = config.to_json().unwrap();
    assert_eq!(ModelConfig::from_json(&text).unwrap(), config);
}

#[test]
fn a_field_of_the_wrong_kind_is_named() {
    for (fields, got, expected) in [
        (
            r#""hidden_size": "32""#,
            r#"hidden_size: invalid type: string "32""#,
            "usize",
        ),
        (
            r#""hidden_size": 32.5"#,
            "hidden_size: invalid type: floating point `32.5`",
            "usize",
        ),
        (
            r#""hidden_size": -1"#,
            "hidden_size: invalid value: integer `-1`",
            "usize",
        ),
        (
            r#""eos_token_id": -1"#,
            "eos_token_id[0]: invalid value: integer `-1`",
            "u32",
        ),
        (
            r#""eos_token_id": [1, "2"]"#,
            r#"eos_token_id[1]: invalid type: string "2""#,
            "u32",
        ),
        (
            r#""bos_token_id": 4294967296"#,
            "bos_token_id: invalid value: integer `4294967296`",
            "u32",
        ),
        (
            r#""rms_norm_eps": "small""#,
            r#"rms_norm_eps: invalid type: string "small""#,
            "f64",
        ),
        (
            r#""tie_word_embeddings": 1"#,
            "tie_word_embeddings: invalid type: integer `1`",
            "a boolean",
        ),
        (
            r#""architectures": "Llama""#,
            r#"architectures: invalid type: string "Llama""#,
            "a sequence",
        ),
        (
            r#""rope_scaling": 2"#,
            "rope_scaling: invalid type: integer `2`",
            "an object",
        ),
        (
            r#""rope_scaling": {"factor": "2"}"#,
            r#"rope_scaling.factor: invalid type: string "2""#,
            "f64",
        ),
        (
            r#""rope_scaling": {"type": 2}"#,
            "rope_scaling.type: invalid type: integer `2`",
            "a string",
        ),
        (
            r#""model_type": 2"#,
            "model_type: invalid type: integer `2`",
            "a string",
        ),
    ] {
        assert_error(fields, &[got, &format!(", expected {expected}")]);
    }
    assert_error(r#""vocab_size": null"#, &["missing field `vocab_size`"]);
    let message = ModelConfig::from_json("[]").unwrap_err().to_string();
    assert!(message.contains("expected a JSON object"), "{message}");
}

#[test]
fn sizes_out_of_range_are_named() {
    for name in [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ] {
        assert_error(
            &format!(r#""head_dim": 8, "{name}": 18446744073709551615"#),
            &[&format!(
                "{name} is 18446744073709551615; expected at most 2147483648"
            )],
        );
    }
    for name in ["num_hidden_layers", "head_dim"] {
        assert_error(
            &format!(r#""{name}": 65538"#),
            &[&format!("{name} is 65538; expected at most 65536")],
        );
    }
    assert_error(
        r#""head_dim": 8, "vocab_size": 2147483648, "hidden_size": 2147483648"#,
        &[
            "values; expected at most 281474976710656",
            "vocab_size(2147483648)",
        ],
    );
    assert_error(
        r#""head_dim": 65536, "num_hidden_layers": 65536, "num_attention_heads": 2147483648,
        "hidden_size": 2147483648, "vocab_size": 2147483648, "intermediate_size": 2147483648"#,
        &["values; expected at most"],
    );
}
