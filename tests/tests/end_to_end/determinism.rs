//! The same run twice gives the same bits, whatever the order in which ranks get to run.

use candle_parallel::{Schedule, ZeroStage};

use crate::fixture::{Fixture, Run};
use crate::run::{Layout, Outcome, train};
use crate::tensors::Tensors;

/// Every number of a run, bit by bit.
#[derive(PartialEq)]
pub struct Bits {
    metrics: Vec<(u64, u64)>,
    gradients: Vec<(String, Vec<u32>)>,
    weights: Vec<(String, Vec<u32>)>,
}

fn bits_of(tensors: &Tensors) -> Vec<(String, Vec<u32>)> {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
    tensors
        .iter()
        .map(|(name, values)| (name.clone(), bits(values)))
        .collect()
}

pub fn bits(outcome: &Outcome) -> Bits {
    let metrics = outcome.metrics.iter();
    Bits {
        metrics: metrics
            .map(|m| (m.loss.to_bits(), m.grad_norm.to_bits()))
            .collect(),
        gradients: bits_of(&outcome.first_gradients),
        weights: bits_of(&outcome.final_weights),
    }
}

#[test]
fn runs_repeat_bit_by_bit_under_random_delays() {
    let fixture = Fixture::new("tied_bias");
    let run = Run {
        steps: 2,
        seq_len: 8,
        micro_batch_size: 1,
        global_batch_size: 6,
        ..fixture.run.clone()
    };
    for (pp, dp, tp) in [(1, 1, 1), (2, 2, 2), (1, 3, 2), (4, 1, 2)] {
        let zero_1 = Layout {
            zero: ZeroStage::One,
            ..Layout::new(pp, dp, tp)
        };
        let gpipe = Layout {
            schedule: Schedule::GPipe,
            ..Layout::new(pp, dp, tp)
        };
        for layout in [zero_1, gpipe] {
            let first = bits(&train(&fixture, &run, layout).unwrap());
            for delays in [None, Some(1), Some(2)] {
                let layout = Layout { delays, ..layout };
                let again = bits(&train(&fixture, &run, layout).unwrap());
                assert!(again == first, "{layout:?}: other bits");
            }
        }
    }
}
