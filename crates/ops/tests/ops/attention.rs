//! Forward and gradients to the rounding errors of f32.

use crate::check::{
    EXP_ROUNDINGS, assert_close, at_most, doubles, floats, grads, in_dtype, on_each_device, random,
    random_var, rounding_error,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_ops::{
    AttentionGrad, AttentionSpec, DocumentStarts, HeadGroups, attention_backward,
    attention_forward, causal_attention,
};
use rand::Rng;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

struct Case {
    b: usize,
    t: usize,
    hq: usize,
    hkv: usize,
    d: usize,
    groups: HeadGroups,
    window: Option<usize>,
    /// Longest document.
    longest: Option<usize>,
}

const fn case(
    b: usize,
    t: usize,
    hq: usize,
    hkv: usize,
    d: usize,
    size: usize,
    offset: usize,
) -> Case {
    Case {
        b,
        t,
        hq,
        hkv,
        d,
        groups: HeadGroups { size, offset },
        window: None,
        longest: None,
    }
}

const fn windowed(window: usize, case: Case) -> Case {
    Case {
        window: Some(window),
        ..case
    }
}

const fn of_documents(longest: usize, case: Case) -> Case {
    Case {
        longest: Some(longest),
        ..case
    }
}

const CASES: [Case; 31] = [
    case(1, 1, 1, 1, 16, 1, 0),
    case(2, 2, 2, 2, 48, 1, 0),
    case(1, 127, 4, 1, 64, 4, 0),
    case(2, 127, 6, 2, 16, 3, 0),
    case(1, 64, 2, 1, 48, 2, 0),
    case(1, 65, 3, 2, 48, 2, 1),
    case(2, 130, 5, 3, 16, 2, 1),
    case(1, 9, 2, 1, 16, 8, 5),
    case(1, 1000, 3, 1, 16, 3, 0),
    case(1, 1000, 1, 1, 128, 1, 0),
    case(2, 1, 4, 1, 128, 4, 0),
    case(1, 2, 3, 1, 64, 3, 0),
    case(1, 5, 2, 3, 16, 1, 0),
    windowed(1, case(1, 1, 1, 1, 16, 1, 0)),
    windowed(1, case(2, 127, 4, 2, 32, 2, 0)),
    windowed(2, case(1, 2, 3, 1, 64, 3, 0)),
    windowed(2, case(1, 129, 3, 2, 48, 2, 1)),
    windowed(16, case(1, 129, 2, 1, 128, 2, 0)),
    windowed(33, case(2, 200, 4, 1, 64, 4, 0)),
    windowed(64, case(1, 200, 5, 3, 16, 2, 1)),
    windowed(100, case(1, 1000, 1, 1, 128, 1, 0)),
    windowed(129, case(1, 1000, 3, 1, 16, 3, 0)),
    windowed(usize::MAX, case(1, 127, 2, 2, 16, 1, 0)),
    of_documents(1, case(2, 65, 2, 1, 16, 2, 0)),
    of_documents(5, case(3, 127, 4, 2, 48, 2, 0)),
    of_documents(40, case(2, 200, 3, 2, 48, 2, 1)),
    of_documents(90, case(2, 260, 4, 1, 64, 4, 0)),
    of_documents(300, case(1, 1000, 3, 1, 16, 3, 0)),
    of_documents(1000, case(1, 1000, 1, 1, 128, 1, 0)),
    of_documents(60, windowed(17, case(2, 200, 4, 1, 64, 4, 0))),
    of_documents(9, windowed(33, case(3, 129, 5, 3, 16, 2, 1))),
];

impl Case {
    fn scale(&self) -> f64 {
        1.0 / (self.d as f64).sqrt()
    }

    fn spec(&self) -> AttentionSpec {
        AttentionSpec {
            scale: self.scale() as f32,
            groups: self.groups,
            window: self.window,
            rows: self.documents().map(Into::into),
        }
    }

    /// Some of each length up to the longest, cut anew in each sequence.
    fn documents(&self) -> Option<DocumentStarts> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.t as u64);
        let mut starts = Vec::new();
        for _ in 0..self.b {
            let first = starts.len();
            while starts.len() - first < self.t {
                let start = starts.len() - first;
                let len = rng.random_range(1..=self.longest?).min(self.t - start);
                starts.extend(std::iter::repeat_n(start as u32, len));
            }
        }
        Some(DocumentStarts::new(starts, (self.b, self.t)).unwrap())
    }

    fn inputs(&self) -> Result<[Var; 3]> {
        let (q, kv) = (
            (self.b, self.t, self.hq, self.d),
            (self.b, self.t, self.hkv, self.d),
        );
        // Scores of a few units, so that the probabilities are far from uniform.
        let q = (random(1, q)? * 6.0)?;
        Ok([
            Var::from_tensor(&q)?,
            random_var(2, kv)?,
            random_var(3, kv)?,
        ])
    }

    /// Scaled scores have a root mean square of 2: an error of theirs, that of a sum of d products, is one of the
    /// probabilities. Values are sums over the positions that are seen, gradients over those of the blocks of each head too.
    fn bounds(&self) -> [f64; 2] {
        let scores = 4 * self.d + EXP_ROUNDINGS;
        let seen = self.window.unwrap_or(self.t).min(self.t);
        let queries = seen.max(32.min(seen) * self.groups.size);
        [
            rounding_error(scores + seen),
            rounding_error(scores + self.d + queries),
        ]
    }

    /// `[out, dq, dk, dv]`, by the definition.
    fn reference(&self, [q, k, v, grad]: [&[f64]; 4]) -> [Vec<f64>; 4] {
        let Case {
            b,
            t,
            hq,
            hkv,
            d,
            groups,
            window,
            ..
        } = *self;
        let documents = self.documents();
        let starts = documents.as_ref().map(DocumentStarts::starts);
        let (mut out, mut dq) = (vec![0.0; q.len()], vec![0.0; q.len()]);
        let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; k.len()]);
        let dot = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
        let heads = (0..b).flat_map(|b| (0..hq).map(move |head| (b, head)));
        for ((b, head), i) in heads.flat_map(|at| (0..t).map(move |i| (at, i))) {
            let kv_head = (groups.offset + head) / groups.size;
            let at_q = ((b * t + i) * hq + head) * d;
            let at_kv = |j: usize| ((b * t + j) * hkv + kv_head) * d;
            let start = starts.map_or(0, |starts| starts[b * t + i] as usize);
            let seen = (i + 1).saturating_sub(window.unwrap_or(t)).max(start)..i + 1;
            let (q_i, grad_i) = (&q[at_q..][..d], &grad[at_q..][..d]);
            let exps: Vec<f64> = seen
                .clone()
                .map(|j| (dot(q_i, &k[at_kv(j)..][..d]) * self.scale()).exp())
                .collect();
            let sum: f64 = exps.iter().sum();
            let p: Vec<f64> = exps.iter().map(|x| x / sum).collect();
            let dp: Vec<f64> = seen
                .clone()
                .map(|j| dot(grad_i, &v[at_kv(j)..][..d]))
                .collect();
            let along_p = dot(&p, &dp);
            for ((j, p), dp) in seen.zip(p).zip(dp) {
                let ds = p * (dp - along_p) * self.scale();
                for c in 0..d {
                    out[at_q + c] += p * v[at_kv(j) + c];
                    dq[at_q + c] += ds * k[at_kv(j) + c];
                    dk[at_kv(j) + c] += ds * q_i[c];
                    dv[at_kv(j) + c] += p * grad_i[c];
                }
            }
        }
        [out, dq, dk, dv]
    }
}

#[test]
fn matches_the_reference() -> Result<()> {
    on_each_device(|| {
        for case in CASES {
            let case = Case {
                t: at_most(260, case.t),
                ..case
            };
            let [q, k, v] = case.inputs()?;
            let grad = random(4, q.shape())?;
            let out = causal_attention(&q, &k, &v, &case.spec())?;
            let inputs = [doubles(&q)?, doubles(&k)?, doubles(&v)?, doubles(&grad)?];
            let want = case.reference([&inputs[0], &inputs[1], &inputs[2], &inputs[3]]);
            let what = format!(
                "t {} hq {} hkv {} d {} window {:?}, documents of up to {:?}",
                case.t, case.hq, case.hkv, case.d, case.window, case.longest
            );
            let [out_bound, grad_bound] = case.bounds();
            assert_close(&format!("out, {what}"), &out, &want[0], out_bound);
            let [dq, dk, dv] = grads(&out, &grad, [&q, &k, &v])?;
            assert_close(&format!("dv, {what}"), &dv, &want[3], grad_bound);
            // With one position that is seen the probability is 1 whatever the score: these gradients are rounding errors of 0.
            if case.t > 1 && case.window != Some(1) && case.longest != Some(1) {
                assert_close(&format!("dq, {what}"), &dq, &want[1], grad_bound);
                assert_close(&format!("dk, {what}"), &dk, &want[2], grad_bound);
            } else {
                assert!(
                    floats(&dq)?
                        .iter()
                        .chain(&floats(&dk)?)
                        .all(|x| x.abs() < 1e-5)
                );
            }
        }
        Ok(())
    })
}

#[test]
fn heads_of_views_that_are_not_contiguous() -> Result<()> {
    on_each_device(|| {
        let case = &CASES[3];
        let [q, k, v] = case.inputs()?;
        let call = |q: &Tensor, k: &Tensor, v: &Tensor| causal_attention(q, k, v, &case.spec());
        let turned = q.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
        assert!(!turned.is_contiguous());
        assert_eq!(
            floats(&call(&q, &k, &v)?)?,
            floats(&call(&turned, &k, &v)?)?
        );
        Ok(())
    })
}

#[test]
fn scores_far_from_zero_stay_finite() -> Result<()> {
    on_each_device(|| {
        let case = &CASES[2];
        let [q, k, v] = case.inputs()?;
        for window in [None, Some(5)] {
            let spec = AttentionSpec {
                scale: 1e4,
                window,
                ..case.spec()
            };
            let out = causal_attention(&q, &k, &v, &spec)?;
            let grad = out.ones_like()?.detach();
            for tensor in [
                vec![out.clone()],
                grads(&out, &grad, [&q, &k, &v])?.to_vec(),
            ]
            .concat()
            {
                assert!(floats(&tensor)?.iter().all(|x| x.is_finite()));
            }
        }
        Ok(())
    })
}

#[test]
fn a_window_of_all_positions_has_the_bits_of_none() -> Result<()> {
    on_each_device(|| {
        for (t, dtype) in [1, 2, 127, 129, 200]
            .into_iter()
            .flat_map(|t| [DType::F32, DType::BF16, DType::F16].map(|dtype| (t, dtype)))
        {
            let case = case(1, t, 4, 2, 24, 2, 0);
            let [q, k, v] = case.inputs()?;
            let grad = random(4, q.shape())?;
            let [q, k, v, grad] = [q.as_tensor(), &k, &v, &grad].map(|x| in_dtype(x, dtype));
            let (q, k, v, grad) = (q?, k?, v?, grad?);
            let bits = |window| -> Result<Vec<Vec<f32>>> {
                let spec = AttentionSpec {
                    window,
                    ..case.spec()
                };
                let (out, log_sum_exp) = attention_forward(&q, &k, &v, &spec)?;
                let pass = AttentionGrad {
                    q: &q,
                    k: &k,
                    v: &v,
                    out: Some(&out),
                    log_sum_exp: &log_sum_exp,
                    grad: &grad,
                };
                let (dq, dk, dv) = attention_backward(&pass, &spec)?;
                [&out, &log_sum_exp, &dq, &dk, &dv]
                    .map(floats)
                    .into_iter()
                    .collect()
            };
            let all = bits(None)?;
            for window in [t, t + 1, usize::MAX] {
                assert!(bits(Some(window))? == all, "t {t} window {window}");
            }
            if t > 1 {
                assert!(bits(Some(t - 1))? != all, "t {t}: the last query sees all");
            }
        }
        Ok(())
    })
}

#[test]
fn one_document_has_the_bits_of_none_and_no_document_reads_another() -> Result<()> {
    on_each_device(|| {
        let case = case(2, 150, 4, 2, 24, 2, 0);
        let [q, k, v] = case.inputs()?;
        let grad = random(4, q.shape())?;
        let bits = |k: &Tensor, starts: Option<Vec<u32>>| -> Result<Vec<Vec<f32>>> {
            let documents = starts.map(|starts| DocumentStarts::new(starts, (2, 150)));
            let spec = AttentionSpec {
                rows: documents.transpose()?.map(Into::into),
                ..case.spec()
            };
            let (out, log_sum_exp) = attention_forward(&q, k, &v, &spec)?;
            let pass = AttentionGrad {
                q: &q,
                k,
                v: &v,
                out: Some(&out),
                log_sum_exp: &log_sum_exp,
                grad: &grad,
            };
            let (dq, dk, dv) = attention_backward(&pass, &spec)?;
            [&out, &log_sum_exp, &dq, &dk, &dv]
                .map(floats)
                .into_iter()
                .collect()
        };
        assert!(bits(&k, None)? == bits(&k, Some(vec![0; 300]))?);
        // The second document of the first sequence, from 70 on, does not see the keys before it.
        let two = [vec![0; 70], vec![70; 80], vec![0; 150]].concat();
        let other = Tensor::cat(&[random(5, (2, 70, 2, 24))?, k.narrow(1, 70, 80)?], 1)?;
        let [was, is] = [k.as_tensor(), &other].map(|k| bits(k, Some(two.clone())));
        let (was, is) = (was?, is?);
        let own = (70 * 4 * 24)..(150 * 4 * 24);
        assert!(was[0][own.clone()] == is[0][own.clone()], "the output");
        assert!(was[2][own.clone()] == is[2][own], "the gradient of q");
        assert!(was[0] != is[0]);
        Ok(())
    })
}
