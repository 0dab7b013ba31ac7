//! Pipeline schedules as lists of instructions: pure functions of the ranks' stages and the number of micro-batches, which are checked
//! before anything runs, simulated, and carried out by [`Pipeline`](crate::Pipeline).

mod csv;
mod instruction;
mod orders;
mod plan;
#[expect(
    clippy::module_inception,
    reason = "the schedules among what is made of them"
)]
mod schedule;
mod simulation;

pub use instruction::{Instruction, Instructions, Message, Unit};
pub use plan::Plan;
pub(crate) use plan::{Link, links};
pub use schedule::Schedule;
pub use simulation::{MoveTimes, Simulation, StageTimes, Timed, Times};
