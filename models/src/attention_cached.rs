//! Attention of new tokens to those of a cache, while a text is generated; nothing is kept for a backward pass.

use candle_core::{DType, Result, Tensor};
use candle_ops::{RopeDirection, attention_forward, rope_in_place};
use candle_parallel::{KeyValueCache, Pass};

use crate::attention::Attention;

impl Attention {
    /// residual + attention(xs), all (b, t, hidden), for tokens that come after those of `cache`, which gets theirs, too.
    pub fn infer(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        pass: &Pass,
        cache: &KeyValueCache,
    ) -> Result<Tensor> {
        let num_before = cache.num_tokens(self.layer)?;
        let (q, k, v) = self.projected(xs, pass)?;
        let (q, k) = self.normed(q, k)?;
        let t = q.dim(1)?;
        let (cos, sin) = self.rotary.get(num_before + t)?;
        let (cos, sin) = (cos.narrow(0, num_before, t)?, sin.narrow(0, num_before, t)?);
        let rope = |xs| rope_in_place(xs, &cos, &sin, RopeDirection::Forward);
        let (q, k) = (rope(q)?, rope(k)?);
        let (all_k, all_v) = cache.append(self.layer, &k, &v)?;
        let ys = match num_before {
            0 => attention_forward(&q, &k, &v, &self.spec)?.0,
            _ => {
                let of_token =
                    |i| self.of_token(&q.narrow(1, i, 1)?, &all_k, &all_v, num_before + i);
                Tensor::cat(&(0..t).map(of_token).collect::<Result<Vec<_>>>()?, 1)?
            }
        };
        let (out, _) = self
            .o_proj
            .forward_add(&ys.flatten_from(2)?, Some(residual), pass)?;
        Ok(out)
    }

    /// What the token at `position`, with queries (b, 1, heads, head_dim), reads of keys and values: in the shape of the queries.
    fn of_token(&self, q: &Tensor, k: &Tensor, v: &Tensor, position: usize) -> Result<Tensor> {
        let (_b, _t, num_heads, _head_dim) = q.dims4()?;
        let first = (position + 1).saturating_sub(self.spec.window.unwrap_or(usize::MAX));
        let seen = |xs: &Tensor, head| -> Result<Tensor> {
            let xs = xs.narrow(1, first, position + 1 - first)?;
            xs.narrow(2, head, 1)?.squeeze(2)?.to_dtype(DType::F32) // (b, seen, head_dim)
        };
        let mut heads = Vec::with_capacity(k.dim(2)?);
        for kv_head in 0..k.dim(2)? {
            let group = self.spec.groups.q_heads(kv_head, num_heads);
            if group.is_empty() {
                continue;
            }
            let q = q.squeeze(1)?.narrow(1, group.start, group.len())?;
            let q = q.to_dtype(DType::F32)?.contiguous()?; // (b, group, head_dim)
            let k = seen(k, kv_head)?.transpose(1, 2)?.contiguous()?;
            let scores = (q.matmul(&k)? * f64::from(self.spec.scale))?;
            let weights = candle_nn::ops::softmax(&scores, 2)?;
            heads.push(weights.matmul(&seen(v, kv_head)?.contiguous()?)?);
        }
        Tensor::cat(&heads, 1)?.unsqueeze(1)?.to_dtype(q.dtype())
    }
}
