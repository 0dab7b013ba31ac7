//! The emulated GPU does what a program asks for, and notices what a program does wrong.
#![cfg(feature = "cuda")]

mod candle;
mod faults;
mod grids;
mod order;
mod process;
mod threads;
