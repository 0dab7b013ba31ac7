//! Ranks on GPUs pass the conformance suite and give the same bits as on the CPU: on one GPU, on one GPU opened twice (two
//! streams) and on all GPUs in turn.
//!
//! Without a GPU these tests say so and pass; with `CANDLE_TRAIN_REQUIRE_CUDA=1` they fail.

use std::sync::OnceLock;

use candle_comm::{ReduceOp, launch};
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{DType, Device, Result};

use crate::conformance;
use crate::determinism;
use crate::reference::{assert_same, inputs, on, reduce};
use crate::threads::Threads;

/// Opens a GPU as training does: one stream, and no event for each tensor.
pub fn open(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    // SAFETY: the local backend orders streams by events of its own, which is what these tests show.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    Ok(device)
}

/// Every GPU once, then the first one again with another stream; nothing if no GPU answers.
pub fn gpus() -> &'static [Device] {
    static GPUS: OnceLock<Vec<Device>> = OnceLock::new();
    GPUS.get_or_init(|| {
        let count = CudaContext::device_count().unwrap_or_default();
        let gpus = (0..count).chain((count > 0).then_some(0));
        let gpus: Result<Vec<Device>> = gpus.map(|ordinal| open(ordinal as usize)).collect();
        let gpus = gpus.unwrap();
        if gpus.is_empty() {
            let required = std::env::var("CANDLE_TRAIN_REQUIRE_CUDA").is_ok_and(|v| v == "1");
            assert!(
                !required,
                "no GPU answers, and CANDLE_TRAIN_REQUIRE_CUDA is 1"
            );
            println!("no GPU answers: nothing is tested on GPUs");
        }
        gpus
    })
}

/// The ways to place ranks: all on the first GPU, on two streams of it, and in turn on all GPUs if there are several.
fn placements() -> Vec<Vec<Device>> {
    let [first, .., again] = gpus() else {
        return Vec::new();
    };
    let mut placements = vec![vec![first.clone()], vec![first.clone(), again.clone()]];
    if gpus().len() > 2 {
        placements.push(gpus()[..gpus().len() - 1].to_vec());
    }
    placements
}

/// The same for each placement.
pub fn on_gpus(delays: Option<u64>) -> impl Iterator<Item = Threads> {
    placements()
        .into_iter()
        .map(move |devices| Threads { devices, delays })
}

macro_rules! conformance {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() -> Result<()> {
            on_gpus(None).try_for_each(|threads| conformance::$name(&threads))
        })*
    };
}

for_each_conformance!(conformance);

#[test]
fn with_delays() -> Result<()> {
    on_gpus(Some(1)).try_for_each(|threads| {
        conformance::splits(&threads)?;
        conformance::message_order(&threads)?;
        conformance::independent_results(&threads)
    })
}

#[test]
fn the_same_bits_as_on_the_cpu() -> Result<()> {
    let expected = determinism::run(&Threads::default())?;
    for delays in [None, Some(1), Some(2)] {
        for threads in on_gpus(delays) {
            let devices = &threads.devices;
            assert!(determinism::run(&threads)? == expected, "{devices:?}");
        }
    }
    Ok(())
}

/// More than is reduced at a time, on ranks that overwrite their input as soon as they may.
#[test]
fn a_reduction_in_parts() -> Result<()> {
    const LEN: usize = (4 << 20) + 3;
    let Some(threads) = on_gpus(None).last() else {
        return Ok(());
    };
    launch::threads_with(threads.config(2), |world| {
        let all = inputs(3, 2, &[LEN], DType::F32)?;
        let mine = on(&world, &all[world.rank()])?;
        let sum = world.all_reduce(&mine, ReduceOp::Sum)?;
        mine.zero_set()?;
        assert_same("sum", &sum, &reduce(&all, ReduceOp::Sum)?)
    })?;
    Ok(())
}
