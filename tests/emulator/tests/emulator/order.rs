//! What waits for what: work on a stream runs in order, and between streams only as the program says.
#![allow(unsafe_code)]

use super::process::says;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaStream, result};
use std::sync::Arc;

const LEN: usize = 1000;
const TURNS: usize = 50;

/// How often a copy on one stream of what another stream writes has the new values.
fn turns_with_new_values(wait: impl Fn(&CudaStream, &CudaStream)) -> usize {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the streams of this test wait for each other, or are meant not to.
    unsafe { context.disable_event_tracking() };
    let [writer, reader] = [(); 2].map(|()| context.new_stream().unwrap());
    (0..TURNS)
        .filter(|&turn| {
            let source: Vec<f32> = vec![turn as f32; LEN];
            let mut shared = writer.alloc_zeros::<f32>(LEN).unwrap();
            let mut copy = reader.alloc_zeros::<f32>(LEN).unwrap();
            context.synchronize().unwrap();
            writer.memcpy_htod(&source, &mut shared).unwrap();
            wait(&reader, &writer);
            reader.memcpy_dtod(&shared, &mut copy).unwrap();
            let got = reader.clone_dtoh(&copy).unwrap();
            context.synchronize().unwrap();
            got == source
        })
        .count()
}

#[test]
fn a_stream_that_waits_reads_what_was_written() {
    let by_event = |reader: &CudaStream, writer: &CudaStream| reader.join(writer).unwrap();
    assert_eq!(turns_with_new_values(by_event), TURNS);
    let by_host = |_: &CudaStream, writer: &CudaStream| writer.synchronize().unwrap();
    assert_eq!(turns_with_new_values(by_host), TURNS);
}

#[test]
fn a_stream_that_does_not_wait_is_found() {
    let turns = turns_with_new_values(|_, _| {});
    assert!(turns < TURNS, "all {turns} turns had the new values");
}

#[test]
fn without_a_seed_work_runs_at_once() {
    let seed = [("EMULATED_GPU_SEED", "0")];
    says(
        "order::without_a_seed_work_runs_at_once",
        &seed,
        &[],
        || {
            assert_eq!(turns_with_new_values(|_, _| {}), TURNS);
        },
    );
}

#[test]
fn memory_that_another_stream_allocates_is_not_there_yet() {
    let test = "order::memory_that_another_stream_allocates_is_not_there_yet";
    says(test, &[], &["are not there yet"], || {
        let context = CudaContext::new(0).unwrap();
        let [first, second] = [(); 2].map(|()| context.new_stream().unwrap());
        let allocate_and_fill = |first: &Arc<CudaStream>, second: &Arc<CudaStream>| unsafe {
            // SAFETY: nothing reads the memory.
            let address = result::malloc_async(first.cu_stream(), 4096).unwrap();
            result::memset_d8_async(address, 0, 4096, second.cu_stream()).unwrap();
            second.synchronize()
        };
        let failed = (0..TURNS).any(|_| allocate_and_fill(&first, &second).is_err());
        assert!(failed, "no turn failed");
    });
}

#[test]
fn a_copy_to_pinned_memory_must_be_waited_for() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let values = stream.clone_htod(&vec![1f32; LEN]).unwrap();
    let stale = (0..TURNS)
        .filter(|_| {
            // SAFETY: every value is written before it is used as more than bits.
            let mut pinned = unsafe { context.alloc_pinned::<f32>(LEN) }.unwrap();
            let start = pinned.as_mut_ptr().unwrap();
            stream.memcpy_dtoh(&values, &mut pinned).unwrap();
            // SAFETY: the buffer has a first value; the GPU may write it at the same time, which is the test.
            let early = unsafe { start.read_volatile() };
            stream.synchronize().unwrap();
            // SAFETY: as above, and the copy is done.
            assert_eq!(unsafe { start.read_volatile() }, 1.0);
            early.is_nan()
        })
        .count();
    assert!(stale > 0, "no copy was late");
}

#[test]
fn memory_that_nobody_wrote_is_nan() {
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    for _ in 0..TURNS {
        // SAFETY: f32 takes any bits.
        let unwritten = unsafe { stream.alloc::<f32>(LEN) }.unwrap();
        let values = stream.clone_dtoh(&unwritten).unwrap();
        assert!(values.iter().all(|value| value.is_nan()));
        drop(stream.clone_htod(&vec![1f32; LEN]).unwrap());
    }
}

#[test]
fn copies_between_gpus() {
    let gpus = [("EMULATED_GPUS", "2")];
    says("order::copies_between_gpus", &gpus, &[], || {
        let [first, second] = [0, 1].map(|gpu| CudaContext::new(gpu).unwrap());
        let [first, second] = [first.new_stream().unwrap(), second.new_stream().unwrap()];
        for turn in 0..TURNS {
            let source = vec![turn as f32; LEN];
            let there = first.clone_htod(&source).unwrap();
            let mut here = second.alloc_zeros::<f32>(LEN).unwrap();
            second.memcpy_dtod(&there, &mut here).unwrap();
            assert_eq!(second.clone_dtoh(&here).unwrap(), source);
        }
    });
}
