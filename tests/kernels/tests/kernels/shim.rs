//! The shim notices what it is for: each broken kernel is caught, whatever the order of the threads.

use candle_train_kernel_tests::{Buffer, Launch};

unsafe extern "C" {
    fn broken_without_barrier(reversed: *mut f32, src: *const f32);
    fn broken_reuse(first: *mut f32, second: *mut f32, src: *const f32);
    fn sound_reuse(first: *mut f32, second: *mut f32, src: *const f32);
    fn broken_second_reduction(first: *mut f32, second: *mut f32, src: *const f32);
    fn broken_divergent_barrier(dst: *mut f32);
    fn broken_shuffle(dst: *mut f32);
    fn broken_bound(dst: *mut f32, len: i64);
    fn broken_shared_size();
    fn broken_uninitialised(dst: *mut f32);
}

const BLOCK: usize = 64;

fn orders() -> impl Iterator<Item = Launch> {
    (0..20).map(|seed| Launch {
        seed,
        ..Launch::new(1, BLOCK, BLOCK * 4)
    })
}

fn numbers() -> (Buffer<f32>, Vec<f32>) {
    let values: Vec<f32> = (0..BLOCK).map(|i| i as f32).collect();
    let reversed = values.iter().rev().copied().collect();
    (Buffer::from_slice(&values), reversed)
}

#[test]
fn a_missing_barrier_is_a_wrong_result_in_every_order() {
    for launch in orders() {
        let (src, want) = numbers();
        let got = Buffer::new(BLOCK);
        launch!(launch, broken_without_barrier(got.ptr(), src.ptr())).unwrap();
        assert_ne!(got.read(), want);
    }
}

#[test]
fn a_missing_barrier_before_memory_is_written_again_is_a_wrong_result() {
    for launch in orders() {
        let (src, want) = numbers();
        let (first, second) = (Buffer::new(BLOCK), Buffer::new(BLOCK));
        launch!(launch, broken_reuse(first.ptr(), second.ptr(), src.ptr())).unwrap();
        assert_ne!(first.read(), want);
        launch!(launch, sound_reuse(first.ptr(), second.ptr(), src.ptr())).unwrap();
        assert_eq!(first.read(), want);
        assert!(second.read().iter().zip(&want).all(|(a, b)| *a == 2.0 * b));
    }
}

#[test]
fn a_warp_that_is_far_ahead_of_another_is_a_wrong_result_in_some_orders() {
    let sum: f32 = numbers().1.iter().sum();
    let wrong = orders().filter(|launch| {
        let (first, second) = (Buffer::<f32>::new(BLOCK), Buffer::<f32>::new(BLOCK));
        let src = numbers().0;
        launch!(
            launch,
            broken_second_reduction(first.ptr(), second.ptr(), src.ptr())
        )
        .unwrap();
        first.read().iter().any(|x| *x != sum) || second.read().iter().any(|x| *x != 2.0 * sum)
    });
    assert!(wrong.count() >= 5);
}

#[test]
fn waiting_in_vain_is_an_error_that_names_the_line() {
    for launch in orders() {
        let dst = Buffer::<f32>::new(BLOCK);
        let barrier = launch!(launch, broken_divergent_barrier(dst.ptr())).unwrap_err();
        assert!(
            barrier.contains("broken.cu:") && barrier.contains("never come"),
            "{barrier}"
        );
        let shuffle = launch!(launch, broken_shuffle(dst.ptr())).unwrap_err();
        assert!(
            shuffle.contains("reduce.cuh:") && shuffle.contains("never come"),
            "{shuffle}"
        );
    }
}

#[test]
#[should_panic(expected = "beyond a buffer of 50 elements")]
fn a_write_behind_a_buffer_is_found() {
    let dst = Buffer::<f32>::new(50);
    launch!(Launch::new(1, BLOCK, 0), broken_bound(dst.ptr(), 50)).unwrap();
    dst.read();
}

#[test]
fn a_write_behind_the_shared_memory_is_an_error() {
    let launch = Launch::new(1, BLOCK, BLOCK * 4 - 4);
    let error = launch!(launch, broken_shared_size()).unwrap_err();
    assert!(error.contains("beyond its shared memory"), "{error}");
}

#[test]
fn what_nobody_has_written_is_nan() {
    let launch = Launch::new(2, BLOCK, BLOCK * 4);
    let dst = Buffer::<f32>::new(BLOCK);
    assert!(dst.read().iter().all(|x| x.is_nan()));
    launch!(launch, sound_reuse(dst.ptr(), dst.ptr(), numbers().0.ptr())).unwrap();
    assert!(dst.read().iter().all(|x| !x.is_nan()));
    launch!(launch, broken_uninitialised(dst.ptr())).unwrap();
    assert!(dst.read().iter().all(|x| x.is_nan()));
}
