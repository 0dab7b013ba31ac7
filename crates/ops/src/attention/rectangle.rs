//! Attention to keys of other ranks by code that knows whole sequences only: where documents are not packed, the queries of a rank that see any of
//! another's keys are its last ones, and each sees the same keys.

use candle_core::{Result, Tensor};

use super::runs::AttentionRows;
use super::spec::AttentionGrad;

/// Of each of several sequences as many queries and keys, of which the queries from `first_query` on see the keys up to `num_seen`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rectangle {
    /// Sequences.
    pub(crate) b: usize,
    /// Rows of queries of a sequence, and of keys.
    pub(crate) num_queries: usize,
    pub(crate) num_keys: usize,
    /// Query of a sequence that is the first to see any key.
    pub(crate) first_query: usize,
    /// Keys of a sequence that are seen.
    pub(crate) num_seen: usize,
    pub(crate) mask: Mask,
}

/// What a query sees of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mask {
    /// Those of its own number and before.
    Causal,
    /// All.
    Full,
}

/// Output and log-sum-exp.
type Attended = (Tensor, Tensor);

impl AttentionRows {
    /// The rows as such rectangles, if that is what they are, with a window that hides none of them.
    pub(crate) fn rectangle(&self, window: Option<usize>) -> Option<Rectangle> {
        let sequences = self.sequences();
        let first = sequences.first()?;
        let (num_queries, num_keys) = (first.queries.len(), first.keys.len());
        let seen = self.seen(window);
        let of_first = &seen[first.queries.clone()];
        let first_query = of_first.iter().position(|seen| !seen.is_empty())?;
        let num_seen = of_first.last()?.end as usize;
        let of_query = |mask, query: usize| match mask {
            Mask::Causal => 0..(query - first_query + 1) as u32,
            Mask::Full => 0..num_seen as u32,
        };
        let is = |mask: &Mask| {
            sequences.iter().all(|rows| {
                let seen = &seen[rows.queries.clone()];
                let is_like_first =
                    (rows.queries.len(), rows.keys.len()) == (num_queries, num_keys);
                let mut queries = seen.iter().enumerate();
                is_like_first
                    && queries.all(|(query, seen)| match query < first_query {
                        true => seen.is_empty(),
                        false => *seen == of_query(*mask, query),
                    })
            })
        };
        let mask = [Mask::Full, Mask::Causal].into_iter().find(is)?;
        Some(Rectangle {
            b: sequences.len(),
            num_queries,
            num_keys,
            first_query,
            num_seen,
            mask,
        })
    }
}

impl Rectangle {
    /// Attention of `q` to `k` and `v`, whose rows are this one's: in the type of q, and the log-sum-exp of each row of scores. `attend` computes that of
    /// `(b, t, hq, d)` to `(b, tk, hkv, d)`, where it can.
    pub(crate) fn forward(
        &self,
        [q, k, v]: [&Tensor; 3],
        attend: impl FnOnce([&Tensor; 3]) -> Result<Option<Attended>>,
    ) -> Result<Option<Attended>> {
        let (own_q, own_k, own_v) = (self.queries(q)?, self.keys(k)?, self.keys(v)?);
        let Some((out, log_sum_exp)) = attend([&own_q, &own_k, &own_v])? else {
            return Ok(None);
        };
        let out = self.all_queries(&out)?.reshape(q.shape())?;
        let (b, heads, _) = log_sum_exp.dims3()?;
        let log_sum_exp = match self.first_query {
            0 => log_sum_exp,
            unseeing => {
                let none = Tensor::full(f32::NEG_INFINITY, (b, heads, unseeing), q.device())?;
                Tensor::cat(&[none, log_sum_exp], 2)?
            }
        };
        let (sequences, t, ..) = q.dims4()?;
        let log_sum_exp = match sequences == b {
            true => log_sum_exp,
            false => log_sum_exp
                .transpose(0, 1)?
                .contiguous()?
                .reshape((sequences, heads, t))?,
        };
        Ok(Some((out, log_sum_exp)))
    }

    /// The gradients of q, k and v, in their shapes; `attend` computes those of attention without gaps from what it reads of `pass`.
    pub(crate) fn backward(
        &self,
        pass: &AttentionGrad<'_>,
        attend: impl FnOnce(&AttentionGrad<'_>) -> Result<Option<[Tensor; 3]>>,
    ) -> Result<Option<[Tensor; 3]>> {
        let AttentionGrad {
            q,
            k,
            v,
            out,
            log_sum_exp,
            grad,
        } = *pass;
        let heads = q.dim(2)?;
        // (b, heads, rows), whatever sequences the tensors have.
        let of_rows = match self.b == q.dim(0)? {
            true => log_sum_exp.clone(),
            false => log_sum_exp
                .reshape((heads, self.b, self.num_queries))?
                .transpose(0, 1)?,
        };
        let seeing = self.num_queries - self.first_query;
        let of_rows = of_rows.narrow(2, self.first_query, seeing)?.contiguous()?;
        let out = out.map(|out| self.queries(out)).transpose()?;
        let own = AttentionGrad {
            q: &self.queries(q)?,
            k: &self.keys(k)?,
            v: &self.keys(v)?,
            out: out.as_ref(),
            log_sum_exp: &of_rows,
            grad: &self.queries(grad)?,
        };
        let Some([dq, dk, dv]) = attend(&own)? else {
            return Ok(None);
        };
        let all_keys = |grad: Tensor, like: &Tensor| {
            let unseen = self.num_keys - self.num_seen;
            grad.pad_with_zeros(1, 0, unseen)?.reshape(like.shape())
        };
        let dq = self.all_queries(&dq)?.reshape(q.shape())?;
        Ok(Some([dq, all_keys(dk, k)?, all_keys(dv, v)?]))
    }

    /// Of each sequence the rows of queries that see keys.
    fn queries(&self, xs: &Tensor) -> Result<Tensor> {
        let seeing = self.num_queries - self.first_query;
        let xs = self.by_sequence(xs, self.num_queries)?;
        xs.narrow(1, self.first_query, seeing)?.contiguous()
    }

    /// Of each sequence the rows of keys that are seen.
    fn keys(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = self.by_sequence(xs, self.num_keys)?;
        xs.narrow(1, 0, self.num_seen)?.contiguous()
    }

    fn by_sequence(&self, xs: &Tensor, num_rows: usize) -> Result<Tensor> {
        let (_, _, heads, d) = xs.dims4()?;
        xs.reshape((self.b, num_rows, heads, d))
    }

    /// The way back of [`Self::queries`], with zeros for queries that see no key.
    fn all_queries(&self, xs: &Tensor) -> Result<Tensor> {
        xs.pad_with_zeros(1, self.first_query, 0)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Result, Tensor};

    use super::Mask;
    use crate::attention::causal::{
        attention_backward_of_part, attention_forward, attention_of_part,
    };
    use crate::attention::document_starts::DocumentStarts;
    use crate::attention::head_groups::HeadGroups;
    use crate::attention::runs::{AttentionRows, Runs};
    use crate::attention::spec::{AttentionGrad, AttentionSpec};

    fn random(dims: [usize; 4]) -> Result<Tensor> {
        Tensor::randn(0f32, 1., &dims, &Device::Cpu)
    }

    fn is_close(a: &Tensor, b: &Tensor) -> Result<bool> {
        let values = |xs: &Tensor| xs.flatten_all()?.to_vec1::<f32>();
        let (a, b) = (values(a)?, values(b)?);
        let mut pairs = a.iter().zip(&b);
        Ok(a.len() == b.len() && pairs.all(|(a, b)| a == b || (a - b).abs() < 1e-5))
    }

    /// Queries of so many positions and keys of which all see all, or the usual ones.
    fn spec(mask: Mask, [q, k, _]: [&Tensor; 3]) -> Result<AttentionSpec> {
        let spec = AttentionSpec::new(0.5, HeadGroups { size: 2, offset: 0 });
        let (b, t, ..) = q.dims4()?;
        let keys = k.dim(1)?;
        Ok(match mask {
            Mask::Causal => spec,
            Mask::Full => {
                let all = Runs::sequences(b, keys + t).cut(1, 0).0;
                let queries: Vec<u32> = (0..b)
                    .flat_map(|i| {
                        (i * (keys + t) + keys..(i + 1) * (keys + t)).map(|row| row as u32)
                    })
                    .collect();
                let first: Vec<u32> = (0..b)
                    .flat_map(|i| (i * (keys + t)..i * (keys + t) + keys).map(|row| row as u32))
                    .collect();
                spec.with_rows(AttentionRows::new(all.take(&queries)?, all.take(&first)?))
            }
        })
    }

    /// The same as (1, rows, heads, d).
    fn in_one(xs: &Tensor) -> Result<Tensor> {
        let (b, t, heads, d) = xs.dims4()?;
        xs.reshape((1, b * t, heads, d))
    }

    #[test]
    fn rows_of_ranks_of_a_ring_are_rectangles_and_attention_to_them_is_that_of_all_rows()
    -> Result<()> {
        let mut num_causal = 0;
        for (b, t, num_ranks) in [(1, 37, 2), (2, 24, 3), (1, 16, 4), (3, 8, 2), (1, 7, 2)] {
            let all = Runs::sequences(b, t);
            for (of_q, of_k) in (0..num_ranks * num_ranks).map(|i| (i / num_ranks, i % num_ranks)) {
                let (queries, keys) = (all.cut(num_ranks, of_q).0, all.cut(num_ranks, of_k).0);
                let queries = if of_q == of_k { keys.clone() } else { queries };
                let rows = AttentionRows::new(queries.clone(), keys.clone());
                let rectangle = rows.rectangle(None).unwrap();
                num_causal += usize::from(rectangle.mask == Mask::Causal);
                let q = random([1, queries.num_rows(), 4, 8])?;
                let k = random([1, keys.num_rows(), 2, 8])?;
                let v = random([1, keys.num_rows(), 2, 8])?;
                let of_rows =
                    AttentionSpec::new(0.5, HeadGroups { size: 2, offset: 0 }).with_rows(rows);
                let expected = attention_of_part(&q, &k, &v, &of_rows)?;
                let attend = |qkv: [&Tensor; 3]| {
                    let spec = spec(rectangle.mask, qkv)?;
                    let [q, k, v] = match spec.rows {
                        None => qkv.map(Tensor::clone),
                        Some(_) => [in_one(qkv[0])?, in_one(qkv[1])?, in_one(qkv[2])?],
                    };
                    let (out, log_sum_exp) = attention_forward(&q, &k, &v, &spec)?;
                    let (b, t, heads, _) = qkv[0].dims4()?;
                    let log_sum_exp = match spec.rows {
                        None => log_sum_exp,
                        Some(_) => log_sum_exp
                            .reshape((heads, b, t))?
                            .transpose(0, 1)?
                            .contiguous()?,
                    };
                    Ok(Some((out.reshape(qkv[0].shape())?, log_sum_exp)))
                };
                let (out, log_sum_exp) = rectangle.forward([&q, &k, &v], attend)?.unwrap();
                assert!(
                    is_close(&out, &expected.0)? && is_close(&log_sum_exp, &expected.1)?,
                    "{rectangle:?}"
                );

                // With a log-sum-exp of more keys than these.
                let log_sum_exp = expected.1.maximum(0.)?.affine(1., 0.3)?;
                let out = random([1, queries.num_rows(), 4, 8])?;
                let grad = random([1, queries.num_rows(), 4, 8])?;
                let pass = AttentionGrad {
                    q: &q,
                    k: &k,
                    v: &v,
                    out: Some(&out),
                    log_sum_exp: &log_sum_exp,
                    grad: &grad,
                };
                let gradients = |pass: &AttentionGrad<'_>,
                                 spec: &AttentionSpec|
                 -> Result<[Tensor; 3]> {
                    let sums = [
                        pass.q.zeros_like()?,
                        pass.k.zeros_like()?,
                        pass.v.zeros_like()?,
                    ];
                    let delta =
                        crate::attention::causal::attention_delta(pass.out.unwrap(), pass.grad)?;
                    attention_backward_of_part(pass, Some(&delta), spec, &sums)?;
                    Ok(sums)
                };
                let expected = gradients(&pass, &of_rows)?;
                let attend = |pass: &AttentionGrad<'_>| {
                    let qkv = [pass.q, pass.k, pass.v];
                    let spec = spec(rectangle.mask, qkv)?;
                    if spec.rows.is_none() {
                        return gradients(pass, &spec).map(Some);
                    }
                    let (heads, rows) = (pass.q.dim(2)?, pass.q.dim(0)? * pass.q.dim(1)?);
                    let log_sum_exp = pass
                        .log_sum_exp
                        .transpose(0, 1)?
                        .contiguous()?
                        .reshape((1, heads, rows))?;
                    let [q, k, v] = [in_one(pass.q)?, in_one(pass.k)?, in_one(pass.v)?];
                    let (out, grad) = (in_one(pass.out.unwrap())?, in_one(pass.grad)?);
                    let one = AttentionGrad {
                        q: &q,
                        k: &k,
                        v: &v,
                        out: Some(&out),
                        log_sum_exp: &log_sum_exp,
                        grad: &grad,
                    };
                    let [dq, dk, dv] = gradients(&one, &spec)?;
                    Ok(Some([
                        dq.reshape(pass.q.shape())?,
                        dk.reshape(pass.k.shape())?,
                        dv.reshape(pass.v.shape())?,
                    ]))
                };
                let got = rectangle.backward(&pass, attend)?.unwrap();
                for (got, expected) in got.iter().zip(&expected) {
                    assert_eq!(got.dims(), expected.dims());
                    assert!(is_close(got, expected)?, "{rectangle:?}");
                }
            }
        }
        // Each rank's rows with its own keys.
        assert_eq!(num_causal, 2 + 3 + 4 + 2 + 2);
        Ok(())
    }

    #[test]
    fn the_rows_of_all_ranks_are_whole_again_and_those_of_some_are_not() -> Result<()> {
        let documents = DocumentStarts::new(
            vec![0, 0, 0, 0, 0, 5, 6, 6, 6, 6, 10, 10, 10, 10, 10, 10],
            (1, 16),
        )?;
        for (all, lens) in [
            (Runs::from(&documents), vec![5, 1, 4, 6]),
            (Runs::sequences(2, 7), vec![7, 7]),
            (Runs::sequences(1, 16), vec![16]),
        ] {
            for num_ranks in [2, 3] {
                let parts: Vec<Runs> = (0..num_ranks)
                    .map(|rank| all.cut(num_ranks, rank).0)
                    .collect();
                let (joined, _) = Runs::join(&parts)?;
                let whole: Vec<usize> = joined.whole().flatten().unwrap().lens().collect();
                assert_eq!((whole, joined.dims()), (lens.clone(), (1, all.num_rows())));
                let (some, _) = Runs::join(&parts[1..])?;
                assert!(some.whole().is_none());
                assert!(parts.iter().all(|part| part.whole().is_none()));
            }
        }
        Ok(())
    }

    #[test]
    fn rows_that_are_no_rectangles_are_not_taken_for_any() -> Result<()> {
        let all = Runs::sequences(1, 16);
        let of = |rank| all.cut(2, rank).0;
        assert!(
            AttentionRows::new(of(0), of(1))
                .rectangle(Some(4))
                .is_none()
        );
        assert!(
            AttentionRows::new(of(0), of(1))
                .rectangle(Some(16))
                .is_some()
        );
        // A rank's two pieces and all keys.
        let own_and_all = AttentionRows::new(of(0), all.clone());
        assert!(own_and_all.rectangle(None).is_none());
        let documents = DocumentStarts::new(
            vec![0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6],
            (1, 16),
        )?;
        let packed = Runs::from(&documents);
        let rows = AttentionRows::new(packed.cut(2, 0).0, packed.cut(2, 1).0);
        assert!(rows.rectangle(None).is_none());
        // Sequences whose pieces are of different lengths.
        let uneven = Runs::sequences(2, 7);
        let rows = AttentionRows::new(uneven.cut(2, 0).0, uneven.cut(2, 1).0);
        assert!(rows.rectangle(None).is_none());
        Ok(())
    }
}
