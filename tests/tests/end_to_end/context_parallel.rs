//! Context-parallel and sequence-parallel ranks train as one rank does: losses, every gradient, the norm and the weights after ten steps. A sample of all combinations in which each pair
//! of values occurs; all of them with `scripts/all-contexts.sh`.

use std::collections::BTreeMap;
use std::sync::Mutex;

use candle_comm::launch::threads_with;
use candle_comm::{LocalConfig, Mesh};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{DocumentStarts, IGNORE_INDEX};
use candle_parallel::{
    AdamWConfig, ContextConfig, ContextMethod, DistributedOptimizer, Gradients, LoraConfig,
    ParamStore, Pass, Pipeline, Recompute, Schedule, ZeroStage,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};

use crate::device::devices;
use crate::fixture::Fixture;
use crate::pairwise::{self, Random};
use crate::run::{Layout, gather};
use crate::tensors::Tensors;

const LAYERS: usize = 2;
/// On a CPU.
const STEPS: usize = 10;
/// Of all replicas together.
const MICRO_BATCHES: usize = 2;

const FACTORS: [usize; 12] = [
    2,
    RANKS.len(),
    METHODS.len(),
    FAMILIES.len(),
    2,
    2,
    2,
    4,
    2,
    5,
    2,
    2,
];

const RANKS: [usize; 5] = [1, 2, 3, 4, 8];

const METHODS: [(ContextMethod, Option<usize>); 4] = [
    (ContextMethod::Ring, None),
    (ContextMethod::AllGather, None),
    (ContextMethod::Ulysses, None),
    (ContextMethod::Ring, Some(2)),
];

const FAMILIES: [&str; 5] = ["gqa", "mistral", "qwen2", "qwen3", "gemma"];

#[derive(Clone, Copy, Debug)]
struct Case {
    cp: usize,
    context: ContextConfig,
    sequence_parallel: bool,
    family: &'static str,
    pp: usize,
    dp: usize,
    tp: usize,
    zero: ZeroStage,
    is_packed: bool,
    /// Sequences of a micro-batch, and tokens of each.
    b: usize,
    t: usize,
    recompute: Recompute,
    /// Whether low-rank adapters with dropout are trained, or everything.
    is_lora: bool,
    is_late: bool,
    dtype: DType,
}

impl Case {
    fn of(values: &[usize; FACTORS.len()]) -> Option<Self> {
        let [
            sequence_parallel,
            cp,
            method,
            family,
            pp,
            dp,
            tp,
            zero,
            packed,
            t,
            recompute,
            lora,
        ] = *values;
        let cp = RANKS[cp];
        let (method, ulysses) = METHODS[method];
        let case = Self {
            cp,
            context: ContextConfig { method, ulysses },
            sequence_parallel: sequence_parallel == 1,
            family: FAMILIES[family],
            pp: 1 + pp,
            dp: 1 + dp,
            tp: 1 + tp,
            zero: [
                ZeroStage::Zero,
                ZeroStage::One,
                ZeroStage::Two,
                ZeroStage::Three,
            ][zero],
            is_packed: packed == 1,
            b: 2,
            t: [2 * cp - 1, 2 * cp, 2 * cp + 1, 23, 37][t],
            recompute: [Recompute::None, Recompute::Full][recompute],
            is_lora: lora == 1,
            is_late: (method as usize + family).is_multiple_of(3),
            dtype: DType::F32,
        };
        let config = case.config();
        let heads = config.heads_of_rank(case.tp);
        let fits = cp == 1 || case.context.groups(cp, heads, DType::F32).is_ok();
        let fits = fits && (case.tp > 1 || !case.sequence_parallel);
        (case.layout().world_size() <= 8 && fits).then_some(case)
    }

    /// Whether it is one of all: with and without a window, whatever else is combined, but for other families, adapters and recomputation.
    fn is_of_all(&self) -> bool {
        let is_plain = !self.is_lora && self.recompute == Recompute::None;
        is_plain && ["gqa", "mistral"].contains(&self.family)
    }

    fn layout(self) -> Layout {
        Layout {
            cp: self.cp,
            zero: self.zero,
            ..Layout::new(self.pp, self.dp, self.tp)
        }
    }

    /// One rank for all.
    fn reference(self) -> Self {
        Self {
            cp: 1,
            context: ContextConfig::default(),
            sequence_parallel: false,
            pp: 1,
            dp: 1,
            tp: 1,
            zero: ZeroStage::Zero,
            recompute: Recompute::None,
            is_late: false,
            ..self
        }
    }

    fn config(self) -> ModelConfig {
        let config = Fixture::new(self.family).config();
        let windows = config.windows.iter().take(LAYERS).copied();
        ModelConfig {
            num_hidden_layers: LAYERS,
            windows: windows.collect(),
            ..config.clone()
        }
    }

    fn store(self) -> Result<ParamStore> {
        let store = ParamStore::init(11).with_data_parallel(self.layout().data_parallel());
        match self.is_lora {
            false => Ok(store),
            true => store.with_lora(LoraConfig {
                rank: 2,
                dropout: 0.3,
                ..LoraConfig::default()
            }),
        }
    }

    /// The micro-batches of a step, of replica `rank` of `num_replicas`: random tokens of two sequences, some without a target, in one document or several.
    fn batches(
        self,
        step: usize,
        (rank, num_replicas): (usize, usize),
        vocab: usize,
    ) -> Result<Vec<Pass>> {
        let micro_batch = |index: usize| {
            let mut random = Random::new(step * 64 + index);
            let (b, t) = (self.b, self.t);
            let tokens = (0..b * t).map(|_| random.below(vocab) as u32);
            let tokens: Vec<u32> = tokens.collect();
            let targets = (0..b * t).map(|_| match random.below(4) {
                0 => IGNORE_INDEX,
                _ => random.below(vocab) as u32,
            });
            let mut targets: Vec<u32> = targets.collect();
            targets[0] = 1;
            let tensor = |ids: Vec<u32>| Tensor::from_vec(ids, (b, t), &Device::Cpu);
            let pass = Pass::train(tensor(tokens)?, tensor(targets)?);
            if !self.is_packed {
                return Ok(pass);
            }
            let mut starts = Vec::new();
            for _ in 0..b {
                let first = starts.len();
                while starts.len() - first < t {
                    let start = starts.len() - first;
                    // Also of one token.
                    let len = (1 + random.below(t)).min(t - start);
                    starts.extend(std::iter::repeat_n(start as u32, len));
                }
            }
            Ok(pass.with_documents(DocumentStarts::new(starts, (b, t))?))
        };
        candle_parallel::part(MICRO_BATCHES, rank, num_replicas)
            .map(micro_batch)
            .collect()
    }
}

/// What a run gives, on its first rank.
struct Run {
    /// The loss of each step, and the norm of its gradients.
    steps: Vec<(f64, f64)>,
    evaluation: f64,
    gradients: Tensors,
    weights: Tensors,
}

fn run(case: Case) -> Run {
    let result = Mutex::new(None);
    let config = LocalConfig {
        devices: devices(),
        delays: case.is_late.then_some(5),
        ..LocalConfig::new(case.layout().world_size())
    };
    let ranks = threads_with(config, |world| {
        let mesh = Mesh::new(world, case.layout().degrees())?;
        let config = case.config();
        let vb = case.store()?.builder(case.dtype, mesh.world.device());
        let parts = PartConfig {
            context: case.context,
            sequence_parallel: case.sequence_parallel,
            ..PartConfig::default()
        };
        let part = CausalLm::part_with(&config, &mesh, &vb, parts)?;
        let part = part.with_recompute(|_| case.recompute);
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let adamw = AdamWConfig {
            weight_decay: 0.1,
            // Adapters begin with gradients that are rounding errors, which less would make updates of.
            eps: 1e-2,
            ..AdamWConfig::default()
        };
        let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, adamw)?;
        let (mut steps, mut first) = (Vec::new(), None);
        let replica = (mesh.dp.rank(), mesh.dp.world_size());
        let num_steps = if mesh.world.device().is_cpu() {
            STEPS
        } else {
            2
        };
        for step in 0..num_steps {
            let batches = case.batches(step, replica, config.vocab_size)?;
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            let reduced = gradients.reduce()?;
            if step == 0 {
                let local = reduced.local_gradients()?;
                first = Some(gather(&part, &mesh, |index| match local.get(&index) {
                    Some(grad) => Ok(grad.clone()),
                    None => {
                        let shape = part.params().get(index).local_shape();
                        Tensor::zeros(shape, DType::F32, part.device())
                    }
                })?);
            }
            let report = optimizer.step_reduced(reduced, 0.003, Some(0.5))?;
            steps.push((report.loss.mean, report.grad_norm));
        }
        let weights = gather(&part, &mesh, |index| part.params().values(index))?;
        let batches = case.batches(STEPS, (0, 1), config.vocab_size)?;
        let sums = pipeline.evaluate(&part, batches.into_iter().map(Ok))?;
        // Of the last stage, and each context-parallel rank has its own targets.
        let of_rank = match mesh.tp.rank() == 0 && mesh.dp.rank() == 0 {
            true => [sums.loss(), sums.num_targets],
            false => [0.0; 2],
        };
        let of_rank = Tensor::new(&of_rank, mesh.world.device())?;
        let all = mesh
            .world
            .all_reduce(&of_rank, candle_comm::ReduceOp::Sum)?;
        let all = all.to_vec1::<f64>()?;
        if mesh.world.rank() == 0 {
            *result.lock().unwrap() = Some(Run {
                steps,
                evaluation: all[0] / all[1],
                gradients: first.unwrap_or_default(),
                weights,
            });
        }
        Ok(())
    });
    ranks.unwrap_or_else(|err| panic!("{case:?}: {err}"));
    result.into_inner().unwrap().unwrap()
}

/// The distance of two vectors by the length of the second.
fn error(got: &[f32], want: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let pairs = got.iter().zip(want);
    let distance = square(&mut pairs.map(|(got, want)| f64::from(got - want)));
    let length = square(&mut want.iter().map(|value| f64::from(*value)));
    match length == 0.0 {
        true => distance.sqrt(),
        false => (distance / length).sqrt(),
    }
}

fn check(case: Case, reference: &Run) {
    let got = run(case);
    let is_close = |got: f64, want: f64| (got - want).abs() <= 1e-5 * want.abs();
    for (step, (got, want)) in got.steps.iter().zip(&reference.steps).enumerate() {
        assert!(
            is_close(got.0, want.0) && is_close(got.1, want.1),
            "{case:?}: loss and norm of step {step}: {got:?} instead of {want:?}"
        );
    }
    assert!(
        is_close(got.evaluation, reference.evaluation),
        "{case:?}: {} instead of {}",
        got.evaluation,
        reference.evaluation
    );
    for (what, got, want) in [
        ("gradient", &got.gradients, &reference.gradients),
        ("weight", &got.weights, &reference.weights),
    ] {
        assert!(got.keys().eq(want.keys()) && !got.is_empty(), "{case:?}");
        for (name, want) in want {
            let error = error(&got[name], want);
            assert!(error <= 1e-4, "{case:?}: {what} of {name}: {error}");
        }
    }
}

#[test]
fn context_parallel_ranks_train_as_one_does() {
    if devices().iter().any(|device| !device.is_cpu()) {
        // Few, as an emulated GPU takes long.
        let in_sequence = Case {
            tp: 2,
            sequence_parallel: true,
            ..plain(1, ContextMethod::Ring)
        };
        let methods = [
            ContextMethod::Ring,
            ContextMethod::AllGather,
            ContextMethod::Ulysses,
        ];
        let cases = methods
            .map(|method| plain(2, method))
            .into_iter()
            .chain([in_sequence]);
        let reference = run(in_sequence.reference());
        cases.for_each(|case| check(case, &reference));
        return;
    }
    let variable = "CANDLE_TRAIN_ALL_CONTEXTS";
    let cases = pairwise::cases(variable, FACTORS, Case::of, Case::is_of_all);
    pairwise::compare(variable, &cases, Case::reference, run, check);
}

/// Bytes that a rank sends to its context-parallel peers in a step: of a model with so many (query, key/value) heads of 4 values, for two sequences of `t` tokens.
fn bytes_of_step(
    cp: usize,
    context: ContextConfig,
    (heads, kv_heads): (usize, usize),
    t: usize,
) -> u64 {
    let bytes = Mutex::new(0);
    let degrees = Layout {
        cp,
        ..Layout::new(1, 1, 1)
    }
    .degrees();
    threads_with(LocalConfig::new(cp), |world| {
        let mesh = Mesh::new(world, degrees)?;
        let config = ModelConfig {
            hidden_size: 4 * heads,
            head_dim: 4,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            num_hidden_layers: LAYERS,
            ..Fixture::new("gqa").config().clone()
        };
        let vb = ParamStore::init(11).builder(DType::F32, &Device::Cpu);
        let parts = PartConfig {
            context,
            ..PartConfig::default()
        };
        let part = CausalLm::part_with(&config, &mesh, &vb, parts)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let ids = Tensor::zeros((2, t), DType::U32, &Device::Cpu)?;
        mesh.cp.reset_counters();
        pipeline.forward_backward(&part, &[Pass::train(ids.clone(), ids)], &mut gradients)?;
        *bytes.lock().unwrap() = mesh.cp.counters().total().bytes;
        Ok(())
    })
    .unwrap();
    bytes.into_inner().unwrap()
}

#[test]
fn ranks_send_what_the_formulas_say() {
    let (b, t) = (2, 32);
    for (cp, heads, kv_heads) in [(2, 8, 2), (4, 8, 4), (8, 8, 8), (4, 4, 4), (3, 6, 3)] {
        // A multiple of 2c.
        let t = if cp == 3 { 30 } else { t };
        let (q, kv) = ((4 * heads) as u64, (4 * kv_heads) as u64);
        let (c, rows) = (cp as u64, (b * t) as u64);
        let method = |method, ulysses| ContextConfig { method, ulysses };
        let layers = LAYERS as u64;
        // Keys and values of f32 in both passes, their gradients once around.
        let ring = 2 * (2 * rows * kv * 4 * (c - 1) / c) + 2 * rows * kv * 4;
        let got = bytes_of_step(cp, method(ContextMethod::Ring, None), (heads, kv_heads), t);
        assert_eq!(got, layers * ring, "ring of {cp}");
        let all_gather = 3 * (2 * rows * kv * 4 * (c - 1) / c);
        let got = bytes_of_step(
            cp,
            method(ContextMethod::AllGather, None),
            (heads, kv_heads),
            t,
        );
        assert_eq!(got, layers * all_gather, "all-gather over {cp}");
        // Heads of a key/value head that several ranks read go to each of them.
        let repeated = kv.max(4 * c);
        let ulysses = 2 * ((2 * q + 2 * repeated) * (rows / c) * 4 * (c - 1) / c);
        let got = bytes_of_step(
            cp,
            method(ContextMethod::Ulysses, None),
            (heads, kv_heads),
            t,
        );
        assert_eq!(got, layers * ulysses, "Ulysses over {cp}");
        if cp == 4 || cp == 8 {
            // Groups of two exchange heads, and half of the heads go around a ring of half as many.
            let (u, r) = (2, c / 2);
            let exchange = 2 * ((2 * q + 2 * kv) * (rows / c) * 4 * (u - 1) / u);
            let around =
                2 * (2 * (2 * rows / c) * (kv / 2) * 4 * (r - 1)) + 2 * rows * (kv / 2) * 4;
            let got = bytes_of_step(
                cp,
                method(ContextMethod::Ring, Some(2)),
                (heads, kv_heads),
                t,
            );
            assert_eq!(
                got,
                layers * (exchange + around),
                "groups of 2 in a ring of {r}"
            );
        }
    }
    // What auto takes sends no more than the other.
    for (cp, heads, kv_heads) in [(2, 8, 2), (4, 8, 1), (4, 8, 8), (8, 8, 2), (2, 8, 1)] {
        let of = |method| {
            let context = ContextConfig {
                method,
                ulysses: None,
            };
            bytes_of_step(cp, context, (heads, kv_heads), t)
        };
        let least = of(ContextMethod::Ring).min(of(ContextMethod::Ulysses));
        assert_eq!(of(ContextMethod::Auto), least, "{cp} {heads} {kv_heads}");
    }
}

/// A case that is like no other but for what is said.
fn plain(cp: usize, method: ContextMethod) -> Case {
    Case {
        cp,
        context: ContextConfig {
            method,
            ulysses: None,
        },
        sequence_parallel: false,
        family: "gqa",
        pp: 1,
        dp: 1,
        tp: 1,
        zero: ZeroStage::Zero,
        is_packed: true,
        b: 2,
        t: 37,
        recompute: Recompute::None,
        is_lora: false,
        is_late: false,
        dtype: DType::F32,
    }
}

#[test]
fn two_runs_of_context_parallel_ranks_give_the_same_bits_whatever_is_late() {
    for method in [ContextMethod::Ring, ContextMethod::AllGather] {
        let case = Case {
            tp: 2,
            sequence_parallel: true,
            ..plain(3, method)
        };
        let bits = |case| {
            let Run {
                steps,
                gradients,
                weights,
                ..
            } = run(case);
            (steps, gradients, weights)
        };
        let first = bits(case);
        for is_late in [false, true] {
            assert!(
                bits(Case { is_late, ..case }) == first,
                "{method:?}, late: {is_late}"
            );
        }
    }
}

/// Also of each gradient of a bias of keys, which is what is left of many that cancel: a product of output and gradient that is not exact shows there.
#[test]
fn a_ring_in_bf16_is_as_exact_as_one_rank() {
    for family in ["gqa", "qwen2"] {
        let gradients = |cp, dtype| {
            let case = Case {
                dtype,
                family,
                ..plain(cp, ContextMethod::Ring)
            };
            run(case).gradients
        };
        let exact = gradients(1, DType::F32);
        let errors = |cp| -> BTreeMap<&String, f64> {
            let got = gradients(cp, DType::BF16);
            let of = exact.iter();
            of.map(|(name, want)| (name, error(&got[name], want)))
                .collect()
        };
        let (alone, in_ring) = (errors(1), errors(8));
        let mean = |errors: &BTreeMap<&String, f64>, part: &str| {
            let of_part = errors.iter().filter(|(name, _)| name.contains(part));
            let errors: Vec<f64> = of_part.map(|(_, error)| *error).collect();
            (!errors.is_empty()).then(|| errors.iter().sum::<f64>() / errors.len() as f64)
        };
        for part in ["", "k_proj.bias"] {
            let (Some(alone), Some(in_ring)) = (mean(&alone, part), mean(&in_ring, part)) else {
                continue;
            };
            eprintln!(
                "{family}: mean error of a gradient {part} {alone:.2e}, in a ring of 8 {in_ring:.2e}"
            );
            assert!(
                in_ring <= 1.5 * alone,
                "{family}, {part}: {in_ring} {alone}"
            );
        }
    }
}

#[test]
fn ranks_without_a_row_train_along() {
    if devices().iter().any(|device| !device.is_cpu()) {
        eprintln!("not tested on a GPU: candle has no tensors of nothing there");
        return;
    }
    let of_one = |case: Case| Case {
        b: 1,
        t: 1,
        is_packed: false,
        ..case
    };
    for family in ["gqa", "qwen3"] {
        let reference = run(Case {
            family,
            ..of_one(plain(1, ContextMethod::Ring)).reference()
        });
        for method in [
            ContextMethod::Ring,
            ContextMethod::AllGather,
            ContextMethod::Ulysses,
        ] {
            for (cp, tp, pp) in [(2, 1, 2), (2, 2, 1), (1, 2, 2)] {
                let case = Case {
                    family,
                    tp,
                    pp,
                    sequence_parallel: tp > 1,
                    ..of_one(plain(cp, method))
                };
                check(case, &reference);
            }
        }
    }
}
