//! How long ranks of a pipeline wait, measured with blocks that sleep, against the simulation.

use std::sync::Mutex;
use std::time::Duration;

use candle_comm::launch::threads_with;
use candle_comm::{Degrees, LocalConfig, Mesh};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Init;
use candle_parallel::{
    GradientSink, Gradients, Layer, Loss, ModelPart, ParamStore, Pass, Pipeline, PipelineLayout,
    PlainBlock, PlainHead, Plan, Schedule, StageTimes, Times, layer_block, plain_block, plain_head,
};

/// A layer that does nothing but take its time.
struct Sleeping {
    weight: Tensor,
    times: StageTimes,
}

fn sleep(secs: f64) {
    std::thread::sleep(Duration::from_secs_f64(secs));
}

impl Layer for Sleeping {
    type Saved = ();

    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<(Tensor, ())> {
        sleep(self.times.forward);
        Ok((xs.clone(), ()))
    }

    fn backward(
        &self,
        (): (),
        dy: &Tensor,
        _pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        sleep(self.times.input_grad);
        let secs = self.times.weight_grad;
        let grad = move |target: &Tensor, _adds: bool| -> Result<()> {
            sleep(secs);
            target.zero_set()
        };
        gradients.put(&self.weight, Box::new(grad))?;
        Ok(Some(dy.clone()))
    }

    fn weights(&self) -> Vec<&Tensor> {
        vec![&self.weight]
    }
}

/// The beginning of the model, and its end, which take no time.
struct Thin;

impl PlainBlock for Thin {
    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<Tensor> {
        xs.affine(1.0, 0.0)
    }
}

impl PlainHead for Thin {
    fn loss(&self, xs: &Tensor, _pass: &Pass) -> Result<Loss> {
        Ok(Loss::new(xs.sum_all()?, 1.0))
    }
}

struct Case {
    schedule: Schedule,
    v: usize,
    /// Of a micro-batch in a stage, in seconds.
    times: [f64; 3],
    /// Of a message, of the forward pass.
    hop: f64,
    /// The rank that takes 1.5 times as long.
    slow: Option<usize>,
}

/// Of the step.
const TOLERANCE: f64 = 0.03;

fn are_close(measured: &[f64], expected: &[f64]) -> bool {
    let mut pairs = measured.iter().zip(expected);
    pairs.all(|(measured, expected)| (measured - expected).abs() < TOLERANCE)
}

/// The share of the passes' time in which each rank did not compute, in the shortest of some steps, and that of the simulation. A busy machine
/// makes steps longer, never shorter: there are more of them until one is as it should be.
fn measured(case: &Case, p: usize, m: usize) -> (Vec<f64>, Vec<f64>) {
    let ranks = case.schedule.placement(p, case.v).unwrap();
    let layout = PipelineLayout::of_layers(&vec![1; ranks.len()], &ranks).unwrap();
    let [forward, input_grad, weight_grad] = case.times.map(|secs| secs * case.v as f64);
    let of_rank = StageTimes {
        forward,
        input_grad,
        weight_grad,
    };
    let mut times = Times::even(of_rank, &layout);
    times.hop = case.hop * case.times[0];
    for (stage, times) in times.stages.iter_mut().enumerate() {
        if Some(ranks[stage]) == case.slow {
            *times = StageTimes {
                forward: 1.5 * times.forward,
                input_grad: 1.5 * times.input_grad,
                weight_grad: 1.5 * times.weight_grad,
            };
        }
    }
    let plan = Plan::new(&case.schedule, &layout, m).unwrap();
    let simulation = plan.simulate(&times).unwrap();
    let expected = (0..p).map(|rank| simulation.idle_share(rank));
    let expected: Vec<f64> = expected.collect();

    let config = LocalConfig {
        latency: Duration::from_secs_f64(times.hop),
        ..LocalConfig::new(p)
    };
    let best: Mutex<Option<(f64, Vec<f64>)>> = Mutex::new(None);
    let run = |world| -> Result<()> {
        let degrees = Degrees {
            pp: p,
            ..Degrees::default()
        };
        let mesh = Mesh::new(world, degrees)?;
        let vb = ParamStore::init(1).builder(DType::F32, &Device::Cpu);
        let last = layout.num_blocks() - 1;
        let part = ModelPart::build_stages(&mesh, &vb, layout.clone(), 2, |index, vb| {
            Ok(match index {
                0 => plain_block(Thin),
                _ if index == last => plain_head(Thin),
                _ => layer_block(Sleeping {
                    weight: vb.pp(index).get(2, "weight", Init::Const(1.0))?,
                    times: times.stages[index - 1],
                }),
            })
        })?;
        let pipeline = Pipeline::new(case.schedule, &mesh);
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let xs = Tensor::ones((1, 1, 2), DType::F32, &Device::Cpu)?;
        let batches = vec![Pass::train(xs.clone(), xs); m];
        for _ in 0..12 {
            let report = pipeline.forward_backward(&part, &batches, &mut gradients)?;
            gradients.clear();
            let busy = report.forward_secs + report.backward_secs;
            let numbers = [busy, report.passes_secs].map(f64::to_le_bytes).concat();
            let all = mesh.pp.all_gather_bytes(&numbers)?;
            let number = |bytes: &[u8], place: usize| {
                f64::from_le_bytes(bytes[8 * place..8 * place + 8].try_into().unwrap())
            };
            let longest = all
                .iter()
                .map(|of_rank| number(of_rank, 1))
                .fold(0.0, f64::max);
            let idle = all.iter().map(|of_rank| 1.0 - number(of_rank, 0) / longest);
            let idle: Vec<f64> = idle.collect();
            let is_close = are_close(&idle, &expected);
            let mut best = best.lock().unwrap();
            if best.as_ref().is_none_or(|(known, _)| longest < *known) {
                *best = Some((longest, idle));
            }
            // The same on every rank.
            if is_close {
                break;
            }
        }
        Ok(())
    };
    threads_with(config, run).unwrap();
    (best.into_inner().unwrap().unwrap().1, expected)
}

#[test]
fn ranks_wait_as_long_as_the_simulation_says() {
    let equal = [0.006, 0.006, 0.006];
    let unequal = [0.006, 0.008, 0.005];
    for (p, m) in [(2, 4), (4, 8), (8, 16)] {
        for (schedule, v, times, hop, slow) in [
            (Schedule::OneForwardOneBackward, 1, equal, 0.0, None),
            (Schedule::OneForwardOneBackward, 2, equal, 0.2, None),
            (Schedule::ZeroBubbleH1, 1, unequal, 0.2, None),
            (Schedule::ZeroBubbleH1, 2, equal, 0.0, None),
            (Schedule::ZeroBubbleV, 2, equal, 0.2, None),
            (Schedule::ZeroBubble2p, 1, unequal, 0.0, Some(p - 1)),
            (Schedule::DualPipeV, 2, equal, 0.0, Some(0)),
            (Schedule::GPipe, 1, unequal, 0.2, Some(1)),
        ] {
            let case = Case {
                schedule,
                v,
                times,
                hop,
                slow,
            };
            let (measured, expected) = measured(&case, p, m);
            assert!(
                are_close(&measured, &expected),
                "{} with {v} stages on each of {p} ranks, hop {hop}, slow {slow:?}: idle {measured:.3?} of the time, expected {expected:.3?}",
                schedule.name()
            );
        }
    }
}
