//! Exact: forward copies, and the additions of the backward come in a known order.

use crate::check::{device, floats, grads, on_each_device, random, random_ids, random_var};
use candle_core::{Result, Tensor};
use candle_ops::embedding;

#[test]
fn looks_up_rows_and_adds_gradients_in_order() -> Result<()> {
    on_each_device(|| {
        for (v, h, b, t) in [
            (1, 3, 1, 1),
            (97, 48, 2, 127),
            (3001, 16, 1, 500),
            (97, 128, 1, 1000),
            (32001, 16, 1, 127),
            (32001, 3, 2, 2),
            (5, 4, 3, 700),
        ] {
            let weight = random_var(1, (v, h))?;
            let mut ids = random_ids(2, b * t, v as u32);
            // Ids of other shards, when there is room for them.
            ids.iter_mut()
                .skip(1)
                .step_by(7)
                .for_each(|id| *id = u32::MAX);
            ids.iter_mut()
                .skip(2)
                .step_by(11)
                .for_each(|id| *id = v as u32);
            let y = embedding(&weight, &Tensor::from_slice(&ids, (b, t), &device())?)?;
            assert_eq!(y.dims(), &[b, t, h]);
            let dy = random(3, (b, t, h))?;
            let [dw] = grads(&y, &dy, [&weight])?;
            let (table, dy) = (floats(&weight)?, floats(&dy)?);
            let (mut want_y, mut want_dw) = (vec![0f32; b * t * h], vec![0f32; v * h]);
            for (i, &id) in ids.iter().enumerate().filter(|(_, id)| (**id as usize) < v) {
                for c in 0..h {
                    want_y[i * h + c] = table[id as usize * h + c];
                    want_dw[id as usize * h + c] += dy[i * h + c];
                }
            }
            assert_eq!(floats(&y)?, want_y);
            assert_eq!(floats(&dw)?, want_dw);
        }
        Ok(())
    })
}
