//! The launcher behind `candle-train launch`: starts the ranks of a run and ends them together.
//!
//! Two layers, the same for one host and for many. The *front*, which the user starts, starts one *agent* per host,
//! directly or through ssh; an agent starts the ranks of its host, and no process below it outlives it.
//!
//! Ranks that speak MPI are started by an MPI library's launcher, which starts an agent for each, and these call the front. On hosts
//! without ssh a launcher on each of them calls the one that leads, which then reaches them as by ssh.
//!
//! All are the program that calls [`launch`]: as `PROGRAM agent [FRONT]` it calls [`run_agent`], as
//! `PROGRAM rank AGENT_PID PROGRAM ARGS` [`become_rank`], as `PROGRAM reach FRONT PORT HOST COMMAND` [`reach`].
//!
//! | who dies | what ends the rest |
//! |---|---|
//! | a rank | the front tells all agents to stop |
//! | the front | its agents see the end of their stdin |
//! | an agent | the kernel kills its ranks (PDEATHSIG); what they left behind becomes the front's, which kills it |
//! | a link | each side gives the other up after `--silence-secs` without a word |

mod agent;
mod call;
mod config;
mod dry_run;
mod end;
mod front;
mod host;
mod host_plan;
mod layout;
mod member;
mod mpi;
mod outcome;
mod process_tree;
mod program;
mod rank_variables;
mod rendezvous_address;
mod say;
mod signals;
mod thread;
mod wire;

pub use agent::{become_rank, run_agent};
pub use call::reach;
pub use config::{LaunchConfig, NodeRange};
pub use end::{
    CANNOT_GO_ON_EXIT_CODE, NEEDS_MPI_EXIT_CODE, NOT_SAVED_EXIT_CODE, PEER_FAILED_EXIT_CODE,
    WOULD_FAIL_AGAIN_EXIT_CODE,
};
pub use front::launch;
pub use program::quoted;
pub use rendezvous_address::RendezvousAddress;
