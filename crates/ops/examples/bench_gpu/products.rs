//! The three products of a linear layer.

use crate::timer::secs_of_call;
use crate::{number, random};
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_ops::{linear_forward, linear_input_grad, linear_weight_grad_into};

pub fn measure(device: &Device, shapes: &[String]) -> Result<()> {
    for shape in shapes {
        let sizes: Vec<usize> = shape.split('x').map(number).collect::<Result<_>>()?;
        let [rows, num_in, num_out] = sizes[..] else {
            bail!("products: expected shapes ROWSxINxOUT, got {shape}")
        };
        let (x, dy) = (
            random((rows, num_in), device)?,
            random((rows, num_out), device)?,
        );
        let weight = random((num_out, num_in), device)?;
        let dw = Tensor::zeros(num_out * num_in, DType::F32, device)?;
        let forward = secs_of_call(device, || linear_forward(&x, &weight, None).map(drop))?;
        let input_grad = secs_of_call(device, || linear_input_grad(&dy, &weight).map(drop))?;
        let weight_grad = secs_of_call(device, || linear_weight_grad_into(&dw, false, &dy, &x))?;
        let flops = 2.0 * (rows * num_in * num_out) as f64;
        for (op, secs) in [
            ("forward", forward),
            ("input gradient", input_grad),
            ("weight gradient", weight_grad),
        ] {
            println!(
                "{{\"op\": \"{shape} {op}\", \"secs\": {secs}, \"tflops\": {}}}",
                flops / secs / 1e12
            );
        }
    }
    Ok(())
}
