//! Backward passes in two halves on every family: input halves in any order, weight halves in that of the micro-batches, the same bits.

use std::sync::Mutex;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor};
use candle_parallel::{
    Gradients, Instruction, Instructions, Pipeline, PipelineLayout, Recompute, Schedule, Unit,
    ZeroStage,
};

use crate::fixture::{ALL, Fixture, Run};
use crate::run::{Adapters, Layout, Variant, batches, gather, launch, load_variant};
use crate::tensors::Tensors;

/// All forward passes, then the input halves, the last micro-batch first where nothing passes between ranks, then the weight halves.
fn in_halves(layout: &PipelineLayout, rank: usize, m: usize) -> Vec<Instruction> {
    let turns = layout.num_stages() == 1;
    let unit = |stage: usize, micro_batch: usize| Unit { stage, micro_batch };
    let of = |stage| (0..m).map(move |index| unit(stage, index));
    let mut list = Vec::new();
    for stage in layout.stages_of(rank) {
        list.extend(of(stage).map(Instruction::Forward));
        let mut inputs: Vec<_> = of(stage).map(Instruction::InputGrad).collect();
        if turns {
            inputs.reverse();
        }
        list.extend(inputs);
        list.extend(of(stage).map(Instruction::WeightGrad));
    }
    list
}

/// The bits of the gradients of a step, and of its loss.
fn gradients(
    fixture: &Fixture,
    (layout, variant): (Layout, Variant),
    schedule: impl Instructions + Copy + 'static,
) -> (Tensors, u64) {
    let result = Mutex::new(None);
    let run = Run {
        seq_len: 8,
        micro_batch_size: 1,
        global_batch_size: 6,
        ..fixture.run.clone()
    };
    let passes = |world| -> Result<()> {
        let mesh = Mesh::new(world, layout.degrees())?;
        let part = load_variant(fixture, &mesh, (layout, variant))?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let micro_batches = batches(fixture, &run, &mesh)?.batch(0)?;
        assert!(micro_batches.len() > 2);
        Pipeline::new(schedule, &mesh).forward_backward(&part, &micro_batches, &mut gradients)?;
        let reduced = gradients.reduce()?;
        let local = reduced.local_gradients()?;
        let whole = gather(&part, &mesh, |index| match local.get(&index) {
            Some(grad) => Ok(grad.clone()),
            None => {
                let shape = part.params().get(index).local_shape();
                Tensor::zeros(shape, DType::F32, part.device())
            }
        })?;
        if mesh.world.rank() == 0 {
            *result.lock().unwrap() = Some((whole, reduced.loss().mean.to_bits()));
        }
        Ok(())
    };
    launch(layout, passes).unwrap();
    result.into_inner().unwrap().unwrap()
}

#[test]
fn two_halves_give_the_bits_of_whole_backward_passes() {
    for name in ALL {
        let fixture = Fixture::new(name);
        for (pp, dp, tp, zero) in [
            (1, 1, 1, ZeroStage::Zero),
            (1, 2, 1, ZeroStage::Three),
            (2, 1, 1, ZeroStage::One),
            (1, 1, 2, ZeroStage::One),
        ] {
            let layout = Layout {
                zero,
                ..Layout::new(pp, dp, tp)
            };
            for variant in [
                Variant::default(),
                Variant {
                    dtype: DType::BF16,
                    recompute: Recompute::Full,
                    ..Variant::default()
                },
                Variant {
                    adapters: Adapters::New(0.3),
                    ..Variant::default()
                },
            ] {
                let case = (layout, variant);
                let whole = gradients(&fixture, case, Schedule::OneForwardOneBackward);
                let halves = gradients(&fixture, case, in_halves);
                assert!(halves == whole, "{name} {layout:?} {:?}", variant.dtype);
            }
        }
    }
}
