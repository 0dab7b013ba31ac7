//! Column- and row-parallel linear layers against one matrix product: outputs and all gradients, uneven parts.

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor, Var};
use candle_parallel::regions::copy_to_tensor_parallel_region;
use candle_parallel::{ColumnParallelLinear, Layer, Pass, RowParallelLinear};

use crate::check::{assert_close, grads, own_part, random, var};
use crate::device::on_ranks;

const IN: usize = 5;
const OUT: usize = 7;

/// The layer in candle's graph, outside of any pass.
fn graph<L>(layer: &L, xs: &Tensor) -> Result<Tensor>
where
    L: Layer + Clone + 'static,
    L::Saved: Clone + Send + Sync + 'static,
{
    layer.apply(xs, &Pass::infer(xs.detach()))
}

struct Reference {
    x: Tensor,
    w: Tensor,
    b: Option<Tensor>,
    y: Tensor,
    dy: Tensor,
    dx: Tensor,
    dw: Tensor,
    db: Option<Tensor>,
}

/// y = x · wᵀ + b by candle alone.
fn reference(bias: bool) -> Result<Reference> {
    let x = var(&random(1, (2, 3, IN))?)?;
    let w = var(&random(2, (OUT, IN))?)?;
    let b = bias.then(|| var(&random(3, OUT)?)).transpose()?;
    let dy = random(4, (2, 3, OUT))?;
    let mut y = x.reshape((6, IN))?.matmul(&w.t()?)?.reshape((2, 3, OUT))?;
    if let Some(b) = &b {
        y = y.broadcast_add(b)?;
    }
    let store = (&y * &dy)?.sum_all()?.backward()?;
    let grad = |var: &Var| store.get(var).unwrap().clone();
    Ok(Reference {
        dx: grad(&x),
        dw: grad(&w),
        db: b.as_ref().map(grad),
        x: x.as_detached_tensor(),
        w: w.as_detached_tensor(),
        b: b.map(|b| b.as_detached_tensor()),
        y: y.detach(),
        dy,
    })
}

fn check_column(tp: &ProcessGroup, whole: &Reference, in_region: bool) -> Result<()> {
    let x = var(&whole.x)?;
    let w = var(&own_part(&whole.w, 0, tp)?)?;
    let b = match &whole.b {
        Some(b) => Some(var(&own_part(b, 0, tp)?)?),
        None => None,
    };
    let bias = b.as_ref().map(|b| b.as_tensor().clone());
    let layer = ColumnParallelLinear::new(w.as_tensor().clone(), bias, tp.clone());
    let y = match in_region {
        false => graph(&layer, &x)?,
        true => graph(
            &layer.inside_region(),
            &copy_to_tensor_parallel_region(&x, tp)?,
        )?,
    };
    assert_close("y", &y, &own_part(&whole.y, 2, tp)?);
    let dy = own_part(&whole.dy, 2, tp)?;
    let [dx, dw] = grads(&y, &dy, [&x, &w])?;
    assert_close("dx", &dx, &whole.dx);
    assert_close("dw", &dw, &own_part(&whole.dw, 0, tp)?);
    if let (Some(b), Some(db)) = (&b, &whole.db) {
        let [mine] = grads(&y, &dy, [b])?;
        assert_close("db", &mine, &own_part(db, 0, tp)?);
    }
    Ok(())
}

#[test]
fn column_parallel_equals_one_matrix() {
    for tp in 1..=4 {
        for bias in [false, true] {
            let whole = reference(bias).unwrap();
            for in_region in [false, true] {
                on_ranks(tp, |tp| check_column(&tp, &whole, in_region));
            }
        }
    }
}

#[test]
fn row_parallel_equals_one_matrix() {
    for tp in 1..=4 {
        for bias in [false, true] {
            let whole = reference(bias).unwrap();
            on_ranks(tp, |tp| {
                let x = var(&own_part(&whole.x, 2, &tp)?)?;
                let w = var(&own_part(&whole.w, 1, &tp)?)?;
                let b = whole.b.as_ref().map(var).transpose()?;
                let bias = b.as_ref().map(|b| b.as_tensor().clone());
                let layer = RowParallelLinear::new(w.as_tensor().clone(), bias, tp.clone());
                let y = graph(&layer, &x)?;
                assert_close("y", &y, &whole.y);
                let [dx, dw] = grads(&y, &whole.dy, [&x, &w])?;
                assert_close("dx", &dx, &own_part(&whole.dx, 2, &tp)?);
                assert_close("dw", &dw, &own_part(&whole.dw, 1, &tp)?);
                if let (Some(b), Some(db)) = (&b, &whole.db) {
                    let [mine] = grads(&y, &whole.dy, [b])?;
                    assert_close("db", &mine, db);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_column_after_a_row_is_a_product_of_two_matrices() {
    let (w1, w2) = (random(1, (9, IN)).unwrap(), random(2, (OUT, 9)).unwrap());
    let (x, dy) = (random(3, (4, IN)).unwrap(), random(4, (4, OUT)).unwrap());
    let whole = var(&x).unwrap();
    let y = whole.matmul(&w1.t().unwrap()).unwrap();
    let y = y.tanh().unwrap().matmul(&w2.t().unwrap()).unwrap();
    let [dx] = grads(&y, &dy, [&whole]).unwrap();
    for tp in 1..=4 {
        on_ranks(tp, |tp| {
            let x = var(&x)?;
            let up = ColumnParallelLinear::new(own_part(&w1, 0, &tp)?, None, tp.clone());
            let down = RowParallelLinear::new(own_part(&w2, 1, &tp)?, None, tp.clone());
            let mine = graph(&down, &graph(&up, &x)?.tanh()?)?;
            assert_close("y", &mine, &y);
            assert_close("dx", &grads(&mine, &dy, [&x])?[0], &dx);
            Ok(())
        });
    }
}

#[test]
fn constants_get_no_gradient() {
    on_ranks(2, |tp| {
        let x = var(&random(1, (3, 4))?)?;
        let w = random(2, (5, 4))?;
        let column = ColumnParallelLinear::new(own_part(&w, 0, &tp)?, None, tp.clone());
        let store = graph(&column, &x)?.sum_all()?.backward()?;
        assert!(store.get(column.weight()).is_none());
        assert!(store.get(&x).is_some());
        let row = RowParallelLinear::new(random(3, (5, 4))?, None, tp.clone());
        let store = graph(&row, &x)?.sum_all()?.backward()?;
        assert!(store.get(row.weight()).is_none());
        // Nothing tracked at all: no graph.
        assert!(!graph(&column, &x.as_detached_tensor())?.track_op());
        assert!(!graph(&row, &x.as_detached_tensor())?.track_op());
        Ok(())
    });
}
