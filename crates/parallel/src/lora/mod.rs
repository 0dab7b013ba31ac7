//! Low-rank adapters of linear layers: y = x Wᵀ + s · dropout(x) Aᵀ Bᵀ, of which A and B are trained and W is not
//! (arXiv:2106.09685).

mod adapter;
mod adapter_config;
mod config;

pub use adapter::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, Adapter};
pub(crate) use adapter::{file_name, module_of};
pub(crate) use adapter_config::to_json;
pub use config::{LoraConfig, LoraTargets};
