//! `candle-train schedule`: what a pipeline's ranks do in a step, and how long they wait, without a model.

use std::fmt::Write as _;
use std::path::PathBuf;

use candle_comm::{Degrees, ProcessGroup};
use candle_core::{DType, Device, Error, Result};
use candle_parallel::{
    AdamW, DataParallel, ModelSpec, Offload, PackWeights, ParamStore, PipelineLayout, Plan,
    PlannedPasses, PlannedUpdate, PlannedWork, Recompute, Simulation, StageTimes, Times, ZeroStage,
    column_parallel_linear, head_block, layer_block, part, vocab_parallel_embedding,
    vocab_parallel_head,
};
use candle_train_run::{ScheduleArgs, comma_list, print_line, print_note, whole};
use candle_trainer::counted;

use crate::pictures::timeline::{draw_schedule, micro_batches};

/// Print or draw what the ranks of a pipeline do in a step, and how long they wait; or check a schedule of one's own
#[derive(Debug, clap::Args)]
pub(crate) struct ScheduleCommand {
    /// Ranks of the pipeline
    #[arg(long, default_value_t = 4, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pp: usize,
    #[command(flatten)]
    order: ScheduleArgs,
    /// Micro-batches of the step
    #[arg(long, default_value_t = 8, value_name = "MICRO_BATCHES", value_parser = whole::<usize>(1..))]
    micro_batches: usize,
    /// What a micro-batch takes on a rank, all of its stages together, in any unit: the forward pass, the gradient of the input, and that of
    /// the weights
    #[arg(
        long,
        default_value = "1,1,1",
        value_parser = times_of,
        value_name = "F,B,W",
        allow_hyphen_values = true
    )]
    times: StageTimes,
    /// Print the schedule as torch writes it: a row for each rank, with cells such as 0F2, 0I2, 0W2 and 0B2
    #[arg(long)]
    csv: bool,
    /// Read such a file instead, and say what is wrong with it; ranks, stages and micro-batches are its own
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pp", "schedule", "virtual_stages", "micro_batches"])]
    check: Option<PathBuf>,
    /// Draw it: a picture that ends with .png or .svg
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    program: ProgramArgs,
}

/// All that a rank does in a step of a small model.
#[derive(Debug, clap::Args)]
struct ProgramArgs {
    /// Print everything that a rank does in a step instead, with gathers, sums, norm and update, for a model of small layers
    #[arg(long, conflicts_with_all = ["csv", "check", "output", "times"])]
    program: bool,
    /// Layers of that model, beside its embedding and its head
    #[arg(long, default_value_t = 4, requires = "program", value_name = "LAYERS", value_parser = whole::<usize>(1..))]
    layers: usize,
    /// Replicas
    #[arg(long, default_value_t = 1, requires = "program", value_name = "REPLICAS", value_parser = whole::<usize>(1..))]
    dp: usize,
    /// ZeRO stage, what replicas divide between them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too
    #[arg(long, default_value_t = 1, requires = "program", value_parser = whole::<u8>(0..=3))]
    zero: u8,
    /// Communicate between replicas only while nothing is computed
    #[arg(long, requires = "program")]
    no_overlap: bool,
    /// Which of the --pp x --dp ranks, from 0, the replicas of a stage one after the other
    #[arg(long, default_value_t = 0, requires = "program", value_name = "RANK")]
    rank: usize,
}

/// The value of `--times`.
fn times_of(text: &str) -> std::result::Result<StageTimes, String> {
    let is_time = |time: &f64| *time == 0.0 || (1e-3..=1e9).contains(time);
    let numbers = text.split(',').map(|number| number.trim().parse());
    let times = numbers.map(|number| number.ok().filter(is_time));
    let times: Option<Vec<f64>> = times.collect();
    match times.unwrap_or_default()[..] {
        [forward, input_grad, weight_grad] if forward + input_grad + weight_grad > 0.0 => {
            Ok(StageTimes {
                forward,
                input_grad,
                weight_grad,
            })
        }
        _ => Err(
            "expected three times, each 0 or from 0.001 to 1e9, not all 0, such as 1,1.2,0.8"
                .to_string(),
        ),
    }
}

impl ScheduleCommand {
    /// Prints, and draws, what it was asked for.
    ///
    /// # Errors
    /// Numbers that the schedule is not made for, a file that cannot be read or is no schedule, a picture that cannot be drawn.
    pub fn run(&self) -> Result<()> {
        if self.program.program {
            print_line(self.program()?.trim_end());
            return Ok(());
        }
        let (plan, name) = self.plan()?;
        let times = Times::even(self.times, plan.layout());
        let simulation = plan.simulate(&times)?;
        if let Some(output) = &self.output {
            draw_schedule(&plan, &simulation, &name, output)?;
            // Beside what stdout has, which may be a file's.
            print_note(&format!("wrote {}", output.display()));
        }
        match self.csv {
            true => print_line(plan.to_csv().trim_end()),
            false => print_line(self.table(&plan, &simulation, &name).trim_end()),
        }
        Ok(())
    }

    /// The list of a rank for a step of a small model.
    fn program(&self) -> Result<String> {
        let ProgramArgs {
            layers,
            dp,
            zero,
            rank,
            ..
        } = self.program;
        let degrees = Degrees {
            pp: self.pp,
            dp,
            ..Degrees::default()
        };
        let num_ranks = self.pp * dp;
        if rank >= num_ranks {
            return Err(Error::msg(format!(
                "--rank is {rank}; expected one of {num_ranks}, from 0"
            )));
        }
        let schedule = self.order.schedule();
        let ranks = self.order.placement(self.pp)?;
        let of_stage = |stage| part(layers, stage, ranks.len()).len();
        let of_stages: Vec<usize> = (0..ranks.len()).map(of_stage).collect();
        let layout = PipelineLayout::of_layers(&of_stages, &ranks)?;
        let replicas = DataParallel {
            overlap: !self.program.no_overlap,
            ..DataParallel::from(ZeroStage::try_from(zero)?)
        };
        let vb = ParamStore::init(0).with_data_parallel(replicas);
        let vb = vb.builder(DType::F32, &Device::Cpu);
        let single = ProcessGroup::single(Device::Cpu);
        let model = ModelSpec::describe(layout, degrees, &vb, |index, vb| {
            Ok(match index.checked_sub(1) {
                None => layer_block(vocab_parallel_embedding(256, 64, &single, vb.pp("tokens"))?),
                Some(layer) if layer < layers => {
                    let vb = vb.pp("layers").pp(layer);
                    layer_block(column_parallel_linear(64, 64, false, &single, vb)?)
                }
                _ => head_block(vocab_parallel_head(256, 64, &single, vb.pp("head"))?),
            })
        })?;
        let plan = Plan::new(&schedule, model.layout(), self.micro_batches)?;
        let work = PlannedWork {
            replicas,
            offload: &Offload::default(),
            pack_weights: PackWeights::Off,
            on_gpu: false,
            passes: Some(PlannedPasses {
                plan: &plan,
                tapes: model.tapes(),
                recompute: Recompute::None,
                num_rows: 64,
            }),
            update: Some(PlannedUpdate {
                rule: &AdamW::default(),
            }),
        };
        work.program(&model.of_rank(rank))
    }

    fn plan(&self) -> Result<(Plan, String)> {
        if let Some(file) = &self.check {
            let name = file.display().to_string();
            let text = std::fs::read_to_string(file)
                .map_err(|err| Error::msg(format!("cannot read the schedule {name}: {err}")))?;
            let plan = Plan::from_csv(&text).map_err(|err| err.context(name.clone()))?;
            return Ok((plan, name));
        }
        let schedule = self.order.schedule();
        let ranks = self.order.placement(self.pp)?;
        let layout = PipelineLayout::new(&vec![1; ranks.len()], &ranks)?;
        let plan = Plan::new(&schedule, &layout, self.micro_batches)?;
        Ok((plan, schedule.name().to_string()))
    }

    fn table(&self, plan: &Plan, simulation: &Simulation, name: &str) -> String {
        let StageTimes {
            forward,
            input_grad,
            weight_grad,
        } = self.times;
        let layout = plan.layout();
        let num_ranks = layout.num_ranks();
        let mut text = format!(
            "{name}: {}, {}, {}; a micro-batch takes {forward} forward, {input_grad} for its input's gradient, {weight_grad} for its \
             weights'\n\n",
            counted(num_ranks, "rank"),
            counted(layout.num_stages(), "stage"),
            micro_batches(plan),
        );
        for (rank, list) in plan.ranks().iter().enumerate() {
            let cells: Vec<String> = list.iter().map(|it| it.cell()).collect();
            let _ = writeln!(text, "rank {rank}  {}", cells.join(" "));
        }
        let _ = writeln!(text, "\nrank  stages      idle   most micro-batches held");
        for rank in 0..num_ranks {
            let stages: Vec<usize> = layout.stages_of(rank).collect();
            let peak = plan.peak(rank) as f64 / stages.len() as f64;
            let _ = writeln!(
                text,
                "{rank:<4}  {:<9} {:>5.1}%   {}",
                comma_list(&stages),
                100.0 * simulation.idle_share(rank),
                rounded(peak)
            );
        }
        let busiest = (0..num_ranks).map(|rank| simulation.busy(rank));
        let busiest = busiest.fold(0.0, f64::max);
        let bubble = simulation.makespan - busiest;
        let _ = writeln!(
            text,
            "\na step takes {}, of which the busiest rank works {} and waits {}: a bubble of {:.1}%",
            rounded(simulation.makespan),
            rounded(busiest),
            rounded(bubble),
            100.0 * bubble / simulation.makespan
        );
        text
    }
}

/// With three digits after the point at most.
fn rounded(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
