//! The exchange of heads for rows (DeepSpeed-Ulysses, arXiv:2309.14509): before it a rank has some rows of all heads, after it all rows of some.
//!
//! Query heads are spread over the ranks as evenly as can be; a key/value head goes to every rank that has a query head which reads it.

use std::ops::Range;

use candle_comm::ProcessGroup;
use candle_core::{D, DType, Result, Tensor, bail};
use candle_ops::{AttentionSpec, HeadGroups};

use crate::pass::ContextRows;
use crate::placement::part;

pub(super) struct Exchange<'a> {
    group: &'a ProcessGroup,
    rows: &'a ContextRows,
    num_kv_heads: usize,
    /// Query heads and key/value heads of each rank after the exchange.
    heads: Vec<[Range<usize>; 2]>,
    groups: HeadGroups,
}

impl<'a> Exchange<'a> {
    /// For tensors of so many (query, key/value) heads.
    pub fn new(
        group: &'a ProcessGroup,
        rows: &'a ContextRows,
        (num_q_heads, num_kv_heads): (usize, usize),
        spec: &AttentionSpec,
    ) -> Result<Self> {
        let num_ranks = group.world_size();
        if num_ranks > num_q_heads {
            bail!(
                "{num_ranks} ranks exchange the rows of {num_q_heads} query heads; expected no more ranks than heads"
            );
        }
        let groups = spec.groups;
        let of_rank = |rank| {
            let q = part(num_q_heads, rank, num_ranks);
            let kv = groups.kv_head(q.start)..groups.kv_head(q.end - 1) + 1;
            [q, kv]
        };
        let heads: Vec<_> = (0..num_ranks).map(of_rank).collect();
        let [q, kv] = &heads[group.rank()];
        // Heads that read the same one are a whole group, however many are left of it.
        let groups = match kv.len() {
            1 => HeadGroups {
                size: q.len(),
                offset: 0,
            },
            _ => HeadGroups {
                size: groups.size,
                offset: groups.offset + q.start - kv.start * groups.size,
            },
        };
        Ok(Self {
            group,
            rows,
            num_kv_heads,
            heads,
            groups,
        })
    }

    /// What attention to the heads after the exchange computes.
    pub fn spec(&self, spec: &AttentionSpec) -> AttentionSpec {
        AttentionSpec {
            groups: self.groups,
            ..spec.clone()
        }
    }

    fn own(&self) -> &[Range<usize>; 2] {
        &self.heads[self.group.rank()]
    }

    /// q, k and v of this rank's rows, (1, rows, heads, head_dim), as all rows of its heads.
    pub fn to_heads(&self, [q, k, v]: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let parts = self.heads.iter().map(|[of_q, of_kv]| {
            let own = [(q, of_q), (k, of_kv), (v, of_kv)];
            let own = own.map(|(xs, heads)| xs.squeeze(0)?.narrow(1, heads.start, heads.len()));
            Tensor::cat(&own.into_iter().collect::<Result<Vec<_>>>()?, 1)
        });
        let [of_q, of_kv] = self.own();
        let (num_q, num_kv) = (of_q.len(), of_kv.len());
        let all = self.exchanged(parts.collect::<Result<Vec<_>>>()?, num_q + 2 * num_kv)?;
        let heads = |first, len| all.narrow(1, first, len)?.contiguous()?.unsqueeze(0);
        Ok([
            heads(0, num_q)?,
            heads(num_q, num_kv)?,
            heads(num_q + num_kv, num_kv)?,
        ])
    }

    /// The gradient of the output, in the shape of q, as [`Self::to_heads`].
    pub fn grad_to_heads(&self, grad: &Tensor) -> Result<Tensor> {
        let parts = self.heads.iter().map(|[of_q, _]| {
            let own = grad.squeeze(0)?.narrow(1, of_q.start, of_q.len())?;
            own.contiguous()
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        self.exchanged(parts, self.own()[0].len())?.unsqueeze(0)
    }

    /// What goes to each rank, (rows, its heads, head_dim), as (all rows, this rank's heads, head_dim).
    fn exchanged(&self, parts: Vec<Tensor>, num_heads: usize) -> Result<Tensor> {
        let head_dim = parts[0].dim(D::Minus1)?;
        let sizes = parts.iter().map(|part| part.elem_count() / head_dim);
        let sizes: Vec<usize> = sizes.collect();
        let members = self.rows.members.iter();
        let receive: Vec<usize> = members.map(|rows| rows * num_heads).collect();
        let all = self.moved(parts, head_dim, &sizes, &receive)?;
        let rows = self
            .rows
            .in_order(&all.reshape(((), num_heads * head_dim))?)?;
        rows.reshape(((), num_heads, head_dim))
    }

    /// The output of this rank's heads, (1, all rows, heads, head_dim), as its rows of all heads.
    pub fn to_rows(&self, out: &Tensor) -> Result<Tensor> {
        let parts = self.returned(out.squeeze(0)?, |heads| heads[0].len())?;
        Tensor::cat(&parts, 1)?.unsqueeze(0)
    }

    /// The gradients of q, k and v the same way; those of a key/value head that several ranks have are added up.
    pub fn grads_to_rows(&self, [dq, dk, dv]: [Tensor; 3]) -> Result<[Tensor; 3]> {
        let dtype = dq.dtype();
        let all = Tensor::cat(&[dq, dk, dv], 2)?.squeeze(0)?;
        let parts = self.returned(all, |[q, kv]| q.len() + 2 * kv.len())?;
        let of_q = parts.iter().zip(&self.heads);
        let of_q = of_q.map(|(part, [q, _])| part.narrow(1, 0, q.len()));
        let dq = Tensor::cat(&of_q.collect::<Result<Vec<_>>>()?, 1)?;
        let of_kv = |which: usize| -> Result<Tensor> {
            let mut sum: Option<Tensor> = None;
            for (part, [q, kv]) in parts.iter().zip(&self.heads) {
                let own = part.narrow(1, q.len() + which * kv.len(), kv.len())?;
                let own = own.to_dtype(DType::F32)?;
                let own = own.pad_with_zeros(1, kv.start, self.num_kv_heads - kv.end)?;
                sum = Some(match sum {
                    None => own,
                    Some(sum) => (sum + own)?,
                });
            }
            match sum {
                Some(sum) => sum.to_dtype(dtype)?.unsqueeze(0),
                None => bail!("the heads of no ranks"),
            }
        };
        Ok([dq.unsqueeze(0)?, of_kv(0)?, of_kv(1)?])
    }

    /// All rows of this rank's heads, (rows, heads, head_dim): of each rank this one's rows of the heads that it had.
    fn returned(
        &self,
        all: Tensor,
        num_heads: impl Fn(&[Range<usize>; 2]) -> usize,
    ) -> Result<Vec<Tensor>> {
        let (_, own, head_dim) = all.dims3()?;
        let by_rank = self.rows.by_rank(&all.flatten_from(1)?)?;
        let send: Vec<usize> = self.rows.members.iter().map(|rows| rows * own).collect();
        let num_rows = self.rows.num_own();
        let receive: Vec<usize> = self
            .heads
            .iter()
            .map(|heads| num_rows * num_heads(heads))
            .collect();
        let moved = self.moved(vec![by_rank], head_dim, &send, &receive)?;
        let mut start = 0;
        let parts = receive.iter().zip(&self.heads).map(|(len, heads)| {
            let part = moved.narrow(0, start, *len)?;
            start += len;
            part.contiguous()?
                .reshape((num_rows, num_heads(heads), head_dim))
        });
        parts.collect()
    }

    /// Parts that lie one after the other, as heads, to the ranks; what came from them.
    fn moved(
        &self,
        parts: Vec<Tensor>,
        head_dim: usize,
        send: &[usize],
        receive: &[usize],
    ) -> Result<Tensor> {
        let parts = parts.iter().map(|part| part.flatten_all());
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let some: Vec<&Tensor> = parts.iter().filter(|part| part.elem_count() > 0).collect();
        // candle's cat panics on tensors without elements.
        let flat = match (&some[..], parts.first()) {
            ([], Some(empty)) => empty.clone(),
            (some, _) => Tensor::cat(some, 0)?,
        };
        let xs = flat.reshape(((), head_dim))?;
        self.group
            .start_all_to_all_uneven(&xs, send, receive)?
            .wait()
    }
}
