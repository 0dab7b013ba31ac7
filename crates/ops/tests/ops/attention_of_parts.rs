//! Attention to parts of the keys, put together, against the definition over all of them: random sequences, documents and windows, cut at random.

use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{
    AttentionGrad, AttentionRows, AttentionSpec, DocumentStarts, HeadGroups, Run, Runs,
    attention_backward_of_part, attention_delta, attention_of_part, merge_attention,
};
use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

use crate::attention_reference::{
    Attention, both_passes, documents, random_starts, types_summed_in_f32,
};
use crate::check::{at_most, device, in_dtype, on_each_device, random};

/// What goes wrong elsewhere.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    None,
    /// The sum along the probabilities is that of each part.
    DeltaOfPart,
    /// The last part of the keys is left out in the backward pass.
    OnePartLess,
    /// A query that sees no key of a part counts as one whose scores sum to 1.
    RowsWithoutKey,
}

struct Case {
    b: usize,
    t: usize,
    hq: usize,
    hkv: usize,
    d: usize,
    window: Option<usize>,
    runs: Runs,
    starts: Vec<usize>,
    queries: Vec<Vec<u32>>,
    keys: Vec<Vec<u32>>,
}

/// The rows dealt to as many parts: some get none, some one.
fn dealt(num_rows: usize, rng: &mut ChaCha8Rng) -> Vec<Vec<u32>> {
    let mut parts = vec![Vec::new(); rng.random_range(1..=5)];
    let (mut row, num_parts) = (0, parts.len());
    while row < num_rows {
        let len = rng.random_range(1..=9).min(num_rows - row);
        parts[rng.random_range(0..num_parts)].extend((row..row + len).map(|row| row as u32));
        row += len;
    }
    if !device().is_cpu() {
        // candle has no tensors of nothing there.
        parts.retain(|part| !part.is_empty());
    }
    parts
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (b, t) = (rng.random_range(1..=3), rng.random_range(1..=45));
        let (hkv, size) = (rng.random_range(1..=2), rng.random_range(1..=3));
        let longest = rng.random_range(1..=t);
        let mut starts = random_starts(&mut rng, b, t, longest);
        let is_packed = rng.random_bool(0.6);
        if !is_packed {
            starts.fill(0);
        }
        let runs = match is_packed {
            true => Runs::from(&documents(&starts, t)),
            false => Runs::sequences(b, t),
        };
        let window = rng.random_bool(0.4).then(|| rng.random_range(1..=t));
        Self {
            b,
            t,
            hq: hkv * size,
            hkv,
            d: 2 * rng.random_range(1..=5),
            window,
            runs,
            starts,
            queries: dealt(b * t, &mut rng),
            keys: dealt(b * t, &mut rng),
        }
    }

    fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            window: self.window,
            ..AttentionSpec::new(0.7, HeadGroups::new(self.hq / self.hkv))
        }
    }

    /// `[out, lse, dq, dk, dv]` by the definition, as rows of all heads.
    fn reference(&self, [q, k, v, grad]: [&[f64]; 4]) -> [Vec<f64>; 5] {
        let attention = Attention {
            t: self.t,
            hq: self.hq,
            hkv: self.hkv,
            d: self.d,
            groups: self.spec().groups,
            window: self.window.unwrap_or(self.t),
            scale: f64::from(0.7f32),
            starts: self.starts.clone(),
        };
        let [out, lse] = attention.forward([q, k, v]);
        let [dq, dk, dv] = attention.backward([q, k, v], [&out, grad]);
        [out, lse, dq, dk, dv]
    }

    /// `[out, lse, dq, dk, dv]` from parts, as rows of all heads.
    fn by_parts(&self, [q, k, v, grad]: [&Tensor; 4], mistake: Mistake) -> Result<[Vec<f64>; 5]> {
        let rows_of = |xs: &Tensor, rows: &[u32]| -> Result<Tensor> {
            let (b, t, h, d) = xs.dims4()?;
            let rows = Tensor::new(rows, xs.device())?;
            xs.reshape((b * t, h, d))?
                .index_select(&rows, 0)?
                .unsqueeze(0)
        };
        let zeros = |like: &Tensor| Tensor::zeros(like.shape(), DType::F32, like.device());
        let mut keys = Vec::new();
        for rows in &self.keys {
            let (k, v) = (rows_of(k, rows)?, rows_of(v, rows)?);
            let (dk, dv) = (zeros(&k)?, zeros(&v)?);
            keys.push((k, v, dk, dv, self.runs.take(rows)?));
        }
        let (mut outs, mut lses, mut dqs) = (Vec::new(), Vec::new(), Vec::new());
        for rows in &self.queries {
            let (q, grad) = (rows_of(q, rows)?, rows_of(grad, rows)?);
            let queries = self.runs.take(rows)?;
            let spec_of = |keys: &Runs| {
                self.spec()
                    .with_rows(AttentionRows::new(queries.clone(), keys.clone()))
            };
            let mut all: Option<(Tensor, Tensor)> = None;
            let mut deltas = Vec::new();
            for (k, v, _, _, runs) in &keys {
                let mut part = attention_of_part(&q, k, v, &spec_of(runs))?;
                deltas.push(attention_delta(&part.0, &grad)?);
                if mistake == Mistake::RowsWithoutKey {
                    part.1 = part.1.maximum(0.0)?;
                }
                match &all {
                    None => all = Some(part),
                    Some(all) => merge_attention(all, &part)?,
                }
            }
            let (out, lse) = all.unwrap();
            let delta = attention_delta(&out, &grad)?;
            let mut sums = [zeros(&q)?, zeros(&q)?, zeros(&q)?];
            let num_parts = match mistake {
                Mistake::OnePartLess => keys.len() - 1,
                _ => keys.len(),
            };
            for ((k, v, dk, dv, runs), of_part) in keys.iter().zip(&deltas).take(num_parts) {
                let pass = AttentionGrad {
                    q: &q,
                    k,
                    v,
                    out: Some(&out),
                    log_sum_exp: &lse,
                    grad: &grad,
                };
                let delta = match mistake {
                    Mistake::DeltaOfPart => of_part,
                    _ => &delta,
                };
                sums = [sums[0].clone(), dk.clone(), dv.clone()];
                attention_backward_of_part(&pass, Some(delta), &spec_of(runs), &sums)?;
            }
            outs.push(out);
            lses.push(lse.transpose(1, 2)?.contiguous()?.unsqueeze(3)?);
            dqs.push(sums[0].clone());
        }
        let (dks, dvs): (Vec<_>, Vec<_>) = keys.into_iter().map(|(.., dk, dv, _)| (dk, dv)).unzip();
        Ok([
            in_order(&outs, &self.queries)?,
            in_order(&lses, &self.queries)?,
            in_order(&dqs, &self.queries)?,
            in_order(&dks, &self.keys)?,
            in_order(&dvs, &self.keys)?,
        ])
    }
}

/// The rows of parts as those of the whole.
fn in_order(parts: &[Tensor], rows: &[Vec<u32>]) -> Result<Vec<f64>> {
    let mut all: Vec<(u32, Vec<f32>)> = Vec::new();
    for (part, rows) in parts.iter().zip(rows) {
        let values = part.squeeze(0)?.flatten_from(1)?.to_device(&Device::Cpu)?;
        all.extend(rows.iter().copied().zip(values.to_vec2::<f32>()?));
    }
    all.sort_by_key(|(row, _)| *row);
    Ok(all
        .into_iter()
        .flat_map(|(_, values)| values)
        .map(f64::from)
        .collect())
}

/// The distance of two vectors by the length of the second, or `least` if that is more.
fn error(got: &[f64], want: &[f64], least: f64) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let distance = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
    assert_eq!(got.len(), want.len());
    distance / norm(&mut want.iter().copied()).max(least)
}

#[test]
fn parts_put_together_are_the_whole_and_three_mistakes_are_seen() -> Result<()> {
    on_each_device(|| {
        let mut seen = [0; 3];
        for seed in 0..at_most(60, 2000) as u64 {
            let case = Case::random(seed);
            let (b, t, hq, hkv, d) = (case.b, case.t, case.hq, case.hkv, case.d);
            let types = types_summed_in_f32()?;
            let dtype = types[seed as usize % types.len()];
            let q = in_dtype(&(random(seed, (b, t, hq, d))? * 2.0)?, dtype)?;
            let [k, v] = [1, 2].map(|n| in_dtype(&random(seed + n, (b, t, hkv, d))?, dtype));
            let (k, v) = (k?, v?);
            let grad = in_dtype(&random(seed + 3, (b, t, hq, d))?, dtype)?;
            let inputs = [&q, &k, &v, &grad];
            let doubles = inputs.map(crate::check::doubles).into_iter();
            let doubles = doubles.collect::<Result<Vec<_>>>()?;
            let want = case.reference([&doubles[0], &doubles[1], &doubles[2], &doubles[3]]);
            let least = (t as f64).sqrt();
            let errors = |mistake| -> Result<Vec<f64>> {
                let got = case.by_parts(inputs, mistake)?;
                let pairs = got.iter().zip(&want);
                Ok(pairs.map(|(got, want)| error(got, want, least)).collect())
            };
            let of_parts = errors(Mistake::None)?;
            assert!(
                of_parts.iter().all(|error| *error < 1e-5),
                "{seed}: {of_parts:?}"
            );
            let mistakes = [
                Mistake::DeltaOfPart,
                Mistake::OnePartLess,
                Mistake::RowsWithoutKey,
            ];
            for (mistake, seen) in mistakes.into_iter().zip(&mut seen) {
                let is_right = errors(mistake)?.iter().all(|error| *error < 1e-2);
                *seen += usize::from(!is_right);
            }
            // Some of the queries and all keys: in one piece.
            for rows in &case.queries {
                let take = |xs: &Tensor| -> Result<Tensor> {
                    let rows = Tensor::new(&rows[..], xs.device())?;
                    xs.reshape((b * t, hq, d))?
                        .index_select(&rows, 0)?
                        .unsqueeze(0)
                };
                let (q, grad) = (take(&q)?, take(&grad)?);
                let spec = case
                    .spec()
                    .with_rows(AttentionRows::new(case.runs.take(rows)?, case.runs.clone()));
                let [out, _, dq, _, _] = both_passes([&q, &k, &v, &grad], &spec)?;
                for (got, want) in [(out, &want[0]), (dq, &want[2])] {
                    let rows = rows.iter().map(|row| *row as usize * hq * d);
                    let want: Vec<f64> =
                        rows.flat_map(|at| want[at..][..hq * d].to_vec()).collect();
                    let error = error(&crate::check::doubles(&got)?, &want, least);
                    let bound = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                    assert!(error < bound, "{seed}, {dtype:?}: {error}");
                }
            }
        }
        assert!(
            seen.iter().all(|seen| *seen >= at_most(20, 300)),
            "{seen:?}"
        );
        Ok(())
    })
}

#[test]
fn ranks_have_as_many_tokens_and_pairs_and_all_rows_once() {
    for seed in 0..200 {
        let case = Case::random(seed);
        for num_ranks in [1, 2, 3, 4, 8] {
            let cuts = (0..num_ranks).map(|rank| case.runs.cut(num_ranks, rank));
            let (parts, rows): (Vec<_>, Vec<_>) = cuts.unzip();
            let lens = parts.iter().map(Runs::num_rows);
            let (shortest, longest) = (lens.clone().min().unwrap(), lens.max().unwrap());
            assert!(longest - shortest <= 2, "{shortest} {longest}");
            for (part, rows) in parts.iter().zip(&rows) {
                assert_eq!(
                    *part,
                    if num_ranks == 1 {
                        case.runs.clone()
                    } else {
                        case.runs.take(rows).unwrap()
                    }
                );
                let of_whole: Vec<usize> = case.runs.positions().collect();
                let positions = rows.iter().map(|row| of_whole[*row as usize]);
                assert!(part.positions().eq(positions));
            }
            let (joined, places) = Runs::join(&parts).unwrap();
            let all = rows.concat();
            let in_order = places.iter().map(|place| all[*place as usize]);
            assert!(in_order.eq(0..(case.b * case.t) as u32));
            assert!(joined.positions().eq(case.runs.positions()));
            assert!(
                joined.runs().iter().map(|run| run.len).eq(case
                    .runs
                    .runs()
                    .iter()
                    .map(|run| run.len))
            );
        }
    }
    // Each document of one token goes to another rank.
    let documents = DocumentStarts::new((0..8).collect(), (1, 8)).unwrap();
    let of_rank = |rank| Runs::from(&documents).cut(4, rank).1.len();
    assert_eq!((0..4).map(of_rank).collect::<Vec<_>>(), [2; 4]);
}

#[test]
fn ranks_work_alike_on_packs_of_chat_data() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for num_ranks in [2, 4, 8] {
        for _ in 0..50 {
            // Lengths whose logarithms are normal, by twelve uniform numbers; their median is 400.
            let mut starts = Vec::new();
            while starts.len() < 4096 {
                let normal = (0..12).map(|_| rng.random::<f64>()).sum::<f64>() - 6.0;
                let len = ((400.0 * normal.exp()) as usize).clamp(1, 4096 - starts.len());
                starts.extend(std::iter::repeat_n(starts.len() as u32, len));
            }
            let documents = DocumentStarts::new(starts, (1, 4096)).unwrap();
            let runs = Runs::from(&documents);
            let pairs = (0..num_ranks).map(|rank| {
                let rows = AttentionRows::new(runs.cut(num_ranks, rank).0, runs.clone());
                rows.num_pairs(None) as f64
            });
            let pairs: Vec<f64> = pairs.collect();
            let mean = pairs.iter().sum::<f64>() / num_ranks as f64;
            let most = pairs.iter().copied().fold(0.0, f64::max);
            assert!(most <= 1.02 * mean, "{num_ranks} ranks: {}", most / mean);
        }
    }
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let runs = Runs::sequences(2, 3);
    assert_eq!(
        runs.runs()[1],
        Run {
            document: 1,
            start: 0,
            len: 3
        }
    );
    for rows in [&[0, 0][..], &[2, 1], &[6]] {
        assert!(
            runs.take(rows)
                .unwrap_err()
                .to_string()
                .contains("ascending numbers of 6 rows")
        );
    }
    let other = Runs::join(&[runs, Runs::sequences(3, 2)]).unwrap_err();
    assert!(other.to_string().contains("other sequences"), "{other}");
}
