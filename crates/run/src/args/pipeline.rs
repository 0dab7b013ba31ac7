//! Flags of the pipeline: which layers a stage has, which rank has which stages, and in what order they work.

use std::fmt;
use std::str::FromStr;

use candle_core::{Result, bail};
use candle_parallel::{PipelineLayout, Plan, Schedule};
use candle_train_models::{ModelConfig, block_costs};
use candle_trainer::counted;
use clap::Args;
use serde::Serialize;

use crate::args::choices::some_by_name;
use crate::args::number::whole;
use crate::args::text::text;

/// In what order the stages of a pipeline work on their micro-batches.
#[derive(Args, Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ScheduleArgs {
    /// Order of the micro-batches in the pipeline [default: 1f1b, or what offloaded weights ask for]
    ///
    /// The default is gpipe with a stage for each block where --offload has params and activations, in files, with --recompute full: each stage takes all
    /// micro-batches before the next one, so a step reads the weights twice, however many micro-batches it has, whose inputs of stages wait
    /// meanwhile. But not with tied weights, tiles, parameter servers, or ranks that do not divide the blocks evenly.
    #[arg(long)]
    #[serde(serialize_with = "some_by_name")]
    pub schedule: Option<Schedule>,
    /// Stages on each pipeline rank; with more than 1, 1f1b, zb-h1 and gpipe are interleaved [default: 1, of zbv and dualpipev 2]
    #[arg(long, value_name = "STAGES", value_parser = whole::<usize>(1..))]
    pub virtual_stages: Option<usize>,
}

/// How a pipeline's stages are made and work.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PipelineArgs {
    /// Their order.
    #[command(flatten)]
    #[serde(flatten)]
    pub order: ScheduleArgs,
    /// Layers of each stage, in the order of the model, such as 7,8,8,7; auto: so that the rank with the most to do has least, embedding and
    /// head counted in
    #[arg(long, default_value = "auto", value_name = "auto|N,N,..")]
    #[serde(serialize_with = "text")]
    pub pipeline_layout: StageLayers,
    /// Receives that a pipeline rank posts ahead: what other ranks send comes while it computes, and each takes the memory of a
    /// micro-batch between two layers
    #[arg(long, default_value_t = 1, value_name = "RECEIVES", value_parser = whole::<usize>(0..))]
    pub pipeline_prefetch: usize,
}

/// The value of `--pipeline-layout`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StageLayers {
    /// By what blocks cost.
    Auto,
    /// Of each stage.
    Given(Vec<usize>),
}

impl FromStr for StageLayers {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let numbers = text.split(',').map(|number| number.trim().parse());
        match numbers.collect::<std::result::Result<Vec<usize>, _>>() {
            Ok(numbers) => Ok(Self::Given(numbers)),
            Err(_) => Err(
                "expected auto, or a number of layers for each stage with commas between them, such as 7,8,8,7"
                    .to_string(),
            ),
        }
    }
}

impl fmt::Display for StageLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Given(layers) => f.write_str(&comma_list(layers)),
        }
    }
}

impl ScheduleArgs {
    /// The order; where nothing was chosen yet 1F1B.
    pub fn schedule(&self) -> Schedule {
        self.schedule.unwrap_or(Schedule::OneForwardOneBackward)
    }

    /// Of each stage the pipeline rank that has it.
    ///
    /// # Errors
    /// As [`Schedule::placement`].
    pub fn placement(&self, pp: usize) -> Result<Vec<usize>> {
        let schedule = self.schedule();
        let virtual_stages = self.virtual_stages.unwrap_or(schedule.virtual_stages());
        schedule.placement(pp, virtual_stages)
    }
}

impl PipelineArgs {
    /// The stages of a model that is trained on sequences of `seq_len` tokens by `pp` pipeline ranks: the same on every rank.
    ///
    /// # Errors
    /// More stages than layers, stages that the schedule is not made for, and layers of stages that are not those of the model.
    pub fn layout(
        &self,
        pp: usize,
        config: &ModelConfig,
        seq_len: usize,
    ) -> Result<PipelineLayout> {
        let ranks = self.order.placement(pp)?;
        let num_layers = config.num_hidden_layers;
        match &self.pipeline_layout {
            StageLayers::Auto => {
                PipelineLayout::balanced(num_layers, &ranks, &block_costs(config, seq_len))
            }
            StageLayers::Given(layers) => {
                let given = layers
                    .iter()
                    .fold(0, |sum: usize, own| sum.saturating_add(*own));
                let inner = layers.iter().enumerate().skip(1);
                let mut inner = inner.take(layers.len().saturating_sub(2));
                if let Some((stage, _)) = inner.find(|(_, own)| **own == 0) {
                    bail!(
                        "--pipeline-layout {} has no layers in stage {stage}; expected 1 or more but in the first and the last stage",
                        comma_list(layers)
                    );
                }
                if layers.len() != ranks.len() || given != num_layers {
                    let auto =
                        PipelineLayout::balanced(num_layers, &ranks, &block_costs(config, seq_len));
                    let hint = match auto {
                        Ok(auto) => format!("--pipeline-layout {}", comma_list(&auto.num_layers())),
                        Err(_) => "fewer stages".to_string(),
                    };
                    bail!(
                        "--pipeline-layout {} has {given} layers in {}; expected the {num_layers} layers of the model in {}\nhint: {hint}",
                        comma_list(layers),
                        counted(layers.len(), "stage"),
                        counted(ranks.len(), "stage"),
                    );
                }
                PipelineLayout::of_layers(layers, &ranks)
            }
        }
    }

    /// What each rank does in a step of `num_micro_batches`.
    ///
    /// # Errors
    /// As [`Self::layout`], and a number of micro-batches that the schedule is not made for.
    pub fn plan(
        &self,
        pp: usize,
        config: &ModelConfig,
        seq_len: usize,
        num_micro_batches: usize,
    ) -> Result<Plan> {
        let layout = self.layout(pp, config, seq_len)?;
        Plan::new(&self.order.schedule(), &layout, num_micro_batches)
    }
}

/// Such as `7,8,8,7`.
pub fn comma_list(numbers: &[usize]) -> String {
    let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    numbers.join(",")
}
