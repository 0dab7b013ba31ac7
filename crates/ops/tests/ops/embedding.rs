//! Exact: forward copies, and the additions of the backward come in a known order.

use crate::check::{
    device, floats, grads, in_dtype, on_each_device_in_each_type, random, random_ids, random_var_in,
};
use candle_core::{Device, Result, Tensor};
use candle_ops::{embedding, embedding_grad_into};

#[test]
fn looks_up_rows_and_adds_gradients_in_order() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for (v, h, b, t) in [
            (1, 3, 1, 1),
            (97, 48, 2, 127),
            (3001, 16, 1, 500),
            (97, 128, 1, 1000),
            (32001, 16, 1, 127),
            (32001, 3, 2, 2),
            (5, 4, 3, 700),
            // Tiles of 256 positions, and ids of three bytes.
            (97, 33, 1, 256),
            (97, 33, 1, 257),
            (70_001, 1, 1, 1500),
        ] {
            let weight = random_var_in(dtype, 1, (v, h))?;
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
            let ids_there = Tensor::from_slice(&ids, (b, t), &device())?;
            let y = embedding(&weight, &ids_there)?;
            assert_eq!(y.dims(), &[b, t, h]);
            let dy = in_dtype(&random(3, (b, t, h))?, dtype)?;
            let [dw] = grads(&y, &dy, [&weight])?;
            let sums = Tensor::full(f32::NAN, v * h, &device())?;
            embedding_grad_into(&sums, false, &ids_there, &dy)?;
            let (table, dy) = (floats(&weight)?, floats(&dy)?);
            let (mut want_y, mut want_dw) = (vec![0f32; b * t * h], vec![0f32; v * h]);
            for (i, &id) in ids.iter().enumerate().filter(|(_, id)| (**id as usize) < v) {
                for c in 0..h {
                    want_y[i * h + c] = table[id as usize * h + c];
                    want_dw[id as usize * h + c] += dy[i * h + c];
                }
            }
            assert_eq!(floats(&y)?, want_y);
            assert_eq!(floats(&sums)?, want_dw);
            let rounded = Tensor::from_vec(want_dw, (v, h), &Device::Cpu)?.to_dtype(dtype)?;
            assert_eq!(floats(&dw)?, floats(&rounded)?);
        }
        Ok(())
    })
}
