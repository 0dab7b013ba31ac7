//! Rotary tables against those of `transformers`, for every kind and both spellings of `config.json`.

use candle_core::{Device, Tensor};
use candle_train_models::{ModelConfig, RotaryTable};
use serde_json::{Value, json};

/// What the frequencies' last bits make of angles of 64 positions.
const TOLERANCE: f32 = 1e-5;

#[test]
fn tables_equal_those_of_transformers() {
    let cases = include_str!("../../../tests/fixtures/rope_tables.jsonl");
    assert!(cases.lines().count() > 20);
    for line in cases.lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let mut file = case["fields"].clone();
        file["model_type"] = json!("llama");
        for name in ["vocab_size", "intermediate_size", "num_hidden_layers"] {
            file[name] = json!(1);
        }
        let config = ModelConfig::from_json(&file.to_string()).unwrap();
        let t = case["t"].as_u64().unwrap() as usize;
        let (cos, sin) = RotaryTable::new(&config, &Device::Cpu).get(t).unwrap();
        for (name, table) in [("cos", cos), ("sin", sin)] {
            let expected: Vec<Vec<f32>> = serde_json::from_value(case[name].clone()).unwrap();
            for (position, expected) in [1, t - 1].into_iter().zip(expected) {
                let ours: Tensor = table.get(position).unwrap();
                let pairs = ours.to_vec1::<f32>().unwrap().into_iter().zip(&expected);
                let error = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(
                    error <= TOLERANCE,
                    "{name} of position {position} of {t} is off by {error}: {line}"
                );
            }
        }
        // What is written means the same.
        let written = ModelConfig::from_json(&config.to_json().unwrap()).unwrap();
        assert_eq!(written, config);
    }
}

#[test]
fn a_file_that_yarn_scales_is_read_as_transformers_reads_it() {
    let cases = include_str!("../../../tests/fixtures/rope_tables.jsonl");
    let mut num_cases = 0;
    let fields = cases.lines().map(|line| {
        let case: Value = serde_json::from_str(line).unwrap();
        case["fields"].clone()
    });
    // Which would win if it stayed.
    let mut outside = fields.clone().next().unwrap();
    outside["original_max_position_embeddings"] = json!(24);
    for mut file in fields.chain([outside]) {
        for name in ["vocab_size", "intermediate_size", "num_hidden_layers"] {
            file[name] = json!(1);
        }
        file["model_type"] = json!("llama");
        let config = ModelConfig::from_json(&file.to_string()).unwrap();
        let Some(original) = config.original_context() else {
            let message = ModelConfig::json_with_yarn(&file.to_string(), 4.0).unwrap_err();
            assert!(message.to_string().contains("scaled already"), "{message}");
            continue;
        };
        num_cases += 1;
        let least = config.max_seq_len() as f64 / original as f64;
        for factor in [1.0 + 1.0 / original as f64, 1.3, 4.0, 7.77] {
            if factor < least {
                let message = ModelConfig::json_with_yarn(&file.to_string(), factor).unwrap_err();
                assert!(message.to_string().contains("no fewer than"), "{message}");
                continue;
            }
            let text = ModelConfig::json_with_yarn(&file.to_string(), factor).unwrap();
            let longer = ModelConfig::from_json(&text).unwrap();
            let written: Value = serde_json::from_str(&text).unwrap();
            let longest = (factor * original as f64).round() as usize;
            assert_eq!(longer.max_seq_len(), longest);
            assert_eq!(longer.max_position_embeddings, longest);
            assert_eq!(longer.original_context(), Some(original));
            assert_eq!(longer.rope_theta, config.rope_theta);
            let rope = &written["rope_scaling"];
            assert_eq!(rope["factor"], json!(longest as f64 / original as f64));
            let given = &file["rope_parameters"];
            for stays in [
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ] {
                assert_eq!(rope[stays], given[stays], "{stays}");
            }
            assert_eq!(rope, &written["rope_parameters"]);
            // Once more changes nothing.
            let again = ModelConfig::json_with_yarn(&text, longest as f64 / original as f64);
            assert_eq!(again.unwrap(), text);
        }
        for factor in [1.0, 0.5, f64::NAN, -2.0] {
            let message = ModelConfig::json_with_yarn(&file.to_string(), factor).unwrap_err();
            assert!(
                message.to_string().contains("expected more than"),
                "{message}"
            );
        }
    }
    assert!(num_cases > 10);
}

#[test]
fn a_table_for_sequences_of_changing_length_is_that_of_each_length() {
    let config = |rope: &str| {
        ModelConfig::from_json(&format!(
            r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "max_position_embeddings": 8, "rope_scaling": {rope}}}"#
        ))
        .unwrap()
    };
    let values = |table: &RotaryTable, t: usize| {
        let (cos, sin) = table.get(t).unwrap();
        let both = Tensor::cat(&[cos, sin], 0).unwrap();
        both.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    for rope in ["null", r#"{"type": "dynamic", "factor": 2}"#] {
        let config = config(rope);
        let table = RotaryTable::new(&config, &Device::Cpu);
        let most = config.max_seq_len().min(20);
        for t in [5, most, 3, 8, most, most - 1, 2] {
            let fresh = RotaryTable::new(&config, &Device::Cpu);
            assert!(values(&table, t) == values(&fresh, t), "{rope}, {t} tokens");
        }
    }
}
