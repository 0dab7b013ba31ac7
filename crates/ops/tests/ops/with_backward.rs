//! The bridge to candle's graph.

use crate::check::{floats, grads, on_each_device, random, random_var};
use candle_core::{CpuStorage, DType, Result, Tensor};
use candle_ops::{OpOutput, with_backward};
use std::sync::{Arc, Mutex};

#[test]
fn the_given_backward_is_the_one_that_runs() -> Result<()> {
    on_each_device(|| {
        let [x, y, z] = [random_var(1, 3)?, random_var(2, 3)?, random_var(3, 3)?];
        let (value, dy) = (random(4, 3)?, random(5, 3)?);
        let times =
            |grad: &Tensor, factor: f64| -> Result<Option<Tensor>> { Ok(Some((grad * factor)?)) };

        let out = with_backward([x.as_tensor()], value.clone(), "one", move |g| {
            Ok([times(g, 2.0)?])
        })?;
        assert_eq!(floats(&out)?, floats(&value)?);
        assert_eq!(floats(&grads(&out, &dy, [&x])?[0])?, floats(&(&dy * 2.0)?)?);

        let out = with_backward([&*x, &y], value.clone(), "two", move |g| {
            Ok([times(g, 2.0)?, times(g, 3.0)?])
        })?;
        let [dx, d_y] = grads(&out, &dy, [&x, &y])?;
        assert_eq!(
            [floats(&dx)?, floats(&d_y)?],
            [floats(&(&dy * 2.0)?)?, floats(&(&dy * 3.0)?)?]
        );

        let out = with_backward([&*x, &y, &z], value, "three", move |g| {
            Ok([times(g, 2.0)?, None, times(g, 4.0)?])
        })?;
        let store = (&out * &dy)?.sum_all()?.backward()?;
        assert!(store.get(&y).is_none());
        assert_eq!(
            floats(store.get(&z).expect("a gradient"))?,
            floats(&(&dy * 4.0)?)?
        );
        Ok(())
    })
}

#[test]
fn values_may_be_views_and_of_any_shape_and_dtype() -> Result<()> {
    let x = random_var(1, 3)?;
    let whole = random(2, (4, 6))?;
    for view in [
        whole.t()?,
        whole.narrow(0, 1, 2)?,
        whole.narrow(1, 2, 0)?,
        whole.get(0)?.get(0)?,
    ] {
        for view in [view.clone(), view.to_dtype(DType::F64)?] {
            let out = with_backward([x.as_tensor()], view.clone(), "view", |_| Ok([None]))?;
            assert!(out.track_op());
            assert_eq!((out.dims(), out.dtype()), (view.dims(), view.dtype()));
            let (out, view) = (out.to_dtype(DType::F32)?, view.to_dtype(DType::F32)?);
            assert_eq!(floats(&out)?, floats(&view)?);
        }
    }
    Ok(())
}

#[test]
fn a_bare_storage_is_moved_not_copied() -> Result<()> {
    let values = vec![1f32, 2.0];
    let address = values.as_ptr();
    let output = OpOutput::from((CpuStorage::F32(values), 2));
    let out = with_backward([random_var(1, 2)?.as_tensor()], output, "moved", |_| {
        Ok([None])
    })?;
    let (guard, _) = out.storage_and_layout();
    let candle_core::Storage::Cpu(CpuStorage::F32(values)) = &*guard else {
        panic!("f32 on the CPU")
    };
    assert_eq!(values.as_ptr(), address);
    Ok(())
}

#[test]
fn no_graph_without_a_tracked_input() -> Result<()> {
    let (x, value) = (random(1, 2)?, random(2, 2)?);
    let out = with_backward([&x], value.clone(), "none", |_| Ok([None]))?;
    assert!(!out.track_op());
    assert_eq!(out.id(), value.id());
    Ok(())
}

#[test]
fn an_error_in_the_backward_reaches_the_caller_and_the_graph_can_be_freed() -> Result<()> {
    let captured = Arc::new(Mutex::new(0));
    let held = captured.clone();
    let out = with_backward(
        [random_var(1, 2)?.as_tensor()],
        random(2, 2)?,
        "broken",
        move |_| {
            *held.lock().expect("not poisoned") += 1;
            candle_core::bail!("the ranks disagree")
        },
    )?;
    let error = out.sum_all()?.backward().expect_err("the backward failed");
    assert!(error.to_string().contains("the ranks disagree"), "{error}");
    assert_eq!(*captured.lock().expect("not poisoned"), 1);
    drop(out);
    assert_eq!(Arc::strong_count(&captured), 1);
    Ok(())
}
