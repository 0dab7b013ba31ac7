//! A pass drops the same places in a part of a tensor as in the whole, and refuses rows that are not its own.

use std::sync::{Arc, Mutex};

use candle_comm::{Degrees, Mesh};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_ops::IGNORE_INDEX;
use candle_parallel::{
    Gradients, ModelPart, ParamStore, Pass, Pipeline, PlainBlock, Region, Schedule, Shard,
    head_block, layer_block, plain_block, regions, vocab_parallel_embedding, vocab_parallel_head,
};

use crate::check::{assert_says, floats, message, random_ids};
use crate::device::{device, on_ranks};

const VOCAB: usize = 13;
const HIDDEN: usize = 12;
const HEADS: usize = 4;

type Seen = Arc<Mutex<Vec<Tensor>>>;

/// A block that gives what it gets, and keeps what `see` makes of a pass.
struct Probe<F>(F, Seen);

impl<F: Fn(&Pass) -> Result<Tensor> + Send + Sync> PlainBlock for Probe<F> {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let seen = (self.0)(pass)?;
        self.1.lock().unwrap().push(seen);
        Ok(xs.clone())
    }
}

/// The masks of two blocks of a model in a training pass; `region` is the model's.
fn probe(
    mesh: &Mesh,
    region: &Region,
    pass: Pass,
    see: impl Fn(&Pass) -> Result<Tensor> + Clone + Send + Sync + 'static,
) -> Result<[Tensor; 2]> {
    let seen = Seen::default();
    let vb = ParamStore::init(5).builder(DType::F32, &device());
    let part = ModelPart::build(mesh, &vb, 4, HIDDEN, |index, vb| {
        let vb = vb.pp(index);
        let block = match index {
            0 => layer_block(vocab_parallel_embedding(VOCAB, HIDDEN, region, vb)?),
            1 | 2 => plain_block(Probe(see.clone(), seen.clone())),
            _ => head_block(vocab_parallel_head(VOCAB, HIDDEN, region, vb)?),
        };
        Ok(block.of_rows())
    })?;
    let part = part.with_region(region.clone());
    let mut gradients = Gradients::new(part.params(), mesh)?;
    Pipeline::new(Schedule::GPipe, mesh).forward_backward(&part, &[pass], &mut gradients)?;
    let [first, second] = &seen.lock().unwrap()[..] else {
        panic!("two blocks see one pass each")
    };
    Ok([first.clone(), second.clone()])
}

/// Sequences of four tokens, padded to `len`.
fn batch(num: usize, len: usize) -> Result<Pass> {
    let of_len = |ids: Vec<u32>, padding| {
        let sequences = ids.chunks(4);
        let padded = sequences.flat_map(|ids| [ids, &vec![padding; len - 4]].concat());
        Tensor::from_vec(padded.collect(), (num, len), &Device::Cpu)
    };
    let ids = |seed| random_ids(seed, 4 * num, VOCAB);
    Ok(Pass::train(
        of_len(ids(1), 0)?,
        of_len(ids(2), IGNORE_INDEX)?,
    ))
}

fn ones(dims: &[usize]) -> Result<Tensor> {
    Tensor::ones(dims, DType::F32, &device())
}

fn mesh_of(cp: usize, tp: usize, run: impl Fn(Mesh) -> Result<()> + Sync) {
    let degrees = Degrees {
        cp,
        tp,
        ..Degrees::default()
    };
    on_ranks(cp * tp, |world| run(Mesh::new(world, degrees)?));
}

#[test]
fn blocks_that_give_the_same_name_drop_differently() {
    mesh_of(1, 1, |mesh| {
        let (tp, region) = (mesh.tp.clone(), Region::from(&mesh.tp));
        let see = move |pass: &Pass| pass.dropout(&ones(&[2, 4, 50])?, 0.5, "same", &tp);
        let [first, second] = probe(&mesh, &region, batch(2, 4)?, see)?;
        let both = (first * second)?;
        let kept = floats(&both)?.into_iter().filter(|value| *value > 0.0);
        let kept = kept.count();
        // Of 400 a quarter, not a half.
        assert!((60..140).contains(&kept), "{kept}");
        Ok(())
    });
}

/// Attention's probabilities, (b, heads, t, t), by whole ones.
#[test]
fn parts_of_any_dim_and_padded_sequences_drop_what_the_whole_drops() {
    let of_heads = |shard: Shard, len: usize| {
        move |pass: &Pass| {
            let dims = [2, shard.len(), len, len];
            pass.dropout_sharded(&ones(&dims)?, 0.5, "heads", &shard.along(1))
        }
    };
    let wholes = Mutex::new(Vec::new());
    mesh_of(1, 1, |mesh| {
        let region = Region::from(&mesh.tp);
        let whole = of_heads(Shard::even(0, HEADS, &mesh.tp)?, 4);
        let [whole, _] = probe(&mesh, &region, batch(2, 4)?, whole)?;
        // The rows one after the other are the same rows.
        let (tp, flat_tp) = (mesh.tp.clone(), mesh.tp.clone());
        let rows = move |pass: &Pass| pass.dropout(&ones(&[2, 4, 5])?, 0.5, "rows", &tp);
        let flat = move |pass: &Pass| pass.dropout(&ones(&[8, 5])?, 0.5, "rows", &flat_tp);
        let [rows, _] = probe(&mesh, &region, batch(2, 4)?, rows)?;
        let [flat, _] = probe(&mesh, &region, batch(2, 4)?, flat)?;
        assert_eq!(floats(&rows)?, floats(&flat)?);
        wholes.lock().unwrap().push(whole);
        Ok(())
    });
    let whole = wholes.into_inner().unwrap().pop().unwrap();
    mesh_of(1, 2, |mesh| {
        let shard = Shard::even(0, HEADS, &mesh.tp)?;
        let want = floats(&whole.narrow(1, shard.start(), shard.len())?.contiguous()?)?;
        for region in [Region::from(&mesh.tp), Region::sequence_parallel(&mesh.tp)] {
            let [part, _] = probe(&mesh, &region, batch(2, 4)?, of_heads(shard.clone(), 4))?;
            assert_eq!(floats(&part)?, want);
            let [padded, _] = probe(&mesh, &region, batch(2, 6)?, of_heads(shard.clone(), 6))?;
            let padded = padded.narrow(D::Minus1, 0, 4)?.narrow(D::Minus2, 0, 4)?;
            assert_eq!(floats(&padded.contiguous()?)?, want);
        }
        Ok(())
    });
}

/// Four rows of which a rank of three has two, two and none; context-parallel ranks have four of eight.
#[test]
fn ranks_drop_of_their_rows_what_the_whole_drops() {
    let see = |region: Region| {
        move |pass: &Pass| {
            let (b, t) = pass.dims()?;
            let (b, t) = region.dims_outside(b, t);
            pass.dropout(&ones(&[b, t, 20])?, 0.5, "rows", &region)
        }
    };
    for (cp, tp, num) in [(1, 3, 1), (2, 1, 2), (2, 2, 2)] {
        let parts = Mutex::new(Vec::new());
        for (cp, tp) in [(1, 1), (cp, tp)] {
            mesh_of(cp, tp, |mesh| {
                let region = Region::sequence_parallel(&mesh.tp);
                let [seen, _] = probe(&mesh, &region, batch(num, 4)?, see(region.clone()))?;
                let rows = floats(&seen)?;
                parts
                    .lock()
                    .unwrap()
                    .push(rows.chunks(20).map(Vec::from).collect());
                Ok(())
            });
        }
        let mut parts: Vec<Vec<Vec<f32>>> = parts.into_inner().unwrap();
        let mut whole = parts.remove(0);
        let mut parts = parts.concat();
        let by_bits = |a: &Vec<f32>, b: &Vec<f32>| a.partial_cmp(b).unwrap();
        whole.sort_by(by_bits);
        parts.sort_by(by_bits);
        assert_eq!(parts, whole, "cp {cp} tp {tp}");
    }
}

#[test]
fn rows_that_are_not_those_of_the_pass_are_an_error() {
    let fails = |mesh: &Mesh, region: &Region, see: Box<See>, words: &[&str]| -> Result<()> {
        let see = Arc::new(see);
        let said = probe(mesh, region, batch(1, 4)?, move |pass| see(pass));
        assert_says(
            &message(said),
            &[&["forward pass of block 1", "dropout x"], words].concat(),
        );
        Ok(())
    };
    mesh_of(1, 2, |mesh| {
        let (tp, plain) = (mesh.tp.clone(), Region::from(&mesh.tp));
        let divided = Region::sequence_parallel(&mesh.tp);
        // One sequence: a rank's rows of it look like a shorter one.
        let other = tp.clone();
        let own = move |pass: &Pass| pass.dropout(&ones(&[1, 2, 5])?, 0.5, "x", &other);
        fails(
            &mesh,
            &divided,
            Box::new(own),
            &["[1, 2, 5]", "(1, 4, ..)", "with_region"],
        )?;
        let region = divided.clone();
        let inside = move |pass: &Pass| pass.dropout(&ones(&[1, 4, 5])?, 0.5, "x", &region);
        fails(
            &mesh,
            &divided,
            Box::new(inside),
            &["[1, 4, 5]", "(1, 2, ..)", "dropout_sharded"],
        )?;
        let other = tp.clone();
        let samples = move |pass: &Pass| pass.dropout(&ones(&[3, 5])?, 0.5, "x", &other);
        fails(
            &mesh,
            &plain,
            Box::new(samples),
            &["[3, 5]", "1 samples in dim 0, or 4 rows"],
        )?;
        let shard = Shard::even(0, 10, &tp)?;
        let of_samples =
            move |pass: &Pass| pass.dropout_sharded(&ones(&[1, 4, 5])?, 0.5, "x", &shard);
        fails(
            &mesh,
            &plain,
            Box::new(of_samples),
            &["dim 0", "shard.along(2)"],
        )?;
        let shard = Shard::even(2, 10, &tp)?;
        let long = move |pass: &Pass| pass.dropout_sharded(&ones(&[1, 4, 10])?, 0.5, "x", &shard);
        fails(
            &mesh,
            &plain,
            Box::new(long),
            &["[1, 4, 10]", "expected 5 indices of dim 2", "part of 10"],
        )?;
        let shard = Shard::even(2, 10, &tp)?;
        let region = divided.clone();
        let entered = move |pass: &Pass| {
            let whole = regions::enter(&ones(&[1, 3, 5])?, &region, pass)?;
            pass.dropout_sharded(&whole, 0.5, "x", &shard)
        };
        let said = message(probe(&mesh, &divided, batch(1, 4)?, entered));
        assert_says(&said, &["[1, 3, 5]", "expected 2 rows"]);
        let plain_region = plain.clone();
        let of_group = move |pass: &Pass| regions::enter(&ones(&[1, 2, 5])?, &plain_region, pass);
        let said = message(probe(&mesh, &divided, batch(1, 4)?, of_group));
        assert_says(&said, &["[1, 2, 5]", "all 4 rows", "with_region"]);
        let region = divided.clone();
        let left = move |pass: &Pass| regions::leave(&ones(&[1, 3, 5])?, &region, pass);
        let said = message(probe(&mesh, &divided, batch(1, 4)?, left));
        assert_says(&said, &["[1, 3, 5]", "all 4 rows"]);
        Ok(())
    });
    mesh_of(2, 1, |mesh| {
        // Heads are where context-parallel ranks have rows.
        let shard = Shard::new(1, 0..2, 2);
        let heads = move |pass: &Pass| pass.dropout_sharded(&ones(&[1, 2, 5])?, 0.5, "x", &shard);
        fails(
            &mesh,
            &Region::from(&mesh.tp),
            Box::new(heads),
            &["[1, 2, 5]", "(1, 2, ..)"],
        )
    });
}

type See = dyn Fn(&Pass) -> Result<Tensor> + Send + Sync;
