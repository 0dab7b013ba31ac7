//! `data_parallel_inference`: a score for each line, whichever rank it is from.

use std::fs;
use std::path::{Path, PathBuf};

use candle_comm::{Degrees, Mesh, launch};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops::log_softmax;
use candle_parallel::{ParamStore, Pass, Pipeline, Schedule};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::Tokenizer;
use serde_json::Value;

use super::example;
use super::program::Program;

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/shakespeare-llama")
}

fn program(file: &Path, ranks: usize) -> Program {
    let program = example("data_parallel_inference").flag("--model", model().display());
    let program = program.flag("--data", file.display());
    program.flag("--device", "cpu").flag("--ranks", ranks)
}

/// The mean cross-entropy of a text that fits into one sequence, from the model's logits.
fn from_logits(ids: &[u32]) -> Result<f64> {
    let config = ModelConfig::from_file(model().join("config.json"))?;
    let degrees = Degrees {
        pp: 1,
        dp: 1,
        cp: 1,
        tp: 1,
    };
    let losses = launch::threads(1, |world| {
        let mesh = Mesh::new(world, degrees)?;
        let store = ParamStore::from_pretrained(model())?;
        let vb = store.builder(DType::F32, &Device::Cpu);
        let part = CausalLm::part(&config, &mesh, &vb)?;
        let last = ids.len() - 1;
        let batch = Pass::infer(Tensor::new(&ids[..last], &Device::Cpu)?.unsqueeze(0)?);
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        let logits = pipeline.logits(&part, &batch, &Vec::from_iter(0..last))?;
        let logs = log_softmax(&logits.to_dtype(DType::F64)?, D::Minus1)?;
        let targets = Tensor::new(&ids[1..], &Device::Cpu)?.unsqueeze(1)?;
        logs.gather(&targets, 1)?.mean_all()?.neg()?.to_scalar()
    })?;
    Ok(losses[0])
}

#[test]
fn lines_are_scored_in_their_order_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.txt");
    let tokenizer = Tokenizer::from_dir(model()).unwrap();
    let long = "All the perfumes of Arabia will not sweeten this little hand. ".repeat(60);
    let lines = [
        &long,
        "Hear me!",
        "",
        "The Queen of Hearts, she made some tarts,",
    ];
    // A line's end may be that of Windows, and the last line has none.
    fs::write(&file, lines.join("\n").replace("Hear me!", "Hear me!\r")).unwrap();
    let alone = program(&file, 1).succeeds();
    let scores: Vec<Value> = alone
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(scores.len(), lines.len());
    for (index, (score, line)) in scores.iter().zip(lines).enumerate() {
        let ids = tokenizer.encode_prompt(line).unwrap();
        assert_eq!(score["line"], index + 1);
        assert_eq!(score["tokens"], ids.len().saturating_sub(1));
        match index {
            // It does not fit into one sequence.
            0 => assert!(ids.len() > 600 && score["loss"].as_f64().unwrap() > 1.0),
            2 => assert!(score["loss"].is_null()),
            _ => {
                let (got, want) = (score["loss"].as_f64().unwrap(), from_logits(&ids).unwrap());
                assert!((got - want).abs() < 1e-4, "{line}: {got}, {want}");
            }
        }
    }
    for ranks in [2, 3] {
        assert_eq!(program(&file, ranks).succeeds().stdout, alone.stdout);
    }
}

#[test]
fn what_cannot_be_scored_ends_all_ranks_with_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines.txt");
    program(&file, 1).fails(&["--data", "lines.txt: No such file"]);
    fs::write(&file, b"fair\nfoul \xff\nfair\n").unwrap();
    program(&file, 2).fails(&["line 2 of ", "lines.txt cannot be read", "UTF-8"]);
    program(&file, 2).flag("--ranks", 0).fails(&["--ranks"]);
}
