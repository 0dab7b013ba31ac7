//! Causal attention in f64 by its definition, with whole rows of scores.

use crate::check::{assert_slopes, device, doubles, random};
use candle_core::{DType, Result, Tensor};
use candle_ops::{
    AttentionCode, AttentionGrad, AttentionSpec, DocumentStarts, HeadGroups, attention_backward,
    attention_forward,
};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Queries of `starts.len()` rows, in sequences of `t`, and as many keys; values are `(rows, heads, d)`.
pub struct Attention {
    pub t: usize,
    pub hq: usize,
    pub hkv: usize,
    pub d: usize,
    pub groups: HeadGroups,
    pub window: usize,
    pub scale: f64,
    /// Where the document of each row begins in its sequence.
    pub starts: Vec<usize>,
}

/// What a head of a row sees.
struct Seen {
    /// Where its query is, and its output.
    query: usize,
    /// Where the keys are, and the values.
    keys: Vec<usize>,
    probabilities: Vec<f64>,
    log_sum_exp: f64,
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

fn add(to: &mut [f64], factor: f64, x: &[f64]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
}

impl Attention {
    fn seen<'a>(&'a self, q: &'a [f64], k: &'a [f64]) -> impl Iterator<Item = Seen> + 'a {
        let &Self { t, hq, hkv, d, .. } = self;
        let heads = (0..self.starts.len()).flat_map(move |row| (0..hq).map(move |h| (row, h)));
        heads.map(move |(row, head)| {
            let query = (row * hq + head) * d;
            let head = (self.groups.offset + head) / self.groups.size;
            let first = (row % t + 1).saturating_sub(self.window);
            let seen = first.max(self.starts[row])..row % t + 1;
            let keys = seen.map(|j| ((row / t * t + j) * hkv + head) * d);
            let keys: Vec<usize> = keys.collect();
            let scores = keys
                .iter()
                .map(|&key| self.scale * dot(&q[query..][..d], &k[key..][..d]));
            let scores: Vec<f64> = scores.collect();
            let log_sum_exp = scores.iter().map(|score| score.exp()).sum::<f64>().ln();
            let probabilities = scores.iter().map(|score| (score - log_sum_exp).exp());
            Seen {
                query,
                keys,
                probabilities: probabilities.collect(),
                log_sum_exp,
            }
        })
    }

    /// The output, and the log-sum-exps `(rows, heads)`.
    pub fn forward(&self, [q, k, v]: [&[f64]; 3]) -> [Vec<f64>; 2] {
        let mut out = vec![0.0; q.len()];
        let log_sum_exps = self.seen(q, k).map(|seen| {
            for (&key, p) in seen.keys.iter().zip(&seen.probabilities) {
                add(&mut out[seen.query..][..self.d], *p, &v[key..][..self.d]);
            }
            seen.log_sum_exp
        });
        let log_sum_exps = log_sum_exps.collect();
        [out, log_sum_exps]
    }

    /// The gradients of q, k and v, from the output as it was stored and its gradient.
    pub fn backward(&self, [q, k, v]: [&[f64]; 3], [out, grad]: [&[f64]; 2]) -> [Vec<f64>; 3] {
        let [mut dq, mut dk, mut dv] = [q, k, v].map(|values| vec![0.0; values.len()]);
        let d = self.d;
        for seen in self.seen(q, k) {
            let at = seen.query;
            let delta = dot(&grad[at..][..d], &out[at..][..d]);
            for (&key, p) in seen.keys.iter().zip(&seen.probabilities) {
                let ds = self.scale * p * (dot(&grad[at..][..d], &v[key..][..d]) - delta);
                add(&mut dq[at..][..d], ds, &k[key..][..d]);
                add(&mut dk[key..][..d], ds, &q[at..][..d]);
                add(&mut dv[key..][..d], *p, &grad[at..][..d]);
            }
        }
        [dq, dk, dv]
    }
}

/// Where the document of each row begins in its sequence: of random lengths, cut anew in each of `b` sequences.
pub fn random_starts(rng: &mut ChaCha8Rng, b: usize, t: usize, longest: usize) -> Vec<usize> {
    let mut starts = Vec::new();
    for _ in 0..b {
        let first = starts.len();
        while starts.len() - first < t {
            let start = starts.len() - first;
            let len = rng.random_range(1..=longest).min(t - start);
            starts.extend(std::iter::repeat_n(start, len));
        }
    }
    starts
}

/// The documents of these.
pub fn documents(starts: &[usize], t: usize) -> DocumentStarts {
    let rows = starts.iter().map(|start| *start as u32).collect();
    DocumentStarts::new(rows, (starts.len() / t, t)).expect("starts of documents")
}

/// The output, the log-sum-exps `(b, heads, t)`, and the gradients of q, k and v, outside any graph.
pub fn both_passes([q, k, v, grad]: [&Tensor; 4], spec: &AttentionSpec) -> Result<[Tensor; 5]> {
    let (out, log_sum_exp) = attention_forward(q, k, v, spec)?;
    let pass = AttentionGrad {
        q,
        k,
        v,
        out: Some(&out),
        log_sum_exp: &log_sum_exp,
        grad,
    };
    let (dq, dk, dv) = attention_backward(&pass, spec)?;
    Ok([out, log_sum_exp, dq, dk, dv])
}

/// The types that attention on this device computes with in f32, but for the last rounding: cuDNN and the CPU round
/// probabilities, too.
pub fn types_summed_in_f32() -> Result<Vec<DType>> {
    let mut types = vec![DType::F32];
    for dtype in [DType::BF16, DType::F16] {
        if AttentionCode::of_whole(&device(), dtype)? == AttentionCode::Own {
            types.push(dtype);
        }
    }
    Ok(types)
}

#[test]
fn the_gradients_are_the_slopes_of_the_output() -> Result<()> {
    let attention = Attention {
        t: 6,
        hq: 3,
        hkv: 2,
        d: 2,
        groups: HeadGroups { size: 2, offset: 1 },
        window: 4,
        scale: 0.7,
        starts: vec![0, 0, 0, 0, 0, 5],
    };
    let random = |seed, heads: usize| doubles(&random(seed, 12 * heads)?);
    let (inputs, grad) = ([random(1, 3)?, random(2, 2)?, random(3, 2)?], random(4, 3)?);
    let output = |inputs: &[Vec<f64>; 3]| {
        let [out, _] = attention.forward(inputs.each_ref().map(|x| &x[..]));
        out
    };
    let out = output(&inputs);
    let gradients = attention.backward(inputs.each_ref().map(|x| &x[..]), [&out, &grad]);
    assert_slopes(gradients, inputs, |inputs| dot(&output(inputs), &grad));
    Ok(())
}
