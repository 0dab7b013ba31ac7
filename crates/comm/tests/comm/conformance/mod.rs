//! What every backend must pass: each operation against its naive reference, as functions over a way to run ranks.

mod background;
mod collectives;
mod groups;
mod messages;
mod rooted;

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{DType, Result};

pub use background::*;
pub use collectives::*;
pub use groups::*;
pub use messages::*;
pub use rooted::*;

use crate::reference::DTYPES;

/// A way to run ranks.
pub trait Launch {
    /// The worlds to try.
    fn world_sizes(&self) -> &[usize] {
        &[1, 2, 3, 4, 5]
    }

    fn run<T: Send>(
        &self,
        world_size: usize,
        run: impl Fn(ProcessGroup) -> Result<T> + Sync,
    ) -> Result<Vec<T>>;
}

/// The reductions of a dtype.
pub fn ops(dtype: DType) -> Vec<ReduceOp> {
    let ops = [
        ReduceOp::Sum,
        ReduceOp::Max,
        ReduceOp::Min,
        ReduceOp::Prod,
        ReduceOp::Avg,
    ];
    let ops = ops.into_iter();
    ops.filter(|op| *op != ReduceOp::Avg || dtype.is_float())
        .collect()
}

/// Calls `check(world, dims, dtype)` for every world size, dtype and small shape.
pub(super) fn for_all(
    launch: &impl Launch,
    shapes: &[&[usize]],
    check: impl Fn(&ProcessGroup, &[usize], DType) -> Result<()> + Sync,
) -> Result<()> {
    for &world_size in launch.world_sizes() {
        launch.run(world_size, |world| {
            assert_eq!(world.world_size(), world_size);
            for dtype in DTYPES {
                for dims in shapes {
                    check(&world, dims, dtype)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Passes the names of all functions that every backend must pass, but [`large`] and [`background`], to a macro.
macro_rules! for_each_conformance {
    ($then:ident) => {
        $then!(
            all_reduce,
            all_gather,
            reduce_scatter,
            in_place,
            broadcast,
            all_to_all,
            all_to_all_uneven,
            reduce_to_root,
            scatter_and_gather,
            rooted_in_flight,
            batch_send_recv,
            views,
            independent_results,
            splits,
            many_in_flight,
            message_order,
            all_gather_bytes,
            counters,
        );
    };
}
