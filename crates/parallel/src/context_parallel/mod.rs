//! Context parallelism: attention of sequences whose rows are divided over ranks.
//!
//! Everything but attention works on each row alone, so a rank computes the rows that [`Runs::cut`](candle_ops::Runs::cut) gives it, and only
//! here ranks need what others have.
//!
//! | method | what moves | paper |
//! |---|---|---|
//! | ring | keys and values, from rank to rank, while the block that is here is computed; their gradients in f32 behind them | arXiv:2310.01889 |
//! | all-gather | keys and values, all at once; their gradients by a reduce-scatter in f32 | arXiv:2407.21783 |
//! | Ulysses | heads for rows: each rank has all rows of some heads | arXiv:2309.14509 |
//!
//! Groups of Ulysses may lie in a ring (arXiv:2405.07719).

mod config;
mod ulysses;

pub use config::{ContextConfig, ContextMethod};

use candle_comm::{Mesh, P2p, Pending, ProcessGroup, ReduceOp};
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_ops::{
    AttentionGrad, AttentionRows, AttentionSpec, add_into, attention_backward,
    attention_backward_of_part, attention_delta, attention_forward, attention_of_part,
    embedding_forward, merge_attention,
};

use crate::pass::{ContextRows, Pass};

/// The context-parallel ranks of a model, and how they attend.
#[derive(Clone)]
pub struct ContextParallel {
    /// Ranks that exchange heads for rows.
    ulysses: ProcessGroup,
    /// Ranks that have other rows of the same heads.
    ring: ProcessGroup,
    gathers: bool,
}

/// What the backward pass needs beside the output, and beside q, k and v unless it [`has them`](Self::has_inputs).
#[derive(Clone)]
pub struct KeptAttention {
    log_sum_exp: Tensor,
    exchanged: Option<Exchanged>,
}

/// q, k, v and the output of all rows of this rank's heads.
#[derive(Clone)]
struct Exchanged {
    inputs: [Tensor; 3],
    /// If the backward pass reads it.
    out: Option<Tensor>,
    /// Of q and of k before the exchange.
    num_heads: (usize, usize),
}

impl KeptAttention {
    fn new(log_sum_exp: Tensor, exchanged: Option<Exchanged>) -> Self {
        Self {
            log_sum_exp,
            exchanged,
        }
    }

    /// Whether q, k and v are in it, in another form: after an exchange of heads for rows.
    pub fn has_inputs(&self) -> bool {
        self.exchanged.is_some()
    }
}

/// Queries, keys, values and output, each (b, t, heads, head_dim).
struct Heads<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    out: Option<&'a Tensor>,
}

impl Heads<'_> {
    /// What the backward pass of attention to these keys and values reads.
    fn pass<'b>(
        &'b self,
        [k, v]: [&'b Tensor; 2],
        log_sum_exp: &'b Tensor,
        grad: &'b Tensor,
    ) -> AttentionGrad<'b> {
        AttentionGrad {
            q: self.q,
            k,
            v,
            out: self.out,
            log_sum_exp,
            grad,
        }
    }
}

impl ContextParallel {
    /// One rank for whole sequences.
    pub fn none(device: &Device) -> Self {
        let single = || ProcessGroup::single(device.clone());
        Self {
            ulysses: single(),
            ring: single(),
            gathers: false,
        }
    }

    /// The ranks of `mesh.cp`, every one of which must call it, with the same numbers of (query, key/value) heads: those of the tensor-parallel rank that has
    /// fewest.
    ///
    /// # Errors
    /// As [`ContextConfig::groups`].
    pub fn new(
        mesh: &Mesh,
        config: &ContextConfig,
        heads: (usize, usize),
        dtype: DType,
    ) -> Result<Self> {
        let cp = &mesh.cp;
        if cp.world_size() == 1 {
            return Ok(Self::none(cp.device()));
        }
        let (num_ulysses, gathers) = config.groups(cp.world_size(), heads, dtype)?;
        // Ranks that divide themselves in other ways would wait for each other.
        let own = format!("{num_ulysses} ranks exchange heads, gathered: {gathers}");
        let all = cp.all_gather_bytes(own.as_bytes())?;
        if let Some(other) = all.iter().find(|other| ***other != *own.as_bytes()) {
            bail!(
                "context-parallel ranks attend in different ways: {own}; and {}\nhint: the same ContextConfig on all of them",
                String::from_utf8_lossy(other)
            );
        }
        let single = || ProcessGroup::single(cp.device().clone());
        let (ulysses, ring) = match num_ulysses {
            1 => (single(), cp.clone()),
            all if all == cp.world_size() => (cp.clone(), single()),
            some => (
                cp.split(cp.rank() / some, cp.rank())?.counted_with(cp),
                cp.split(cp.rank() % some, cp.rank())?.counted_with(cp),
            ),
        };
        Ok(Self {
            ulysses,
            ring,
            gathers,
        })
    }

    /// Attention of this rank's queries `q` (b, t, heads, head_dim) to the keys and values of all ranks, of which `k` and `v` (b, tk, kv_heads, head_dim)
    /// are this one's: in the shape and type of `q`. `rows` are those of q and k where sequences are not divided.
    ///
    /// # Errors
    /// Shapes that do not fit, and failures of ranks.
    pub fn forward(
        &self,
        [q, k, v]: [&Tensor; 3],
        spec: &AttentionSpec,
        pass: &Pass,
        rows: AttentionRows,
    ) -> Result<(Tensor, KeptAttention)> {
        let plain = |(out, log_sum_exp)| (out, KeptAttention::new(log_sum_exp, None));
        let Some(cut) = pass.of_cut() else {
            return attention_forward(q, k, v, &spec.clone().with_rows(rows)).map(plain);
        };
        let rows = cut.context_rows(&self.ulysses, &self.ring, q.device())?;
        if self.ulysses.world_size() == 1 {
            return self.forward_in_ring([q, k, v], spec, rows).map(plain);
        }
        let num_heads = (q.dim(2)?, k.dim(2)?);
        let exchange = ulysses::Exchange::new(&self.ulysses, rows, num_heads, spec)?;
        let inputs = exchange.to_heads([q, k, v])?;
        let [q, k, v] = &inputs;
        let (out, log_sum_exp) = self.forward_in_ring([q, k, v], &exchange.spec(spec), rows)?;
        let own = exchange.to_rows(&out)?;
        let is_in_ring = self.ring.world_size() > 1 && !self.gathers;
        let is_read = is_in_ring || !out.device().is_cpu();
        let exchanged = Exchanged {
            inputs,
            out: is_read.then_some(out),
            num_heads,
        };
        Ok((own, KeptAttention::new(log_sum_exp, Some(exchanged))))
    }

    /// The gradients of q, k and v, in their shapes, from that of the output, `grad`. `inputs` are q, k and v of the forward pass unless `kept`
    /// [`has them`](KeptAttention::has_inputs), and `out` is its output.
    ///
    /// # Errors
    /// As [`Self::forward`], and inputs that are nowhere.
    pub fn backward(
        &self,
        kept: KeptAttention,
        (inputs, out): (Option<[&Tensor; 3]>, &Tensor),
        grad: &Tensor,
        spec: &AttentionSpec,
        pass: &Pass,
    ) -> Result<[Tensor; 3]> {
        let KeptAttention {
            log_sum_exp,
            exchanged,
        } = &kept;
        let cut = pass.of_cut();
        let rows = cut.map(|cut| cut.context_rows(&self.ulysses, &self.ring, grad.device()));
        let rows = rows.transpose()?;
        if let (Some(rows), Some(exchanged)) = (rows, exchanged) {
            let exchange = ulysses::Exchange::new(&self.ulysses, rows, exchanged.num_heads, spec)?;
            let grad = exchange.grad_to_heads(grad)?;
            let [q, k, v] = &exchanged.inputs;
            let out = exchanged.out.as_ref();
            let heads = Heads { q, k, v, out };
            let spec = exchange.spec(spec);
            let grads = self.backward_in_ring(&heads, log_sum_exp, &grad, &spec, rows)?;
            return exchange.grads_to_rows(grads);
        }
        let Some([q, k, v]) = inputs else {
            bail!("the backward pass of attention needs q, k and v, which were not exchanged")
        };
        let out = Some(out);
        let heads = Heads { q, k, v, out };
        if let Some(rows) = rows {
            return self.backward_in_ring(&heads, log_sum_exp, grad, spec, rows);
        }
        let of_op = heads.pass([k, v], log_sum_exp, grad);
        let spec = spec.clone().with_rows(pass.rows(0)?);
        Ok(attention_backward(&of_op, &spec)?.into())
    }

    /// The output, and its log-sum-exps.
    fn forward_in_ring(
        &self,
        [q, k, v]: [&Tensor; 3],
        spec: &AttentionSpec,
        rows: &ContextRows,
    ) -> Result<(Tensor, Tensor)> {
        let spec_of = |rows: &AttentionRows| spec.clone().with_rows(rows.clone());
        if self.ring.world_size() == 1 {
            return attention_forward(q, k, v, &spec_of(&rows.of_ring[0]));
        }
        if self.gathers {
            let (k, v) = (self.gathered(k, rows)?, self.gathered(v, rows)?);
            return attention_forward(q, &k, &v, &spec_of(&rows.of_all));
        }
        let mut all: Option<(Tensor, Tensor)> = None;
        self.for_each_block(k, v, rows, |block, k, v| {
            let part = attention_of_part(q, k, v, &spec_of(&rows.of_ring[block]))?;
            match &all {
                None => all = Some(part),
                Some(all) => merge_attention(all, &part)?,
            }
            Ok(())
        })?;
        let Some((out, log_sum_exp)) = all else {
            bail!("attention in a ring of no ranks")
        };
        Ok((out.to_dtype(q.dtype())?, log_sum_exp))
    }

    fn backward_in_ring(
        &self,
        heads: &Heads<'_>,
        log_sum_exp: &Tensor,
        grad: &Tensor,
        spec: &AttentionSpec,
        rows: &ContextRows,
    ) -> Result<[Tensor; 3]> {
        let Heads { q, k, v, out } = *heads;
        let spec_of = |rows: &AttentionRows| spec.clone().with_rows(rows.clone());
        let sums_like = |like: &Tensor| Tensor::zeros(like.shape(), DType::F32, like.device());
        if self.ring.world_size() == 1 {
            let pass = heads.pass([k, v], log_sum_exp, grad);
            return Ok(attention_backward(&pass, &spec_of(&rows.of_ring[0]))?.into());
        }
        let dq = sums_like(q)?;
        if self.gathers {
            let (all_k, all_v) = (self.gathered(k, rows)?, self.gathered(v, rows)?);
            let (dk, dv) = (sums_like(&all_k)?, sums_like(&all_v)?);
            let sums = [dq, dk, dv];
            let spec = spec_of(&rows.of_all);
            attention_backward_of_part(
                &heads.pass([&all_k, &all_v], log_sum_exp, grad),
                None,
                &spec,
                &sums,
            )?;
            let [dq, dk, dv] = sums;
            let (dk, dv) = (self.scattered(&dk, rows)?, self.scattered(&dv, rows)?);
            return in_type_of([q, k, v], [dq, dk, dv]);
        }
        let Some(out) = out else {
            bail!("the backward pass of a ring needs the output")
        };
        let delta = attention_delta(&out.to_dtype(DType::F32)?, grad)?;
        let (rank, num_ranks) = (self.ring.rank(), self.ring.world_size());
        let mut arriving: Option<Pending<Vec<Tensor>>> = None;
        self.for_each_block(k, v, rows, |block, k, v| {
            let sums = [dq.clone(), sums_like(k)?, sums_like(v)?];
            let spec = spec_of(&rows.of_ring[block]);
            attention_backward_of_part(
                &heads.pass([k, v], log_sum_exp, grad),
                Some(&delta),
                &spec,
                &sums,
            )?;
            let [_, dk, dv] = sums;
            // What the ranks before have added for this block.
            if let Some(arriving) = arriving.take() {
                for (sum, earlier) in [&dk, &dv].into_iter().zip(arriving.wait()?) {
                    add_into(sum, true, &earlier)?;
                }
            }
            // Which the rank before has at this time.
            let next = (block + num_ranks - 1) % num_ranks;
            arriving = Some(self.start_moving([&dk, &dv], rows.num_rows_of_ring(next))?);
            Ok(())
        })?;
        let own = arriving.map_or_else(|| Ok(Vec::new()), Pending::wait)?;
        match <[Tensor; 2]>::try_from(own) {
            Ok([dk, dv]) => in_type_of([q, k, v], [dq, dk, dv]),
            Err(other) => bail!(
                "rank {rank} of a ring expected the gradients of k and v, got {} tensors",
                other.len()
            ),
        }
    }

    /// Calls `work` with each block of keys and values, this rank's first and then those of the ranks before it, of which the next one is on its way
    /// meanwhile.
    fn for_each_block(
        &self,
        k: &Tensor,
        v: &Tensor,
        rows: &ContextRows,
        mut work: impl FnMut(usize, &Tensor, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let (rank, num_ranks) = (self.ring.rank(), self.ring.world_size());
        let (mut k, mut v) = (k.clone(), v.clone());
        for step in 0..num_ranks {
            let block = (rank + num_ranks - step) % num_ranks;
            let next = (block + num_ranks - 1) % num_ranks;
            let start = || self.start_moving([&k, &v], rows.num_rows_of_ring(next));
            let moving = (step + 1 < num_ranks).then(start).transpose()?;
            work(block, &k, &v)?;
            let Some(moving) = moving else { break };
            match <[Tensor; 2]>::try_from(moving.wait()?) {
                Ok(next) => [k, v] = next,
                Err(other) => bail!("expected k and v of a ring, got {} tensors", other.len()),
            }
        }
        Ok(())
    }

    /// Sends two tensors (1, rows, ..) to the next rank of the ring, and receives those of the rank before, which have `num_rows`.
    fn start_moving(&self, own: [&Tensor; 2], num_rows: usize) -> Result<Pending<Vec<Tensor>>> {
        let (rank, num_ranks) = (self.ring.rank(), self.ring.world_size());
        let (dst, src) = ((rank + 1) % num_ranks, (rank + num_ranks - 1) % num_ranks);
        let [a, b] = own.map(Tensor::contiguous);
        let (a, b) = (a?, b?);
        let send = |xs| P2p::Send { xs, dst };
        let receive = |like: &Tensor| {
            let mut dims = like.dims().to_vec();
            dims[1] = num_rows;
            P2p::Recv {
                shape: dims.into(),
                dtype: like.dtype(),
                src,
            }
        };
        let ops = [send(&a), send(&b), receive(&a), receive(&b)];
        self.ring.start_batch_send_recv(&ops)
    }

    /// The rows of all ranks of the ring, in their order in the sequences, of `xs` (1, rows, heads, head_dim).
    fn gathered(&self, xs: &Tensor, rows: &ContextRows) -> Result<Tensor> {
        let (_, _, heads, head_dim) = xs.dims4()?;
        let padded = rows.padded(&xs.squeeze(0)?.flatten_from(1)?.contiguous()?)?;
        let all = self.ring.all_gather(&padded, 0)?;
        let all = embedding_forward(&all, &rows.gather_order)?;
        all.reshape((1, (), heads, head_dim))
    }

    /// This rank's rows of the sum of all ranks' `xs`, which have the rows of all: the way back of [`Self::gathered`].
    fn scattered(&self, xs: &Tensor, rows: &ContextRows) -> Result<Tensor> {
        let (_, _, heads, head_dim) = xs.dims4()?;
        let xs = xs.squeeze(0)?.flatten_from(1)?;
        let padded = embedding_forward(&xs, &rows.scatter_order)?;
        let own = self.ring.reduce_scatter(&padded, ReduceOp::Sum, 0)?;
        let own = own.narrow(0, 0, rows.num_rows_of_ring(self.ring.rank()))?;
        own.contiguous()?.reshape((1, (), heads, head_dim))
    }
}

/// Gradients in the types of what they are of.
fn in_type_of(of: [&Tensor; 3], grads: [Tensor; 3]) -> Result<[Tensor; 3]> {
    let [q, k, v] = of.map(Tensor::dtype);
    let [dq, dk, dv] = grads;
    Ok([dq.to_dtype(q)?, dk.to_dtype(k)?, dv.to_dtype(v)?])
}
