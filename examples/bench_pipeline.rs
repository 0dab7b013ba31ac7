//! Measures how long the ranks of a pipeline wait, with blocks that sleep, beside what a simulation says: a schedule by itself, on a machine with
//! fewer cores than ranks too. It prints one JSON line.
//!
//! | field of the line | meaning |
//! |---|---|
//! | `schedule`, `virtual_stages` | the schedule and the stages of each rank |
//! | `idle_share` | of each rank, the share of a step's passes in which it did not compute, of the step that is most as it should be: others were disturbed |
//! | `simulated_idle_share` | what it should be |
//! | `step_secs`, `simulated_step_secs` | the passes of that step, and what they should take |

use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;

use candle_comm::launch::threads_with;
use candle_comm::{Degrees, LocalConfig, Mesh, ProcessGroup};
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::Init;
use candle_parallel::{
    GradientSink, Gradients, Layer, Loss, ModelPart, ParamStore, Pass, Pipeline, PipelineLayout,
    PlainBlock, PlainHead, Plan, StageTimes, Times, layer_block, plain_block, plain_head,
};
use candle_train_run::ScheduleArgs;
use clap::Parser;

/// Measure how long the ranks of a pipeline wait, with blocks that sleep
#[derive(Parser)]
struct Args {
    /// Ranks of the pipeline
    #[arg(long, default_value_t = 4)]
    pp: usize,
    #[command(flatten)]
    order: ScheduleArgs,
    /// Micro-batches of a step
    #[arg(long, default_value_t = 8)]
    micro_batches: usize,
    /// Seconds of a micro-batch in a stage, of the forward pass, the input's gradient and the weights': of each stage in the order of the
    /// model, or of all alike
    #[arg(long, value_name = "F,B,W", num_args = 1.., default_value = "0.006,0.006,0.006")]
    stage_secs: Vec<StageSecs>,
    /// Seconds that a message is on its way
    #[arg(long, default_value_t = 0.0)]
    hop: f64,
    /// Steps to measure at most; fewer if one is as the simulation says
    #[arg(long, default_value_t = 20)]
    steps: usize,
}

#[derive(Clone, Copy)]
struct StageSecs(StageTimes);

impl FromStr for StageSecs {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let secs = text.split(',').map(str::parse::<f64>);
        match secs.collect::<std::result::Result<Vec<_>, _>>().as_deref() {
            Ok(&[forward, input_grad, weight_grad])
                if [forward, input_grad, weight_grad]
                    .iter()
                    .all(|secs| (0.0..60.0).contains(secs)) =>
            {
                Ok(Self(StageTimes {
                    forward,
                    input_grad,
                    weight_grad,
                }))
            }
            _ => {
                Err("expected three numbers of seconds from 0 to 60, such as 0.01,0.01,0.01".into())
            }
        }
    }
}

/// A step of which no share is further from the simulated one is the last.
const CLOSE: f64 = 0.01;

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

/// The passes of a step.
#[derive(Clone)]
struct Measured {
    secs: f64,
    idle_shares: Vec<f64>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let schedule = args.order.schedule();
    let ranks = args.order.placement(args.pp)?;
    let layout = PipelineLayout::of_layers(&vec![1; ranks.len()], &ranks)?;
    let given = args.stage_secs.iter().map(|secs| secs.0);
    let given: Vec<StageTimes> = given.collect();
    let mut times = Times::even(given[0], &layout);
    times.hop = args.hop;
    times.stages = match given.len() {
        1 => vec![given[0]; ranks.len()],
        _ => given,
    };
    let plan = Plan::new(&schedule, &layout, args.micro_batches)?;
    let simulation = plan.simulate(&times)?;
    let expected = (0..args.pp).map(|rank| simulation.idle_share(rank));
    let expected: Vec<f64> = expected.collect();

    let config = LocalConfig {
        latency: Duration::from_secs_f64(args.hop),
        ..LocalConfig::new(args.pp)
    };
    let closest: Mutex<Option<(f64, Measured)>> = Mutex::new(None);
    threads_with(config, |world| {
        let degrees = Degrees {
            pp: args.pp,
            ..Degrees::default()
        };
        let mesh = Mesh::new(world, degrees)?;
        let part = sleeping_part(&mesh, &layout, &times)?;
        let pipeline = Pipeline::new(schedule, &mesh);
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let xs = Tensor::ones((1, 1, 2), DType::F32, &Device::Cpu)?;
        let batches = vec![Pass::train(xs.clone(), xs); args.micro_batches];
        for _ in 0..args.steps {
            let report = pipeline.forward_backward(&part, &batches, &mut gradients)?;
            gradients.clear();
            let busy_secs = report.forward_secs + report.backward_secs;
            let measured = measured(&mesh.pp, busy_secs, report.passes_secs)?;
            let pairs = measured.idle_shares.iter().zip(&expected);
            let off = pairs.map(|(idle, expected)| (idle - expected).abs());
            let off = off.fold(0.0, f64::max);
            let mut closest = closest.lock().unwrap_or_else(|err| err.into_inner());
            if closest.as_ref().is_none_or(|(known, _)| off < *known) {
                *closest = Some((off, measured));
            }
            // The same on every rank.
            if off < CLOSE {
                break;
            }
        }
        Ok(())
    })?;
    let closest = closest.into_inner().unwrap_or_else(|err| err.into_inner());
    let Some((_, closest)) = closest else {
        bail!("--steps is 0: nothing was measured");
    };
    let line = serde_json::json!({
        "schedule": schedule.name(),
        "virtual_stages": ranks.len() / args.pp,
        "idle_share": closest.idle_shares,
        "simulated_idle_share": expected,
        "step_secs": closest.secs,
        "simulated_step_secs": simulation.makespan,
    });
    println!("{line}");
    Ok(())
}

/// A model of a sleeping layer in each stage.
fn sleeping_part(mesh: &Mesh, layout: &PipelineLayout, times: &Times) -> Result<ModelPart> {
    let vb = ParamStore::init(1).builder(DType::F32, &Device::Cpu);
    let last = layout.num_blocks() - 1;
    ModelPart::build_stages(mesh, &vb, layout.clone(), 2, |index, vb| {
        Ok(match index {
            0 => plain_block(Thin),
            _ if index == last => plain_head(Thin),
            _ => layer_block(Sleeping {
                weight: vb.pp(index).get(2, "weight", Init::Const(1.0))?,
                times: times.stages[index - 1],
            }),
        })
    })
}

/// What all ranks have measured.
fn measured(pp: &ProcessGroup, busy_secs: f64, passes_secs: f64) -> Result<Measured> {
    let own = [busy_secs, passes_secs].map(f64::to_le_bytes).concat();
    let all = pp.all_gather_bytes(&own)?;
    let numbers = all.iter().map(|bytes| {
        let mut numbers = bytes.chunks_exact(8).map(|bytes| {
            let bytes = bytes.try_into().unwrap_or_default();
            f64::from_le_bytes(bytes)
        });
        (numbers.next().unwrap_or(0.0), numbers.next().unwrap_or(0.0))
    });
    let numbers: Vec<(f64, f64)> = numbers.collect();
    let secs = numbers.iter().map(|of_rank| of_rank.1).fold(0.0, f64::max);
    let idle_shares = numbers.iter().map(|of_rank| 1.0 - of_rank.0 / secs);
    Ok(Measured {
        secs,
        idle_shares: idle_shares.collect(),
    })
}
