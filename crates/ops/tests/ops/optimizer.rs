//! What a step of training does to flat buffers: AdamW, the norm of gradients, sums and roundings.

use crate::check::{device, floats, in_dtype, on_each_device, placed, random};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{
    AdamWBuffers, AdamWConstants, adamw, add_into, clip_scale, round_into, sum_of_squares,
    sum_of_squares_into,
};

const CONSTANTS: AdamWConstants = AdamWConstants {
    step_size: 3e-3,
    correction: 2.5,
    shrink: 0.999,
    rest1: 0.1,
    beta2: 0.95,
    rest2: 0.05,
    eps: 1e-8,
    scale: 0.5,
};

/// The update of one value, in f64.
fn updated([x, m, v, g]: [f64; 4], scale: f64) -> [f64; 3] {
    let c = CONSTANTS;
    let [step_size, correction, shrink] = [c.step_size, c.correction, c.shrink].map(f64::from);
    let [rest1, beta2, rest2] = [c.rest1, c.beta2, c.rest2].map(f64::from);
    let g = g * scale;
    let m = m + (g - m) * rest1;
    let v = v * beta2 + g * g * rest2;
    let x = x * shrink - step_size * m / (v.sqrt() * correction + f64::from(c.eps));
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

#[test]
fn adamw_is_its_equation_on_every_device() -> Result<()> {
    on_each_device(|| {
        // Nothing, less than 16 bytes, a part of a chunk, and more than one chunk.
        for len in [0, 3, 1000, 2 * 16 * 1024 + 5] {
            for (has_weights, device_scale) in [(false, None), (true, None), (true, Some(0.25f32))]
            {
                let before = state(len)?;
                let [master, m, v, grad] = &state(len)?;
                let weights = placed(&Tensor::zeros(len, DType::BF16, &Device::Cpu)?)?;
                let scale_tensor = device_scale.map(|s| Tensor::new(s, &device()));
                let scale_tensor = scale_tensor.transpose()?;
                let buffers = AdamWBuffers {
                    master,
                    exp_avg: m,
                    exp_avg_sq: v,
                    weights: has_weights.then_some(&weights),
                    grad,
                    device_scale: scale_tensor.as_ref(),
                };
                adamw(&buffers, &CONSTANTS)?;
                let scale = f64::from(CONSTANTS.scale) * f64::from(device_scale.unwrap_or(1.0));
                let [x0, m0, v0, g0] = before.each_ref().map(floats);
                let (x0, m0, v0, g0) = (x0?, m0?, v0?, g0?);
                let (x1, m1, v1) = (floats(master)?, floats(m)?, floats(v)?);
                for i in 0..len {
                    let want = updated([x0[i], m0[i], v0[i], g0[i]].map(f64::from), scale);
                    for (got, want) in [x1[i], m1[i], v1[i]].into_iter().zip(want) {
                        assert!((f64::from(got) - want).abs() <= 1e-6, "{got} for {want}");
                    }
                }
                if has_weights {
                    let rounded = floats(&in_dtype(master, DType::BF16)?)?;
                    assert_eq!(floats(&weights)?, rounded);
                }
            }
        }
        Ok(())
    })
}

#[test]
fn adamw_gives_the_same_bits_on_each_device() -> Result<()> {
    on_each_device(|| {
        let len = 5003;
        let here = state(len)?;
        let there: Vec<Tensor> = here
            .iter()
            .map(|tensor| tensor.to_device(&Device::Cpu)?.copy())
            .collect::<Result<_>>()?;
        let clip = Tensor::new(0.3f32, &Device::Cpu)?;
        for (state, scale) in [(&here[..], clip.to_device(&device())?), (&there[..], clip)] {
            let buffers = AdamWBuffers {
                master: &state[0],
                exp_avg: &state[1],
                exp_avg_sq: &state[2],
                weights: None,
                grad: &state[3],
                device_scale: Some(&scale),
            };
            adamw(&buffers, &CONSTANTS)?;
            adamw(&buffers, &CONSTANTS)?;
        }
        for (here, there) in here.iter().zip(&there) {
            let bits = |tensor| Ok(floats(tensor)?.into_iter().map(f32::to_bits).collect());
            let [here, there]: [Result<Vec<u32>>; 2] = [here, there].map(bits);
            assert!(here? == there?);
        }
        Ok(())
    })
}

#[test]
fn a_nan_factor_leaves_everything_as_it_was() -> Result<()> {
    on_each_device(|| {
        let before = state(5)?;
        let [master, m, v, grad] = &state(5)?;
        let nan = Tensor::new(f32::NAN, &device())?;
        let buffers = AdamWBuffers {
            master,
            exp_avg: m,
            exp_avg_sq: v,
            weights: None,
            grad,
            device_scale: Some(&nan),
        };
        adamw(&buffers, &CONSTANTS)?;
        for (after, before) in [master, m, v].into_iter().zip(&before) {
            assert_eq!(floats(after)?, floats(before)?);
        }
        Ok(())
    })
}

#[test]
fn buffers_of_adamw_fit_and_share_nothing() -> Result<()> {
    on_each_device(|| {
        let [master, m, v, grad] = &state(6)?;
        let buffers = AdamWBuffers {
            master,
            exp_avg: m,
            exp_avg_sq: v,
            weights: None,
            grad,
            device_scale: None,
        };
        let says = |buffers: &AdamWBuffers, part: &str| {
            let message = adamw(buffers, &CONSTANTS).expect_err("refused").to_string();
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        };
        let exp_avg = &master.narrow(0, 0, 6)?;
        says(
            &AdamWBuffers { exp_avg, ..buffers },
            "master and exp_avg share a storage",
        );
        let grad = &random(5, 7)?;
        says(&AdamWBuffers { grad, ..buffers }, "grad of 7");
        let weights = Some(&random(5, 6)?);
        let weights = AdamWBuffers { weights, ..buffers };
        says(&weights, "weights must be contiguous BF16");
        let device_scale = Some(&random(5, 2)?);
        says(
            &AdamWBuffers {
                device_scale,
                ..buffers
            },
            "one value as device_scale, got [2]",
        );
        Ok(())
    })
}

#[test]
fn sums_of_squares_and_the_factor_that_clips() -> Result<()> {
    on_each_device(|| {
        for len in [0, 1, 5000, 40_001] {
            let xs = random(7, len)?;
            let want: f64 = floats(&xs)?.iter().map(|&x| f64::from(x).powi(2)).sum();
            let sum = sum_of_squares(&xs)?;
            assert_eq!((sum.dims(), sum.dtype()), (&[][..], DType::F64));
            let got = sum.to_scalar::<f64>()?;
            assert!((got - want).abs() <= 1e-12 * want, "{got} for {want}");
            sum_of_squares_into(&sum, true, &xs)?;
            assert_eq!(sum.to_scalar::<f64>()?, 2.0 * got);
            sum_of_squares_into(&sum, false, &in_dtype(&xs, DType::BF16)?)?;
            assert!((sum.to_scalar::<f64>()? - want).abs() <= 1e-2 * want);
        }
        let factor = |sum: f64, max_norm: f64| -> Result<f32> {
            clip_scale(&Tensor::new(sum, &device())?, max_norm)?.to_scalar()
        };
        assert_eq!(factor(16.0, 1.0)?, (1.0 / (4.0 + 1e-6)) as f32);
        assert_eq!(factor(16.0, 8.0)?, 1.0);
        assert_eq!(factor(16.0, f64::INFINITY)?, 1.0);
        assert!(factor(f64::INFINITY, 1.0)?.is_nan());
        assert!(factor(f64::NAN, f64::INFINITY)?.is_nan());
        Ok(())
    })
}

#[test]
fn values_are_written_added_and_rounded_in_place() -> Result<()> {
    on_each_device(|| {
        let (buffer, xs) = (random(1, 1000)?, random(2, (10, 10))?);
        let before = floats(&buffer)?;
        let view = buffer.narrow(0, 13, 100)?;
        for dtype in [DType::F32, DType::BF16] {
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
        let narrow = Tensor::zeros(1000, DType::BF16, &device())?;
        round_into(&narrow.narrow(0, 7, 100)?, &xs)?;
        let rounded = floats(&narrow)?;
        let want = floats(&in_dtype(&xs, DType::BF16)?)?;
        assert_eq!(rounded[7..107], want);
        assert!(
            rounded[..7]
                .iter()
                .chain(&rounded[107..])
                .all(|x| *x == 0.0)
        );
        Ok(())
    })
}
