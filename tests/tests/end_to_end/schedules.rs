//! Every pipeline schedule gives the bits of 1F1B: losses, gradients, weights after ten steps. A sample of all combinations in which each pair of values
//! occurs; all of them with `scripts/all-schedules.sh`.

use std::collections::BTreeSet;
use std::sync::Mutex;

use candle_comm::launch::threads_with;
use candle_comm::{LocalConfig, Mesh};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{DocumentStarts, IGNORE_INDEX};
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, Gradients, LoraConfig, ParamStore, Pass, Pipeline,
    PipelineLayout, Recompute, Schedule, ZeroStage,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};

use crate::device::devices;
use crate::fixture::Fixture;
use crate::pairwise::{self, Random};
use crate::run::{Layout, gather};
use crate::tensors::Tensors;

/// One in each virtual stage of three ranks with two each.
const LAYERS: usize = 6;
/// Of each replica: two for each of three ranks, as DualPipeV needs.
const MICRO_BATCHES: usize = 6;
const STEPS: usize = 10;

/// What may be combined, by the number of values of each.
const FACTORS: [usize; 13] = [
    SCHEDULES.len(),
    FAMILIES.len(),
    2,
    2,
    3,
    2,
    2,
    4,
    2,
    2,
    TRAINED.len(),
    3,
    2,
];

const SCHEDULES: [(Schedule, usize); 8] = [
    (Schedule::GPipe, 1),
    (Schedule::OneForwardOneBackward, 2),
    (Schedule::OneForwardOneBackward, 3),
    (Schedule::ZeroBubbleH1, 1),
    (Schedule::ZeroBubbleH1, 2),
    (Schedule::ZeroBubble2p, 1),
    (Schedule::ZeroBubbleV, 2),
    (Schedule::DualPipeV, 2),
];

const FAMILIES: [&str; 5] = ["gqa", "mistral", "qwen2", "qwen3", "gemma"];

/// Which weights are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trained {
    All,
    /// All but the embedding, the first layer, and a matrix of another one.
    Some,
    /// Low-rank adapters with dropout.
    Lora,
}

const TRAINED: [Trained; 3] = [Trained::All, Trained::Some, Trained::Lora];

#[derive(Clone, Copy, Debug)]
struct Case {
    schedule: Schedule,
    virtual_stages: usize,
    family: &'static str,
    is_tied: bool,
    dtype: DType,
    pp: usize,
    dp: usize,
    tp: usize,
    zero: ZeroStage,
    recompute: Recompute,
    is_packed: bool,
    trained: Trained,
    /// Equal stages, or the first or the last one without layers.
    stages: usize,
    /// Whether messages are late, at random, and more receives are posted ahead.
    is_late: bool,
}

impl Case {
    /// The case with these values, if there is one.
    fn of(values: &[usize; FACTORS.len()]) -> Option<Self> {
        let [
            schedule,
            family,
            tied,
            dtype,
            pp,
            dp,
            tp,
            zero,
            recompute,
            packed,
            trained,
            stages,
            late,
        ] = *values;
        let (schedule, virtual_stages) = SCHEDULES[schedule];
        let case = Self {
            schedule,
            virtual_stages,
            family: FAMILIES[family],
            is_tied: tied == 1,
            dtype: [DType::F32, DType::BF16][dtype],
            pp: 1 + pp,
            dp: 1 + dp,
            tp: 1 + tp,
            zero: [
                ZeroStage::Zero,
                ZeroStage::One,
                ZeroStage::Two,
                ZeroStage::Three,
            ][zero],
            recompute: [Recompute::None, Recompute::Full][recompute],
            is_packed: packed == 1,
            trained: TRAINED[trained],
            stages,
            is_late: late == 1,
        };
        // One stage on one rank is no pipeline; three stages on each of three would need nine layers.
        let num_stages = case.pp * virtual_stages;
        (case.dtype == DType::F32 || case.family == "gqa")
            .then_some(case)
            .filter(|_| num_stages <= LAYERS)
    }

    /// Whether it is one of all: on two ranks of a pipeline, whatever else is combined, but for delays, and for stages of ZeRO where one replica has
    /// nothing to divide.
    fn is_of_all(&self) -> bool {
        let has_replicas = self.dp > 1 || self.zero == ZeroStage::Zero;
        self.pp == 2 && self.stages < 2 && has_replicas && !self.is_late
    }

    /// The same with 1F1B on as many ranks, which everything is compared with, in equal stages and without delays. One rank has as many stages
    /// as in the case: in one stage the gradients of both uses of a tied weight are added micro-batch by micro-batch, in two stages use by use.
    fn reference(self) -> Self {
        Self {
            schedule: Schedule::OneForwardOneBackward,
            virtual_stages: if self.pp == 1 { self.virtual_stages } else { 1 },
            stages: 0,
            is_late: false,
            ..self
        }
    }

    fn pipeline_layout(self) -> PipelineLayout {
        let ranks = self
            .schedule
            .placement(self.pp, self.virtual_stages)
            .unwrap();
        let mut layers: Vec<usize> = (0..ranks.len())
            .map(|stage| candle_parallel::part(LAYERS, stage, ranks.len()).len())
            .collect();
        // The first or the last stage has nothing but the embedding or the head, or the one beside it has more.
        if ranks.len() > 1 && self.stages > 0 {
            let (from, to) = match self.stages {
                1 => (0, 1),
                _ => (ranks.len() - 1, ranks.len() - 2),
            };
            let moved = layers[from];
            layers[from] -= moved;
            layers[to] += moved;
        }
        PipelineLayout::of_layers(&layers, &ranks).unwrap()
    }

    fn config(self) -> ModelConfig {
        let config = Fixture::new(self.family).config();
        let windows = config.windows.iter().cycle().copied();
        ModelConfig {
            num_hidden_layers: LAYERS,
            tie_word_embeddings: self.is_tied,
            windows: match config.windows.is_empty() {
                true => Vec::new(),
                false => windows.take(LAYERS).collect(),
            },
            ..config.clone()
        }
    }

    fn store(self) -> Result<ParamStore> {
        let layout = Layout {
            zero: self.zero,
            ..Layout::new(self.pp, self.dp, self.tp)
        };
        let store = ParamStore::init(11).with_data_parallel(layout.data_parallel());
        match self.trained {
            Trained::All => Ok(store),
            Trained::Some => Ok(store.freeze(|name| {
                ["embed_tokens", "layers.0.", "layers.3.mlp.up_proj"]
                    .iter()
                    .any(|part| name.contains(part))
            })),
            Trained::Lora => store.with_lora(LoraConfig {
                rank: 2,
                dropout: 0.3,
                ..LoraConfig::default()
            }),
        }
    }

    /// The micro-batches of a step, of replica `dp_rank`: random tokens, some without a target, in one document or several.
    fn batches(self, step: usize, dp_rank: usize, vocab_size: usize) -> Result<Vec<Pass>> {
        let micro_batch = |index: usize| {
            let mut random = Random::new((step * 64 + index) * 8 + dp_rank);
            let t = 7;
            let tokens: Vec<u32> = (0..t).map(|_| random.below(vocab_size) as u32).collect();
            let targets = (0..t).map(|_| match random.below(4) {
                0 => IGNORE_INDEX,
                _ => random.below(vocab_size) as u32,
            });
            let targets: Vec<u32> = targets.collect();
            let tensor = |ids: Vec<u32>| Tensor::from_vec(ids, (1, t), &Device::Cpu);
            let pass = Pass::train(tensor(tokens)?, tensor(targets)?);
            if !self.is_packed {
                return Ok(pass);
            }
            let cut = 1 + random.below(t - 1);
            let starts = (0..t).map(|at| if at < cut { 0 } else { cut as u32 });
            Ok(pass.with_documents(DocumentStarts::new(starts.collect(), (1, t))?))
        };
        (0..MICRO_BATCHES).map(micro_batch).collect()
    }
}

/// What a run gives, on its first rank.
struct Run {
    /// The loss of each step, as bits, and the norm of its gradients.
    steps: Vec<(u64, f64)>,
    /// Of the first step and of the last.
    gradients: Vec<Tensors>,
    weights: Tensors,
}

fn run(case: Case) -> Run {
    let result = Mutex::new(None);
    let config = LocalConfig {
        devices: devices(),
        delays: case.is_late.then_some(5),
        ..LocalConfig::new(case.pp * case.dp * case.tp)
    };
    let ranks = threads_with(config, |world| {
        let layout = Layout::new(case.pp, case.dp, case.tp);
        let mesh = Mesh::new(world, layout.degrees())?;
        let config = case.config();
        let store = case.store()?;
        let vb = store.builder(case.dtype, mesh.world.device());
        let part = CausalLm::part_with(
            &config,
            &mesh,
            &vb,
            PartConfig {
                layout: Some(case.pipeline_layout()),
                ..PartConfig::default()
            },
        )?;
        let part = part.with_recompute(|_| case.recompute);
        let pipeline =
            Pipeline::new(case.schedule, &mesh).with_prefetch(if case.is_late { 3 } else { 1 });
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let adamw = AdamWConfig {
            weight_decay: 0.1,
            eps: 1e-4,
            ..AdamWConfig::default()
        };
        let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, adamw)?;
        let (mut steps, mut all_gradients) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let batches = case.batches(step, mesh.dp.rank(), config.vocab_size)?;
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            let reduced = gradients.reduce()?;
            if [0, STEPS - 1].contains(&step) {
                let local = reduced.local_gradients()?;
                all_gradients.push(gather(&part, &mesh, |index| match local.get(&index) {
                    Some(grad) => Ok(grad.clone()),
                    None => {
                        let shape = part.params().get(index).local_shape();
                        Tensor::zeros(shape, DType::F32, part.device())
                    }
                })?);
            }
            let report = optimizer.step_reduced(reduced, 0.01, Some(0.5))?;
            steps.push((report.loss.mean.to_bits(), report.grad_norm));
        }
        let weights = gather(&part, &mesh, |index| part.params().values(index))?;
        if mesh.world.rank() == 0 {
            *result.lock().unwrap() = Some(Run {
                steps,
                gradients: all_gradients,
                weights,
            });
        }
        Ok(())
    });
    ranks.unwrap_or_else(|err| panic!("{case:?}: {err}"));
    result.into_inner().unwrap().unwrap()
}

/// An error unless what the case gives are the bits of the reference.
fn check(case: Case, reference: &Run) {
    let got = run(case);
    for (step, ((loss, norm), (expected, expected_norm))) in
        got.steps.iter().zip(&reference.steps).enumerate()
    {
        assert_eq!(loss, expected, "{case:?}: the loss of step {step}");
        assert!(
            (norm - expected_norm).abs() <= 1e-12 * expected_norm,
            "{case:?}: the norm of step {step}: {norm} instead of {expected_norm}"
        );
    }
    for (which, (got, expected)) in got.gradients.iter().zip(&reference.gradients).enumerate() {
        assert_same(&format!("{case:?}: gradient {which}"), got, expected);
    }
    assert_same(
        &format!("{case:?}: weight"),
        &got.weights,
        &reference.weights,
    );
}

fn assert_same(what: &str, got: &Tensors, expected: &Tensors) {
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(got), names(expected), "{what}");
    assert!(!got.is_empty(), "{what}");
    for (name, values) in expected {
        let bits = |values: &[f32]| {
            values
                .iter()
                .map(|value| value.to_bits())
                .collect::<Vec<_>>()
        };
        assert!(bits(&got[name]) == bits(values), "{what} {name}");
    }
}

#[test]
fn every_schedule_gives_the_bits_of_1f1b() {
    if devices().iter().any(|device| !device.is_cpu()) {
        eprintln!("not tested on a GPU: `layouts` is, and takes less time");
        return;
    }
    let variable = "CANDLE_TRAIN_ALL_SCHEDULES";
    let cases = pairwise::cases(variable, FACTORS, Case::of, Case::is_of_all);
    pairwise::compare(variable, &cases, Case::reference, run, check);
}
