//! What goes to a GPU while the host goes on: ids, and sums of losses that stay there.

use crate::check::{device, on_each_device, random};
use candle_core::{DType, Result, Tensor};
use candle_ops::{sum_into, upload};

#[test]
fn ids_arrive_as_they_were_when_they_were_sent() -> Result<()> {
    on_each_device(|| {
        for round in 0..3u32 {
            // Many at once, before the GPU has copied any, and of several lengths, so that memory is used again.
            let ids = |n: u32| -> Vec<u32> { (0..n).map(|i| 1000 * n + 10 * i + round).collect() };
            let sent: Vec<Tensor> = (1..20)
                .map(|n| upload(ids(n), (1, n as usize), &device()))
                .collect::<Result<_>>()?;
            for (n, sent) in (1..20).zip(sent) {
                assert_eq!(sent.to_vec2::<u32>()?, [ids(n)]);
            }
        }
        assert_eq!(upload(vec![], (0, 3), &device())?.dims(), [0, 3]);
        assert!(upload(vec![1, 2, 3], 2, &device()).is_err());
        Ok(())
    })
}

#[test]
fn sums_are_written_and_added_in_f64() -> Result<()> {
    on_each_device(|| {
        let sum = Tensor::zeros((), DType::F64, &device())?;
        for n in [1usize, 1000, 5000] {
            let xs = random(n as u64, n)?;
            let want: f64 = xs.to_vec1::<f32>()?.into_iter().map(f64::from).sum();
            sum_into(&sum, false, &xs)?;
            sum_into(&sum, true, &xs)?;
            let got = sum.to_scalar::<f64>()?;
            // Sums in f32 would be off by 1e-7 and more.
            assert!((got - 2.0 * want).abs() <= 1e-12 * n as f64, "{got} {want}");
            sum_into(&sum, false, &xs.to_dtype(DType::F64)?)?;
            assert_eq!(2.0 * sum.to_scalar::<f64>()?, got);
        }
        let wide = Tensor::zeros((), DType::F32, &device())?;
        assert!(sum_into(&wide, true, &wide).is_err());
        let half = Tensor::zeros(4, DType::F16, &device())?;
        assert!(sum_into(&sum, true, &half).is_err());
        // The values that are summed may not be those that change.
        assert!(sum_into(&sum, true, &sum).is_err());
        Ok(())
    })
}
