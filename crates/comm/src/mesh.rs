//! The ranks of the world on the axes pp, dp, cp and tp.
//!
//! ```text
//! rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank
//! ```
//! tp is innermost: its ranks are neighbours and get the fastest links (arXiv:2104.04473, section 3).

use candle_core::Result;

use crate::ProcessGroup;
use crate::error::argument;

/// The number of parts along each axis of a [`Mesh`](crate::Mesh): `Degrees { dp: 2, ..Degrees::default() }`, as later versions have more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Degrees {
    /// Pipeline parallel: stages.
    pub pp: usize,
    /// Data parallel: replicas.
    pub dp: usize,
    /// Context parallel: parts of a sequence.
    pub cp: usize,
    /// Tensor parallel: parts of a layer.
    pub tp: usize,
}

impl Default for Degrees {
    /// One rank: every degree is 1.
    fn default() -> Self {
        Self {
            pp: 1,
            dp: 1,
            cp: 1,
            tp: 1,
        }
    }
}

impl Degrees {
    /// The number of ranks that these degrees need; `None` if it overflows.
    pub fn world_size(&self) -> Option<usize> {
        let degrees = [self.pp, self.dp, self.cp, self.tp];
        (degrees.into_iter()).try_fold(1, usize::checked_mul)
    }

    /// An error if one is 0.
    ///
    /// # Errors
    /// That one, with its name.
    pub fn check(&self) -> Result<()> {
        let Self { pp, dp, cp, tp } = *self;
        let named = [("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)];
        match named.iter().find(|(_, degree)| *degree == 0) {
            None => Ok(()),
            Some((name, _)) => Err(argument(format!(
                "{self}: {name} is 0\nhint: a degree is at least 1"
            ))),
        }
    }
}

impl std::fmt::Display for Degrees {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "pp({}) * dp({}) * cp({}) * tp({})",
            self.pp, self.dp, self.cp, self.tp
        )
    }
}

/// This rank's process group along each axis; `mesh.tp.rank()` is its coordinate.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Mesh {
    /// All ranks.
    pub world: ProcessGroup,
    /// The ranks that hold the other stages of this rank's pipeline.
    pub pp: ProcessGroup,
    /// The ranks that hold the same parameters and other data.
    pub dp: ProcessGroup,
    /// The ranks that hold the other parts of the same sequences.
    pub cp: ProcessGroup,
    /// The ranks that hold the same parameters and other rows: those of `dp` and `cp` together.
    pub replicas: ProcessGroup,
    /// The ranks that hold the other parts of the same layers.
    pub tp: ProcessGroup,
    /// The size of each axis.
    pub degrees: Degrees,
}

impl Mesh {
    /// Splits `world` along the axes. Every rank must call it, with the same degrees.
    ///
    /// # Errors
    /// A degree of 0, a product that is not the world size, or ranks that disagree about the degrees.
    #[track_caller]
    pub fn new(world: ProcessGroup, degrees: Degrees) -> Result<Self> {
        degrees.check()?;
        let world_size = world.world_size();
        let Degrees { dp, cp, tp, pp } = degrees;
        let product = degrees.world_size();
        if product != Some(world_size) {
            let is = product.map_or("overflows and is not".to_string(), |product| {
                format!("= {product} !=")
            });
            return Err(argument(format!("{degrees} {is} world_size({world_size})")));
        }
        let own = degrees.to_string().into_bytes();
        let said = world.exchange(&own)?;
        if let Some(other) = said.iter().position(|said| *said != own) {
            let theirs = String::from_utf8_lossy(&said[other]);
            return Err(argument(format!(
                "ranks disagree about the mesh: rank {} says {degrees}, rank {other} says {theirs}",
                world.rank()
            )));
        }
        let of_samples = axis(&world, dp, cp * tp)?.along("dp");
        let replicas = match cp {
            1 => of_samples.clone(),
            _ => axis(&world, dp * cp, tp)?.along("replicas"),
        };
        Ok(Self {
            pp: axis(&world, pp, dp * cp * tp)?.along("pp"),
            dp: of_samples,
            cp: axis(&world, cp, tp)?.along("cp"),
            replicas,
            tp: axis(&world, tp, 1)?.along("tp"),
            world,
            degrees,
        })
    }

    /// An error if one of the groups has failed; see [`ProcessGroup::check`].
    ///
    /// # Errors
    /// The failure of the first group that has one.
    pub fn check(&self) -> Result<()> {
        [
            &self.world,
            &self.pp,
            &self.dp,
            &self.cp,
            &self.replicas,
            &self.tp,
        ]
        .into_iter()
        .try_for_each(ProcessGroup::check)
    }
}

/// The group of the ranks that differ from this one along one axis only: `degree` ranks, `stride` apart.
#[track_caller]
fn axis(world: &ProcessGroup, degree: usize, stride: usize) -> Result<ProcessGroup> {
    let rank = world.rank();
    if degree == 1 {
        return Ok(ProcessGroup::single(world.device().clone()));
    }
    let color = rank / (stride * degree) * stride + rank % stride;
    world.split(color, rank)
}
