//! The devices of the ranks.

use candle_core::{Device, Result};

use super::LocalConfig;
use crate::Error;
#[cfg(feature = "cuda")]
use crate::device::has_a_stream;
use crate::device::name;

/// One device for each rank.
///
/// # Errors
/// Devices of different kinds, a kind without a backend, and a GPU whose work has no order.
pub(super) fn of_ranks(config: &LocalConfig) -> Result<Vec<Device>> {
    let devices = match &config.devices[..] {
        [] => &[Device::Cpu],
        devices => devices,
    };
    for device in devices {
        check(device)?;
        if device.is_cpu() != devices[0].is_cpu() {
            return Err(Error::Argument(format!(
                "the ranks of a run are all on the CPU or all on GPUs, got {} and {}",
                name(&devices[0]),
                name(device)
            ))
            .into());
        }
    }
    Ok((0..config.world_size)
        .map(|rank| devices[rank % devices.len()].clone())
        .collect())
}

fn check(device: &Device) -> Result<()> {
    let message = match device {
        Device::Cpu => return Ok(()),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) if has_a_stream(cuda) => return Ok(()),
        Device::Cuda(_) => format!(
            "ranks cannot share {}: it was opened with a stream for each thread, without order between them\n\
             hint: open it by `Device::new_cuda_with_stream`",
            name(device)
        ),
        Device::Metal(_) => format!("the local backend has no {}", name(device)),
    };
    Err(Error::Argument(message).into())
}
