//! Gradients and loss are those of the mean over the targets of all replicas, which have not as many each.

use candle_core::{Result, Tensor};
use candle_parallel::{
    DataParallel, Gradients, ModelPart, ParamStore, Pass, Pipeline, Schedule, ZeroStage,
};

use crate::chain::{Chain, gather};
use crate::check::{assert_values_close, message, on_mesh, single_mesh};

/// What replica `dp_rank` of `dp` trains on: 6 targets more than the replica before; all together if there is one.
fn batches(dp_rank: usize, dp: usize) -> Result<Vec<Pass>> {
    let of = |rank: usize| Chain::default().micro_batches(100 * rank as u64, 1 + rank);
    match dp {
        1 => Ok([of(0)?, of(1)?, of(2)?].concat()),
        _ => of(dp_rank),
    }
}

/// Whole gradients by name on rank 0, norm and loss.
fn reduced(
    layout: (usize, usize, usize),
    replicas: DataParallel,
) -> (crate::chain::Values, f64, f64) {
    let all = on_mesh(layout, |mesh| {
        let part =
            Chain::default().part(&mesh, &ParamStore::init(5).with_data_parallel(replicas))?;
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let batches = batches(mesh.dp.rank(), mesh.dp.world_size())?;
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        let reduced = gradients.reduce()?;
        assert_eq!(reduced.loss().num_targets, 36);
        let local = reduced.local_gradients()?;
        let grads = gather(&part, &mesh, |index| Ok(local[&index].clone()))?;
        Ok((grads, reduced.norm(), reduced.loss().mean))
    });
    all.into_iter().next().unwrap()
}

#[test]
fn the_mean_is_taken_over_the_targets_of_all_replicas() {
    let one = reduced((1, 1, 1), ZeroStage::Zero.into());
    for layout in [(2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 3, 2)] {
        for zero in [ZeroStage::Zero, ZeroStage::One] {
            for overlap in [false, true] {
                let replicas = DataParallel {
                    zero,
                    overlap,
                    ..DataParallel::default()
                };
                let (grads, norm, loss) = reduced(layout, replicas);
                let what = format!("{layout:?} {zero:?}");
                assert_eq!(grads.len(), one.0.len());
                for (name, grad) in &one.0 {
                    assert_values_close(&format!("{what} {name}"), &grads[name], grad);
                }
                assert!((norm - one.1).abs() <= 1e-6 * one.1, "{what}: {norm}");
                assert!((loss - one.2).abs() <= 1e-6 * one.2, "{what}: {loss}");
            }
        }
    }
}

fn zero_gradients(part: &ModelPart, gradients: &mut Gradients) -> Result<()> {
    for (index, param) in part.params().iter().enumerate() {
        gradients.accumulate(index, &Tensor::zeros_like(&param.values()?)?)?;
    }
    Ok(())
}

#[test]
fn a_batch_without_targets_is_an_error() -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(
        &mesh,
        &ParamStore::init(5).with_data_parallel(ZeroStage::Zero),
    )?;
    let mut gradients = Gradients::new(part.params(), &mesh)?;
    zero_gradients(&part, &mut gradients)?;
    let refused = gradients.reduce();
    assert!(message(refused.map(|_| ())).contains("no targets"));
    Ok(())
}
