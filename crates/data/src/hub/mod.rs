//! Models and data sets by name: `org/name[@revision]` from a Hugging Face hub, or a folder that exists.
//!
//! Files lie in the standard Hugging Face cache, shared with Python: what one program has fetched the other does not
//! fetch again. A run asks the hub which commit the revision names and fetches only what that commit's snapshot lacks;
//! when the hub cannot be reached, a complete snapshot in the cache is used as it is.
//!
//! Built on the blocking client of `hf-hub` 0.5, whose TLS is `rustls` with bundled root certificates. The 1.x client is
//! asynchronous: with its runtime and its own transfer protocol it would double the number of crates to build, to fetch
//! half a dozen files once. Of the environment variables 0.5 knows two; all that matter here are read by [`HubConfig`].

mod data_use;
mod dataset;
mod fetch;
mod hub_config;
mod repo_spec;
mod resolve;
mod snapshot;
mod weight_index;

pub use data_use::DataUse;
pub use dataset::{DatasetFiles, resolve_dataset, resolve_dataset_with};
pub use hub_config::HubConfig;
pub use repo_spec::{RepoKind, RepoSpec};
pub use resolve::{
    find_model, has_weights, is_gguf, resolve_model, resolve_model_with, resolve_tokenizer,
};
