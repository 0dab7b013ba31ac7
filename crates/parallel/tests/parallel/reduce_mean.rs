//! Gradients of a sum of losses, divided at the end, are those of the mean; targets are counted over replicas, once each.

use candle_core::{Result, Tensor};
use candle_parallel::{
    AdamWConfig, Gradients, Optimizer, ParamStore, Pipeline, ReducedGradients, Schedule, Stage,
    ZeroStage,
};

use crate::chain::Chain;
use crate::check::{message, on_mesh, single_mesh};

/// Targets of replica `dp_rank`: not as many on each.
fn num_targets(dp_rank: usize) -> usize {
    6 * (1 + dp_rank)
}

fn gradients(optimizer: &Optimizer, stage: &Stage, reduced: &ReducedGradients) -> Result<Vec<f32>> {
    let grads = optimizer.local_gradients(reduced)?;
    let mut all = Vec::new();
    for index in 0..stage.params().len() {
        all.extend(grads[&index].flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(all)
}

#[test]
fn the_mean_is_taken_over_the_targets_of_all_replicas() {
    for (pp, dp, tp) in [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 2, 2)] {
        for zero in [ZeroStage::Zero, ZeroStage::One] {
            on_mesh((pp, dp, tp), |mesh| {
                let stage = Chain::default().stage(&mesh, &ParamStore::init(5))?;
                let optimizer =
                    Optimizer::new(stage.params(), &mesh, zero, AdamWConfig::default())?;
                let pipeline = Pipeline::new(Schedule::GPipe, mesh.pp.clone());
                let dp_rank = mesh.dp.rank();
                let batches = Chain::default().micro_batches(100 * dp_rank as u64, 1 + dp_rank)?;
                let total = (0..dp).map(num_targets).sum::<usize>();
                let mut of_mean = Gradients::new(stage.params(), &mesh)?;
                pipeline.forward_backward(&stage, &batches, total, &mut of_mean)?;
                let mut of_sum = Gradients::new(stage.params(), &mesh)?;
                let report = pipeline.forward_backward(&stage, &batches, 1, &mut of_sum)?;

                let wanted = optimizer.reduce(&mut of_mean)?;
                let want = gradients(&optimizer, &stage, &wanted)?;
                let loss_sum = report.loss_sum.as_ref();
                let count = num_targets(dp_rank);
                let (reduced, loss) = optimizer.reduce_mean(&mut of_sum, loss_sum, count)?;
                let got = gradients(&optimizer, &stage, &reduced)?;

                let what = format!("pp {pp}, dp {dp}, tp {tp}, {zero:?}");
                assert_eq!(loss.num_targets, total, "{what}");
                let own = match report.loss_sum {
                    Some(sum) if mesh.tp.rank() == 0 => sum.to_scalar::<f64>()?,
                    _ => 0.0,
                };
                let sums = mesh.world.all_gather_bytes(&own.to_le_bytes())?;
                let sums = sums
                    .into_iter()
                    .map(|sum| f64::from_le_bytes(sum.try_into().unwrap()));
                let mean = sums.sum::<f64>() / total as f64;
                assert!(
                    (loss.mean - mean).abs() <= 1e-9 * mean,
                    "{what}: {} for {mean}",
                    loss.mean
                );
                let largest = want.iter().fold(0f32, |most, grad| most.max(grad.abs()));
                for (got, want) in got.iter().zip(&want) {
                    assert!(
                        (got - want).abs() <= 1e-6 * largest,
                        "{what}: {got} for {want}"
                    );
                }
                let (norm, want) = (reduced.norm(), wanted.norm());
                assert!(
                    (norm - want).abs() <= 1e-6 * want,
                    "{what}: {norm} for {want}"
                );
                Ok(())
            });
        }
    }
}

#[test]
fn a_batch_without_targets_is_an_error() -> Result<()> {
    let mesh = single_mesh();
    let stage = Chain::default().stage(&mesh, &ParamStore::init(5))?;
    let optimizer = Optimizer::new(
        stage.params(),
        &mesh,
        ZeroStage::Zero,
        AdamWConfig::default(),
    )?;
    let mut gradients = Gradients::new(stage.params(), &mesh)?;
    for (index, param) in stage.params().iter().enumerate() {
        gradients.accumulate(index, &Tensor::zeros_like(&param.var)?)?;
    }
    let refused = optimizer.reduce_mean(&mut gradients, None, 0);
    assert!(message(refused.map(|_| ())).contains("no targets"));
    Ok(())
}
