//! What every backend must pass: each operation against its naive reference, as functions over a way to run ranks.

mod background;
mod collectives;
mod groups;
mod messages;

use candle_comm::ProcessGroup;
use candle_core::{DType, Result};

pub use background::*;
pub use collectives::*;
pub use groups::*;
pub use messages::*;

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
