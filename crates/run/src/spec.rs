//! A run with all of its defaults filled, of which arithmetic tells what it will do.

use std::ops::Range;
use std::path::PathBuf;

use candle_comm::{Degrees, RankEnv};
use candle_core::{Device, Result, bail};
use candle_parallel::checkpoint::{CheckpointSaver, HfSave, SpaceNeed};
use candle_parallel::{
    AdamW, AdamWConfig, MemoryCategory, MemoryPlan, MemoryReport, ModelSpec, Offload, Optimizer,
    PackWeights, ParamStore, Parameters, Plan, PlannedPasses, PlannedUpdate, PlannedWork, RankSpec,
};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::{counted, memory_left};

use crate::args::choices::PackChoice;
use crate::args::data::DataArgs;
use crate::args::lora::LoraArgs;
use crate::args::training::TrainingArgs;
use crate::flags::defaults::Taken;

/// A [`Run`](crate::Run) with the configuration of its model, in which everything is filled that flags leave open. What a start checks of
/// flags, layout, batches and schedule can be checked of it without a device, a file or another process, and so can what ranks will hold.
///
/// ```
/// use candle_train_models::ModelConfig;
/// use candle_train_run::Finetune;
///
/// let config = ModelConfig::from_json(
///     r#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
///         "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 256}"#,
/// )?;
/// let mut run = Finetune::new("org/name").data("chat.jsonl");
/// run.training.layout.pp = 4;
/// let spec = run.spec(&config, 8)?;
/// spec.check()?;
/// // Two replicas of four stages each.
/// assert_eq!(spec.training().layout.dp, Some(2));
/// run.training.layout.pp = 8;
/// let refused = run.spec(&config, 8)?.check().unwrap_err().to_string();
/// assert!(refused.contains("hint: "), "{refused}");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RunSpec {
    pub(crate) training: TrainingArgs,
    pub(crate) data: DataArgs,
    pub(crate) lora: LoraArgs,
    pub(crate) config: ModelConfig,
    /// What was taken where no flag says.
    pub(crate) taken: Vec<Taken>,
    /// What else there is to do about sequences that are longer than the model takes, in words.
    pub(crate) longer: String,
    /// Processes; 1: as many threads as the flags need.
    pub(crate) num_ranks: usize,
    /// Whether ranks compute on GPUs.
    pub(crate) on_gpus: bool,
    /// Sequences of an epoch and tokens of the longest of them, when the data has been read.
    pub(crate) samples: Option<(usize, usize)>,
    /// Which weights stay packed for products.
    pub(crate) pack_weights: PackWeights,
    /// Bytes of a rank's activations that stay in memory, of those that go to files.
    pub(crate) kept_activations: u64,
}

/// An error if flags contradict each other, whatever the model is.
pub(crate) fn check_flags(training: &TrainingArgs, lora: &LoraArgs, data: &DataArgs) -> Result<()> {
    training.validate()?;
    lora.validate()?;
    data.validate(&training.evaluation)
}

/// What the ranks of a run hold.
#[derive(Clone, Debug)]
pub(crate) struct RanksMemory {
    /// Of rank 0.
    pub first: MemoryReport,
    /// The most of each category on any rank.
    pub largest: MemoryReport,
    /// The most bytes on any rank at a time.
    pub peak: u64,
    /// Of each rank of the first replica, which others are like.
    of_ranks: Vec<RankMemory>,
}

/// Bytes that a rank holds.
#[derive(Clone, Copy, Debug)]
struct RankMemory {
    /// Of its device the most at a time, and those between steps.
    peak: u64,
    now: u64,
    /// Of the host beside a device that has memory of its own.
    host: u64,
    /// In files.
    disk: u64,
}

impl RanksMemory {
    /// What these ranks of `degrees` hold together: the sum of their peaks, and what they hold at the peak of one of them at least.
    pub fn of(&self, ranks: Range<usize>, degrees: Degrees) -> (u64, u64) {
        let (mut peaks, mut between, mut most) = (0u64, 0u64, 0);
        for RankMemory { peak, now, .. } in ranks.filter_map(|rank| self.of_rank(rank, degrees)) {
            peaks = peaks.saturating_add(peak);
            between = between.saturating_add(now);
            most = most.max(peak.saturating_sub(now));
        }
        (peaks, between.saturating_add(most))
    }

    /// What these ranks hold of the host's memory beside GPUs.
    pub fn on_host(&self, ranks: Range<usize>, degrees: Degrees) -> u64 {
        let of_ranks = ranks.filter_map(|rank| self.of_rank(rank, degrees));
        of_ranks.fold(0, |sum, of| sum.saturating_add(of.host))
    }

    /// What these ranks keep in files, in each of these folders, which they take in turn.
    pub fn in_folders(
        &self,
        ranks: Range<usize>,
        degrees: Degrees,
        folders: &[PathBuf],
    ) -> Vec<SpaceNeed> {
        let need_of = |(turn, folder): (usize, &PathBuf)| {
            let ranks = (ranks.clone()).filter(|rank| rank % folders.len() == turn);
            let of_ranks = ranks.filter_map(|rank| self.of_rank(rank, degrees));
            SpaceNeed {
                folder: folder.clone(),
                num_bytes: of_ranks.fold(0, |sum, of| sum.saturating_add(of.disk)),
                what: "what is offloaded",
            }
        };
        folders.iter().enumerate().map(need_of).collect()
    }

    fn of_rank(&self, rank: usize, Degrees { pp, dp, cp, tp }: Degrees) -> Option<RankMemory> {
        let like = rank / (dp * cp * tp) * tp + rank % tp;
        let of_rank = self.of_ranks.get(like).copied();
        of_rank.filter(|_| rank < pp * dp * cp * tp)
    }
}

impl RunSpec {
    /// The flags, with what was taken where none says.
    pub fn training(&self) -> &TrainingArgs {
        &self.training
    }

    /// Checks everything that a start checks of flags, layout, batches and schedule.
    ///
    /// # Errors
    /// The first thing that keeps the run from being started, with the numbers and what could be done.
    pub fn check(&self) -> Result<()> {
        check_flags(&self.training, &self.lora, &self.data)?;
        self.training.validate_filled()?;
        self.check_ranks()?;
        let layout = &self.training.layout;
        (layout.offload()).validate(&layout.data_parallel(), self.on_gpus)?;
        self.training.check_model(&self.config, &self.longer)?;
        let widest = self.config.intermediate_size.max(self.config.hidden_size);
        if let Some(rank) = self.lora.lora_rank.filter(|rank| *rank > widest) {
            bail!(
                "--lora-rank {rank} is more than the {widest} features of the widest layer, whose adapter would be larger than its weight\nhint: \
                 --lora-rank {widest} at most; 8 to 64 are usual"
            );
        }
        let model = self.model()?;
        self.training.optimizer.freeze.check(model.params())
    }

    /// An error if the degrees need other ranks than there are.
    fn check_ranks(&self) -> Result<()> {
        let (degrees, num_ranks) = (self.training.layout.degrees(), self.num_ranks);
        let num_servers = self.training.strategy.num_servers();
        let needed = degrees.world_size();
        let needed = needed.and_then(|needed| needed.checked_add(num_servers));
        if num_ranks == 1 || needed == Some(num_ranks) {
            return Ok(());
        }
        let of_replica = Degrees { dp: 1, ..degrees }
            .world_size()
            .unwrap_or(usize::MAX);
        let num_workers = num_ranks.saturating_sub(num_servers);
        let hint = match num_workers / of_replica {
            0 => format!("a replica takes {of_replica} of them: smaller --tp, --pp or --cp"),
            dp if dp * of_replica == num_workers => format!("--dp {dp}"),
            dp => format!("--dp {dp} takes {} of them", dp * of_replica + num_servers),
        };
        bail!(
            "{degrees} = {}, and there are {num_ranks}\nhint: {hint}",
            needed.map_or("too many to count".to_string(), |needed| counted(
                needed, "rank"
            ))
        )
    }

    /// What the model asks for, and how it is divided.
    ///
    /// # Errors
    /// Degrees and stages that do not fit the model, and adapters for layers that it does not have; with `--adapter`, one that cannot be read.
    pub fn model(&self) -> Result<ModelSpec> {
        let (training, layout) = (&self.training, &self.training.layout);
        let seed = training.batches.seed;
        let store = training.optimizer.freeze.apply(ParamStore::init(seed));
        let store = self.lora.apply(store, seed, None)?;
        let vb = store
            .with_data_parallel(training.data_parallel())
            .builder(layout.dtype(), &Device::Cpu);
        let degrees = self.degrees();
        let seq_len = training.batches.sequences.seq_len();
        let parts = layout.part_config(&self.config, degrees.pp, seq_len)?;
        CausalLm::spec(&self.config, degrees, &vb, parts)
    }

    /// Those of the ranks that update weights: with parameter servers these are they.
    pub(crate) fn degrees(&self) -> Degrees {
        match self.training.strategy.num_servers() {
            0 => self.training.layout.degrees(),
            num_servers => Degrees {
                dp: num_servers,
                ..Degrees::default()
            },
        }
    }

    /// What a rank of [`Self::model`] will hold, without what `--pack-weights auto` keeps where a machine has room. Parameter servers compute no passes.
    ///
    /// # Errors
    /// A number of micro-batches that the schedule is not made for.
    pub fn memory_plan(&self, model: &ModelSpec, rank: &RankSpec) -> Result<MemoryPlan> {
        self.memory_plan_of(model, rank, self.plan(model)?.as_ref())
    }

    /// The schedule's lists for a step of `model`; `None` for parameter servers.
    fn plan(&self, model: &ModelSpec) -> Result<Option<Plan>> {
        if self.training.strategy.num_servers() > 0 {
            return Ok(None);
        }
        let schedule = self.training.layout.pipeline.order.schedule();
        let (num_micro_batches, _) = self.micro_batches();
        Plan::new(&schedule, model.layout(), num_micro_batches).map(Some)
    }

    fn memory_plan_of(
        &self,
        model: &ModelSpec,
        rank: &RankSpec,
        plan: Option<&Plan>,
    ) -> Result<MemoryPlan> {
        let (batches, parts) = (&self.training.batches, &self.training.layout);
        let degrees = parts.degrees();
        let (_, micro_batch_size) = self.micro_batches();
        // Of a micro-batch that context-parallel ranks divide.
        let seq_len = batches.sequences.seq_len();
        let longest = self.samples.map_or(seq_len, |(_, longest)| longest);
        let num_tokens = micro_batch_size.saturating_mul(longest.min(seq_len));
        let num_tokens = num_tokens.div_ceil(degrees.cp);
        let passes = plan.map(|plan| PlannedPasses {
            plan,
            tapes: model.tapes(),
            recompute: parts.recompute.into(),
            num_rows: num_tokens,
        });
        let update = PlannedUpdate {
            rule: &AdamW(AdamWConfig::default()),
        };
        let work = PlannedWork {
            replicas: self.training.data_parallel(),
            pack_weights: self.pack_weights,
            offload: &self.offload(),
            on_gpu: self.on_gpus,
            passes,
            update: Some(update),
        };
        // What is packed of f32 depends on how they are multiplied.
        let precision = self.training.ranks.matmul_precision();
        precision.during(|| MemoryPlan::new(rank, &work))
    }

    /// Micro-batches of a step, and sequences of each.
    fn micro_batches(&self) -> (usize, usize) {
        let batches = &self.training.batches;
        // No step has more than an epoch.
        let of_step = batches.global_batch_size();
        let of_step = self.samples.map_or(of_step, |(all, _)| all.min(of_step));
        let of_replica = of_step.div_ceil(self.training.layout.degrees().dp);
        let size = batches.micro_batch_size.min(of_replica);
        (of_replica.div_ceil(size.max(1)), size)
    }

    /// What a rank keeps away from its device.
    pub(crate) fn offload(&self) -> Offload {
        Offload {
            kept_activations: self.kept_activations,
            ..self.training.layout.offload()
        }
    }

    /// Lets those weights stay packed for products on the CPU that gain by it, if the ranks of this machine are expected to leave an eighth of what it has left
    /// then, and if no flag says which, or asks for less memory. What all ranks will hold, if that was worked out.
    pub(crate) fn choose_packing(&mut self, env: &RankEnv) -> Result<Option<RanksMemory>> {
        let is_open = self.training.layout.pack_weights == PackChoice::Auto;
        if !is_open || self.on_gpus || self.training.strategy.num_servers() > 0 {
            return Ok(None);
        }
        let (num_micro_batches, _) = self.micro_batches();
        let layout = &self.training.layout;
        let wanted = layout.packing(num_micro_batches);
        if wanted == PackWeights::Off || self.lora.has_smaller_base(layout.dtype()) {
            return Ok(None);
        }
        let (model, left) = (self.model()?, memory_left().unwrap_or(0));
        let mut memory = None;
        for pack_weights in [wanted, PackWeights::Frozen, PackWeights::Off] {
            self.pack_weights = pack_weights;
            let (here, _) = self.ranks_here(env);
            let (peaks, _) = memory.insert(self.memory(&model)?).of(here, self.degrees());
            if peaks <= left - left / 8 {
                break;
            }
        }
        Ok(memory)
    }

    /// Lets as many activations stay in memory, of those that would go to files, as have room in half of what the machine has left beside what its
    /// ranks are expected to take. None stay if a folder is memory itself. Whether it did.
    pub(crate) fn keep_activations(&mut self, env: &RankEnv) -> Result<bool> {
        let offload = self.training.layout.offload();
        let go_to_disk = offload.activations
            && !offload.dirs.is_empty()
            && !offload.is_in_memory()
            && !self.on_gpus;
        if !go_to_disk || self.training.strategy.num_servers() > 0 {
            return Ok(false);
        }
        let (here, _) = self.ranks_here(env);
        let num_ranks = here.len().max(1) as u64;
        let memory = self.memory(&self.model()?)?;
        let (peaks, _) = memory.of(here, self.degrees());
        // Before any weight is there.
        let left = memory_left().unwrap_or(0).saturating_sub(peaks);
        self.kept_activations = left / 2 / num_ranks;
        Ok(true)
    }

    /// The room that the ranks of this machine take in the folders of what is offloaded.
    pub(crate) fn offload_needs(&self, memory: &RanksMemory, env: &RankEnv) -> Vec<SpaceNeed> {
        let (here, _) = self.ranks_here(env);
        memory.in_folders(here, self.degrees(), &self.training.layout.offload().dirs)
    }

    /// The ranks on this machine, and the processes that they are in; of workers of parameter servers nothing is known.
    pub(crate) fn ranks_here(&self, env: &RankEnv) -> (Range<usize>, usize) {
        match env.world_size() {
            1 => (0..self.degrees().world_size().unwrap_or(0), 1),
            _ => {
                let first = env.rank() - env.local_rank().min(env.rank());
                let num_processes = env.local_world_size();
                (first..first + num_processes, num_processes)
            }
        }
    }

    /// What all ranks of the model will hold. No replica holds more than the first one.
    pub(crate) fn memory(&self, model: &ModelSpec) -> Result<RanksMemory> {
        let Degrees { pp, dp, cp, tp } = self.degrees();
        let mut memory = RanksMemory {
            first: MemoryReport::default(),
            largest: MemoryReport::default(),
            peak: 0,
            of_ranks: Vec::new(),
        };
        let plan = self.plan(model)?;
        for stage in 0..pp {
            // Most tensor-parallel ranks of a stage hold alike: each kind is planned once.
            let mut planned: Vec<(RankSpec, MemoryReport, u64)> = Vec::new();
            for part in 0..tp {
                let rank = stage * dp * cp * tp + part;
                let spec = model.of_rank(rank);
                let like = planned.iter().find(|(other, ..)| other.holds_like(&spec));
                let (report, peak) = match like {
                    Some((_, report, peak)) => (*report, *peak),
                    None => {
                        let memory = self.memory_plan_of(model, &spec, plan.as_ref())?;
                        planned.push((spec, memory.report(), memory.peak()));
                        (memory.report(), memory.peak())
                    }
                };
                if rank == 0 {
                    memory.first = report;
                }
                memory.of_ranks.push(RankMemory {
                    peak,
                    now: report.on_device(|of| of.now),
                    host: report.of(MemoryCategory::Host).peak,
                    disk: report.of(MemoryCategory::Disk).peak,
                });
                memory.largest = memory.largest.max(&report);
                memory.peak = memory.peak.max(peak);
            }
        }
        Ok(memory)
    }

    /// What the run will write of the whole model, with checkpoints of which the best is kept besides if it `keeps_best`.
    pub(crate) fn space_needs(
        &self,
        save: &HfSave,
        whole: &Parameters,
        keeps_best: bool,
    ) -> Result<Vec<SpaceNeed>> {
        let mut needs = vec![save.space_need(whole)?];
        let checkpoints = &self.training.checkpoints;
        let best = self.training.folder_of_best()?;
        let folder = match (&checkpoints.save_dir, best) {
            (Some(dir), _) => Some((dir.clone(), checkpoints.keep)),
            (None, best) => best.map(|dir| (dir, 1)),
        };
        if let Some((dir, keep)) = folder {
            // Masters besides.
            let num_kinds = 1 + AdamW(AdamWConfig::default()).state_names().len();
            needs.push(CheckpointSaver::space_need(
                dir,
                keep.saturating_add(usize::from(keeps_best)),
                num_kinds.saturating_mul(whole.num_trainable_values()),
                &save.sidecars,
            ));
        }
        Ok(needs)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Result;

    use super::{
        Degrees, MemoryReport, ModelConfig, PackWeights, PathBuf, RankEnv, RankMemory, RanksMemory,
    };
    use crate::Finetune;

    /// 5 heads on 3 ranks: the first one has one, the others two.
    #[test]
    fn each_rank_is_planned_as_it_is_alone() -> Result<()> {
        let config = ModelConfig::from_json(
            r#"{"model_type": "llama", "vocab_size": 999, "hidden_size": 40, "intermediate_size": 99, "num_hidden_layers": 4,
                "num_attention_heads": 5, "num_key_value_heads": 5, "rms_norm_eps": 1e-5, "max_position_embeddings": 256}"#,
        )?;
        let mut run = Finetune::new("org/name").data("chat.jsonl");
        let layout = &mut run.training.layout;
        (layout.pp, layout.tp, layout.dp) = (2, 3, Some(2));
        let spec = run.spec(&config, 12)?;
        let model = spec.model()?;
        let memory = spec.memory(&model)?;
        let mut peaks = Vec::new();
        for (place, rank) in [0, 1, 2, 6, 7, 8].into_iter().enumerate() {
            let plan = spec.memory_plan(&model, &model.of_rank(rank))?;
            let (of_rank, report) = (memory.of_ranks[place], plan.report());
            assert_eq!(of_rank.peak, plan.peak(), "rank {rank}");
            assert_eq!(of_rank.now, report.on_device(|of| of.now), "rank {rank}");
            peaks.push(plan.peak());
        }
        assert!(model.of_rank(1).holds_like(&model.of_rank(2)));
        assert!(!model.of_rank(0).holds_like(&model.of_rank(1)));
        assert!(
            peaks[0] != peaks[1] && peaks[1] == peaks[2] && peaks[0] != peaks[3],
            "{peaks:?}"
        );
        Ok(())
    }

    #[test]
    fn nothing_is_packed_by_itself_where_a_flag_asks_for_less_memory() {
        let config = r#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 256}"#;
        let config = ModelConfig::from_json(config).unwrap();
        let packed = |flags: &str| {
            let all =
                format!("model = 'm'\ndata = ['d.txt']\nseq-len = 16\nlora-rank = 2\n{flags}");
            let run = Finetune::from_table(&toml::from_str(&all).unwrap()).unwrap();
            let mut spec = run.spec(&config, 1).unwrap();
            let memory = spec.choose_packing(&RankEnv::from_env().unwrap());
            if let Some(memory) = memory.unwrap() {
                let again = spec.memory(&spec.model().unwrap()).unwrap();
                assert_eq!(memory.peak, again.peak);
            }
            spec.pack_weights
        };
        assert_eq!(packed(""), PackWeights::All);
        assert_eq!(packed("global-batch-size = 1"), PackWeights::Frozen);
        // It trains as none does.
        assert_eq!(packed("recompute = 'selective'"), PackWeights::All);
        assert_eq!(
            packed("dtype = 'bf16'\nbase-dtype = 'bf16'"),
            PackWeights::All
        );
        for flags in [
            "recompute = 'full'",
            "offload = 'params'\noffload-dir = 'd'",
            "base-dtype = 'q8_0'",
            "base-dtype = 'q4k'",
            "base-dtype = 'bf16'",
        ] {
            assert_eq!(packed(flags), PackWeights::Off, "{flags}");
        }
        let asked = packed("recompute = 'full'\npack-weights = 'on'");
        assert_eq!(asked, PackWeights::All);
    }

    #[test]
    fn ranks_together_hold_less_than_the_largest_times_their_number() {
        let memory = RanksMemory {
            first: MemoryReport::default(),
            largest: MemoryReport::default(),
            peak: 100,
            // Two stages of two parts each.
            of_ranks: [(100, 60, 7), (90, 60, 5), (40, 10, 3), (30, 10, 2)]
                .map(|(peak, now, away)| RankMemory {
                    peak,
                    now,
                    host: away,
                    disk: 10 * away,
                })
                .to_vec(),
        };
        let degrees = Degrees {
            pp: 2,
            dp: 2,
            tp: 2,
            ..Degrees::default()
        };
        assert_eq!(memory.of(0..8, degrees), (520, 280 + 40));
        // The second host of two: the last stage, of both replicas.
        assert_eq!(memory.of(4..8, degrees), (140, 40 + 30));
        assert_eq!(memory.on_host(0..8, degrees), 2 * (7 + 5 + 3 + 2));
        assert_eq!(memory.on_host(4..9, degrees), 2 * (3 + 2));
        // Ranks 0, 3, 6, then 1, 4, 7, then 2, 5.
        let folders = ["a", "b", "c"].map(PathBuf::from);
        let needs = memory.in_folders(0..8, degrees, &folders);
        let bytes: Vec<u64> = needs.iter().map(|need| need.num_bytes).collect();
        assert_eq!(bytes, [70 + 50 + 30, 50 + 30 + 20, 70 + 20]);
        // The workers behind two parameter servers are unknown.
        let servers = Degrees {
            dp: 2,
            ..Degrees::default()
        };
        assert_eq!(memory.of(0..2, servers), (200, 120 + 40));
        assert_eq!(memory.of(2..4, servers), (0, 0));
    }
}
