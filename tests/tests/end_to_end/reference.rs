//! One rank against PyTorch: losses, norms, every first gradient and every weight after the run.

use crate::fixture::{ALL, Fixture};
use crate::run::{Layout, train};
use crate::tensors::{assert_close, largest_difference};

/// The fixture that is compared on emulated GPUs, too.
const LLAMA: &str = "gqa";

#[test]
fn llama_equals_pytorch() {
    compare(LLAMA);
}

#[test]
fn every_other_model_equals_pytorch() {
    for name in ALL.iter().filter(|name| **name != LLAMA) {
        compare(name);
    }
}

fn compare(name: &str) {
    let fixture = Fixture::new(name);
    let outcome = train(&fixture, &fixture.run, Layout::new(1, 1, 1)).unwrap();
    let reference = fixture.metrics();
    println!(
        "{name}: gradients off by {:?}",
        largest_difference(&outcome.first_gradients, &fixture.first_gradients())
    );
    println!(
        "{name}: weights off by {:?}",
        largest_difference(&outcome.final_weights, &fixture.final_weights())
    );
    assert_eq!(outcome.metrics.len(), reference.len());
    for (ours, expected) in outcome.metrics.iter().zip(&reference) {
        println!(
            "{name}: {} {}  {} {}",
            ours.loss, expected.loss, ours.grad_norm, expected.grad_norm
        );
        expected.assert_matches(ours, 1e-5, name);
    }
    assert_close(
        &outcome.first_gradients,
        &fixture.first_gradients(),
        1e-4,
        name,
    );
    assert_close(&outcome.final_weights, &fixture.final_weights(), 1e-4, name);
}
