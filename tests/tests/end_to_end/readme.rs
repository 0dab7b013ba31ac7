//! The README's Rust is this file's, so that it compiles.

use std::path::Path;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{DType, Device, Result};
use candle_parallel::checkpoint::{HfSave, sidecar_files};
use candle_parallel::{
    DistributedOptimizer, Gradients, MicroBatch, ParamStore, Pipeline, Stage, ZeroStage,
};
use candle_train::{Batches, TrainConfig, Trainer};
use candle_train_models::{CausalLm, ModelConfig};

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_the_trainer(
    world: ProcessGroup, dir: &Path, config: ModelConfig, train_config: TrainConfig, batches: Batches,
) -> Result<()> {
    let mesh = Mesh::new(world, Degrees { pp: 2, dp: 2, cp: 1, tp: 2 })?;
    let store = ParamStore::from_pretrained(dir)?.with_data_parallel(ZeroStage::Three);
    let stage = CausalLm::stage(&config, &mesh, &store.builder(DType::F32, &Device::Cpu))?;
    let mut trainer = Trainer::new(train_config, &mesh, stage)?;
    trainer.train(&batches, |step| { println!("{} {}", step.step, step.loss); Ok(()) })?;
    trainer.save_hf(&HfSave::new("out", sidecar_files(dir)?))
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_a_loop_of_ones_own(
    pipeline: &Pipeline, stage: Stage, micro_batches: Vec<MicroBatch>, mut gradients: Gradients,
    mut optimizer: DistributedOptimizer, learning_rate: f64,
) -> Result<f64> {
    pipeline.forward_backward(&stage, &micro_batches, &mut gradients)?;
    let report = optimizer.step(&mut gradients, learning_rate, Some(1.0))?;
    Ok(report.loss.mean)
}

fn without_indent(text: &str) -> String {
    text.lines()
        .map(|line| format!("{}\n", line.trim()))
        .collect()
}

#[test]
fn the_rust_of_the_readme_is_compiled() {
    let source = without_indent(include_str!("readme.rs"));
    let readme = include_str!("../../../README.md");
    let blocks: Vec<&str> = readme
        .split("```rust\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        assert!(source.contains(&without_indent(block)), "{block}");
    }
}

/// What the README says runs the tests is what runs before a change lands.
#[test]
fn the_test_command_of_the_readme_is_that_of_ci() {
    let readme = include_str!("../../../README.md");
    let lines = readme.lines().filter_map(|line| line.split_once('#'));
    let mut commands = lines.map(|(command, _)| command.trim_end());
    let command = commands
        .find(|command| command.starts_with("cargo test "))
        .unwrap();
    assert!(command.contains("--no-fail-fast"), "{command}");
    for text in [
        include_str!("../../../CONTRIBUTING.md"),
        include_str!("../../../.ci/run"),
    ] {
        assert!(text.contains(&format!("\n{command} ")), "{command}");
    }
}
