//! The example programs run as a user runs them: what they print, what they write, and how they refuse bad input.

#[path = "cli/bench.rs"]
mod bench;
#[path = "cli/config.rs"]
mod config;
#[path = "cli/data.rs"]
mod data;
#[path = "cli/disk_full.rs"]
mod disk_full;
#[path = "cli/divergence.rs"]
mod divergence;
#[path = "cli/flags.rs"]
mod flags;
#[path = "cli/folder.rs"]
mod folder;
#[cfg(feature = "cuda")]
#[path = "cli/gpu.rs"]
mod gpu;
#[path = "cli/help.rs"]
mod help;
#[path = "cli/hub.rs"]
mod hub;
#[path = "../../crates/train/tests/train/hub_server.rs"]
mod hub_server;
#[path = "cli/layout.rs"]
mod layout;
#[path = "cli/output.rs"]
mod output;
#[cfg(feature = "mpi")]
#[path = "cli/processes.rs"]
mod processes;
#[path = "cli/program.rs"]
mod program;
#[path = "cli/tokenizer.rs"]
mod tokenizer;
#[path = "cli/training.rs"]
mod training;
#[cfg(feature = "mpi")]
#[path = "cli/two_hosts.rs"]
mod two_hosts;
#[path = "cli/weights.rs"]
mod weights;
#[path = "cli/workspace.rs"]
mod workspace;
