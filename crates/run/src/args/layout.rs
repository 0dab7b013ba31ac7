//! Flags of the layout: how a model lies on ranks, and what replicas divide.

use std::path::PathBuf;

use candle_comm::{Degrees, Mesh, RankEnv};
use candle_core::{DType, Error, Result, bail};
use candle_parallel::{
    DataParallel, ModelPart, Offload, PackWeights, ParamBuilder, ReduceType, Schedule, ZeroStage,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
use candle_trainer::{BatchConfig, explain_out_of_memory};
use clap::Args;
use clap::builder::ArgPredicate;
use serde::Serialize;

use crate::args::choices::{
    GradientQuantization, PackChoice, Quantization, RecomputeChoice, by_name, float_type,
    some_float_type,
};
use crate::args::context::ContextArgs;
use crate::args::number::whole;
use crate::args::pipeline::{PipelineArgs, ScheduleArgs, StageLayers};
use crate::args::text::some_text;

/// How the model lies on the ranks.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LayoutArgs {
    /// Tensor-parallel degree: ranks that share each layer
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pub tp: usize,
    /// Pipeline-parallel degree: ranks that have the layers one after the other, in one or several stages each
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pub pp: usize,
    /// Data-parallel degree: replicas that share each global batch [default: what the ranks leave after --tp, --pp and --cp]
    ///
    /// Ranks are the processes of a launcher, or one for each GPU of this machine; without either there is one.
    #[arg(long, value_name = "REPLICAS", value_parser = whole::<usize>(1..))]
    pub dp: Option<usize>,
    /// ZeRO stage, what replicas divide between them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too
    #[arg(long, default_value_t = 1, value_parser = whole::<u8>(0..=3))]
    pub zero: u8,
    /// Divide it within groups of so many replicas, which hold the same (HSDP); they move less, and hold more [default: all replicas]
    #[arg(long, value_name = "REPLICAS", value_parser = whole::<usize>(2..))]
    pub zero_group: Option<usize>,
    /// Keep a second copy of the weights, from their first use in a step to the update, divided within groups of so many replicas, and gather them from
    /// there (hpZ): such as those of a host, which then gather across hosts once a step; needs --zero 3 [default: no copy]
    #[arg(long, value_name = "REPLICAS", value_parser = whole::<usize>(2..))]
    pub zero_secondary: Option<usize>,
    /// Type in which gradients move between replicas
    #[arg(long, ignore_case = true, default_value = "f32")]
    #[serde(serialize_with = "by_name")]
    pub grad_reduce_dtype: ReduceType,
    /// Move gradients between replicas in 8 or 4 bits, blocks of 256 values with a scale each; needs --zero 1, 2 or 3 [default: no]
    ///
    /// If --zero-secondary makes several groups they move in two hops (qgZ): sums within a group, rounded again, are added to those of the others.
    #[arg(long, value_name = "TYPE", conflicts_with = "grad_reduce_dtype")]
    pub quantize_gradients: Option<GradientQuantization>,
    /// Gather weights in 8 bits, blocks of 256 values with a scale each; needs --zero 3 [default: no]
    #[arg(long, value_name = "TYPE")]
    pub quantize_weights: Option<Quantization>,
    /// Gather or fetch the weight of a linear layer, of the embedding and of the head in TILES tiles of rows, one after the other, each freed
    /// after its use; more than 1 needs --zero 3 or --offload params
    #[arg(long, default_value_t = 1, value_name = "TILES", value_parser = whole::<usize>(1..))]
    pub tile_linears: usize,
    /// Communicate between replicas only while nothing is computed; slower, and the same bits
    #[arg(long)]
    pub no_overlap: bool,
    /// The stages of a pipeline and their order.
    #[command(flatten)]
    #[serde(flatten)]
    pub pipeline: PipelineArgs,
    /// How sequences are divided.
    #[command(flatten)]
    #[serde(flatten)]
    pub context: ContextArgs,
    /// What to compute again in the backward pass instead of keeping it: less memory, the same bits
    #[arg(long, default_value = "none")]
    pub recompute: RecomputeChoice,
    /// Keep weights of linear layers a second time on CPUs, in the order in which products read them, so that it is not made anew for each: more memory, the
    /// same bits
    #[arg(long, default_value = "auto")]
    pub pack_weights: PackChoice,
    /// Type of weights and activations while training; sums, gradients and the optimizer's copy of the weights stay f32, and f16 has dynamic
    /// loss scaling [default: bf16 on GPUs without --matmul-precision, else f32]
    #[arg(long, ignore_case = true, value_parser = float_type(), default_value_ifs = [
        ("bf16", ArgPredicate::IsPresent, "bf16"),
        ("fp16", ArgPredicate::IsPresent, "f16"),
    ])]
    #[serde(serialize_with = "some_float_type")]
    pub dtype: Option<DType>,
    /// The same as --dtype bf16
    #[arg(long, conflicts_with_all = ["dtype", "fp16"])]
    #[serde(skip)]
    pub bf16: bool,
    /// The same as --dtype f16
    #[arg(long, conflicts_with = "dtype")]
    #[serde(skip)]
    pub fp16: bool,
    /// Keep in the host's memory, and not on the device, the optimizer's state and masters (optimizer), gradients and weights but those of
    /// the layers that run (gradients, params), inputs of layers that --recompute full computes again (activations), all four (all), or a list of
    /// them; nvme:DIR is optimizer with --offload-dir DIR; the same bits [default: nothing]
    #[arg(long, value_name = "LIST")]
    #[serde(serialize_with = "some_text")]
    pub offload: Option<Offload>,
    /// Keep what --offload names in files of this folder, for each rank one that is gone after the run; of several folders, given by a
    /// flag each, ranks take one in turn [default: the host's memory]
    #[arg(long, value_name = "DIR")]
    pub offload_dir: Vec<PathBuf>,
}

impl LayoutArgs {
    /// Type of weights and activations; where nothing was chosen yet f32.
    pub fn dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }

    /// How data-parallel replicas work together.
    pub fn data_parallel(&self) -> DataParallel {
        DataParallel {
            // The flag takes no other number.
            zero: ZeroStage::try_from(self.zero).unwrap_or(ZeroStage::Three),
            zero_group: self.zero_group,
            zero_secondary: self.zero_secondary,
            reduce: match self.quantize_gradients {
                Some(GradientQuantization::Int8) => ReduceType::Int8,
                Some(GradientQuantization::Int4) => ReduceType::Int4,
                None => self.grad_reduce_dtype,
            },
            quantize_weights: self.quantize_weights.is_some(),
            tile_linears: self.tile_linears,
            overlap: !self.no_overlap,
        }
    }

    /// Which weights are to stay packed for products, in steps of so many micro-batches; `auto` takes that there is memory, unless a flag asks
    /// for less.
    pub fn packing(&self, num_micro_batches: usize) -> PackWeights {
        match self.pack_weights {
            PackChoice::Off => PackWeights::Off,
            PackChoice::On => PackWeights::All,
            PackChoice::Auto if self.asks_for_less_memory() => PackWeights::Off,
            PackChoice::Auto if num_micro_batches > 1 => PackWeights::All,
            PackChoice::Auto => PackWeights::Frozen,
        }
    }

    /// Whether a flag trades time for memory.
    fn asks_for_less_memory(&self) -> bool {
        self.recompute == RecomputeChoice::Full || self.offload.is_some() || self.tile_linears > 1
    }

    /// What a rank keeps away from its device.
    pub fn offload(&self) -> Offload {
        let mut offload = self.offload.clone().unwrap_or_default();
        offload.dirs.extend(self.offload_dir.iter().cloned());
        offload
    }

    /// Takes the order in which a step reads weights in files twice, however many micro-batches it has, where flags leave it open: a block to a stage, through which
    /// all micro-batches go before the next one. Whether it did.
    ///
    /// Weights that stages share keep the order of their sums, so the bits are the same; and tiles would be read for each micro-batch all the same.
    pub fn fill_schedule(&mut self, config: &ModelConfig, num_micro_batches: usize) -> bool {
        let offload = self.offload();
        let leave = offload.params && offload.activations && !offload.dirs.is_empty();
        let is_full = matches!(self.recompute, RecomputeChoice::Full);
        let is_open = self.pipeline.order.schedule.is_none()
            && self.pipeline.order.virtual_stages.is_none()
            && self.pipeline.pipeline_layout == StageLayers::Auto;
        // A block to a stage, the embedding and the head too: those of two would be read anew for each micro-batch.
        let num_stages = config.num_hidden_layers + 2;
        let is_even = num_stages.checked_rem(self.pp) == Some(0);
        let is_whole = !config.tie_word_embeddings && self.tile_linears == 1;
        if !(leave && is_full && is_open && is_even && is_whole && num_micro_batches > 1) {
            return false;
        }
        let layers = (0..num_stages).map(|stage| usize::from((1..num_stages - 1).contains(&stage)));
        let pipeline = PipelineArgs {
            order: ScheduleArgs {
                schedule: Some(Schedule::GPipe),
                virtual_stages: Some(num_stages / self.pp),
            },
            pipeline_layout: StageLayers::Given(layers.collect()),
            ..self.pipeline.clone()
        };
        // A schedule may be too large to be written down.
        let plan = pipeline.plan(self.pp, config, 1, num_micro_batches);
        if plan.is_ok() {
            self.pipeline = pipeline;
        }
        plan.is_ok()
    }

    /// An error if the flags about what is offloaded contradict each other.
    pub(crate) fn check_offload(&self) -> Result<()> {
        match (&self.offload, self.offload_dir.first()) {
            (None, Some(dir)) => bail!(
                "--offload-dir is given without --offload, which says what to keep in {}\nhint: --offload all",
                dir.display()
            ),
            (Some(offload), Some(dir)) if !offload.dirs.is_empty() => bail!(
                "--offload {offload} and --offload-dir {} name two folders\nhint: --offload optimizer with --offload-dir",
                dir.display()
            ),
            _ => Ok(()),
        }
    }

    /// An error if the model cannot be divided over the ranks, or a step over its micro-batches.
    ///
    /// # Errors
    /// See above, with the numbers.
    pub fn check_model(
        &self,
        config: &ModelConfig,
        batches: &BatchConfig,
        seq_len: usize,
    ) -> Result<()> {
        let degrees = self.degrees();
        CausalLm::check_degrees(config, &Degrees { pp: 1, ..degrees })?;
        self.context.check(config, degrees.tp, seq_len)?;
        let plan_of = |size: usize| {
            let per_replica = size.div_ceil(degrees.dp);
            let num_micro_batches = per_replica.div_ceil(batches.micro_batch_size);
            let plan = self
                .pipeline
                .plan(degrees.pp, config, seq_len, num_micro_batches);
            plan.map(drop)
        };
        plan_of(batches.global_batch_size)?;
        batches.ramp.map_or(Ok(()), |ramp| {
            let of_start =
                |err: Error| err.context(format!("the first steps of --batch-ramp {ramp}"));
            plan_of(ramp.start).map_err(of_start)
        })
    }

    /// A rank's part of a model that is trained on sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// As for [`Self::check_model`], and weights that do not fit the model or the memory.
    pub fn part(
        &self,
        config: &ModelConfig,
        mesh: &Mesh,
        vb: &ParamBuilder,
        seq_len: usize,
    ) -> Result<ModelPart> {
        let parts = self.part_config(config, mesh.degrees.pp, seq_len)?;
        let part = CausalLm::part_with(config, mesh, vb, parts)
            .map_err(|err| explain_out_of_memory(err, mesh.world.device()))?;
        Ok(part.with_recompute(|_| self.recompute.into()))
    }

    /// How the model is divided over `pp` ranks of a pipeline.
    pub(crate) fn part_config(
        &self,
        config: &ModelConfig,
        pp: usize,
        seq_len: usize,
    ) -> Result<PartConfig> {
        Ok(PartConfig {
            layout: Some(self.pipeline.layout(pp, config, seq_len)?),
            context: self.context.config(),
            sequence_parallel: self.context.sequence_parallel,
        })
    }

    /// How many replicas so many ranks make.
    pub(crate) fn replicas_of(&self, num_ranks: usize) -> usize {
        let of_replica = [self.tp, self.context.cp].into_iter();
        (num_ranks / of_replica.fold(self.pp, usize::saturating_mul)).max(1)
    }

    /// The mesh's degrees; without `--dp` as many replicas as a launcher's processes make.
    pub fn degrees(&self) -> Degrees {
        let dp = self.dp.unwrap_or_else(|| {
            // What is wrong with the environment [`RankArgs::config`] says.
            let num_processes = RankEnv::from_env().map_or(1, |env| env.world_size());
            self.replicas_of(num_processes)
        });
        Degrees {
            pp: self.pp,
            dp,
            cp: self.context.cp,
            tp: self.tp,
        }
    }
}
