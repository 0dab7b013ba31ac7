//! Ranks of a replica that are given different micro-batches are told so in the first step.

use candle_core::{Result, Tensor};
use candle_parallel::{
    Gradients, Offload, ParamStore, Pass, PassReport, Pipeline, Schedule, ZeroStage,
};

use crate::chain::Chain;
use crate::check::{assert_says, message, on_mesh};

/// What each rank gets from a step on micro-batches that `change` has changed on rank 1.
fn step(
    layout: (usize, usize, usize),
    zero: ZeroStage,
    change: impl Fn(&mut Vec<Pass>) -> Result<()> + Sync,
) -> Vec<Result<PassReport>> {
    offloaded_step(layout, zero, &Offload::default(), change)
}

/// The same, with what is named away from the device.
fn offloaded_step(
    layout: (usize, usize, usize),
    zero: ZeroStage,
    offload: &Offload,
    change: impl Fn(&mut Vec<Pass>) -> Result<()> + Sync,
) -> Vec<Result<PassReport>> {
    on_mesh(layout, |mesh| {
        let chain = Chain::default();
        let store = ParamStore::init(5).with_data_parallel(zero);
        let part = chain.part(&mesh, &store.with_offload(offload.clone()))?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let mut batches = chain.micro_batches(10 * mesh.dp.rank() as u64, 3)?;
        if mesh.world.rank() == 1 {
            change(&mut batches)?;
        }
        Ok(pipeline.forward_backward(&part, &batches, &mut gradients))
    })
}

/// The batch with another last id.
fn with_another_id(ids: &Tensor) -> Result<Tensor> {
    let mut values = ids.flatten_all()?.to_vec1::<u32>()?;
    if let Some(last) = values.last_mut() {
        *last = (*last + 1) % 13;
    }
    Tensor::from_vec(values, ids.shape(), ids.device())
}

#[test]
fn another_number_of_micro_batches() {
    for layout in [(2, 1, 1), (1, 1, 2)] {
        for result in step(layout, ZeroStage::One, |batches| {
            batches.pop().map_or(Ok(()), |_| Ok(()))
        }) {
            let words = ["ranks 0 and 1", "rank 0 has 3, rank 1 has 2", "hint"];
            assert_says(&message(result), &words);
        }
    }
}

#[test]
fn replicas_with_unequal_numbers_of_micro_batches() {
    let drop_one = |batches: &mut Vec<Pass>| batches.pop().map_or(Ok(()), |_| Ok(()));
    for zero in [ZeroStage::Two, ZeroStage::Three] {
        for result in step((1, 3, 1), zero, drop_one) {
            let words = ["replicas", "rank 0 has 3, rank 1 has 2", "hint", "ZeRO-1"];
            assert_says(&message(result), &words);
        }
    }
    let results = step((1, 3, 1), ZeroStage::One, drop_one);
    assert!(results.iter().all(Result::is_ok));
    // Weights that are away come from all that divide them.
    let dir = tempfile::tempdir().unwrap();
    let offload = Offload::all().in_dir(dir.path());
    for result in offloaded_step((1, 3, 1), ZeroStage::One, &offload, drop_one) {
        assert_says(&message(result), &["replicas", "rank 0 has 3", "ZeRO-0"]);
    }
    let results = offloaded_step((1, 3, 1), ZeroStage::Zero, &offload, drop_one);
    assert!(results.iter().all(Result::is_ok));
}

#[test]
fn other_tokens_targets_and_shapes() {
    for layout in [(2, 1, 1), (1, 1, 2)] {
        let tokens = step(layout, ZeroStage::One, |batches| {
            batches[1] = Pass::train(
                with_another_id(batches[1].inputs())?,
                batches[1].targets()?.clone(),
            );
            Ok(())
        });
        for result in tokens {
            assert_says(&message(result), &["the inputs of micro-batch 1 differ"]);
        }
        let targets = step(layout, ZeroStage::One, |batches| {
            let targets = with_another_id(batches[2].targets()?)?;
            batches[2] = Pass::train(batches[2].inputs().clone(), targets);
            Ok(())
        });
        for result in targets {
            assert_says(&message(result), &["the targets of micro-batch 2 differ"]);
        }
        let shapes = step(layout, ZeroStage::One, |batches| {
            batches[0] = Pass::train(
                batches[0].inputs().narrow(1, 0, 2)?,
                batches[0].targets()?.clone(),
            );
            Ok(())
        });
        for result in shapes {
            let words = ["micro-batch 0", "[2, 3] on rank 0", "[2, 2] on rank 1"];
            assert_says(&message(result), &words);
        }
    }
}

#[test]
fn replicas_have_data_of_their_own() {
    // Rank 1 is the second replica.
    let results = step((1, 2, 1), ZeroStage::Three, |batches| {
        batches[0] = Pass::train(
            with_another_id(batches[0].inputs())?,
            batches[0].targets()?.clone(),
        );
        Ok(())
    });
    assert!(results.iter().all(Result::is_ok));
}
