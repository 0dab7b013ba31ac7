//! A step as it is reckoned takes as long as one that is made, with blocks that sleep and messages that are on their way for a while.

use std::thread::sleep;
use std::time::Duration;

use candle_comm::launch::threads_with;
use candle_comm::{Degrees, LocalConfig, Mesh};
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_parallel::{
    AdamW, GradientSink, Layer, MoveTimes, Offload, PackWeights, ParamStore, Pass, PipelineLayout,
    Plan, PlannedPasses, PlannedWork, RankSpec, Recompute, Schedule, Simulation, StageTimes, Times,
    Training, ZeroStage, head_block, layer_block, part, vocab_parallel_embedding,
    vocab_parallel_head,
};

use crate::device::device;

const HIDDEN: usize = 8;
const LAYERS: usize = 4;
const FORWARD: Duration = Duration::from_millis(6);
const INPUT_GRAD: Duration = Duration::from_millis(7);
const WEIGHT_GRAD: Duration = Duration::from_millis(5);

/// A layer that takes its time, and leaves what it is given as it is.
struct Sleeps(Tensor);

impl Layer for Sleeps {
    type Saved = ();

    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<(Tensor, ())> {
        sleep(FORWARD);
        Ok((xs.clone(), ()))
    }

    fn backward(
        &self,
        (): (),
        dy: &Tensor,
        _pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        sleep(INPUT_GRAD);
        let zeros = self.0.zeros_like()?.detach();
        gradients.put(
            &self.0,
            Box::new(move |sum, adds| {
                sleep(WEIGHT_GRAD);
                if adds {
                    Ok(())
                } else {
                    sum.slice_set(&zeros, 0, 0)
                }
            }),
        )?;
        Ok(Some(dy.clone()))
    }

    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.0]
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    schedule: Schedule,
    pp: usize,
    virtual_stages: usize,
    zero: Option<ZeroStage>,
    num_micro_batches: usize,
    latency: Duration,
}

impl Case {
    fn layout(&self) -> Result<(PipelineLayout, Vec<usize>)> {
        let ranks = self.schedule.placement(self.pp, self.virtual_stages)?;
        let layers = (0..ranks.len()).map(|stage| part(LAYERS, stage, ranks.len()).len());
        let layers: Vec<usize> = layers.collect();
        Ok((PipelineLayout::of_layers(&layers, &ranks)?, layers))
    }

    fn degrees(&self) -> Degrees {
        Degrees {
            pp: self.pp,
            dp: if self.zero.is_some() { 2 } else { 1 },
            ..Degrees::default()
        }
    }

    /// The shares of the passes in which the ranks of the pipeline wait, and what these hold of the model.
    fn measured(&self) -> Result<(Vec<f64>, Vec<RankSpec>)> {
        let degrees = self.degrees();
        let config = LocalConfig {
            latency: self.latency,
            ..LocalConfig::for_mesh(&degrees)?
        };
        let ranks = threads_with(config, |world| {
            let mesh = Mesh::new(world, degrees)?;
            let zero = self.zero.unwrap_or(ZeroStage::One);
            let store = ParamStore::init(1).with_data_parallel(zero);
            let vb = store.builder(DType::F32, &device());
            let (layout, _) = self.layout()?;
            let part = candle_parallel::ModelPart::build_stages(
                &mesh,
                &vb,
                layout,
                HIDDEN,
                |index, vb| {
                    Ok(match index.checked_sub(1) {
                        None => layer_block(vocab_parallel_embedding(
                            16,
                            HIDDEN,
                            &mesh.tp,
                            vb.pp("tokens"),
                        )?),
                        Some(LAYERS) => {
                            head_block(vocab_parallel_head(16, HIDDEN, &mesh.tp, vb.pp("head"))?)
                        }
                        Some(layer) => layer_block(Sleeps(vb.pp(layer).get(
                            HIDDEN,
                            "weight",
                            Init::Const(1.0),
                        )?)),
                    })
                },
            )?;
            let spec = part.params().of_rank().clone();
            let mut training = Training::new(part, &mesh, self.schedule, AdamW::default())?;
            let tokens = Tensor::arange(0u32, 8, &device())?.reshape((2, 4))?;
            let batches = vec![Pass::train(tokens.clone(), tokens); self.num_micro_batches];
            training.step(&batches, 1e-3, None)?;
            let report = training.step(&batches, 1e-3, None)?;
            let idle = report
                .pipeline
                .iter()
                .map(|rank| rank.idle_share.unwrap_or(f64::NAN));
            Ok((mesh.dp.rank() == 0, idle.collect::<Vec<_>>(), spec))
        })?;
        let idle = ranks[0].1.clone();
        let specs = ranks.into_iter().filter(|(is_first, ..)| *is_first);
        Ok((idle, specs.map(|(.., spec)| spec).collect()))
    }

    fn simulated(&self, ranks: &[RankSpec]) -> Result<Vec<f64>> {
        let (layout, layers) = self.layout()?;
        let plan = Plan::new(&self.schedule, &layout, self.num_micro_batches)?;
        let stages = layers.iter().map(|num_layers| {
            let all = |of_one: Duration| of_one.as_secs_f64() * *num_layers as f64;
            StageTimes {
                forward: all(FORWARD),
                input_grad: all(INPUT_GRAD),
                weight_grad: all(WEIGHT_GRAD),
            }
        });
        let nothing = StageTimes {
            forward: 0.0,
            input_grad: 0.0,
            weight_grad: 0.0,
        };
        let mut times = Times::even(nothing, &layout);
        times.stages = stages.collect();
        times.hop = self.latency.as_secs_f64();
        times.moves = MoveTimes::default();
        let work = PlannedWork {
            replicas: self.zero.unwrap_or(ZeroStage::One).into(),
            offload: &Offload::default(),
            pack_weights: PackWeights::Off,
            on_gpu: false,
            passes: Some(PlannedPasses {
                plan: &plan,
                tapes: &[],
                recompute: Recompute::None,
                num_rows: 8,
            }),
            update: None,
        };
        let step = Simulation::of_step(ranks, &work, &times)?;
        Ok((0..self.pp)
            .map(|rank| 1.0 - step.busy(rank) / step.passes)
            .collect())
    }
}

#[test]
fn the_shares_in_which_ranks_wait_are_those_that_are_reckoned() {
    let case = |schedule, pp, virtual_stages, zero, num_micro_batches, latency| Case {
        schedule,
        pp,
        virtual_stages,
        zero,
        num_micro_batches,
        latency: Duration::from_millis(latency),
    };
    let three = Some(ZeroStage::Three);
    let cases = [
        case(Schedule::OneForwardOneBackward, 2, 1, None, 4, 0),
        case(Schedule::OneForwardOneBackward, 2, 1, None, 4, 9),
        case(Schedule::OneForwardOneBackward, 4, 1, None, 6, 3),
        case(Schedule::OneForwardOneBackward, 2, 2, None, 4, 3),
        case(Schedule::OneForwardOneBackward, 2, 1, three, 4, 3),
        case(Schedule::GPipe, 2, 1, None, 3, 5),
        case(Schedule::GPipe, 4, 1, None, 4, 0),
        case(Schedule::ZeroBubbleH1, 2, 1, None, 4, 3),
        case(Schedule::ZeroBubbleH1, 4, 1, None, 5, 0),
        case(Schedule::ZeroBubble2p, 2, 1, None, 6, 3),
        case(Schedule::ZeroBubbleV, 2, 2, None, 4, 0),
        case(Schedule::ZeroBubbleV, 2, 2, three, 4, 3),
    ];
    for case in cases {
        let mut nearest = f64::INFINITY;
        let mut seen = Vec::new();
        // Who sleeps wakes late where much else runs.
        for _ in 0..12 {
            let (measured, ranks) = case.measured().unwrap();
            let simulated = case.simulated(&ranks).unwrap();
            let pairs = measured.iter().zip(&simulated);
            let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            nearest = nearest.min(most);
            seen.push((measured, simulated));
            if nearest < 0.03 {
                break;
            }
        }
        assert!(nearest < 0.03, "{case:?}: {seen:.3?}");
    }
}
