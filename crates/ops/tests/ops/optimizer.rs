//! What a step of training does to flat buffers: AdamW, the norm of gradients, sums and roundings.

use crate::check::{
    device, floats, in_dtype, on_each_device, on_each_device_in_each_type, placed, random,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{
    AdamWBuffers, AdamWConstants, AdamWSlot, adamw, add_into, join_master, split_master,
    sum_of_squares, sum_of_squares_into,
};
use half::bf16;

const CONSTANTS: AdamWConstants = AdamWConstants {
    step_size: 3e-3,
    correction: 2.5,
    decay_factor: 0.999,
    one_minus_beta1: 0.1,
    beta2: 0.95,
    one_minus_beta2: 0.05,
    eps: 1e-8,
    scale: 0.5,
};

/// The update of one value, in f64.
fn updated([x, m, v, g]: [f64; 4], decays: bool) -> [f64; 3] {
    let c = CONSTANTS;
    let [step_size, correction, decay_factor] =
        [c.step_size, c.correction, c.decay_factor].map(f64::from);
    let [one_minus_beta1, beta2, one_minus_beta2] =
        [c.one_minus_beta1, c.beta2, c.one_minus_beta2].map(f64::from);
    let decay_factor = if decays { decay_factor } else { 1.0 };
    let g = g * f64::from(c.scale);
    let m = m + (g - m) * one_minus_beta1;
    let v = v * beta2 + g * g * one_minus_beta2;
    let x = x * decay_factor - step_size * m / (v.sqrt() * correction + f64::from(c.eps));
    [x, m, v]
}

/// A buffer's four kinds of values: master, first and second moments, gradients.
fn state(len: usize) -> Result<[Tensor; 4]> {
    Ok([
        random(1, len)?,
        random(2, len)?,
        // The square of random values may be one of nothing.
        placed(&random(3, len)?.to_device(&Device::Cpu)?.sqr()?)?,
        random(4, len)?,
    ])
}

/// Weights of these lengths, one after the other in flat buffers that begin and end with values of nobody.
struct Case {
    buffers: [Tensor; 4],
    weights: Vec<Tensor>,
    starts: Vec<usize>,
    /// The type of the weights, if they are rounded from master values.
    narrow: Option<DType>,
}

impl Case {
    fn new(lens: &[usize], narrow: Option<DType>) -> Result<Self> {
        let starts: Vec<usize> = (0..lens.len())
            .map(|i| 3 + lens[..i].iter().sum::<usize>())
            .collect();
        let buffers = state(3 + lens.iter().sum::<usize>() + 2)?;
        let weights = starts.iter().zip(lens).map(|(start, len)| {
            // One more, as candle asks a GPU for 0 bytes, which is an error to it.
            let values = match narrow {
                Some(dtype) => Tensor::zeros(*len + 1, dtype, &device()),
                None => buffers[0].narrow(0, *start, *len + 1)?.copy(),
            };
            values?.narrow(0, 0, *len)
        });
        Ok(Self {
            weights: weights.collect::<Result<_>>()?,
            buffers,
            starts,
            narrow,
        })
    }

    fn step(&self) -> Result<()> {
        let [master, exp_avg, exp_avg_sq, grad] = &self.buffers;
        let buffers = AdamWBuffers {
            master: self.narrow.map(|_| master),
            exp_avg,
            exp_avg_sq,
            grad,
        };
        let slots = self.weights.iter().zip(&self.starts).enumerate();
        let slots = slots.map(|(i, (weights, start))| AdamWSlot {
            weights,
            start: *start,
            decays: i % 2 == 0,
        });
        adamw(&buffers, &slots.collect::<Vec<_>>(), &CONSTANTS)
    }
}

#[test]
fn adamw_is_its_equation_on_every_device() -> Result<()> {
    on_each_device(|| {
        // No weights; less than 16 bytes, a part of a chunk, more than one chunk; more tensors than one launch takes.
        let many: Vec<usize> = (0..19).map(|i| (i * 37) % 50).collect();
        for lens in [&[][..], &[0, 3, 1000, 2 * 16 * 1024 + 5, 8], &many] {
            for narrow in [None, Some(DType::BF16), Some(DType::F16)] {
                let (before, case) = (Case::new(lens, narrow)?, Case::new(lens, narrow)?);
                case.step()?;
                let [x0, m0, v0, g0] = before.buffers.each_ref().map(floats);
                let [x1, m1, v1, g1] = case.buffers.each_ref().map(floats);
                let ([x0, m0, v0, g0], [x1, m1, v1, g1]) =
                    ([x0?, m0?, v0?, g0?], [x1?, m1?, v1?, g1?]);
                assert_eq!(g1, g0);
                for (slot, (start, len)) in case.starts.iter().zip(lens).enumerate() {
                    let weights = floats(&case.weights[slot])?;
                    for i in *start..start + len {
                        let before = [x0[i], m0[i], v0[i], g0[i]].map(f64::from);
                        let want = updated(before, slot % 2 == 0);
                        let x = if narrow.is_some() {
                            x1[i]
                        } else {
                            weights[i - start]
                        };
                        for (got, want) in [x, m1[i], v1[i]].into_iter().zip(want) {
                            assert!((f64::from(got) - want).abs() <= 1e-6, "{got} for {want}");
                        }
                    }
                    if let Some(dtype) = narrow {
                        let master = case.buffers[0].narrow(0, *start, *len)?;
                        assert_eq!(weights, floats(&in_dtype(&master, dtype)?)?);
                    }
                }
                let used = 3..x0.len() - 2;
                for (after, before) in [(&x1, &x0), (&m1, &m0), (&v1, &v0)] {
                    let others = (0..x0.len()).filter(|i| !used.contains(i));
                    for i in others {
                        assert_eq!(after[i], before[i], "value {i} is nobody's");
                    }
                }
            }
        }
        Ok(())
    })
}

/// Masters that are divided into bf16 weights and remainders get the values that whole ones get.
#[test]
fn adamw_of_divided_masters_is_that_of_whole_ones() -> Result<()> {
    on_each_device(|| {
        // The last one begins at a multiple of 16 bytes.
        for lens in [&[][..], &[0, 3, 1000, 2 * 16 * 1024 + 5, 8], &[5, 4099]] {
            let case = Case::new(lens, Some(DType::BF16))?;
            let [master, exp_avg, exp_avg_sq, grad] = &case.buffers;
            // One in the middle of two weights.
            let middle = Tensor::new(&[f32::from_bits(0x3f80_8000)], &device())?;
            master.slice_set(&middle, 0, 3)?;
            let halves: Vec<(bf16, i16)> = floats(master)?.into_iter().map(split_master).collect();
            let remainders = halves.iter().map(|(_, remainder)| *remainder).collect();
            let remainders = Tensor::from_vec(remainders, halves.len(), &device())?;
            let weights = case.starts.iter().zip(lens).map(|(start, len)| {
                let values = halves[*start..start + len + 1].iter();
                let values: Vec<bf16> = values.map(|(weight, _)| *weight).collect();
                Tensor::from_vec(values, len + 1, &device())?.narrow(0, 0, *len)
            });
            let weights = weights.collect::<Result<Vec<_>>>()?;
            let (m, v) = (exp_avg.copy()?, exp_avg_sq.copy()?);
            let buffers = AdamWBuffers {
                master: Some(&remainders),
                exp_avg: &m,
                exp_avg_sq: &v,
                grad,
            };
            let slots = weights.iter().zip(&case.starts).enumerate();
            let slots = slots.map(|(i, (weights, start))| AdamWSlot {
                weights,
                start: *start,
                decays: i % 2 == 0,
            });
            let slots: Vec<AdamWSlot> = slots.collect();
            // Masters in the middle of two weights lose their last bit when they are divided.
            let divide = || {
                let divided = floats(master)?.into_iter().map(split_master);
                let divided = divided.map(|(weight, remainder)| join_master(weight, remainder));
                let divided = Tensor::from_vec(divided.collect(), halves.len(), &device())?;
                master.slice_set(&divided, 0, 0)
            };
            divide()?;
            for _ in 0..3 {
                case.step()?;
                adamw(&buffers, &slots, &CONSTANTS)?;
                divide()?;
            }
            let remainders: Vec<i16> = remainders.to_vec1()?;
            let (masters, mut is_used) = (floats(master)?, vec![false; halves.len()]);
            for (slot, weights) in slots.iter().zip(&case.weights) {
                let got: Vec<bf16> = slot.weights.to_vec1()?;
                assert_eq!(got, weights.to_vec1::<bf16>()?);
                for (i, weight) in (slot.start..).zip(got) {
                    assert_eq!((weight, remainders[i]), split_master(masters[i]));
                    assert_eq!(join_master(weight, remainders[i]), masters[i]);
                    is_used[i] = true;
                }
            }
            for (i, (_, before)) in halves.iter().enumerate().filter(|(i, _)| !is_used[*i]) {
                assert_eq!(remainders[i], *before, "value {i} is nobody's");
            }
            for (whole, divided) in [(exp_avg, &m), (exp_avg_sq, &v)] {
                assert_eq!(floats(whole)?, floats(divided)?);
            }
            if let Some(slot) = slots.iter().find(|slot| slot.weights.elem_count() > 0) {
                let weights = &slot.weights.to_dtype(DType::F16)?;
                let refused = adamw(&buffers, &[AdamWSlot { weights, ..*slot }], &CONSTANTS);
                let message = refused.expect_err("f16 has no remainders").to_string();
                assert!(
                    message.contains("weights must be contiguous BF16"),
                    "{message}"
                );
            }
        }
        Ok(())
    })
}

/// A zero may have been put in where another value had a remainder below zero.
#[test]
fn a_zero_that_was_put_in_has_nothing_below_it() -> Result<()> {
    on_each_device(|| {
        let zeros = [(); 3].map(|()| Tensor::zeros(1, DType::F32, &device()));
        let [exp_avg, exp_avg_sq, grad] = &zeros.map(|zero| zero.expect("memory"));
        let weights = &Tensor::new(&[-bf16::ZERO], &device())?;
        let remainder = &Tensor::new(&[-7i16], &device())?;
        let buffers = AdamWBuffers {
            master: Some(remainder),
            exp_avg,
            exp_avg_sq,
            grad,
        };
        let slot = AdamWSlot {
            weights,
            start: 0,
            decays: true,
        };
        adamw(&buffers, &[slot], &CONSTANTS)?;
        assert_eq!(weights.to_vec1::<bf16>()?, [-bf16::ZERO]);
        assert_eq!(remainder.to_vec1::<i16>()?, [0]);
        Ok(())
    })
}

#[test]
fn adamw_gives_the_same_bits_on_each_device() -> Result<()> {
    for narrow in [None, Some(DType::BF16), Some(DType::F16)] {
        let mut bits: Vec<Vec<Vec<u32>>> = Vec::new();
        let steps = std::cell::RefCell::new(&mut bits);
        on_each_device(|| {
            let case = Case::new(&[5, 5003, 4, 77], narrow)?;
            case.step()?;
            case.step()?;
            let bits = |tensor| Ok(floats(tensor)?.into_iter().map(f32::to_bits).collect());
            let after = case.buffers.iter().chain(&case.weights).map(bits);
            steps.borrow_mut().push(after.collect::<Result<_>>()?);
            Ok(())
        })?;
        assert!(bits.iter().all(|other| *other == bits[0]), "{narrow:?}");
    }
    Ok(())
}

#[test]
fn buffers_of_adamw_fit_and_share_nothing() -> Result<()> {
    on_each_device(|| {
        let [x, m, v, grad] = &state(6)?;
        let buffers = AdamWBuffers {
            master: None,
            exp_avg: m,
            exp_avg_sq: v,
            grad,
        };
        let slot = AdamWSlot {
            weights: x,
            start: 0,
            decays: true,
        };
        let says = |buffers: &AdamWBuffers, slots: &[AdamWSlot], part: &str| {
            let refused = adamw(buffers, slots, &CONSTANTS).expect_err("refused");
            let message = refused.to_string();
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        };
        let exp_avg_sq = &m.narrow(0, 0, 6)?;
        let shared = AdamWBuffers {
            exp_avg_sq,
            ..buffers
        };
        says(&shared, &[slot], "exp_avg and exp_avg_sq share a storage");
        let longer = &random(5, 7)?;
        let grad = AdamWBuffers {
            grad: longer,
            ..buffers
        };
        says(&grad, &[slot], "got grad of [7]");
        let weights = longer;
        says(&buffers, &[AdamWSlot { weights, ..slot }], "reach beyond");
        let far = AdamWSlot {
            start: usize::MAX,
            ..slot
        };
        says(&buffers, &[far], "reach beyond");
        let [short, other] = [&random(7, 3)?, &random(8, 3)?];
        let at = |weights, start| AdamWSlot {
            weights,
            start,
            decays: true,
        };
        says(&buffers, &[at(short, 2), at(other, 0)], "overlap");
        let halves = [x.narrow(0, 0, 3)?, x.narrow(0, 3, 3)?];
        let halves = [at(&halves[0], 0), at(&halves[1], 3)];
        says(&buffers, &halves, "weights and weights share");
        adamw(&buffers, &[at(short, 3), at(other, 0)], &CONSTANTS)?;
        let with_master = AdamWBuffers {
            master: Some(&random(6, 6)?),
            ..buffers
        };
        says(&with_master, &[slot], "expected weights of BF16 or F16");
        Ok(())
    })
}

#[test]
fn sums_of_squares_are_written_or_added() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for len in [0, 1, 5000, 40_001] {
            let xs = in_dtype(&random(7, len)?, dtype)?;
            let want: f64 = floats(&xs)?.iter().map(|&x| f64::from(x).powi(2)).sum();
            let sum = sum_of_squares(&xs)?;
            assert_eq!((sum.dims(), sum.dtype()), (&[][..], DType::F64));
            let got = sum.to_scalar::<f64>()?;
            assert!((got - want).abs() <= 1e-12 * want, "{got} for {want}");
            sum_of_squares_into(&sum, true, &xs)?;
            assert_eq!(sum.to_scalar::<f64>()?, 2.0 * got);
            for broken in [f64::NAN, f64::INFINITY] {
                let broken = in_dtype(&Tensor::new(&[broken], &Device::Cpu)?, dtype)?;
                let sum = sum_of_squares(&Tensor::cat(&[&xs, &broken, &xs], 0)?)?;
                assert!(!sum.to_scalar::<f64>()?.is_finite());
            }
        }
        let large = Tensor::full(1e30f32, 4, &device())?;
        let sum = sum_of_squares(&large)?.to_scalar::<f64>()?;
        assert_eq!(sum, 4.0 * f64::from(1e30f32).powi(2));
        Ok(())
    })
}

#[test]
fn values_are_written_and_added_in_place() -> Result<()> {
    on_each_device(|| {
        let (buffer, xs) = (random(1, 1000)?, random(2, (10, 10))?);
        let before = floats(&buffer)?;
        let view = buffer.narrow(0, 13, 100)?;
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let values = xs.to_dtype(dtype)?.t()?;
            let wide = floats(&values)?;
            add_into(&view, false, &values)?;
            assert_eq!(floats(&view)?, wide);
            add_into(&view, true, &values)?;
            let twice: Vec<f32> = wide.iter().map(|x| x + x).collect();
            assert_eq!(floats(&view)?, twice);
        }
        let after = floats(&buffer)?;
        assert_eq!(after[..13], before[..13]);
        assert_eq!(after[113..], before[113..]);
        let shared = add_into(&view, true, &buffer.narrow(0, 500, 100)?);
        let message = shared.expect_err("one lock for two views").to_string();
        assert!(message.contains("share a storage"), "{message}");
        Ok(())
    })
}
