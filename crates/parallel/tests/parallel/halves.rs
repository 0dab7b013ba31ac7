//! Backward passes in two halves, ranks with several stages, weights that stages share: the same bits in whatever order the units come.

use std::sync::Mutex;
use std::time::Duration;

use candle_comm::launch::threads_with;
use candle_comm::{Degrees, LocalConfig, Mesh, ProcessGroup};
use candle_core::{DType, Device, Result, Tensor};
use candle_parallel::{
    DataParallel, Gradients, Instruction, Instructions, ModelPart, ParamStore, Pass, Pipeline,
    PipelineLayout, Schedule, Unit, ZeroStage,
};

use crate::chain::{Chain, HIDDEN, Values, gather};
use crate::check::{ZERO_STAGES, assert_values_close, message, on_mesh};
use crate::device::device;

const NUM: usize = 3;

/// All forward passes, then the input halves in the order that `order` makes of 0..m, then the weight halves; stage by stage.
fn in_halves(order: fn(usize, usize) -> usize) -> impl Instructions {
    move |layout: &PipelineLayout, rank: usize, m: usize| -> Vec<Instruction> {
        let stages: Vec<usize> = layout.stages_of(rank).collect();
        let unit = |stage: usize, micro_batch: usize| Unit { stage, micro_batch };
        let mut list = Vec::new();
        for &stage in &stages {
            list.extend((0..m).map(|index| Instruction::Forward(unit(stage, index))));
        }
        for &stage in stages.iter().rev() {
            let halves = (0..m).map(|place| unit(stage, order(place, m)));
            list.extend(halves.map(Instruction::InputGrad));
        }
        for &stage in stages.iter().rev() {
            list.extend((0..m).map(|index| Instruction::WeightGrad(unit(stage, index))));
        }
        list
    }
}

fn in_order(place: usize, _: usize) -> usize {
    place
}

/// All forward passes, then all backward passes, of stages anywhere.
fn whole(layout: &PipelineLayout, rank: usize, m: usize) -> Vec<Instruction> {
    let stages: Vec<usize> = layout.stages_of(rank).collect();
    let of = |stage: usize| (0..m).map(move |micro_batch| Unit { stage, micro_batch });
    let forward = stages.iter().flat_map(|&stage| of(stage));
    let backward = stages.iter().rev().flat_map(|&stage| of(stage));
    let forward = forward.map(Instruction::Forward);
    forward.chain(backward.map(Instruction::Backward)).collect()
}

fn last_first(place: usize, m: usize) -> usize {
    m - 1 - place
}

fn middle_first(place: usize, m: usize) -> usize {
    (place + m / 2) % m
}

fn build(chain: &Chain, mesh: &Mesh, store: &ParamStore, cut: &Cut) -> Result<ModelPart> {
    let layout = match cut {
        Cut::Even => PipelineLayout::even(chain.num_blocks(), mesh.pp.world_size())?,
        Cut::Of(num_blocks, ranks) => PipelineLayout::new(num_blocks, ranks)?,
    };
    let vb = store.builder(DType::F32, &device());
    ModelPart::build_stages(mesh, &vb, layout, HIDDEN, |index, vb| {
        chain.block(index, &mesh.tp, &vb)
    })
}

/// Where stages lie.
enum Cut {
    Even,
    /// Numbers of blocks and ranks.
    Of(&'static [usize], &'static [usize]),
}

/// The gradients of a step, and its loss.
fn reduced(
    chain: &Chain,
    layout: (usize, usize, usize),
    zero: ZeroStage,
    cut: &Cut,
    schedule: fn() -> Box<dyn Instructions>,
) -> (Values, f64) {
    let result = Mutex::new(None);
    on_mesh(layout, |mesh| {
        let replicas: DataParallel = zero.into();
        let store = ParamStore::init(5).with_data_parallel(replicas);
        let part = build(chain, &mesh, &store, cut)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Dyn(schedule()), &mesh);
        let batches = chain.micro_batches(7 * mesh.dp.rank() as u64, NUM)?;
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        let reduced = gradients.reduce()?;
        let local = reduced.local_gradients()?;
        let values = gather(&part, &mesh, |index| Ok(local[&index].clone()))?;
        if mesh.world.rank() == 0 {
            *result.lock().unwrap() = Some((values, reduced.loss().mean));
        }
        Ok(())
    });
    result.into_inner().unwrap().unwrap()
}

/// A schedule that is known when the test runs.
struct Dyn(Box<dyn Instructions>);

impl Instructions for Dyn {
    fn of_rank(&self, layout: &PipelineLayout, rank: usize, m: usize) -> Result<Vec<Instruction>> {
        self.0.of_rank(layout, rank, m)
    }
}

fn one_f_one_b() -> Box<dyn Instructions> {
    Box::new(Schedule::OneForwardOneBackward)
}

fn gpipe() -> Box<dyn Instructions> {
    Box::new(Schedule::GPipe)
}

#[test]
fn halves_in_any_order_give_the_bits_of_whole_backward_passes() {
    for tied in [false, true] {
        let chain = Chain {
            tied,
            ..Chain::default()
        };
        for zero in ZERO_STAGES {
            for layout in [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2)] {
                let whole = reduced(&chain, layout, zero, &Cut::Even, one_f_one_b);
                let halves: [fn() -> Box<dyn Instructions>; 3] = [
                    || Box::new(in_halves(in_order)),
                    || Box::new(in_halves(last_first)),
                    || Box::new(in_halves(middle_first)),
                ];
                for (order, schedule) in halves.into_iter().enumerate() {
                    // Messages between stages are in one order.
                    if layout.0 > 1 && order > 0 && zero != ZeroStage::Zero {
                        continue;
                    }
                    let got = reduced(&chain, layout, zero, &Cut::Even, schedule);
                    assert!(
                        got == whole,
                        "{layout:?} {zero:?} tied {tied}, order {order}"
                    );
                }
            }
        }
    }
}

/// The stages of two ranks: one way, to and fro, and around.
const CUTS: [Cut; 3] = [
    Cut::Of(&[2, 3], &[0, 1]),
    Cut::Of(&[1, 1, 1, 2], &[0, 1, 1, 0]),
    Cut::Of(&[1, 1, 2, 1], &[0, 1, 0, 1]),
];

#[test]
fn ranks_with_several_stages_give_the_gradients_of_one_rank() {
    for tied in [false, true] {
        let chain = Chain {
            tied,
            ..Chain::default()
        };
        for zero in [ZeroStage::Zero, ZeroStage::Two, ZeroStage::Three] {
            let (one, loss) = reduced(&chain, (1, 1, 1), zero, &Cut::Even, gpipe);
            for (index, cut) in CUTS.iter().enumerate() {
                for schedule in [
                    || Box::new(whole) as Box<_>,
                    || Box::new(in_halves(in_order)) as Box<_>,
                ] {
                    let (got, of_got) = reduced(&chain, (2, 1, 1), zero, cut, schedule);
                    let what = format!("cut {index} {zero:?} tied {tied}");
                    assert!((of_got - loss).abs() < 1e-6 * loss, "{what}");
                    assert_eq!(got.len(), one.len(), "{what}");
                    for (name, values) in &one {
                        assert_values_close(&format!("{what}: {name}"), &got[name], values);
                    }
                }
            }
        }
    }
}

#[test]
fn ranks_with_several_stages_evaluate_as_one_rank_does() {
    let chain = Chain::default();
    let losses = |layout, cut: &Cut| {
        let all = on_mesh(layout, |mesh| {
            let part = build(&chain, &mesh, &ParamStore::init(5), cut)?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            let batches = chain.micro_batches(3, 5)?.into_iter();
            let sums = pipeline.evaluate(&part, batches.map(Ok))?;
            Ok((part.is_last(), sums))
        });
        let mut last = all.into_iter().filter(|(is_last, _)| *is_last);
        last.next().unwrap().1
    };
    let one = losses((1, 1, 1), &Cut::Even);
    assert_eq!(one.num_targets, 30.0);
    for cut in &CUTS {
        assert_eq!(losses((2, 1, 1), cut), one);
    }
}

#[test]
fn gpipe_and_1f1b_have_the_same_bits_with_tied_weights() {
    let chain = Chain {
        tied: true,
        ..Chain::default()
    };
    for zero in ZERO_STAGES {
        for (layout, cut) in [
            ((1, 1, 1), &Cut::Even),
            ((1, 2, 1), &Cut::Even),
            ((2, 1, 1), &Cut::Even),
            ((2, 2, 1), &CUTS[0]),
        ] {
            let want = reduced(&chain, layout, zero, cut, gpipe);
            let got = reduced(&chain, layout, zero, cut, one_f_one_b);
            assert!(got == want, "{layout:?} {zero:?}");
        }
        // Both uses on one rank, in stages of their own, or on two: the same sums, added in the order of the stages.
        let apart = reduced(
            &chain,
            (2, 1, 1),
            zero,
            &Cut::Of(&[1, 3, 1], &[0, 1, 1]),
            || Box::new(whole),
        );
        let together = reduced(
            &chain,
            (2, 1, 1),
            zero,
            &Cut::Of(&[1, 3, 1], &[0, 1, 0]),
            || Box::new(whole),
        );
        assert!(apart == together, "{zero:?}");
    }
}

/// A list of instructions that was spoiled.
type Change = fn(Vec<Instruction>) -> Vec<Instruction>;

#[test]
fn a_schedule_that_leaves_something_out_is_an_error_before_anything_runs() {
    let chain = Chain::default();
    let cases: [(Change, &str); 3] = [
        (
            |list| list[..list.len() - 1].to_vec(),
            "does not have the backward pass of micro-batch 2 in stage 0 on rank 0",
        ),
        (
            |list| [&list[..], &list[..1]].concat(),
            "has the forward pass of micro-batch 0 in stage 0 on rank 0 of the pipeline after the backward pass",
        ),
        (
            |list| list.into_iter().rev().collect(),
            "has the backward pass of micro-batch 2 in stage 0 on rank 0 of the pipeline before its forward pass",
        ),
    ];
    for (change, words) in cases {
        on_mesh((1, 1, 1), |mesh| {
            let part = build(&chain, &mesh, &ParamStore::init(5), &Cut::Even)?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let schedule = move |layout: &PipelineLayout, rank: usize, m: usize| {
                change(Schedule::GPipe.of_rank(layout, rank, m).unwrap())
            };
            let pipeline = Pipeline::new(schedule, &mesh);
            let batches = chain.micro_batches(1, NUM)?;
            let said = message(pipeline.forward_backward(&part, &batches, &mut gradients));
            assert!(said.contains(words), "{said}");
            Ok(())
        });
    }
}

/// One rank gives its outputs in an order in which the next one does not take them: of equal shapes, one would be taken for the other.
#[test]
fn ranks_whose_messages_are_in_other_orders_are_told_before_anything_runs() {
    let chain = Chain::default();
    let results = on_mesh((2, 1, 1), |mesh| {
        let part = build(&chain, &mesh, &ParamStore::init(5), &Cut::Even)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let schedule = |layout: &PipelineLayout, rank: usize, m: usize| {
            let mut list = Schedule::GPipe.of_rank(layout, rank, m).unwrap();
            if rank == 0 {
                list[..m].reverse();
            }
            list
        };
        let pipeline = Pipeline::new(schedule, &mesh);
        let batches = chain.micro_batches(1, NUM)?;
        Ok(message(pipeline.forward_backward(
            &part,
            &batches,
            &mut gradients,
        )))
    });
    for said in results {
        assert!(
            said.contains("rank 0 of the pipeline send to rank 1 in another order"),
            "{said}"
        );
    }
}

#[test]
fn a_layout_that_does_not_fit_is_an_error() {
    for (num_blocks, ranks) in [
        (&[2, 3][..], &[0][..]),
        (&[2, 0, 3], &[0, 1, 0]),
        (&[2, 3], &[0, 2]),
        (&[], &[]),
    ] {
        let said = message(PipelineLayout::new(num_blocks, ranks));
        assert!(said.contains("expected for each stage"), "{said}");
    }
}

/// A target beyond the vocabulary, which the last stage finds; the first one has sent its outputs by then.
#[test]
fn a_pipeline_does_not_go_on_with_the_messages_of_a_step_that_failed() {
    let chain = Chain::default();
    let said = Mutex::new(Vec::new());
    let config = LocalConfig {
        deadline: Duration::from_secs(2),
        devices: vec![device()],
        ..LocalConfig::new(2)
    };
    let rank = |world: ProcessGroup| -> Result<()> {
        let degrees = Degrees {
            pp: 2,
            ..Degrees::default()
        };
        let mesh = Mesh::new(world, degrees)?;
        let part = build(&chain, &mesh, &ParamStore::init(5), &Cut::Even)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        let mut bad = chain.micro_batches(1, NUM)?;
        let beyond = Tensor::full(99u32, (2, 3), &Device::Cpu)?;
        bad[0] = Pass::train(bad[0].inputs().clone(), beyond);
        let first = pipeline.forward_backward(&part, &bad, &mut gradients);
        let good = chain.micro_batches(1, NUM)?;
        let second = pipeline.forward_backward(&part, &good, &mut gradients);
        let mut said = said.lock().unwrap();
        said.push((message(first), message(second)));
        Ok(())
    };
    // The first rank waits for a gradient in vain.
    threads_with(config, rank).unwrap();
    let said = said.into_inner().unwrap();
    assert!(
        said.iter().any(|(first, _)| first.contains("99")),
        "{said:?}"
    );
    for (_, second) in said {
        assert!(second.contains("an earlier pass has failed"), "{second}");
    }
}
