//! The Rust of docs/custom-models.md is this file's, or that of the tests of candle-parallel, so that it compiles.

use std::path::Path;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{DType, Device, Error, Module, Result, Shape, Tensor, bail};
use candle_nn::Init;
use candle_parallel::checkpoint::{HfSave, sidecar_files};
use candle_parallel::{
    AdamW, AdamWConfig, DistributedOptimizer, Loss, ModelPart, Needs, Optimizer, Param,
    ParamBuilder, ParamGroup, ParamMatrix, ParamSlice, ParamStore, Parameters, Pass, Placement,
    Schedule, Shard, Training, UpdateStep, ZeroStage,
};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::{Batches, Evaluation, TrainConfig, Trainer};

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_the_trainer(
    world: ProcessGroup, dir: &Path, config: ModelConfig, train_config: TrainConfig, batches: Batches,
) -> Result<()> {
    let mesh = Mesh::new(world, Degrees { pp: 2, dp: 2, tp: 2, ..Degrees::default() })?;
    let store = ParamStore::from_pretrained(dir)?.with_data_parallel(ZeroStage::Three);
    let part = CausalLm::part(&config, &mesh, &store.builder(DType::F32, &Device::Cpu))?;
    let mut trainer = Trainer::new(train_config, &mesh, part)?;
    trainer.train(&batches, |step| { println!("{} {}", step.step, step.loss); Ok(()) })?;
    trainer.save_hf(&HfSave::new("out", sidecar_files(dir)?))
}

struct Image {
    pixels: Tensor,
    label: Tensor,
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_batches_of_ones_own(
    mut trainer: Trainer, held_out: Vec<Pass>, images: impl Iterator<Item = Image>,
) -> Result<()> {
    trainer = trainer.with_evaluation(Evaluation::new(move || held_out.clone().into_iter().map(Ok)).with_every(Some(100)));
    trainer.train(images.map(|image| Ok(vec![Pass::train(image.pixels, image.label)])), |_| Ok(()))?;
    Ok(())
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_borders_of_ones_own(part: ModelPart) -> Result<ModelPart> {
    let part = part.with_borders(|block, pass| {
        let (b, t) = pass.dims()?;
        let shape = if block < 3 { Shape::from((b, t, 512)) } else { Shape::from((b, 512)) };
        Ok(vec![(shape, DType::BF16)])
    });
    Ok(part)
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_fused_weights(
    mesh: Mesh, vb: ParamBuilder, num_heads: usize, num_kv_heads: usize, head_dim: usize, hidden: usize, init: Init,
) -> Result<Tensor> {
    let rows = |heads: usize| Ok::<_, Error>(Shard::even(0, heads, &mesh.tp)?.scaled(head_dim));
    let qkv = Shard::fused(&[rows(num_heads)?, rows(num_kv_heads)?, rows(num_kv_heads)?])?;
    let weight = vb.get_placed((qkv.global(), hidden), "qkv_proj.weight", Placement::Sharded(qkv), init)?;
    Ok(weight)
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_a_loop_of_ones_own(
    part: ModelPart, mesh: Mesh, micro_batches: Vec<Pass>, held_out: Vec<Pass>, sidecars: Vec<(String, Vec<u8>)>, learning_rate: f64,
) -> Result<f64> {
    let mut training = Training::new(part, &mesh, Schedule::OneForwardOneBackward, AdamW::default())?;
    let report = training.step(&micro_batches, learning_rate, Some(1.0))?;
    let loss = training.evaluate(held_out.iter().cloned().map(Ok))?.mean();
    training.save_hf(&HfSave::new("out", sidecars))?;
    Ok(report.loss.mean + loss)
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_a_model_as_it_is(mesh: Mesh) -> Result<ModelPart> {
    let part = ModelPart::whole(
        &mesh,
        &ParamStore::init(0).with_data_parallel(ZeroStage::Three).builder(DType::F32, mesh.world.device()),
        |vb| candle_nn::linear(784, 10, vb.var_builder()),
        |model, pass| {
            let logits = model.forward(&pass.inputs().to_dtype(DType::F32)?)?;
            let losses = candle_nn::loss::cross_entropy(&logits, pass.targets()?)?;
            let count = pass.num_targets()? as f64;
            Ok(Loss::new((losses * count)?, count))
        },
    )?;
    Ok(part)
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn use_average(params: &Parameters, optimizer: &DistributedOptimizer, average: &[Tensor]) -> Result<Vec<Tensor>> {
    let mut before = Vec::new();
    for (index, average) in average.iter().enumerate() {
        before.push(optimizer.values_f32(index)?);
        params.set(index, average)?;
    }
    Ok(before)
}

#[derive(Debug)]
struct Muon;

#[rustfmt::skip]
impl Optimizer for Muon {
    fn state_names(&self) -> &'static [&'static str] {
        &["momentum"]
    }

    fn needs(&self, _param: &Param) -> Needs {
        Needs::Matrix
    }

    fn update(&self, _slice: &ParamSlice<'_>, _step: &UpdateStep) -> Result<()> {
        bail!("Muon updates matrices only")
    }

    fn update_matrix(&self, matrix: &ParamMatrix<'_>, step: &UpdateStep) -> Result<()> {
        let grad = (matrix.grad() * step.grad_scale)?;
        let momentum = ((&matrix.state()[0] * 0.95)? + &grad)?;
        matrix.set_state(0, &momentum)?;
        let direction = matrix.whole(&(grad + (momentum * 0.95)?)?)?;
        let update = matrix.part(&orthogonal(&direction)?)?;
        matrix.set_weights(&(matrix.weights()? - (update * step.lr)?)?)
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }
}

fn orthogonal(matrix: &Tensor) -> Result<Tensor> {
    let norm = matrix.sqr()?.sum_all()?.sqrt()?;
    matrix.broadcast_div(&norm)
}

#[rustfmt::skip]
#[expect(dead_code, reason = "compiled, not run")]
fn with_a_rule_of_ones_own(params: &Parameters, mesh: Mesh) -> Result<DistributedOptimizer> {
    let muon = ParamGroup::new(|name| name.ends_with("proj.weight")).with_rule(Muon).with_lr_scale(10.0);
    let optimizer = DistributedOptimizer::adamw(params, &mesh, AdamWConfig::default())?.with_groups(vec![muon])?;
    Ok(optimizer)
}

fn without_indent(text: &str) -> String {
    text.lines()
        .map(|line| format!("{}\n", line.trim()))
        .collect()
}

/// A page of the documents, and how many blocks of Rust it has. Those of the README are tests of the crate `candle-train`.
const PAGES: [(&str, usize); 1] = [(include_str!("../../../docs/custom-models.md"), 14)];

#[test]
fn the_rust_of_the_documents_is_compiled() {
    let own_blocks = include_str!("../../../crates/parallel/tests/parallel/own_blocks.rs");
    let source = [include_str!("readme.rs"), own_blocks].map(without_indent);
    for (page, num_blocks) in PAGES {
        let blocks = page.split("```rust\n").skip(1);
        let blocks: Vec<&str> = blocks.filter_map(|rest| rest.split("```").next()).collect();
        assert_eq!(blocks.len(), num_blocks);
        for block in blocks {
            let block = without_indent(block);
            assert!(
                source.iter().any(|source| source.contains(&block)),
                "{block}"
            );
        }
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
    let contributing = include_str!("../../../CONTRIBUTING.md");
    assert!(contributing.contains(&format!("\n{command} ")), "{command}");
    // It reads the command from the README, and runs it as it is.
    let ci = include_str!("../../../.ci/run");
    assert!(ci.contains("README.md)\n") && ci.contains("\nbash -euc \"$tests\"\n"));
}

/// A stranger reads it in a few minutes.
#[test]
fn the_readme_is_short() {
    let readme = include_str!("../../../README.md");
    let (num_lines, num_words) = (readme.lines().count(), readme.split_whitespace().count());
    assert!(num_lines <= 130, "{num_lines} lines");
    assert!(num_words <= 1300, "{num_words} words");
}

/// What stands between bars of the rows of all tables that begin with this line.
fn rows(page: &str, beginning: &str) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let mut lines = page.lines();
    while lines.any(|line| line == beginning) {
        let of_table = lines.clone().skip(1);
        rows.extend(of_table.take_while(|line| line.starts_with('|')));
    }
    let cells = |row: &str| row.split('|').map(|cell| cell.trim().to_string()).collect();
    rows.into_iter().map(cells).collect()
}

#[test]
fn the_speed_that_the_readme_tells_is_that_of_the_measurements() {
    let readme = include_str!("../../../README.md");
    let measured = rows(
        include_str!("../../../docs/performance.md"),
        "| case | precision | tokens/s | step / products alone | PyTorch | ratio |",
    );
    for precision in ["f32", "bf16"] {
        let of_precision = measured.iter().filter(|row| row[2] == precision);
        let ratios = of_precision.map(|row| row[6].trim_matches('*').to_string());
        let ratios: Vec<String> = ratios.collect();
        assert_eq!(ratios.len(), 10, "five cases on two processors");
        let (least, most) = (ratios.iter().min().unwrap(), ratios.iter().max().unwrap());
        let range = format!("{least} to {most}");
        assert!(readme.contains(&range), "{precision}: {range}");
    }
}
