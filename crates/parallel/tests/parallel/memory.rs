//! What the meter counts beside the formulas: with Ψ values on N replicas, weights of 4Ψ or 2Ψ bytes, gradients of 4Ψ, and an
//! optimizer of 8Ψ, or 10Ψ with the remainders of bf16 weights, each over N where a stage of ZeRO divides it.

use candle_core::DType;
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, Gradients, MemoryCategory, ParamStore, Pipeline, Schedule,
    ZeroStage,
};

use crate::chain::Chain;
use crate::check::on_mesh;
use crate::traffic::padded_values;

/// Whether a stage divides weights, gradients and optimizer.
const STAGES: [(ZeroStage, [bool; 3]); 4] = [
    (ZeroStage::Zero, [false, false, false]),
    (ZeroStage::One, [false, false, true]),
    (ZeroStage::Two, [false, true, true]),
    (ZeroStage::Three, [true, true, true]),
];

#[test]
fn bytes_held_equal_the_formulas() {
    for (zero, divides) in STAGES {
        for dp in [1, 2, 4, 8] {
            for (dtype, bytes_per_value) in [(DType::F32, [4, 4, 8]), (DType::BF16, [2, 4, 10])] {
                let chain = Chain {
                    dtype,
                    ..Chain::default()
                };
                on_mesh((1, dp, 1), |mesh| {
                    let divides = divides.map(|divides| divides && dp > 1);
                    let store = ParamStore::init(5).with_data_parallel(zero);
                    let part = chain.part(&mesh, &store)?;
                    let mut gradients = Gradients::new(part.params(), &mesh)?;
                    let config = AdamWConfig::default();
                    let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
                    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
                    let batches = chain.micro_batches(mesh.dp.rank() as u64, 2)?;
                    pipeline.forward_backward(&part, &batches, &mut gradients)?;
                    optimizer.step(&mut gradients, 0.1, Some(1.0))?;
                    part.params().wait_for_updates()?;

                    let what = format!("{zero:?} dp {dp} {dtype:?}");
                    let report = part.params().meter().report();
                    let blocks = padded_values(&part, dp, 1);
                    let padded: usize = blocks.iter().sum();
                    let values = part.params().num_global_values();
                    // Only what is divided, and what lies in buckets, is padded.
                    let lens = [if divides[0] { padded } else { values }, padded, padded];
                    for (index, category) in [
                        MemoryCategory::Weights,
                        MemoryCategory::Gradients,
                        MemoryCategory::Optimizer,
                    ]
                    .into_iter()
                    .enumerate()
                    {
                        let parts = if divides[index] { dp } else { 1 };
                        let expected = lens[index] * bytes_per_value[index] / parts;
                        let held = report.of(category).now;
                        assert_eq!(held, expected as u64, "{category}, {what}");
                    }
                    let most = blocks.iter().max().unwrap_or(&0) * bytes_per_value[0];
                    let gathered = report.of(MemoryCategory::Gathered);
                    let two_blocks = if divides[0] { 2 * most } else { 0 };
                    assert!(gathered.peak <= two_blocks as u64, "{what}: {gathered:?}");
                    assert_eq!(gathered.now, 0, "{what}");
                    let buffers = report.of(MemoryCategory::Buffers);
                    assert_eq!(buffers.now, 0, "{what}");
                    // Updated weights that are not f32 do not fit the gradients' buffers on their way.
                    let stages_weights = dp > 1 && dtype != DType::F32 && divides[2];
                    assert_eq!(buffers.peak > 0, stages_weights || divides[1], "{what}");
                    if divides[1] {
                        let two_buckets = 2 * 4 * blocks.iter().max().unwrap_or(&0);
                        assert!(buffers.peak <= two_buckets as u64, "{what}: {buffers:?}");
                    }
                    Ok(())
                });
            }
        }
    }
}
