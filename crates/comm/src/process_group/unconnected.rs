//! A rank that exchanges nothing with others: one that is alone, or one of a group that does not exist, for what follows from a rank's
//! place alone.

use candle_core::{Device, Result, Tensor};

use crate::error::argument;
use crate::{Communicator, Pending, Request};

/// A place in a group whose other ranks nobody runs: every operation is an error, unless there are none, where it gives its input.
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

    fn start(&self, request: &mut Request<'_>) -> Result<Pending<Vec<Tensor>>> {
        self.check_alone()?;
        let results = request.place.map_or(request.tensors, std::slice::from_ref);
        Ok(Pending::ready(results.iter().map(Tensor::detach).collect()))
    }

    fn subgroup(&self, _: &[usize], _: &[i64]) -> Result<Box<dyn Communicator>> {
        self.check_alone()?;
        let device = self.device.clone();
        Ok(Box::new(Self { device, ..*self }))
    }
}

impl Unconnected {
    fn check_alone(&self) -> Result<()> {
        let Self {
            rank, world_size, ..
        } = self;
        if *world_size == 1 {
            return Ok(());
        }
        Err(argument(format!(
            "rank {rank} of a group of {world_size} that is not connected can exchange nothing\nhint: such a group is for what is computed from \
             a rank's place alone"
        )))
    }
}
