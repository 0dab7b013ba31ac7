//! A rank of a group that does not exist: for what follows from a rank's place alone.

use candle_core::{Device, Result, Tensor};

use crate::{Communicator, Error, Pending, Request};

/// A place in a group whose ranks nobody runs: every operation is an error.
pub(crate) struct Unconnected {
    pub rank: usize,
    pub world_size: usize,
    pub device: Device,
}

impl Communicator for Unconnected {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn start(&self, _: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        Err(self.error())
    }

    fn subgroup(&self, _: &[usize], _: &[i64]) -> Result<Box<dyn Communicator>> {
        Err(self.error())
    }
}

impl Unconnected {
    fn error(&self) -> candle_core::Error {
        let Self {
            rank, world_size, ..
        } = self;
        Error::Argument(format!(
            "rank {rank} of a group of {world_size} that is not connected can exchange nothing\nhint: such a group is for what is computed from \
             a rank's place alone"
        ))
        .into()
    }
}
