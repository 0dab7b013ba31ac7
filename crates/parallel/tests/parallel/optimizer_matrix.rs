//! Rules that see names and shapes, that need whole matrices, and that differ between groups.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, bail};
use candle_parallel::checkpoint::{CheckpointSaver, TrainingCheckpoint};
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, DistributedOptimizer, Gradients, MemoryCategory, ModelPart,
    Needs, Offload, Optimizer, Param, ParamGroup, ParamMatrix, ParamSlice, ParamStore, Pipeline,
    Schedule, Shard, UpdateStep, WEIGHT_INIT, ZeroStage,
};
use serde_json::json;
use tempfile::tempdir;

use crate::chain::{Chain, HIDDEN, Values, gather_weights, one_target};
use crate::check::{assert_says, message, on_mesh, random, single_mesh};

/// Muon: v ← 0.95 v + g, θ ← θ(1 − ηλ) − η √max(1, rows / columns) orthogonal(g + 0.95 v).
struct Muon;

impl Optimizer for Muon {
    fn state_names(&self) -> &'static [&'static str] {
        &["momentum"]
    }

    fn needs(&self, _param: &Param) -> Needs {
        Needs::Matrix
    }

    fn update(&self, _slice: &ParamSlice<'_>, _step: &UpdateStep) -> Result<()> {
        bail!("Muon updates matrices only")
    }

    fn update_matrix(&self, matrix: &ParamMatrix<'_>, step: &UpdateStep) -> Result<()> {
        let grad = (matrix.grad() * step.grad_scale)?;
        let momentum = ((&matrix.state()[0] * 0.95)? + &grad)?;
        matrix.set_state(0, &momentum)?;
        let direction = matrix.whole(&(grad + (momentum * 0.95)?)?)?;
        let update = matrix.part(&orthogonal(&direction)?)?;
        let decay = 1.0 - step.lr * step.weight_decay.unwrap_or(0.0);
        matrix.set_weights(&((matrix.weights()? * decay)? - (update * step.lr)?)?)
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }
}

/// The orthogonal matrix near a matrix, by five steps of Newton and Schulz, times √max(1, rows / columns).
fn orthogonal(matrix: &Tensor) -> Result<Tensor> {
    let (rows, columns) = matrix.dims2()?;
    let wide = match rows > columns {
        true => matrix.t()?,
        false => matrix.clone(),
    };
    let norm = wide.sqr()?.sum_all()?.sqrt()?;
    let mut xs = wide.broadcast_div(&(norm + 1e-7)?)?;
    for _ in 0..5 {
        let square = xs.matmul(&xs.t()?)?;
        let polynomial = ((&square * -4.775)? + (square.matmul(&square)? * 2.0315)?)?;
        xs = ((&xs * 3.4445)? + polynomial.matmul(&xs)?)?;
    }
    let xs = match rows > columns {
        true => xs.t()?,
        false => xs,
    };
    xs * (rows as f64 / columns as f64).max(1.0).sqrt()
}

/// Gradients of one target: of parameter `index` the random numbers of this seed.
fn random_gradients(part: &ModelPart, mesh: &Mesh) -> Result<Gradients> {
    let mut gradients = Gradients::new(part.params(), mesh)?;
    for (index, param) in part.params().iter().enumerate() {
        // Tensor-parallel ranks that hold parts have gradients of their own.
        let rank = param.shard().map_or(0, |_| mesh.tp.rank());
        if param.num_values() > 0 {
            let grad = random((index + 100 * rank) as u64, param.local_shape())?;
            gradients.accumulate(index, &grad)?;
        }
    }
    one_target(&mut gradients, mesh);
    Ok(gradients)
}

fn is_of_muon(name: &str) -> bool {
    name.contains("up.weight") || name.contains("down.weight")
}

const LR: f64 = 0.01;

#[derive(Clone, Copy, Debug)]
struct Layout {
    mesh: (usize, usize, usize),
    zero: ZeroStage,
    zero_group: Option<usize>,
    in_file: bool,
}

const fn layout(mesh: (usize, usize, usize), zero: ZeroStage) -> Layout {
    Layout {
        mesh,
        zero,
        zero_group: None,
        in_file: false,
    }
}

const LAYOUTS: [Layout; 11] = [
    layout((1, 1, 1), ZeroStage::Zero),
    layout((1, 2, 1), ZeroStage::Zero),
    layout((1, 2, 1), ZeroStage::One),
    layout((1, 2, 1), ZeroStage::Two),
    layout((1, 3, 1), ZeroStage::Three),
    layout((1, 1, 2), ZeroStage::Zero),
    layout((2, 1, 1), ZeroStage::Zero),
    layout((1, 2, 2), ZeroStage::Three),
    layout((2, 2, 2), ZeroStage::Two),
    Layout {
        in_file: true,
        ..layout((1, 2, 3), ZeroStage::One)
    },
    Layout {
        zero_group: Some(3),
        ..layout((1, 6, 1), ZeroStage::Three)
    },
];

struct Run {
    chain: Chain,
    mesh: Mesh,
    part: ModelPart,
    optimizer: DistributedOptimizer,
}

impl Run {
    /// Muon for the matrices of layers, AdamW for embedding, head, norms and biases, these with another decay.
    fn new(chain: Chain, layout: Layout, mesh: Mesh, seed: u64, files: &Path) -> Result<Self> {
        let store = ParamStore::init(seed).with_data_parallel(DataParallel {
            zero: layout.zero,
            zero_group: layout.zero_group,
            ..DataParallel::default()
        });
        let offload = match layout.in_file {
            true => Offload::all().in_dir(files),
            false => Offload::default(),
        };
        let part = chain.part(&mesh, &store.with_offload(offload))?;
        let rest = AdamW(AdamWConfig::default());
        let optimizer = DistributedOptimizer::new(part.params(), &mesh, rest)?;
        let optimizer = optimizer.with_groups(vec![
            ParamGroup::new(is_of_muon)
                .with_rule(Muon)
                .with_lr_scale(0.5)
                .with_weight_decay(0.1),
            ParamGroup::new(|name| name.contains("bias")).with_weight_decay(0.2),
        ])?;
        Ok(Self {
            chain,
            mesh,
            part,
            optimizer,
        })
    }

    fn step(&mut self, step: u64) -> Result<()> {
        let mut gradients = Gradients::new(self.part.params(), &self.mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &self.mesh);
        let (rank, dp) = (self.mesh.dp.rank(), self.mesh.dp.world_size());
        let batches = self.chain.micro_batches(50 * step, 6)?;
        let batches = &batches[rank * 6 / dp..(rank + 1) * 6 / dp];
        pipeline.forward_backward(&self.part, batches, &mut gradients)?;
        self.optimizer.step(&mut gradients, LR, Some(1.0)).map(drop)
    }

    /// The bits of the state that this rank keeps, by parameter, kind and place.
    fn state(&self) -> Result<State> {
        let mut state = State::new();
        for kept in self.optimizer.state()? {
            let places = kept.offsets.into_iter().flatten();
            let values = kept.values.into_iter().map(f32::to_bits);
            let of_kind = state.entry((kept.name, kept.kind)).or_default();
            of_kind.extend(places.zip(values));
        }
        Ok(state)
    }
}

type State = BTreeMap<(String, String), BTreeMap<usize, u32>>;

/// Weights of the whole model, and the state of all ranks together.
fn joined(ranks: Vec<(Values, State)>) -> (Values, State) {
    let (mut weights, mut state) = (Values::new(), State::new());
    for (of_rank, kept) in ranks {
        weights.extend(of_rank);
        for (key, values) in kept {
            state.entry(key).or_default().extend(values);
        }
    }
    (weights, state)
}

fn assert_near(what: &str, got: &Values, want: &Values, tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (name, values) in want {
        let square = |x: f32| f64::from(x).powi(2);
        let pairs = got[name].iter().zip(values);
        let difference: f64 = pairs.map(|(a, b)| square(a - b)).sum();
        let norm: f64 = values.iter().map(|b| square(*b)).sum();
        let error = (difference / norm).sqrt();
        assert!(error < tolerance, "{what}: {name} is off by {error:e}");
    }
}

fn trained(chain: Chain, layout: Layout) -> (Values, State) {
    let files = tempdir().unwrap();
    joined(on_mesh(layout.mesh, |mesh| {
        let mut run = Run::new(chain, layout, mesh, 5, files.path())?;
        for step in 0..3 {
            run.step(step)?;
        }
        Ok((gather_weights(&run.part, &run.mesh)?, run.state()?))
    }))
}

#[test]
fn muon_and_adamw_are_the_same_on_every_layout() {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2)] {
        let chain = Chain {
            dtype,
            ..Chain::default()
        };
        let (want, state) = trained(chain, LAYOUTS[0]);
        for (name, kind) in state.keys() {
            let is_known = match is_of_muon(name) {
                true => kind == "momentum",
                false => kind.starts_with("exp_avg"),
            };
            assert!(is_known || kind == "master", "{name} has the state {kind}");
        }
        for layout in &LAYOUTS[1..] {
            let (got, kept) = trained(chain, *layout);
            assert_near(&format!("{dtype:?} {layout:?}"), &got, &want, tolerance);
            assert!(kept.keys().eq(state.keys()), "{layout:?}");
        }
    }
}

/// The first update of a matrix, computed from the gradient that was given; that of a vector moves by the learning rate.
#[test]
fn muon_moves_along_the_orthogonal_matrix() -> Result<()> {
    let dir = tempdir().unwrap();
    let mut run = Run::new(Chain::default(), LAYOUTS[0], single_mesh(), 5, dir.path())?;
    let params = run.part.params().clone();
    let before = params.iter().map(|param| param.values()?.copy());
    let before = before.collect::<Result<Vec<_>>>()?;
    let grad = |index: usize| random(index as u64, params.get(index).local_shape());
    let mut gradients = random_gradients(&run.part, &run.mesh)?;
    run.optimizer.step(&mut gradients, LR, None)?;
    for (index, param) in params.iter().enumerate() {
        if is_of_muon(&param.name) {
            let (before, moved) = (&before[index], orthogonal(&grad(index)?)?);
            let want = ((before * (1.0 - 0.5 * LR * 0.1))? - (&moved * (0.5 * LR))?)?;
            crate::check::assert_close(&param.name, &param.values()?, &want);
            // Its singular values are near 1, but for the factor.
            let (rows, columns) = moved.dims2()?;
            let norm = moved.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
            let factor = (rows as f32 / columns as f32).max(1.0).sqrt();
            let expected = factor * (rows.min(columns) as f32).sqrt();
            assert!((norm / expected - 1.0).abs() < 0.3, "{norm} {expected}");
        }
    }
    Ok(())
}

#[test]
fn a_run_with_two_rules_resumes_on_another_layout() {
    for dtype in [DType::F32, DType::BF16] {
        let chain = Chain {
            dtype,
            ..Chain::default()
        };
        for (from, to) in [(0, 7), (7, 9), (9, 10), (10, 5), (8, 3), (4, 6)] {
            let (from, to) = (LAYOUTS[from], LAYOUTS[to]);
            let what = format!("{dtype:?} from {from:?} to {to:?}");
            let dir = tempdir().unwrap();
            let saved = joined(on_mesh(from.mesh, |mesh| {
                let mut run = Run::new(chain, from, mesh, 5, dir.path())?;
                run.step(0)?;
                let state = run.state()?;
                let folder = dir.path().join("saves");
                let mut saver = CheckpointSaver::new(&run.mesh.world, &folder, 1, None)?;
                saver.start(&run.optimizer, 1, json!(null))?;
                saver.finish()?.unwrap().saved.unwrap();
                run.step(1)?;
                Ok((gather_weights(&run.part, &run.mesh)?, state))
            }));
            let loaded = joined(on_mesh(to.mesh, |mesh| {
                let mut run = Run::new(chain, to, mesh, 6, dir.path())?;
                let step = dir.path().join("saves/step-000001");
                TrainingCheckpoint::open(&run.mesh.world, &step)?.load(&mut run.optimizer)?;
                let state = run.state()?;
                run.step(1)?;
                Ok((gather_weights(&run.part, &run.mesh)?, state))
            }));
            assert!(loaded.1 == saved.1, "{what}: the state differs");
            let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
            assert_near(&what, &loaded.0, &saved.0, tolerance);
        }
    }
}

#[test]
fn a_checkpoint_of_other_rules_is_refused() {
    let dir = tempdir().unwrap();
    let mut run = Run::new(Chain::default(), LAYOUTS[0], single_mesh(), 5, dir.path()).unwrap();
    let mut saver = CheckpointSaver::new(&run.mesh.world, dir.path(), 1, None).unwrap();
    run.step(0).unwrap();
    saver.start(&run.optimizer, 1, json!(null)).unwrap();
    saver.finish().unwrap().unwrap().saved.unwrap();
    let adamw = AdamWConfig::default();
    drop(run.optimizer);
    let optimizer = DistributedOptimizer::adamw(run.part.params(), &run.mesh, adamw);
    let step = dir.path().join("step-000001");
    let checkpoint = TrainingCheckpoint::open(&run.mesh.world, &step).unwrap();
    let said = message(checkpoint.load(&mut optimizer.unwrap()));
    assert_says(&said, &["momentum", "expected", "hint: another optimizer"]);
}

/// What a rule sees: of each call the parameter's name, shape, place and, of a matrix, all of it.
#[derive(Clone, Default)]
struct Observer(Arc<Mutex<Vec<Seen>>>);

#[derive(Clone, Debug)]
struct Seen {
    name: String,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
    whole: Option<Vec<f32>>,
}

impl Optimizer for Observer {
    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn needs(&self, param: &Param) -> Needs {
        match param.name.starts_with("layers.1") && param.global_shape.rank() == 2 {
            true => Needs::Matrix,
            false => Needs::Slice,
        }
    }

    fn update(&self, slice: &ParamSlice<'_>, _step: &UpdateStep) -> Result<()> {
        for weight in slice.weights {
            assert_eq!(weight.values.elem_count(), weight.range.len());
            assert_eq!(weight.is_matrix(), weight.param.global_shape.rank() == 2);
            self.0.lock().unwrap().push(Seen {
                name: weight.param.name.clone(),
                shape: weight.param.global_shape.dims().to_vec(),
                range: weight.range.clone(),
                whole: None,
            });
        }
        Ok(())
    }

    fn update_matrix(&self, matrix: &ParamMatrix<'_>, _step: &UpdateStep) -> Result<()> {
        let (part, param) = (matrix.weights()?, matrix.param());
        let whole = matrix.whole(&part)?;
        assert_eq!(whole.dims(), param.global_shape.dims());
        let again = matrix.part(&whole)?.to_vec1::<f32>()?;
        // A rank without values of the matrix has a zero for the first one.
        assert!(again == part.to_vec1::<f32>()? || again == [0.0]);
        let wrong = message(matrix.whole(&Tensor::zeros(5, DType::F32, part.device())?));
        assert_says(&wrong, &[&param.name, "[5]", "expected"]);
        let wrong = message(matrix.part(&part));
        assert_says(&wrong, &[&param.name, "expected"]);
        self.0.lock().unwrap().push(Seen {
            name: param.name.clone(),
            shape: param.global_shape.dims().to_vec(),
            range: 0..0,
            whole: Some(whole.flatten_all()?.to_vec1()?),
        });
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }
}

/// The chain, with a matrix of which tensor-parallel ranks hold parts that overlap, and of three ranks the last one nothing.
fn with_overlaps(mesh: &Mesh, store: &ParamStore) -> Result<ModelPart> {
    let chain = Chain::default();
    let vb = store.builder(chain.dtype, &crate::device::device());
    let range = |rank: usize| match (mesh.tp.world_size(), rank) {
        (1, _) => 0..4,
        (2, 0) => 0..3,
        (3, 0) => 0..2,
        (_, 1) => 1..4,
        _ => 4..4,
    };
    ModelPart::build(mesh, &vb, chain.num_blocks(), HIDDEN, |index, vb| {
        if index == 2 {
            // Two fused maps with such parts.
            let part = Shard::of_ranks(1, 4, &mesh.tp, range);
            let shard = Shard::fused(&[part.clone(), part])?;
            vb.get_placed((5, 8), "layers.1.shared", shard, WEIGHT_INIT)?;
        }
        chain.block(index, &mesh.tp, &vb)
    })
}

#[test]
fn a_rule_sees_names_shapes_ranges_and_whole_matrices() {
    let seen = |layout: Layout| {
        let all = on_mesh(layout.mesh, |mesh| {
            let store = ParamStore::init(5).with_data_parallel(DataParallel {
                zero: layout.zero,
                zero_group: layout.zero_group,
                ..DataParallel::default()
            });
            let part = with_overlaps(&mesh, &store)?;
            let observer = Observer::default();
            let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, observer.clone())?;
            optimizer.step(&mut random_gradients(&part, &mesh)?, LR, None)?;
            let seen = observer.0.lock().unwrap().clone();
            Ok((gather_weights(&part, &mesh)?, seen))
        });
        let (mut weights, mut seen) = (Values::new(), Vec::new());
        for (of_rank, by_rule) in all {
            weights.extend(of_rank);
            seen.extend(by_rule);
        }
        (weights, seen)
    };
    for layout in LAYOUTS {
        let (weights, all) = seen(layout);
        for (name, values) in &weights {
            let of_param: Vec<&Seen> = all.iter().filter(|seen| seen.name == *name).collect();
            let places: usize = of_param.iter().map(|seen| seen.range.len()).sum();
            assert!(!of_param.is_empty(), "{layout:?}: {name}");
            for seen in of_param {
                assert_eq!(seen.shape.iter().product::<usize>(), values.len(), "{name}");
                match &seen.whole {
                    Some(whole) => assert!(whole == values, "{layout:?}: {name}"),
                    None => assert!(places >= values.len(), "{layout:?}: {name}"),
                }
            }
        }
        let num_whole = all.iter().filter(|seen| seen.whole.is_some()).count();
        let (pp, dp, tp) = layout.mesh;
        assert_eq!(num_whole, 3 * dp * tp, "{layout:?} with {pp} stages");
    }
}

#[test]
fn groups_that_differ_between_ranks_are_an_error_on_all() {
    let said = on_mesh((1, 2, 1), |mesh| {
        let part = Chain::default().part(&mesh, &ParamStore::init(5))?;
        let scale = 1.0 + mesh.dp.rank() as f64;
        let group = ParamGroup::new(is_of_muon).with_lr_scale(scale);
        let optimizer = DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default())?;
        let mut optimizer = optimizer.with_groups(vec![group])?;
        let mut gradients = random_gradients(&part, &mesh)?;
        Ok(message(optimizer.step(&mut gradients, LR, None)))
    });
    for said in said {
        let words = [
            "groups of parameters",
            "6 parameters",
            "lr_scale 1",
            "lr_scale 2",
        ];
        assert_says(&said, &words);
    }
}

/// Of the matrices of embedding and head there is one kind of state, not AdamW's two; each has a bucket of its own, of 128 values.
#[test]
fn muon_takes_less_memory_than_adamw() -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, &ParamStore::init(5))?;
    let held = || {
        let report = part.params().meter().report();
        report.of(MemoryCategory::Optimizer).now
    };
    let optimizer = DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default())?;
    let of_adamw = held();
    let ends = |name: &str| name.starts_with("embed") || name.starts_with("head");
    let optimizer = optimizer.with_groups(vec![ParamGroup::new(ends).with_rule(Muon)])?;
    assert_eq!(held(), of_adamw - 2 * 4 * 128);
    let _again = optimizer.with_groups(Vec::new())?;
    assert_eq!(held(), of_adamw);
    Ok(())
}

/// A rule that says it needs matrices and cannot update them.
struct Unable;

impl Optimizer for Unable {
    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn needs(&self, _param: &Param) -> Needs {
        Needs::Matrix
    }

    fn update(&self, _slice: &ParamSlice<'_>, _step: &UpdateStep) -> Result<()> {
        Ok(())
    }

    fn validate(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn mistakes_with_groups_and_rules_are_named() -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, &ParamStore::init(5))?;
    let optimizer = || DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default());
    let of_groups = |groups| optimizer()?.with_groups(groups);
    let nothing = of_groups(vec![
        ParamGroup::new(|name| name.contains("up")),
        ParamGroup::new(|name| name.contains("q_proj")).with_rule(Muon),
    ]);
    let words = [
        "group 2 of 2 matches none of the 17",
        "hint",
        "embed.weight",
    ];
    assert_says(&message(nothing.map(drop)), &words);
    let taken = of_groups(vec![
        ParamGroup::new(|name| name.contains("up")),
        ParamGroup::new(|name| name.contains("up.bias")),
    ]);
    let words = ["group 2 of 2 has no parameter", "layers.0.up.bias", "hint"];
    assert_says(&message(taken.map(drop)), &words);
    let vector = of_groups(vec![
        ParamGroup::new(|name| name.contains("layers.2.up")).with_rule(Muon),
    ]);
    let words = [
        "layers.2.up.bias",
        "matrix",
        "[7]",
        "two or more dims",
        "hint",
    ];
    assert_says(&message(vector.map(drop)), &words);
    let constants = AdamWConfig {
        beta1: 2.0,
        ..AdamWConfig::default()
    };
    let rule = ParamGroup::new(|_| true).with_rule(AdamW(constants));
    assert_says(&message(of_groups(vec![rule]).map(drop)), &["beta1 is 2"]);

    let mut late = optimizer()?;
    late.step(&mut random_gradients(&part, &mesh)?, LR, None)?;
    let muon = || vec![ParamGroup::new(is_of_muon).with_rule(Muon)];
    let words = ["after 1 updates", "hint"];
    assert_says(&message(late.with_groups(muon()).map(drop)), &words);

    let unable = ParamGroup::new(|name| name == "head.weight").with_rule(Unable);
    let mut unable = of_groups(vec![unable])?;
    let said = message(unable.step(&mut random_gradients(&part, &mesh)?, LR, None));
    assert_says(&said, &["head.weight", "no update of matrices", "hint"]);
    Ok(())
}
