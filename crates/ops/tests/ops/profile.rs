//! Profiles: what they count and print.

use crate::check::{device, on_each_device};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ops::{
    OpTime, Profile, Stopwatch, cross_entropy, linear_forward, linear_input_grad_sum,
    linear_weight_grad_into, rms_norm_forward,
};

fn op(op: &str, num_calls: usize, secs: f64) -> OpTime {
    OpTime {
        op: op.to_string(),
        num_calls,
        secs,
    }
}

#[test]
fn a_table_has_the_longest_operation_first_and_what_no_operation_explains() {
    let ops = vec![op("rope", 8, 0.002), op("linear", 4, 0.006)];
    let table = Profile::new(0.010, ops, 2).to_string();
    let rows: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split("  ").map(str::trim).collect())
        .map(|cells: Vec<&str>| cells.into_iter().filter(|cell| !cell.is_empty()).collect())
        .collect();
    let expected = [
        vec!["operation", "calls/step", "ms/step", "%"],
        vec!["linear", "2.0", "3.000", "60.0"],
        vec!["rope", "4.0", "1.000", "20.0"],
        vec!["everything else", "1.000", "20.0"],
        vec!["all", "5.000", "100.0"],
    ];
    assert_eq!(rows, expected, "{table}");
}

/// Tests that run at the same time use the same GPU: there counts are lower bounds.
#[test]
fn operations_are_counted_and_timed_while_a_profile_runs() -> Result<()> {
    on_each_device(|| {
        let device = device();
        let xs = Tensor::ones((3, 8), DType::F32, &device)?;
        let weight = Tensor::ones((5, 8), DType::F32, &device)?;
        let wide = Tensor::ones((7, 8), DType::BF16, &device)?;
        let scale = Tensor::ones(8, DType::F32, &device)?;
        let work = || -> Result<()> {
            linear_forward(&xs, &weight, None)?;
            linear_forward(&xs.to_dtype(DType::BF16)?, &wide, None)?;
            rms_norm_forward(&xs, &scale, 1e-6)?;
            Ok(())
        };
        for num_calls in [3, 2] {
            work()?;
            Profile::start(&device)?;
            let error = Profile::start(&device).unwrap_err().to_string();
            assert!(error.contains("runs already"), "{error}");
            for _ in 0..num_calls {
                work()?;
            }
            let profile = Profile::finish(&device, 1)?;
            let names = ["linear 5x3x8 f32", "linear 7x3x8 bf16", "rms_norm_forward"];
            for name in names {
                let time = profile.ops.iter().find(|time| time.op == name);
                let time = time.unwrap_or_else(|| panic!("no {name} in\n{profile}"));
                assert!(time.num_calls >= num_calls && time.secs > 0.0, "{profile}");
                assert!(time.secs <= profile.total_secs, "{profile}");
                assert!(!device.is_cpu() || time.num_calls == num_calls, "{profile}");
            }
            assert!(
                !device.is_cpu() || profile.ops.len() == names.len(),
                "{profile}"
            );
            let error = Profile::finish(&device, 1).unwrap_err().to_string();
            assert!(error.contains("no profile runs"), "{error}");
        }
        Ok(())
    })
}

#[test]
fn a_profile_of_the_cpu_counts_the_operations_of_its_thread_alone() -> Result<()> {
    let cpu = Device::Cpu;
    let logits = Tensor::ones((3, 5), DType::F32, &cpu)?;
    let targets = Tensor::new(&[1u32, 4, 0], &cpu)?;
    let dy = Tensor::ones((2, 3, 5), DType::BF16, &cpu)?;
    let weights = [
        Tensor::ones((5, 7), DType::BF16, &cpu)?,
        Tensor::ones((5, 7), DType::BF16, &cpu)?,
    ];
    let dw = Tensor::zeros((5, 5), DType::F32, &cpu)?;
    Profile::start(&cpu)?;
    let tracked = Var::from_tensor(&logits)?;
    cross_entropy(&tracked, &targets)?.sum_all()?.backward()?;
    linear_input_grad_sum(&[(&dy, &weights[0]), (&dy, &weights[1])])?;
    linear_weight_grad_into(&dw, true, &dy, &dy)?;
    let elsewhere = std::thread::spawn(move || -> Result<Profile> {
        Profile::start(&Device::Cpu)?;
        linear_forward(&logits, &logits, None)?;
        Profile::finish(&Device::Cpu, 1)
    });
    let elsewhere = elsewhere.join().unwrap()?;
    let profile = Profile::finish(&cpu, 1)?;
    let counts = |profile: &Profile| {
        let mut counts: Vec<(String, usize)> = profile
            .ops
            .iter()
            .map(|time| (time.op.clone(), time.num_calls))
            .collect();
        counts.sort();
        counts
    };
    let once = |names: &[&str]| -> Vec<(String, usize)> {
        names.iter().map(|name| (name.to_string(), 1)).collect()
    };
    let expected = [
        "cross_entropy_grad",
        "cross_entropy_loss",
        "linear_input_grad_sum 7x6x10 bf16",
        "linear_weight_grad_into 5x5x6 bf16 to f32",
        "softmax_stats",
    ];
    assert_eq!(counts(&profile), once(&expected));
    assert_eq!(counts(&elsewhere), once(&["linear 3x3x5 f32"]));
    let sum: f64 = profile.ops.iter().map(|time| time.secs).sum();
    assert!(sum <= profile.total_secs, "{profile}");
    Ok(())
}

#[test]
fn a_stopwatch_adds_up_work_on_each_device_and_starts_anew() -> Result<()> {
    on_each_device(|| {
        let device = device();
        let xs = Tensor::ones((200, 300), DType::F32, &device)?;
        let weight = Tensor::ones((100, 300), DType::F32, &device)?;
        let mut stopwatch = Stopwatch::default();
        let start = std::time::Instant::now();
        let mut sum = 0.0;
        for _ in 0..2 {
            let product = stopwatch.time(&device, || linear_forward(&xs, &weight, None))?;
            sum += product.sum_all()?.to_scalar::<f32>()?;
        }
        let elapsed = start.elapsed().as_secs_f64();
        assert_eq!(sum, 2.0 * 200.0 * 100.0 * 300.0);
        let secs = stopwatch.take_secs()?;
        assert!(secs > 0.0 && secs <= elapsed, "{secs} of {elapsed}");
        assert_eq!(stopwatch.take_secs()?, 0.0);
        let failed: Result<()> = stopwatch.time(&device, || candle_core::bail!("no"));
        assert!(failed.is_err());
        Ok(())
    })
}
