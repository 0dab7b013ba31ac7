//! The emulated GPU does what a program asks for, and notices what a program does wrong.
#![cfg(feature = "cuda")]

#[path = "emulator/candle.rs"]
mod candle;
#[path = "emulator/faults.rs"]
mod faults;
#[path = "emulator/grids.rs"]
mod grids;
#[path = "emulator/order.rs"]
mod order;
#[path = "emulator/process.rs"]
mod process;
#[path = "emulator/threads.rs"]
mod threads;
