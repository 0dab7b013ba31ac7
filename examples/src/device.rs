//! Which devices a run uses.

use candle_core::{Device, Result};
use candle_ops::DeviceChoice;
use clap::Args;

/// `--device`
#[derive(Args, Clone, Debug)]
pub struct DeviceArgs {
    /// cpu; cuda, all GPUs, which the ranks take in turn; or cuda:N, the GPU of that number for all ranks [default: cuda if
    /// this program was built with it and a GPU answers, else cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceChoice>,
}

impl DeviceArgs {
    /// The devices that `num_ranks` ranks take in turn. In a build with CUDA, a line on stderr says where a run goes that did
    /// not ask.
    ///
    /// # Errors
    /// When the device that was asked for cannot be used.
    pub fn open(&self, num_ranks: usize) -> Result<Vec<Device>> {
        let choice = self.device.unwrap_or(DeviceChoice::preferred());
        match (choice.open_for(num_ranks), self.device, choice) {
            (opened, Some(_), _) | (opened, None, DeviceChoice::Cpu) => opened,
            (Ok(devices), None, _) => {
                eprintln!("device: {}", names(&devices));
                Ok(devices)
            }
            (Err(err), None, _) => {
                let reason = err.to_string();
                let reason = reason.lines().next().unwrap_or_default();
                eprintln!("device: cpu, because {reason}");
                Ok(vec![Device::Cpu])
            }
        }
    }
}

fn names(devices: &[Device]) -> String {
    match devices.len() {
        1 => "cuda:0".to_string(),
        count => format!("cuda:0 to cuda:{}", count - 1),
    }
}
