//! swiglu, geglu and rope: forward and gradients to the rounding errors of f32.

use crate::check::{
    EXP_ROUNDINGS, assert_close, device, doubles, floats, grads, in_dtype, on_each_device,
    on_each_device_in_each_type, random, random_var_in, rounding_error,
};
use candle_core::{Result, Tensor, Var};
use candle_ops::{geglu_backward, geglu_backward_and_output, geglu_forward, rope, swiglu};

#[test]
fn swiglu_matches_the_reference() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for shape in [
            vec![1],
            vec![2, 48],
            vec![97],
            vec![2, 127, 99],
            vec![1000, 64],
        ] {
            let gate = in_dtype(&(random(1, shape.clone())? * 6.0)?, dtype)?;
            let gate = Var::from_tensor(&gate)?;
            let up = random_var_in(dtype, 2, shape.clone())?;
            let dy = in_dtype(&random(3, shape)?, dtype)?;
            let y = swiglu(&gate, &up)?;
            let (g, u, d) = (doubles(&gate)?, doubles(&up)?, doubles(&dy)?);
            let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
            let silu = |x: f64| x * sigmoid(x);
            let silu_prime = |x: f64| sigmoid(x) + x * sigmoid(x) * (1.0 - sigmoid(x));
            let each = |f: &dyn Fn(usize) -> f64| -> Vec<f64> { (0..g.len()).map(f).collect() };
            let bound = |operations: usize| rounding_error(EXP_ROUNDINGS + operations);
            assert_close("y", &y, &each(&|i| silu(g[i]) * u[i]), bound(4));
            let [dg, du] = grads(&y, &dy, [&gate, &up])?;
            assert_close(
                "dgate",
                &dg,
                &each(&|i| d[i] * u[i] * silu_prime(g[i])),
                bound(8),
            );
            assert_close("dup", &du, &each(&|i| d[i] * silu(g[i])), bound(4));
        }
        Ok(())
    })
}

#[test]
fn geglu_matches_the_reference() -> Result<()> {
    on_each_device(|| {
        for shape in [vec![1], vec![97], vec![2, 127, 99]] {
            let gate = (random(1, shape.clone())? * 3.0)?;
            let (up, dy) = (random(2, shape.clone())?, random(3, shape)?);
            let (g, u, d) = (doubles(&gate)?, doubles(&up)?, doubles(&dy)?);
            let scale = std::f64::consts::FRAC_2_PI.sqrt();
            let tanh = |x: f64| (scale * (x + 0.044715 * x.powi(3))).tanh();
            let gelu = |x: f64| x * (1.0 + tanh(x)) / 2.0;
            let gelu_prime = |x: f64| {
                let slope = scale * (1.0 + 3.0 * 0.044715 * x * x);
                (1.0 + tanh(x)) / 2.0 + x * (1.0 - tanh(x).powi(2)) / 2.0 * slope
            };
            let each = |f: &dyn Fn(usize) -> f64| -> Vec<f64> { (0..g.len()).map(f).collect() };
            let bound = |operations: usize| rounding_error(EXP_ROUNDINGS + operations);
            let y = geglu_forward(&gate, &up)?;
            assert_close("y", &y, &each(&|i| gelu(g[i]) * u[i]), bound(8));
            let (dg, du) = geglu_backward(&gate, &up, &dy)?;
            let want = each(&|i| d[i] * u[i] * gelu_prime(g[i]));
            assert_close("dgate", &dg, &want, bound(14));
            assert_close("dup", &du, &each(&|i| d[i] * gelu(g[i])), bound(8));
            let again = geglu_backward_and_output(&gate, &up, &dy)?;
            assert_eq!(floats(&again.0)?, floats(&dg)?);
            assert_eq!(floats(&again.1)?, floats(&du)?);
            assert_eq!(floats(&again.2)?, floats(&y)?);
        }
        Ok(())
    })
}

#[test]
fn geglu_stays_finite_far_from_zero_and_passes_nan_on() -> Result<()> {
    on_each_device(|| {
        let gate = Tensor::new(&[-1e4f32, -100.0, -10.0, 0.0, 88.0, 1e4], &device())?;
        let ones = gate.ones_like()?;
        let (dg, du, y) = geglu_backward_and_output(&gate, &ones, &ones)?;
        assert_eq!(floats(&y)?[3..], [0.0, 88.0, 1e4]);
        assert!(floats(&y)?[..3].iter().all(|y| y.abs() < 1e-20));
        let all = [floats(&dg)?, floats(&du)?].concat();
        assert!(all.iter().all(|x| x.is_finite()));
        let nan = Tensor::new(&[f32::NAN], &device())?;
        assert!(floats(&geglu_forward(&nan, &nan.ones_like()?)?)?[0].is_nan());
        Ok(())
    })
}

#[test]
fn swiglu_stays_finite_far_from_zero_and_passes_nan_on() -> Result<()> {
    on_each_device(|| {
        let gate = Var::new(&[-1e4f32, -100.0, -88.0, 0.0, 88.0, 1e4], &device())?;
        let up = Var::from_tensor(&gate.ones_like()?)?;
        let y = swiglu(&gate, &up)?;
        assert_eq!(floats(&y)?[3..], [0.0, 88.0, 1e4]);
        assert!(floats(&y)?[..3].iter().all(|y| y.abs() < 1e-30));
        let [dg, du] = grads(&y, &y.ones_like()?.detach(), [&gate, &up])?;
        assert!(
            floats(&dg)?
                .iter()
                .chain(&floats(&du)?)
                .all(|x| x.is_finite())
        );
        let nan = Tensor::new(&[f32::NAN], &device())?;
        assert!(floats(&swiglu(&nan, &nan.ones_like()?)?)?[0].is_nan());
        Ok(())
    })
}

/// Rotates in f64 by `direction` times the angles of the tables.
fn rotate(
    x: &[f64],
    [cos, sin]: [&[f64]; 2],
    direction: f64,
    (t, h, d): (usize, usize, usize),
) -> Vec<f64> {
    let half = d / 2;
    let mut y = vec![0.0; x.len()];
    for i in 0..x.len() {
        let (pair, position) = (i % d % half, i / (h * d) % t);
        let at = position * half + pair;
        let (cos, sin) = (cos[at], direction * sin[at]);
        y[i] = if i % d < half {
            x[i] * cos - x[i + half] * sin
        } else {
            x[i] * cos + x[i - half] * sin
        };
    }
    y
}

#[test]
fn rope_matches_the_reference() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for (b, t, h, d) in [
            (1, 1, 1, 16),
            (2, 2, 3, 48),
            (2, 127, 4, 64),
            (1, 1000, 1, 128),
            (1, 3, 2, 2),
            (1, 7, 2, 6),
        ] {
            let x = random_var_in(dtype, 1, (b, t, h, d))?;
            let dy = in_dtype(&random(2, (b, t, h, d))?, dtype)?;
            let angles = (random(3, (t, d / 2))? * 10.0)?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            let y = rope(&x, &cos, &sin)?;
            let (cos, sin) = (doubles(&cos)?, doubles(&sin)?);
            let turned = |x: &[f64], direction| rotate(x, [&cos, &sin], direction, (t, h, d));
            // Two products and a difference.
            let bound = rounding_error(3);
            assert_close("y", &y, &turned(&doubles(&x)?, 1.0), bound);
            let [dx] = grads(&y, &dy, [&x])?;
            assert_close("dx", &dx, &turned(&doubles(&dy)?, -1.0), bound);
        }
        Ok(())
    })
}
