//! Which rows the context-parallel ranks have of a micro-batch, and in which order they come.

use candle_comm::ProcessGroup;
use candle_core::{Device, Result, Tensor};
use candle_ops::{AttentionRows, Runs, embedding_forward, upload};

/// What stands for no row.
const NO_ROW: u32 = u32::MAX;

/// Rows of the ranks of a group of Ulysses, and of the ring of such groups.
#[derive(Debug)]
pub(crate) struct ContextRows {
    /// Of each rank of the group of Ulysses.
    pub members: Vec<usize>,
    rank: usize,
    /// Of each row of the group, in their order in the sequences, its place among the ranks' rows, one rank after the other; and back.
    order: Tensor,
    inverse: Tensor,
    /// This group's queries and the keys of each group of the ring.
    pub of_ring: Vec<AttentionRows>,
    /// This group's queries and the keys of all.
    pub of_all: AttentionRows,
    /// Of all rows, in their order in the sequences, the places among the groups' rows, each padded to the longest; and back.
    pub gather_order: Tensor,
    pub scatter_order: Tensor,
    /// Of a group the places of its rows, padded.
    padding: Tensor,
}

impl ContextRows {
    /// For the rows of each rank, `parts`.
    pub fn new(
        parts: &[Runs],
        ulysses: &ProcessGroup,
        ring: &ProcessGroup,
        device: &Device,
    ) -> Result<Self> {
        let table = |ids: Vec<u32>| {
            let len = ids.len();
            upload(ids, len, device)
        };
        let groups = parts.chunks(ulysses.world_size());
        let members = groups.clone().nth(ring.rank()).unwrap_or_default();
        let members = members.iter().map(Runs::num_rows).collect();
        let joined: Vec<(Runs, Vec<u32>)> = groups.map(Runs::join).collect::<Result<_>>()?;
        let order = joined[ring.rank()].1.clone();
        let groups: Vec<Runs> = joined.into_iter().map(|(runs, _)| runs).collect();
        let longest = groups.iter().map(Runs::num_rows).max().unwrap_or(0);
        let (all, places) = Runs::join(&groups)?;
        let mut padded = Vec::with_capacity(places.len());
        for (group, runs) in groups.iter().enumerate() {
            padded.extend((0..runs.num_rows()).map(|row| (group * longest + row) as u32));
        }
        let gather_order: Vec<u32> = places.iter().map(|place| padded[*place as usize]).collect();
        let scatter_order = inverse(&gather_order, groups.len() * longest);
        let own = groups[ring.rank()].clone();
        let num_own = own.num_rows();
        let padding = (0..longest).map(|row| if row < num_own { row as u32 } else { NO_ROW });
        let with_keys = |keys: &Runs| AttentionRows::new(own.clone(), keys.clone());
        Ok(Self {
            members,
            rank: ulysses.rank(),
            inverse: table(inverse(&order, order.len()))?,
            order: table(order)?,
            of_ring: groups.iter().map(with_keys).collect(),
            of_all: with_keys(&all),
            gather_order: table(gather_order)?,
            scatter_order: table(scatter_order)?,
            padding: table(padding.collect())?,
        })
    }

    /// Rows of this rank.
    pub fn num_own(&self) -> usize {
        self.members[self.rank]
    }

    /// The ranks' rows, one rank after the other, (rows, width), in their order in the sequences.
    pub fn in_order(&self, xs: &Tensor) -> Result<Tensor> {
        embedding_forward(xs, &self.order)
    }

    /// The way back of [`Self::in_order`].
    pub fn by_rank(&self, xs: &Tensor) -> Result<Tensor> {
        embedding_forward(xs, &self.inverse)
    }

    /// Rows of group `group` of the ring.
    pub fn num_rows_of_ring(&self, group: usize) -> usize {
        self.of_ring[group].keys().num_rows()
    }

    /// This group's rows, (rows, width), and zeros up to as many as the longest group has.
    pub fn padded(&self, xs: &Tensor) -> Result<Tensor> {
        embedding_forward(xs, &self.padding)
    }
}

/// Of each of `len` places which of `places` it is.
fn inverse(places: &[u32], len: usize) -> Vec<u32> {
    let mut inverse = vec![NO_ROW; len];
    for (i, place) in places.iter().enumerate() {
        inverse[*place as usize] = i as u32;
    }
    inverse
}
