//! Communication under computation: the same bits as without, whatever the timing.

use std::collections::BTreeMap;
use std::time::Duration;

use candle_comm::Mesh;
use candle_core::{Result, Tensor};
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, DistributedOptimizer, Gradients, Offload, Optimizer,
    OptimizerState, ParamSlice, ParamStore, Pipeline, Schedule, UpdateStep, ZeroStage,
};

use crate::chain::{Chain, local_bits};
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh_with_delays};

const STEPS: u64 = 3;

/// AdamW on a rank that is slow now and then.
struct Slow(AdamW, u64);

impl Optimizer for Slow {
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.0.state_names()
    }

    fn update(&self, slice: &ParamSlice<'_>, step: &UpdateStep) -> Result<()> {
        let values = slice.grad.elem_count() as u64 + step.number as u64;
        let micros = (self.1 * 7919 + values * 104_729) % 1500;
        std::thread::sleep(Duration::from_micros(micros));
        self.0.update(slice, step)
    }

    fn validate(&self) -> Result<()> {
        self.0.validate()
    }
}

/// What each rank has after some steps: the bits of its weights, and its state.
type Trained = (BTreeMap<String, Vec<u32>>, Vec<OptimizerState>);

fn trained(
    (layout, tied): ((usize, usize, usize), bool),
    replicas: DataParallel,
    delays: Option<u64>,
) -> Vec<Trained> {
    on_mesh_with_delays(layout, delays, |mesh: Mesh| {
        let chain = Chain {
            tied,
            ..Chain::default()
        };
        let part = chain.part(&mesh, &ParamStore::init(5).with_data_parallel(replicas))?;
        let rule = AdamW(AdamWConfig::default());
        let seed = delays.map_or(0, |seed| seed + mesh.world.rank() as u64);
        let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, Slow(rule, seed))?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        for step in 0..STEPS {
            let batches = chain.micro_batches(step + 10 * mesh.dp.rank() as u64, 3)?;
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            optimizer.step(&mut gradients, 0.01, Some(0.1))?;
        }
        Ok((local_bits(&part), optimizer.state()?))
    })
}

#[test]
fn overlap_and_delays_change_no_bit() {
    for case in [
        ((1, 3, 1), false),
        ((2, 2, 2), false),
        ((3, 2, 1), true),
        ((2, 3, 2), true),
    ] {
        for zero in ZERO_STAGES {
            let replicas = |overlap| DataParallel {
                zero,
                overlap,
                ..DataParallel::default()
            };
            let want = trained(case, replicas(false), None);
            assert!(
                trained(case, replicas(true), None) == want,
                "{case:?} {zero:?}"
            );
            for seed in [1, 2] {
                let got = trained(case, replicas(true), Some(seed));
                assert!(got == want, "{case:?} {zero:?}, delays {seed}");
            }
        }
    }
}

#[test]
fn tied_copies_have_the_same_bits_on_every_stage_and_replica() {
    for (pp, dp, tp) in [(2, 3, 1), (3, 3, 1), (2, 2, 2)] {
        for zero in ZERO_STAGES {
            let ranks = trained(((pp, dp, tp), true), zero.into(), Some(3));
            for (rank, (bits, _)) in ranks.iter().enumerate() {
                if let Some(copy) = bits.get("embed.weight") {
                    let (first, _) = &ranks[rank % tp];
                    assert!(*copy == first["embed.weight"], "rank {rank} {zero:?}");
                }
            }
        }
    }
}

#[test]
fn reductions_and_gathers_run_before_anybody_waits_for_them() {
    for overlap in [false, true] {
        on_mesh_with_delays((1, 2, 1), None, |mesh: Mesh| {
            let chain = Chain::default();
            let replicas = DataParallel {
                zero: ZeroStage::One,
                overlap,
                ..DataParallel::default()
            };
            let part = chain.part(&mesh, &ParamStore::init(5).with_data_parallel(replicas))?;
            let config = AdamWConfig::default();
            let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
            let batches = chain.micro_batches(mesh.dp.rank() as u64, 2)?;
            mesh.dp.reset_counters();
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            let num_started = mesh.dp.counters().calls("reduce_scatter");
            assert_eq!(num_started, if overlap { 5 } else { 0 });
            let bits = |values: Tensor| -> Result<Vec<f32>> { values.flatten_all()?.to_vec1() };
            let before = local_bits(&part);
            optimizer.step(&mut gradients, 0.01, None)?;
            // Without a wait the other replica's part is still as it was.
            let mut num_old = 0;
            for param in part.params().iter() {
                let now: Vec<u32> = bits(param.tensor().detach())?
                    .iter()
                    .map(|x| x.to_bits())
                    .collect();
                let both = now.iter().zip(&before[&param.name]);
                num_old += both.filter(|(now, before)| now == before).count();
            }
            assert_eq!(num_old > 50, overlap, "{num_old}");
            part.params().wait_for_updates()?;
            for param in part.params().iter() {
                let now: Vec<u32> = bits(param.tensor().detach())?
                    .iter()
                    .map(|x| x.to_bits())
                    .collect();
                assert_eq!(now, local_bits(&part)[&param.name]);
            }
            Ok(())
        });
    }
}

#[test]
fn gradients_are_not_touched_once_their_reduction_has_begun() {
    let dir = tempfile::tempdir().unwrap();
    for offload in [
        Offload::default(),
        Offload {
            gradients: true,
            ..Offload::default()
        }
        .in_dir(dir.path()),
    ] {
        on_mesh_with_delays((1, 2, 1), None, |mesh: Mesh| {
            let chain = Chain::default();
            let store = ParamStore::init(5).with_offload(offload.clone());
            let part = chain.part(&mesh, &store)?;
            let mut gradients = Gradients::new(part.params(), &mesh)?;
            let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
            let batches = chain.micro_batches(1, 1)?;
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            let words = ["reduction over the ranks has begun", "overlap: false"];
            for index in 0..part.params().len() {
                assert_says(&message(gradients.get(index)), &words);
                let zeros = part.params().get(index).values()?.zeros_like()?;
                assert_says(&message(gradients.accumulate(index, &zeros)), &words);
            }
            Ok(())
        });
    }
}
