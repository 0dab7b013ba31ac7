//! Forward and gradients to the rounding errors of f32.

use crate::check::{
    EXP_ROUNDINGS, assert_close, at_most, doubles, floats, grads, on_each_device, random,
    random_var, rounding_error,
};
use candle_core::{Result, Tensor, Var};
use candle_ops::{HeadGroups, causal_attention};

struct Case {
    b: usize,
    t: usize,
    hq: usize,
    hkv: usize,
    d: usize,
    groups: HeadGroups,
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
    }
}

const CASES: [Case; 13] = [
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
];

impl Case {
    fn scale(&self) -> f64 {
        1.0 / (self.d as f64).sqrt()
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
    /// probabilities. Values are sums over the positions, gradients over those of the blocks of each head too.
    fn bounds(&self) -> [f64; 2] {
        let scores = 4 * self.d + EXP_ROUNDINGS;
        let queries = self.t.max(32.min(self.t) * self.groups.size);
        [
            rounding_error(scores + self.t),
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
        } = *self;
        let (mut out, mut dq) = (vec![0.0; q.len()], vec![0.0; q.len()]);
        let (mut dk, mut dv) = (vec![0.0; k.len()], vec![0.0; k.len()]);
        let dot = |x: &[f64], y: &[f64]| -> f64 { x.iter().zip(y).map(|(x, y)| x * y).sum() };
        let heads = (0..b).flat_map(|b| (0..hq).map(move |head| (b, head)));
        for ((b, head), i) in heads.flat_map(|at| (0..t).map(move |i| (at, i))) {
            let kv_head = (groups.offset + head) / groups.size;
            let at_q = ((b * t + i) * hq + head) * d;
            let at_kv = |j: usize| ((b * t + j) * hkv + kv_head) * d;
            let (q_i, grad_i) = (&q[at_q..][..d], &grad[at_q..][..d]);
            let exps: Vec<f64> = (0..=i)
                .map(|j| (dot(q_i, &k[at_kv(j)..][..d]) * self.scale()).exp())
                .collect();
            let sum: f64 = exps.iter().sum();
            let p: Vec<f64> = exps.iter().map(|x| x / sum).collect();
            let dp: Vec<f64> = (0..=i).map(|j| dot(grad_i, &v[at_kv(j)..][..d])).collect();
            let along_p = dot(&p, &dp);
            for j in 0..=i {
                let ds = p[j] * (dp[j] - along_p) * self.scale();
                for c in 0..d {
                    out[at_q + c] += p[j] * v[at_kv(j) + c];
                    dq[at_q + c] += ds * k[at_kv(j) + c];
                    dk[at_kv(j) + c] += ds * q_i[c];
                    dv[at_kv(j) + c] += p[j] * grad_i[c];
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
            let out = causal_attention(&q, &k, &v, case.scale() as f32, case.groups)?;
            let inputs = [doubles(&q)?, doubles(&k)?, doubles(&v)?, doubles(&grad)?];
            let want = case.reference([&inputs[0], &inputs[1], &inputs[2], &inputs[3]]);
            let what = format!("t {} hq {} hkv {} d {}", case.t, case.hq, case.hkv, case.d);
            let [out_bound, grad_bound] = case.bounds();
            assert_close(&format!("out, {what}"), &out, &want[0], out_bound);
            let [dq, dk, dv] = grads(&out, &grad, [&q, &k, &v])?;
            assert_close(&format!("dv, {what}"), &dv, &want[3], grad_bound);
            // With one position the probability is 1 whatever the score: these gradients are rounding errors of 0.
            if case.t > 1 {
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
        let call = |q: &Tensor, k: &Tensor, v: &Tensor| {
            causal_attention(q, k, v, case.scale() as f32, case.groups)
        };
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
        let out = causal_attention(&q, &k, &v, 1e4, case.groups)?;
        let grad = out.ones_like()?.detach();
        for tensor in [
            vec![out.clone()],
            grads(&out, &grad, [&q, &k, &v])?.to_vec(),
        ]
        .concat()
        {
            assert!(floats(&tensor)?.iter().all(|x| x.is_finite()));
        }
        Ok(())
    })
}
