//! What the example programs share: the flags of a training run, the loop with its progress and metrics, and output.
#![deny(unsafe_code)]

mod allocator;
mod choices;
mod config_dtype;
mod device;
mod fingerprint;
mod fit;
mod flags;
mod freeze;
mod model_flops;
mod output;
mod product_floor;
mod rank_args;
mod resource_usage;
mod sample;
mod training_args;

pub use allocator::keep_freed_memory;
pub use choices::{DTypeChoice, ScheduleChoice, StorageChoice};
pub use config_dtype::with_config_dtype;
pub use device::DeviceArgs;
pub use fingerprint::{fingerprint, fingerprint_of_program};
pub use fit::fit;
pub use flags::{Flags, parse};
pub use freeze::FreezeArgs;
pub use model_flops::{flops_per_token, peak_tflops};
pub use output::{exit_with, print_line};
pub use product_floor::product_floor_secs;
pub use rank_args::RankArgs;
pub use resource_usage::{page_faults, peak_rss_bytes};
pub use sample::{SampleArgs, SampleWriter};
pub use training_args::TrainingArgs;
