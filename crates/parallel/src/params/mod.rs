//! Parameters: how they lie on the mesh, where they come from, and where their gradients go.

mod builder;
mod catalog;
mod changes;
mod data_parallel;
mod flat_buffer;
mod init;
mod layout;
mod param;
mod parameters;
mod pending_weights;
mod placement;
mod released;
mod replicas;
mod sharded_weights;
mod slices;
mod store;
mod tiled_weight;

pub use builder::{ParamBuilder, WEIGHT_INIT};
pub use catalog::{CatalogEntry, Holder};
pub(crate) use changes::ValuesFrom;
pub(crate) use data_parallel::ReplicaGroups;
pub use data_parallel::{DataParallel, ReduceType, ZeroStage};
pub(crate) use flat_buffer::FlatBuffer;
pub(crate) use layout::{Bucket, Slot};
pub use param::Param;
pub use parameters::Parameters;
pub(crate) use parameters::Tie;
pub(crate) use pending_weights::BucketWeights;
pub use placement::{Gradient, Placement, Shard, part};
pub(crate) use placement::{intersect, joined, offset_by};
pub(crate) use replicas::{Checksums, checksum};
pub(crate) use slices::gather_range;
pub use store::ParamStore;
pub(crate) use store::in_dtype;
pub use tiled_weight::TiledWeight;
