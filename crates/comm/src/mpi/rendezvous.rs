//! Operations without tensors: barrier and split.

use std::sync::Arc;

use super::collective::{Status, Task};
use super::context::{Context, Group};
use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// Nothing but to meet.
pub(super) struct Barrier;

impl Task for Barrier {
    type Output = ();

    fn data(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn start(&mut self, _: &mut Context, _: (usize, u64), _: Vec<Vec<u8>>) -> Result<Status<()>> {
        Ok(Status::Done(()))
    }

    fn poll(&mut self, _: &mut Context) -> Result<(bool, Status<()>)> {
        Ok((false, Status::Done(())))
    }
}

/// A new group for the ranks with one color, ordered by key.
pub(super) struct Split {
    pub color: usize,
    pub key: usize,
}

/// A group made by a split.
pub(super) struct NewGroup {
    /// Its number on this rank.
    pub index: usize,
    /// The world ranks, by group rank.
    pub members: Arc<[usize]>,
    /// This rank in it.
    pub rank: usize,
}

impl Task for Split {
    type Output = NewGroup;

    fn data(&self) -> Result<Vec<u8>> {
        let numbers = [self.color, self.key];
        Ok(numbers
            .iter()
            .flat_map(|number| (*number as u64).to_le_bytes())
            .collect())
    }

    /// All ranks have said what they want, so each can tell who is in its group; MPI gets small numbers.
    fn start(
        &mut self,
        ctx: &mut Context,
        (group, _): (usize, u64),
        data: Vec<Vec<u8>>,
    ) -> Result<Status<NewGroup>> {
        let parent = &ctx.groups[group];
        let wanted: Option<Vec<(u64, u64)>> = data.iter().map(|data| numbers(data)).collect();
        let Some(wanted) = wanted else {
            return Err(Error::Backend(
                "split: a rank sent something else than color and key\n\
                 hint: all ranks must run the same version of the program"
                    .into(),
            ));
        };
        let own = wanted[parent.rank].0;
        let mut ranks: Vec<usize> = (0..wanted.len())
            .filter(|rank| wanted[*rank].0 == own)
            .collect();
        ranks.sort_by_key(|rank| (wanted[*rank].1, *rank));
        // The color is named by the lowest rank that has it.
        let color = ranks.iter().min().copied().unwrap_or(parent.rank);
        let rank = ranks.iter().position(|rank| *rank == parent.rank);
        let rank = rank.unwrap_or(0);
        let members: Arc<[usize]> = ranks.iter().map(|rank| parent.members[*rank]).collect();
        let comm = ctx.mpi.split(parent.comm, color, rank)?;
        let (mpi_rank, mpi_size) = (ctx.mpi.rank(comm)?, ctx.mpi.size(comm)?);
        if (mpi_rank, mpi_size) != (rank, members.len()) {
            return Err(Error::Backend(format!(
                "MPI_Comm_split made this rank number {mpi_rank} of {mpi_size}, expected {rank} of {}",
                members.len()
            )));
        }
        ctx.groups.push(Group {
            comm,
            members: members.clone(),
            rank,
        });
        Ok(Status::Done(NewGroup {
            index: ctx.groups.len() - 1,
            members,
            rank,
        }))
    }

    fn poll(&mut self, _: &mut Context) -> Result<(bool, Status<NewGroup>)> {
        Ok((false, Status::Working))
    }
}

/// Color and key from their bytes.
fn numbers(data: &[u8]) -> Option<(u64, u64)> {
    let (color, rest) = data.split_first_chunk::<8>()?;
    let key: &[u8; 8] = rest.try_into().ok()?;
    Some((u64::from_le_bytes(*color), u64::from_le_bytes(*key)))
}
