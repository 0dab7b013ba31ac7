//! candle on an emulated GPU gives what it gives on the CPU.

use candle_core::{DType, Device, Result, Tensor};

fn devices() -> Result<[Device; 2]> {
    Ok([Device::Cpu, Device::new_cuda_with_stream(0)?])
}

/// Runs `op` on both devices and compares the results as f32.
fn same(name: &str, tolerance: f32, op: impl Fn(&Device) -> Result<Tensor>) -> Result<()> {
    let [cpu, gpu] = devices()?;
    let [expected, got] = [op(&cpu)?, op(&gpu)?].map(|y| {
        y.to_dtype(DType::F32)?
            .flatten_all()?
            .to_device(&Device::Cpu)?
            .to_vec1::<f32>()
    });
    let (expected, got) = (expected?, got?);
    assert_eq!(expected.len(), got.len(), "{name}");
    for (i, (expected, got)) in expected.iter().zip(&got).enumerate() {
        assert!(
            (expected - got).abs() <= tolerance * expected.abs().max(1.0),
            "{name}: value {i} is {got}, expected {expected}"
        );
    }
    Ok(())
}

fn values(device: &Device, rows: usize, cols: usize, dtype: DType) -> Result<Tensor> {
    let values: Vec<f32> = (0..rows * cols)
        .map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0)
        .collect();
    Tensor::from_vec(values, (rows, cols), device)?.to_dtype(dtype)
}

#[test]
fn elementwise() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let tolerance = if dtype == DType::BF16 { 2e-2 } else { 1e-5 };
        same("unary", tolerance, |device| {
            let x = values(device, 33, 65, dtype)?;
            x.t()?.exp()?.sqrt()?.contiguous()? + x.t()?.silu()?.neg()?
        })?;
        same("binary", tolerance, |device| {
            let (x, y) = (
                values(device, 33, 65, dtype)?,
                values(device, 1, 65, dtype)?,
            );
            x.broadcast_mul(&y)?.affine(2.0, 0.5)?.broadcast_sub(&y)
        })?;
        same("comparison", 0.0, |device| {
            let x = values(device, 33, 65, dtype)?;
            x.gt(&x.zeros_like()?)?.where_cond(&x, &x.zeros_like()?)
        })?;
    }
    Ok(())
}

#[test]
fn reductions() -> Result<()> {
    // The CPU adds bf16 in bf16, the GPU in f32.
    let widened = |device: &Device, dtype| {
        let x = values(device, 67, 129, dtype)?;
        match device.is_cpu() {
            true => x.to_dtype(DType::F32),
            false => Ok(x),
        }
    };
    // Blocks of less than a warp.
    same("short sum", 1e-6, |device| {
        values(device, 67, 5, DType::F32)?.sum(1)
    })?;
    same("sort", 0.0, |device| {
        let x = values(device, 3, 100, DType::F32)?;
        Ok(x.sort_last_dim(true)?.0)
    })?;
    for dtype in [DType::F32, DType::BF16] {
        let tolerance = if dtype == DType::BF16 { 4e-3 } else { 1e-5 };
        for dim in [0, 1] {
            same("sum", tolerance, |device| widened(device, dtype)?.sum(dim))?;
            same("max", 0.0, |device| widened(device, dtype)?.max(dim))?;
            // In bf16 several values are the largest.
            same("argmax", 0.0, |device| {
                widened(device, DType::F32)?.argmax(dim)
            })?;
        }
        same("mean", tolerance, |device| {
            widened(device, dtype)?.mean_all()
        })?;
    }
    Ok(())
}

#[test]
fn indexing() -> Result<()> {
    same("index_select", 0.0, |device| {
        let ids = Tensor::new(&[3u32, 1, 1, 30], device)?;
        values(device, 33, 65, DType::F32)?.index_select(&ids, 0)
    })?;
    same("index_add", 1e-6, |device| {
        let ids = Tensor::new(&[3u32, 1, 1, 30], device)?;
        let x = values(device, 33, 65, DType::F32)?;
        x.index_add(&ids, &values(device, 4, 65, DType::F32)?, 0)
    })?;
    same("gather", 0.0, |device| {
        let ids = Tensor::new(&[[3u32, 1, 1], [0, 64, 2]], device)?;
        values(device, 2, 65, DType::F32)?.gather(&ids, 1)
    })
}

#[test]
fn products() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let tolerance = if dtype == DType::BF16 { 2e-2 } else { 1e-4 };
        same("matmul", tolerance, |device| {
            values(device, 33, 65, dtype)?.matmul(&values(device, 65, 17, dtype)?)
        })?;
        same("transposed matmul", tolerance, |device| {
            let a = values(device, 65, 33, dtype)?;
            a.t()?.matmul(&values(device, 17, 65, dtype)?.t()?)
        })?;
        same("batched matmul", tolerance, |device| {
            let a = values(device, 6 * 9, 65, dtype)?.reshape((6, 9, 65))?;
            a.matmul(&values(device, 6 * 65, 5, dtype)?.reshape((6, 65, 5))?)
        })?;
    }
    Ok(())
}

#[test]
fn copies_between_layouts() -> Result<()> {
    same("permute", 0.0, |device| {
        let x = values(device, 24, 10, DType::F32)?.reshape((2, 3, 4, 10))?;
        x.permute((2, 0, 3, 1))?.contiguous()
    })?;
    same("cat and narrow", 0.0, |device| {
        let x = values(device, 24, 10, DType::BF16)?;
        Tensor::cat(&[&x.narrow(1, 2, 5)?, &x.narrow(1, 0, 3)?], 1)?.narrow(0, 5, 11)
    })?;
    same("casts", 0.0, |device| {
        let x = values(device, 24, 10, DType::F32)?
            .affine(100.0, 0.0)?
            .abs()?;
        x.to_dtype(DType::U32)?
            .to_dtype(DType::I64)?
            .to_dtype(DType::F64)
    })
}

#[test]
fn random_numbers_have_their_moments() -> Result<()> {
    let [_, gpu] = devices()?;
    let x = Tensor::randn(1f32, 2.0, 20_001, &gpu)?;
    let mean = x.mean_all()?.to_scalar::<f32>()?;
    let variance = x.affine(1.0, -1.0)?.sqr()?.mean_all()?.to_scalar::<f32>()?;
    assert!((mean - 1.0).abs() < 0.05, "mean {mean}");
    assert!((variance - 4.0).abs() < 0.2, "variance {variance}");
    let u = Tensor::rand(0f32, 1.0, 20_001, &gpu)?
        .mean_all()?
        .to_scalar::<f32>()?;
    assert!((u - 0.5).abs() < 0.02, "mean {u}");
    Ok(())
}
