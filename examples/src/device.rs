//! Which device a run uses.

use candle_core::{Result, bail};
use candle_ops::DeviceChoice;
use clap::Args;

/// `--device`
#[derive(Args, Clone, Debug)]
pub struct DeviceArgs {
    /// cpu, cuda or cuda:N, the GPU's number [default: cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

impl DeviceArgs {
    /// An error unless training runs on the device that was asked for. In a build with CUDA, a line on stderr says where a
    /// run goes that did not ask.
    pub fn check(&self) -> Result<()> {
        match self.device {
            Some(DeviceChoice::Cpu) => Ok(()),
            Some(cuda @ DeviceChoice::Cuda(_)) => {
                cuda.open()?;
                bail!(
                    "training on {cuda} is not there yet: the device opens, but layers and communication between ranks take tensors on the CPU only\nhint: --device cpu"
                )
            }
            None => {
                if DeviceChoice::preferred() != DeviceChoice::Cpu {
                    eprintln!("device: cpu, because training on CUDA is not there yet");
                }
                Ok(())
            }
        }
    }
}
