//! What a rank holds, as its meter counts it, is what arithmetic says before there is a rank: on a sample of all layouts in which each pair
//! of values occurs; the tests have some of them, `scripts/all-memory-plans.sh` has all.

use candle_comm::launch::threads;
use candle_comm::{Degrees, Mesh};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::ProductChoice;
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, LoraConfig, LossScaling, MemoryCategory, MemoryPlan,
    MemoryReport, Offload, PackWeights, ParamStore, Pass, Pipeline, PipelineLayout, Plan,
    PlannedPasses, PlannedUpdate, PlannedWork, Recompute, ReduceType, Schedule, WeightFormat,
    ZeroStage, count_memory_with,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
use candle_train_run::rank_allocated_bytes;
use candle_trainer::{LrDecay, LrSchedule, TrainConfig, Trainer};
use serde_json::json;

use crate::pairwise::{Random, sample};

const LAYERS: usize = 4;
const VOCAB: usize = 512;
const SEQ_LEN: usize = 64;
/// Of each replica.
const MICRO_BATCHES: usize = 4;
const STEPS: usize = 2;

/// What is compared by its share, and how much that may be off.
const NOT_SMALL: u64 = 1 << 19;
const TOLERANCE: f64 = 0.1;
const TOLERANCE_OF_ALL: f64 = 0.05;

/// All of the sample are compared if this is set.
const ALL: &str = "CANDLE_TRAIN_ALL_MEMORY_PLANS";
/// One in so many otherwise.
const SAMPLED: usize = 15;

/// What a rank does, and what it holds after that.
type ByAction = Vec<(String, MemoryReport)>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trained {
    All,
    /// All but the embedding and the first layer.
    Some,
    Lora(Option<WeightFormat>),
    /// Nothing: an evaluation.
    Nothing,
}

const TRAINED: [Trained; 8] = [
    Trained::All,
    Trained::Some,
    Trained::Lora(None),
    Trained::Lora(Some(WeightFormat::F16)),
    Trained::Lora(Some(WeightFormat::BF16)),
    Trained::Lora(Some(WeightFormat::Q8_0)),
    Trained::Lora(Some(WeightFormat::Q4K)),
    Trained::Nothing,
];

/// What else is set.
type Settings = fn(&mut DataParallel);

/// Settings of replicas, for how many of them there are at least.
const REPLICAS: [(usize, ZeroStage, Settings); 15] = [
    (1, ZeroStage::Zero, |_| {}),
    (1, ZeroStage::One, |replicas| replicas.tile_linears = 3),
    (1, ZeroStage::One, |_| {}),
    (2, ZeroStage::Two, |_| {}),
    (2, ZeroStage::Three, |_| {}),
    (2, ZeroStage::Three, |replicas| replicas.tile_linears = 3),
    (4, ZeroStage::One, |replicas| replicas.zero_group = Some(2)),
    (4, ZeroStage::Three, |replicas| {
        replicas.zero_secondary = Some(2)
    }),
    (4, ZeroStage::Three, |replicas| {
        replicas.zero_secondary = Some(2);
        replicas.quantize_weights = true
    }),
    (4, ZeroStage::Three, |replicas| {
        replicas.zero_group = Some(2)
    }),
    (2, ZeroStage::Zero, |replicas| {
        replicas.reduce = ReduceType::Bf16
    }),
    (2, ZeroStage::Two, |replicas| {
        replicas.reduce = ReduceType::Bf16
    }),
    (2, ZeroStage::One, |replicas| {
        replicas.reduce = ReduceType::Int8
    }),
    (2, ZeroStage::Two, |replicas| {
        replicas.reduce = ReduceType::Int8
    }),
    (2, ZeroStage::Three, |replicas| {
        replicas.quantize_weights = true
    }),
];

const SCHEDULES: [(Schedule, usize); 5] = [
    (Schedule::OneForwardOneBackward, 1),
    (Schedule::GPipe, 1),
    (Schedule::OneForwardOneBackward, 2),
    (Schedule::ZeroBubbleH1, 1),
    (Schedule::ZeroBubbleV, 2),
];

const FACTORS: [usize; 11] = [
    SCHEDULES.len(),
    2,
    3,
    2,
    REPLICAS.len(),
    2,
    2,
    6,
    2,
    TRAINED.len() * 2,
    3,
];

#[derive(Clone, Copy, Debug)]
struct Case {
    schedule: Schedule,
    virtual_stages: usize,
    degrees: Degrees,
    replicas: DataParallel,
    recompute: Recompute,
    /// What is where: all on the device; all on the host; the optimizer's state in a file; gradients in a file; all in a file; all
    /// but some activations.
    offload: usize,
    is_tied: bool,
    trained: Trained,
    dtype: DType,
    pack_weights: PackWeights,
}

impl Case {
    /// The case with these values, if there is one.
    fn of(values: &[usize; FACTORS.len()]) -> Option<Self> {
        let [
            schedule,
            pp,
            dp,
            tp,
            replicas,
            overlap,
            recompute,
            offload,
            tied,
            trained,
            packed,
        ] = *values;
        let (schedule, virtual_stages) = SCHEDULES[schedule];
        let (least_dp, zero, set) = REPLICAS[replicas];
        let (pp, dp) = (1 + pp, [1, 2, 4][dp]);
        let mut replicas = DataParallel {
            overlap: overlap == 0,
            ..DataParallel::from(zero)
        };
        set(&mut replicas);
        let case = Self {
            schedule,
            virtual_stages,
            degrees: Degrees {
                pp,
                dp,
                cp: 1,
                tp: 1 + tp,
            },
            replicas,
            recompute: [Recompute::None, Recompute::Full][recompute],
            offload,
            is_tied: tied == 1,
            trained: TRAINED[trained / 2],
            dtype: [DType::F32, DType::BF16][trained % 2],
            pack_weights: [PackWeights::Off, PackWeights::Frozen, PackWeights::All][packed],
        };
        let has_pipeline = pp > 1 || schedule == Schedule::OneForwardOneBackward;
        let ranks = case.degrees.world_size()?;
        let comes = replicas.zero == ZeroStage::Three || offload >= 4;
        let exists = has_pipeline
            && (replicas.tile_linears == 1 || comes)
            && dp >= least_dp
            && (dp == 1 || replicas.zero > ZeroStage::Zero || least_dp > 1);
        (exists && ranks <= 8 && (pp > 1 || virtual_stages == 1)).then_some(case)
    }

    fn config(&self) -> Result<ModelConfig> {
        let config = json!({
            "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 32,
            "tie_word_embeddings": self.is_tied,
        });
        ModelConfig::from_json(&config.to_string())
    }

    fn store(&self) -> Result<ParamStore> {
        let store = ParamStore::init(5).with_data_parallel(self.replicas);
        match self.trained {
            Trained::All | Trained::Nothing => Ok(store),
            Trained::Some => Ok(
                store.freeze(|name| name.contains("embed_tokens") || name.contains("layers.0."))
            ),
            Trained::Lora(format) => {
                let store = store.with_lora(LoraConfig {
                    rank: 8,
                    dropout: if format.is_none() { 0.1 } else { 0.0 },
                    ..LoraConfig::default()
                })?;
                Ok(match format {
                    Some(format) => store.with_frozen_format(format),
                    None => store,
                })
            }
        }
    }

    fn layout(&self) -> Result<PipelineLayout> {
        let ranks = self
            .schedule
            .placement(self.degrees.pp, self.virtual_stages)?;
        let layers =
            (0..ranks.len()).map(|stage| candle_parallel::part(LAYERS, stage, ranks.len()).len());
        PipelineLayout::of_layers(&layers.collect::<Vec<_>>(), &ranks)
    }

    fn parts(&self) -> Result<PartConfig> {
        Ok(PartConfig {
            layout: Some(self.layout()?),
            ..PartConfig::default()
        })
    }

    fn offload(&self, dir: &tempfile::TempDir) -> Offload {
        match self.offload {
            0 => Offload::default(),
            1 => Offload::all(),
            2 => Offload::optimizer().in_dir(dir.path()),
            3 => Offload {
                gradients: true,
                ..Offload::default()
            }
            .in_dir(dir.path()),
            place => Offload {
                kept_activations: match place {
                    4 => 0,
                    // Two inputs of a layer in f32, or four in bf16, and less than another one.
                    _ => (2 * SEQ_LEN as u64 + 1) * 256 * 4,
                },
                // So that layers are updated in parts.
                update_values: 50_000,
                ..Offload::all().in_dir(dir.path())
            },
        }
    }

    fn batches(&self, seed: usize) -> Result<Vec<Pass>> {
        let mut random = Random::new(seed);
        let mut tokens = || {
            let tokens = (0..SEQ_LEN).map(|_| random.below(VOCAB) as u32);
            Tensor::from_vec(tokens.collect::<Vec<_>>(), (1, SEQ_LEN), &Device::Cpu)
        };
        (0..MICRO_BATCHES)
            .map(|_| Ok(Pass::train(tokens()?, tokens()?)))
            .collect()
    }

    /// What each rank is expected to hold, at its peaks and after each thing that it does.
    fn planned(&self, offload: &Offload) -> Result<Vec<(MemoryPlan, ByAction)>> {
        let vb = self.store()?.builder(self.dtype, &Device::Cpu);
        let config = self.config()?;
        let model = CausalLm::spec(&config, self.degrees, &vb, self.parts()?)?;
        let trains = self.trained != Trained::Nothing;
        let plan = match trains {
            true => Plan::new(&self.schedule, model.layout(), MICRO_BATCHES)?,
            false => Plan::forwards(model.layout(), self.at_once()),
        };
        let rule = AdamW(AdamWConfig::default());
        let work = PlannedWork {
            replicas: self.replicas,
            pack_weights: self.pack_weights,
            offload,
            on_gpu: false,
            passes: Some(PlannedPasses {
                plan: &plan,
                tapes: model.tapes(),
                recompute: self.recompute,
                num_rows: SEQ_LEN,
            }),
            update: trains.then_some(PlannedUpdate { rule: &rule }),
        };
        let ranks = 0..self.degrees.world_size().unwrap_or(0);
        let planned = ranks.map(|rank| {
            let rank = model.of_rank(rank);
            let by_action = if trains {
                MemoryPlan::by_action(&rank, &work, STEPS)?
            } else {
                ByAction::new()
            };
            Ok((MemoryPlan::new(&rank, &work)?, by_action))
        });
        planned.collect()
    }

    /// Micro-batches of an evaluation.
    fn at_once(&self) -> usize {
        if self.virtual_stages > 1 {
            self.degrees.pp
        } else {
            1
        }
    }

    /// What each rank has held, at its peaks and, if it trains, after each thing that it did.
    fn held(&self, offload: &Offload) -> Result<Vec<(MemoryReport, ByAction)>> {
        let num_ranks = self.degrees.world_size().unwrap_or(0);
        threads(num_ranks, |world| {
            let mesh = Mesh::new(world, self.degrees)?;
            let store = self.store()?.with_offload(offload.clone());
            let store = store.with_packed_weights(self.pack_weights);
            let vb = store.builder(self.dtype, &Device::Cpu);
            let part = CausalLm::part_with(&self.config()?, &mesh, &vb, self.parts()?)?;
            let part = part.with_recompute(|_| self.recompute);
            if self.trained == Trained::Nothing {
                let batches = self.batches(mesh.dp.rank())?.into_iter().map(Ok);
                Pipeline::new(self.schedule, &mesh).evaluate(&part, batches)?;
                return Ok((part.params().meter().report(), ByAction::new()));
            }
            let mut trainer = Trainer::new(self.train_config(), &mesh, part)?;
            trainer.part().params().meter().record();
            for step in 0..STEPS {
                trainer.train_step(&self.batches(step * 8 + mesh.dp.rank())?)?;
            }
            let by_action = trainer.part().params().meter().recorded();
            trainer.part().params().wait_for_updates()?;
            Ok((trainer.memory(), by_action))
        })
    }

    fn train_config(&self) -> TrainConfig {
        TrainConfig {
            lr_schedule: LrSchedule {
                lr: 1e-3,
                min_lr_ratio: 1.0,
                warmup_steps: 0,
                num_steps: STEPS,
                decay: LrDecay::Cosine,
                ramp: Vec::new(),
            },
            adamw: AdamWConfig::default(),
            max_grad_norm: Some(1.0),
            loss_scaling: LossScaling::default(),
            schedule: self.schedule,
            pipeline_prefetch: 1,
        }
    }

    /// Where the two differ.
    fn check(&self) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let offload = self.offload(&dir);
        let planned = self
            .planned(&offload)
            .unwrap_or_else(|err| panic!("{self:?}: {err}"));
        let held = self
            .held(&offload)
            .unwrap_or_else(|err| panic!("{self:?}: {err}"));
        let mut wrong = Vec::new();
        for (rank, (planned, held)) in planned.iter().zip(&held).enumerate() {
            let ((planned, planned_actions), (held, held_actions)) = (planned, held);
            let differs = first_difference(planned_actions, held_actions);
            wrong.extend(differs.map(|differs| format!("rank {rank}: {differs}: {self:?}")));
            let mut sums = [0; 2];
            for category in MemoryCategory::ALL {
                let [planned, held] = [planned.report(), *held].map(|it| it.of(category).peak);
                if category.is_on_device() {
                    sums = [sums[0] + planned, sums[1] + held];
                }
                let differ = match category {
                    MemoryCategory::Activations => {
                        held >= NOT_SMALL && off(planned, held) > TOLERANCE
                    }
                    _ => planned != held,
                };
                if differ {
                    wrong.push(format!(
                        "rank {rank}: {category} {planned} planned, {held} held: {self:?}"
                    ));
                }
            }
            let latest = planned.timeline().iter().map(|moment| moment.peak).max();
            assert_eq!(latest, Some(planned.peak()), "{self:?}");
            let is_off = off(sums[0], sums[1]) > TOLERANCE_OF_ALL;
            if is_off || planned.peak() > sums[0] {
                wrong.push(format!(
                    "rank {rank}: {sums:?}, peak {}: {self:?}",
                    planned.peak()
                ));
            }
        }
        wrong
    }
}

/// The first action after which the meter does not have what is planned. What passes keep is measured, not counted, and weights are packed when they
/// are first multiplied with: of these the peaks are compared.
fn first_difference(planned: &ByAction, held: &ByAction) -> Option<String> {
    let of_passes = [MemoryCategory::Activations, MemoryCategory::Packed];
    let counted = MemoryCategory::ALL.into_iter();
    let counted: Vec<MemoryCategory> = counted.filter(|it| !of_passes.contains(it)).collect();
    if planned.len() != held.len() {
        return Some(format!(
            "{} actions planned, {} done",
            planned.len(),
            held.len()
        ));
    }
    let mut pairs = planned.iter().zip(held).enumerate();
    pairs.find_map(|(place, ((planned, expected), (done, report)))| {
        let is = |report: &MemoryReport| -> Vec<u64> {
            counted.iter().map(|it| report.of(*it).now).collect()
        };
        let differs = planned != done || is(expected) != is(report);
        differs.then(|| {
            let (expected, is) = (is(expected), is(report));
            format!("action {place}, {planned} planned and {done} done, of {counted:?} {expected:?} planned, {is:?} held")
        })
    })
}

fn off(planned: u64, held: u64) -> f64 {
    planned.abs_diff(held) as f64 / held.max(1) as f64
}

#[test]
fn what_is_planned_is_what_is_held() {
    count_memory_with(rank_allocated_bytes);
    let all = crate::pairwise::all(FACTORS, |values| Case::of(values).is_some());
    let cases: Vec<Case> = sample(&all, 1).iter().filter_map(Case::of).collect();
    let every = match (std::env::var_os(ALL), ProductChoice::from_env().unwrap()) {
        (Some(_), _) => 1,
        (None, None) => SAMPLED,
        // One of several ways of multiplying.
        (None, Some(_)) => 8 * SAMPLED,
    };
    let num_cases = cases.len();
    let wrong: Vec<String> = cases.iter().step_by(every).flat_map(Case::check).collect();
    assert!(
        wrong.is_empty(),
        "{} in {num_cases} cases:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
