//! Flags of the strategy by which ranks work together.

use candle_comm::Degrees;
use candle_core::{Result, bail};
use candle_trainer::Consistency;
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::args::layout::LayoutArgs;
use crate::args::number::whole;
use crate::flags::idle::Idle;

/// The flags that say how ranks share the work: as a mesh, or as workers and servers.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct StrategyArgs {
    /// How ranks work together
    #[arg(long, default_value = "mesh")]
    pub strategy: StrategyChoice,
    /// Ranks that hold and update the parameters, in equal parts; --dp counts the others, the workers [default: 1]
    #[arg(long, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pub servers: Option<usize>,
    /// Apply each worker's gradients when they come, in place of those of all workers together. Workers that die are dropped, and the run
    /// goes on
    #[arg(long = "async")]
    #[serde(rename = "async")]
    pub is_async: bool,
    /// Steps that a worker may be ahead of the slowest one
    #[arg(long, default_value_t = 1, value_name = "STEPS", value_parser = whole::<usize>(0..))]
    pub max_staleness: usize,
}

/// `--strategy`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum StrategyChoice {
    /// All ranks compute, and what they divide between them the flags of the layout say
    Mesh,
    /// Servers hold the parameters and update them; workers compute gradients and send them there
    ParameterServer,
}

impl StrategyArgs {
    /// Flags that would do nothing.
    pub(crate) fn idle(&self, layout: &LayoutArgs) -> Vec<Idle> {
        const NO_SERVERS: &str = "without --strategy parameter-server";
        const SERVERS: &str =
            "beside --strategy parameter-server, whose servers divide the parameters themselves";
        const STALE: &str =
            "without --async, and no worker of a synchronous parameter server is ahead of another";
        const BY: &[&str] = &["strategy"];
        let has_servers = self.num_servers() > 0;
        let (default, no_layout) = (Self::default(), LayoutArgs::default());
        let is_stale = self.max_staleness != default.max_staleness;
        let is_reduced = layout.grad_reduce_dtype != no_layout.grad_reduce_dtype;
        let is_tiled = layout.tile_linears != no_layout.tile_linears;
        if !has_servers {
            return Idle::of([
                (self.servers.is_some(), "servers", BY, NO_SERVERS),
                (self.is_async, "async", BY, NO_SERVERS),
                (is_stale, "max-staleness", BY, NO_SERVERS),
            ]);
        }
        let is_ahead = !self.is_async && is_stale;
        let has_copy = layout.zero_secondary.is_some();
        let has_small_gradients = layout.quantize_gradients.is_some();
        let has_small_weights = layout.quantize_weights.is_some();
        Idle::of([
            (is_ahead, "max-staleness", &["async"], STALE),
            (layout.zero != no_layout.zero, "zero", BY, SERVERS),
            (layout.zero_group.is_some(), "zero-group", BY, SERVERS),
            (has_copy, "zero-secondary", BY, SERVERS),
            (is_reduced, "grad-reduce-dtype", BY, SERVERS),
            (has_small_gradients, "quantize-gradients", BY, SERVERS),
            (has_small_weights, "quantize-weights", BY, SERVERS),
            (is_tiled, "tile-linears", BY, SERVERS),
            (layout.no_overlap, "no-overlap", BY, SERVERS),
        ])
    }

    /// The number of servers; none without a parameter server.
    pub(crate) fn num_servers(&self) -> usize {
        match self.strategy {
            StrategyChoice::Mesh => 0,
            StrategyChoice::ParameterServer => self.servers.unwrap_or(1),
        }
    }

    pub(crate) fn consistency(&self) -> Consistency {
        match self.is_async {
            false => Consistency::Synchronous,
            true => Consistency::Asynchronous {
                max_staleness: self.max_staleness,
            },
        }
    }

    /// What decides the weights, in words; `None` if it is what data parallelism gives.
    pub(crate) fn setting(&self) -> Option<String> {
        let is_async = self.num_servers() > 0 && self.is_async;
        is_async.then(|| format!("an asynchronous parameter server, {}", self.max_staleness))
    }

    /// An error if workers would be more than one rank each.
    pub(crate) fn check(&self, degrees: &Degrees) -> Result<()> {
        let Degrees { pp, cp, tp, .. } = *degrees;
        for (flag, degree) in [("--tp", tp), ("--pp", pp), ("--cp", cp)] {
            if self.num_servers() > 0 && degree > 1 {
                bail!(
                    "{flag} {degree} is given beside --strategy parameter-server, whose servers divide the parameters themselves, and \
                     whose workers have the model whole\nhint: leave it out"
                );
            }
        }
        Ok(())
    }
}
