//! A world of one rank, on any device.

use candle_core::{Device, Result, Tensor};

use crate::{Communicator, Error, P2p, Pending, ReduceOp};

/// A world of one rank: every collective returns its input.
pub(crate) struct Single {
    device: Device,
}

impl Single {
    pub(crate) fn new(device: Device) -> Self {
        Self { device }
    }
}

impl Communicator for Single {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn all_reduce(&self, xs: &Tensor, _op: ReduceOp) -> Result<Pending<Tensor>> {
        Ok(Pending::ready(xs.detach()))
    }

    fn all_gather(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        Ok(Pending::ready(xs.detach()))
    }

    fn reduce_scatter(&self, xs: &Tensor, _op: ReduceOp) -> Result<Pending<Tensor>> {
        Ok(Pending::ready(xs.detach()))
    }

    fn broadcast(&self, xs: &Tensor, _root: usize) -> Result<Pending<Tensor>> {
        Ok(Pending::ready(xs.detach()))
    }

    fn all_to_all(&self, xs: &Tensor) -> Result<Pending<Tensor>> {
        Ok(Pending::ready(xs.detach()))
    }

    fn batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        if !ops.is_empty() {
            return Err(Error::Argument(
                "a world of one rank has nobody to send to or receive from".into(),
            )
            .into());
        }
        Ok(Pending::ready(Vec::new()))
    }

    fn barrier(&self) -> Result<Pending<()>> {
        Ok(Pending::ready(()))
    }

    fn split(&self, _color: usize, _key: usize) -> Result<Box<dyn Communicator>> {
        Ok(Box::new(Self::new(self.device.clone())))
    }
}
