//! The head and its loss in chunks of rows, against f64 loops over the whole logits: odd numbers of rows, more rows than a
//! chunk, vocabularies of 1, 97 and 32001 ids, and weights that come whole or, to two replicas, tile by tile.

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Init;
use candle_ops::IGNORE_INDEX;
use candle_parallel::{
    DataParallel, Gradients, Loss, ModelPart, ParamStore, Pass, PlainBlock, PlainHead, Shard,
    ZeroStage, linear_cross_entropy, linear_predictions, plain_block, plain_head,
};

use crate::chain::one_target;
use crate::check::{floats, here, on_mesh, random, random_ids};
use crate::device::device;

const HIDDEN: usize = 7;
const LOSS_SCALE: f64 = 0.25;

/// A link of a chain that does nothing.
struct Link;

impl PlainBlock for Link {
    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<Tensor> {
        Ok(xs.clone())
    }
}

impl PlainHead for Link {
    fn loss(&self, xs: &Tensor, _pass: &Pass) -> Result<Loss> {
        Ok(Loss::new(xs.sum_all()?, 1.0))
    }
}

/// What one rank holds: the loss, the gradient of the rows, its part of the weight, the gradient of that, and the loss and the number of
/// right predictions without a backward pass.
type Part = (f64, Vec<f32>, Vec<f32>, Vec<f32>, Vec<f64>);

fn run(
    mesh: &Mesh,
    xs: &Tensor,
    targets: &Tensor,
    vocab: usize,
    tile_linears: usize,
) -> Result<Part> {
    let zero = match tile_linears {
        1 => ZeroStage::Zero,
        _ => ZeroStage::Three,
    };
    let replicas = DataParallel {
        tile_linears,
        ..zero.into()
    };
    let vb = ParamStore::init(5)
        .with_data_parallel(replicas)
        .builder(DType::F32, &device());
    let shard = Shard::even(0, vocab, &mesh.tp)?;
    let weight = std::cell::RefCell::new(None);
    let part = ModelPart::build(mesh, &vb, 2, HIDDEN, |index, vb| {
        let stdev = 1.0;
        let init = Init::Randn { mean: 0.0, stdev };
        if index == 1 {
            let shape = (vocab, HIDDEN);
            weight.replace(Some(vb.get_tiled(shape, "weight", shard.clone(), init)?));
        }
        Ok(match index {
            0 => plain_block(Link),
            _ => plain_head(Link),
        })
    })?;
    let weight = weight.take().unwrap();
    assert_eq!(weight.is_tiled(), tile_linears > 1);
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let xs = here(xs)?;
    let predictions = linear_predictions(&xs, &weight, targets, &shard, &mesh.tp)?;
    let (loss, dx) = linear_cross_entropy(
        &xs,
        &weight,
        targets,
        &shard,
        &mesh.tp,
        LOSS_SCALE,
        &mut gradients,
    )?;
    Ok((
        loss.to_scalar::<f64>()?,
        floats(&dx)?,
        floats(&part.params().values(0)?)?,
        floats(&gradient_of_one_replica(&mut gradients, mesh)?)?,
        predictions
            .iter()
            .map(|number| number.to_scalar())
            .collect::<Result<_>>()?,
    ))
}

/// The gradient of the weight, which is the same on every replica.
fn gradient_of_one_replica(gradients: &mut Gradients, mesh: &Mesh) -> Result<Tensor> {
    if mesh.dp.world_size() == 1 {
        return gradients.get(0);
    }
    let sum = one_target(gradients, mesh)
        .reduce()?
        .local_gradients()?
        .remove(&0);
    sum.unwrap() / mesh.dp.world_size() as f64
}

/// Loss, gradient of the rows, and of the weight, and the number of right predictions, in f64.
type Reference = (f64, Vec<f64>, Vec<f64>, usize);

fn reference(xs: &[f32], weight: &[f32], targets: &[u32]) -> Reference {
    let doubles = |values: &[f32]| -> Vec<f64> { values.iter().map(|x| f64::from(*x)).collect() };
    let (xs, weight) = (doubles(xs), doubles(weight));
    let (mut loss, mut dx) = (0.0, vec![0.0; xs.len()]);
    let mut dw = vec![0.0; weight.len()];
    let mut num_right = 0;
    for (row, &target) in targets.iter().enumerate() {
        if target == IGNORE_INDEX {
            continue;
        }
        let (x, dx) = (
            &xs[row * HIDDEN..][..HIDDEN],
            &mut dx[row * HIDDEN..][..HIDDEN],
        );
        let logit = |w: &[f64]| -> f64 { w.iter().zip(x).map(|(w, x)| w * x).sum() };
        let logits: Vec<f64> = weight.chunks_exact(HIDDEN).map(logit).collect();
        let max = logits.iter().copied().fold(f64::MIN, f64::max);
        let first = logits.iter().position(|&z| z == max);
        num_right += usize::from(first == Some(target as usize));
        let sum: f64 = logits.iter().map(|z| (z - max).exp()).sum();
        loss += sum.ln() - (logits[target as usize] - max);
        let rows = weight.chunks_exact(HIDDEN).zip(dw.chunks_exact_mut(HIDDEN));
        for (id, ((w, dw), z)) in rows.zip(&logits).enumerate() {
            let hit = f64::from(u8::from(id == target as usize));
            let dz = ((z - max).exp() / sum - hit) * LOSS_SCALE;
            for c in 0..HIDDEN {
                dx[c] += dz * w[c];
                dw[c] += dz * x[c];
            }
        }
    }
    (loss, dx, dw, num_right)
}

/// Asserts that the L2 norm of the difference is at most `bound` times that of `want`.
#[track_caller]
fn assert_close(what: &str, got: &[f32], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of values");
    let difference = got
        .iter()
        .zip(want)
        .map(|(a, b)| (f64::from(*a) - b).powi(2));
    let (difference, norm): (f64, f64) = (difference.sum(), want.iter().map(|x| x.powi(2)).sum());
    let error = (difference / norm.max(1e-60)).sqrt();
    assert!(
        error <= bound || difference == 0.0,
        "{what}: relative error {error:e}, more than {bound:e}"
    );
}

#[test]
fn equals_the_loss_of_whole_logits() {
    for (rows, vocab, degrees) in [
        (1, 1, vec![1]),
        (127, 1, vec![1]),
        (127, 3, vec![2]),
        (1, 97, vec![1, 3]),
        (2, 97, vec![2]),
        (127, 97, vec![1, 4]),
        (1000, 97, vec![1, 2]),
        (2, 32001, vec![3]),
        (515, 32001, vec![1, 2]),
    ] {
        let xs = random(1, (rows, HIDDEN)).unwrap();
        let mut ids = random_ids(2, rows, vocab);
        ids.iter_mut()
            .skip(3)
            .step_by(5)
            .for_each(|id| *id = IGNORE_INDEX);
        let targets = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
        let mut want: Option<Reference> = None;
        let runs = degrees.iter().map(|tp| (*tp, 1));
        let tiled = degrees.last().map(|tp| (*tp, 5.min(vocab + 1)));
        for (tp, tiles) in runs.chain(tiled) {
            let dp = if tiles > 1 { 2 } else { 1 };
            let mut parts = on_mesh((1, dp, tp), |mesh| run(&mesh, &xs, &targets, vocab, tiles));
            parts.truncate(tp);
            let weight: Vec<f32> = parts.iter().flat_map(|part| part.2.clone()).collect();
            let dw: Vec<f32> = parts.iter().flat_map(|part| part.3.clone()).collect();
            // The weight is the same for any number of ranks.
            let (loss, dx, want_dw, num_right) =
                want.get_or_insert_with(|| reference(&floats(&xs).unwrap(), &weight, &ids));
            let what = format!("{rows} rows, {vocab} ids, tp {tp}, {tiles} tiles");
            // Logits below 10 are off by the rounding of their products, and so is the logarithm of the sum: each makes
            // a probability wrong by that many half epsilons. Then come sums over the rows.
            let half_epsilon = f64::from(f32::EPSILON) / 2.0;
            let bound = half_epsilon * (10.0 + ((HIDDEN + rows.min(512)) as f64).sqrt());
            for (got, dx_got, .., predictions) in &parts {
                assert!((got - *loss).abs() <= bound * loss.abs(), "loss, {what}");
                let error = (predictions[0] - *loss).abs();
                assert!(error <= bound * loss.abs(), "loss of predictions, {what}");
                assert_eq!(predictions[1], *num_right as f64, "{what}");
                assert_close(&format!("dx, {what}"), dx_got, dx, bound);
            }
            assert_close(&format!("dw, {what}"), &dw, want_dw, bound);
        }
    }
}

#[test]
fn of_equal_logits_the_first_counts() {
    let (rows, vocab) = (9, 7);
    let xs = Tensor::zeros((rows, HIDDEN), DType::F32, &Device::Cpu).unwrap();
    let ids = [0, 1, 6, 0, IGNORE_INDEX, 3, 0, 5, 2];
    let targets = Tensor::new(&ids, &Device::Cpu).unwrap();
    for (tp, tiles) in [(1, 1), (3, 1), (2, 3)] {
        let dp = if tiles > 1 { 2 } else { 1 };
        for part in on_mesh((1, dp, tp), |mesh| run(&mesh, &xs, &targets, vocab, tiles)) {
            assert_eq!(part.4[1], 3.0, "tp {tp}, {tiles} tiles");
        }
    }
}

#[test]
fn gives_the_same_bits_in_each_run_and_for_any_number_of_threads() {
    let (rows, vocab) = (515, 32001);
    let xs = random(1, (rows, HIDDEN)).unwrap();
    let targets = Tensor::new(random_ids(2, rows, vocab), &Device::Cpu).unwrap();
    let bits = |num_threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads);
        pool.build().unwrap().install(|| {
            let mesh = crate::check::single_mesh();
            let (loss, dx, _, dw, _) = run(&mesh, &xs, &targets, vocab, 1).unwrap();
            let values = dx.into_iter().chain(dw).map(f32::to_bits);
            (loss.to_bits(), values.collect::<Vec<u32>>())
        })
    };
    let one = bits(1);
    for run in 0..2 {
        assert!(one == bits(3), "other bits in run {run} of 3 threads");
    }
}
