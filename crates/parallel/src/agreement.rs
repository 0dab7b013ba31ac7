//! What ranks must have alike: they tell each other whether they succeeded, so that all go on or none, and compare what they have.

use std::hash::Hasher;

use candle_comm::{Mesh, ProcessGroup, ReduceOp, message_of};
use candle_core::{Error, Result, Tensor, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use twox_hash::XxHash64;

/// What every rank has to say, in rank order. Every rank of the group must call it. Reports name the line that calls it.
///
/// # Errors
/// Failures of ranks.
#[track_caller]
pub fn gather<T: DeserializeOwned>(group: &ProcessGroup, own: &impl Serialize) -> Result<Vec<T>> {
    let own = serde_json::to_vec(own).map_err(Error::wrap)?;
    let all = group.all_gather_bytes(&own)?.into_iter();
    all.map(|said| serde_json::from_slice(&said).map_err(Error::wrap))
        .collect()
}

/// What every rank has to say, in rank order; or, if some failed, one message for all. Every rank must call it.
///
/// # Errors
/// Failures of ranks, after which nothing can be agreed upon.
pub(crate) fn exchange<T: Serialize + DeserializeOwned>(
    world: &ProcessGroup,
    own: &std::result::Result<T, String>,
) -> Result<std::result::Result<Vec<T>, String>> {
    let all: Vec<std::result::Result<T, String>> = gather(world, own)?;
    let failed: Vec<(usize, String)> = all
        .iter()
        .enumerate()
        .filter_map(|(rank, said)| Some((rank, said.as_ref().err()?.clone())))
        .collect();
    let Some((rank, message)) = failed.first() else {
        return Ok(Ok(all.into_iter().flatten().collect()));
    };
    let is_same = failed.len() == all.len() && failed.iter().all(|(_, other)| other == message);
    Ok(Err(match is_same {
        true => message.clone(),
        false => format!("rank {rank}: {message}"),
    }))
}

/// An error on every rank if `own` is one on any, which names the first of these ranks unless all say the same. Every rank must call it.
///
/// # Errors
/// That one, and failures of ranks.
pub fn agree<T>(world: &ProcessGroup, own: Result<T>) -> Result<T> {
    let said = own.as_ref().map(|_| ()).map_err(message_of);
    match (exchange(world, &said)?, own) {
        (Ok(_), own) => own,
        (Err(message), _) => Err(Error::msg(message)),
    }
}

/// What every rank must say alike: what it is called, and what it is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Facts(Vec<(String, String)>);

impl Facts {
    pub fn add(&mut self, what: &str, is: impl ToString) {
        self.0.push((what.to_string(), is.to_string()));
    }

    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// A hash of all of them.
    pub fn hash(&self) -> u64 {
        let mut hasher = XxHash64::default();
        std::hash::Hash::hash(&self.0, &mut hasher);
        hasher.finish()
    }

    /// `own`, if all ranks have one of which `facts` tells the same: a hash is compared, and only if it differs do ranks tell each other more.
    /// Every rank must call it.
    ///
    /// # Errors
    /// On every rank that of the first rank without one, or as for [`Self::compare`]; failures of ranks.
    pub fn agree<T>(
        world: &ProcessGroup,
        own: Result<T>,
        facts: impl Fn(&T) -> Self,
        error: &str,
        hint: &str,
    ) -> Result<T> {
        if world.world_size() == 1 {
            return own;
        }
        let said = own.as_ref().map(facts).map_err(message_of);
        let hash = said.as_ref().map_or(0, Self::hash);
        // The least is the largest of what is negated; each half is exact.
        let halves = [hash >> 32, hash & u64::from(u32::MAX)].map(|half| half as f64);
        let has_failed = f64::from(u8::from(said.is_err()));
        let own_words = [halves[0], halves[1], -halves[0], -halves[1], has_failed];
        let own_words = Tensor::new(&own_words, world.device())?;
        let most = world.all_reduce(&own_words, ReduceOp::Max)?;
        if let [a, b, c, d, 0.0] = most.to_vec1::<f64>()?.as_slice()
            && (*a, *b) == (-c, -d)
        {
            return own;
        }
        match exchange(world, &said.as_ref().map(drop).map_err(String::clone))? {
            Err(message) => bail!("{message}"),
            Ok(_) => said.unwrap_or_default().compare(world, error, hint)?,
        }
        own
    }

    /// An error on every rank, which begins with `error` and ends with `hint`, if one says something else than rank 0. Every rank must
    /// call it.
    pub fn compare(&self, world: &ProcessGroup, error: &str, hint: &str) -> Result<()> {
        let own = (world.rank() == 0).then_some(self);
        let mut of_ranks: Vec<Option<Self>> = gather(world, &own)?;
        let first = of_ranks.swap_remove(0).unwrap_or_default();
        let own = first.difference(self, world.rank());
        let differences: Vec<Option<String>> = gather(world, &own)?;
        match differences.into_iter().flatten().next() {
            None => Ok(()),
            Some(difference) => bail!("{error}: {difference}\nhint: {hint}"),
        }
    }

    /// The first of these, of rank 0, that another rank does not say alike, in words.
    fn difference(&self, other: &Self, rank: usize) -> Option<String> {
        let of = |facts: &Self, what: &str| {
            let mut facts = facts.0.iter();
            facts.find_map(|(known, is)| (known == what).then(|| is.clone()))
        };
        let differs = self
            .0
            .iter()
            .find_map(|(what, first)| match of(other, what) {
                Some(other) if other == *first => None,
                Some(other) => Some(format!(
                    "{what} is {first} on rank 0 and {other} on rank {rank}"
                )),
                None => Some(format!(
                    "{what} is {first} on rank 0 and missing on rank {rank}"
                )),
            });
        differs.or_else(|| {
            let (what, is) = other.0.iter().find(|(what, _)| of(self, what).is_none())?;
            Some(format!(
                "{what} is {is} on rank {rank} and missing on rank 0"
            ))
        })
    }
}

/// What a rank adds to a sum over all ranks, of f64, by which groups of ranks compare what they have: of a group of n ranks the first
/// adds (n - 1) h and each other one -h, where h is a hash of what the rank has. The sum over all groups is 0 if the ranks of each
/// have the same, and only by an accident of one in 2^24 otherwise; it is exact up to 2^14 ranks, as all are integers below 2^53.
pub(crate) struct Comparison<'a> {
    /// Ranks of the group.
    pub num_ranks: usize,
    /// Whether this is the group's first rank.
    pub is_first: bool,
    /// The group's place in the mesh: without it the differences of two groups that made the same mistake could cancel.
    pub place: &'a [usize],
}

impl<'a> Comparison<'a> {
    /// Over the ranks of a group.
    pub fn over(group: &ProcessGroup, place: &'a [usize]) -> Self {
        Self {
            num_ranks: group.world_size(),
            is_first: group.rank() == 0,
            place,
        }
    }

    /// Over the ranks of a replica of the model, of which `place` is the number.
    pub fn over_replica(mesh: &Mesh, place: &'a [usize; 1]) -> Self {
        let groups = [&mesh.pp, &mesh.cp, &mesh.tp];
        Self {
            num_ranks: groups.iter().map(|group| group.world_size()).product(),
            is_first: groups.iter().all(|group| group.rank() == 0),
            place,
        }
    }

    /// This rank's summand for what it has.
    pub fn summand(&self, has: u64) -> f64 {
        let mut hasher = XxHash64::with_seed(has);
        self.place.iter().for_each(|axis| hasher.write_usize(*axis));
        let hash = (hasher.finish() >> 40) as f64;
        match self.is_first {
            true => (self.num_ranks - 1) as f64 * hash,
            false => -hash,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum over `groups` of ranks that have these.
    fn sum(groups: &[&[u64]]) -> f64 {
        let summand = |(place, group): (usize, &&[u64])| -> f64 {
            let ranks = group.iter().enumerate();
            let of_rank = |(rank, has): (usize, &u64)| {
                let comparison = Comparison {
                    num_ranks: group.len(),
                    is_first: rank == 0,
                    place: &[place],
                };
                comparison.summand(*has)
            };
            ranks.map(of_rank).sum()
        };
        groups.iter().enumerate().map(summand).sum()
    }

    #[test]
    fn the_sum_is_zero_if_and_only_if_each_group_has_the_same() {
        assert_eq!(sum(&[&[7, 7, 7], &[9, 9, 9], &[0]]), 0.0);
        assert_ne!(sum(&[&[7, 8, 7], &[9, 9, 9]]), 0.0);
        assert_ne!(sum(&[&[8, 7, 7], &[9, 9, 9]]), 0.0);
        // The same mistake in two groups, the other way round.
        assert_ne!(sum(&[&[7, 8], &[8, 7]]), 0.0);
    }
}
