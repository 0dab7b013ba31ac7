//! How much of the devices' arithmetic is the model's.

/// What a model needs, and what its devices can do.
#[derive(Clone, Copy, Debug)]
pub struct ModelFlops {
    /// Floating-point operations per token of a step.
    pub per_token: f64,
    /// Operations per second of the devices of all ranks together, if that is known.
    pub peak_per_sec: Option<f64>,
}

impl ModelFlops {
    /// Operations per second, in 10^9.
    pub(crate) fn gflops_per_sec(&self, tokens_per_sec: f64) -> f64 {
        self.per_token * tokens_per_sec / 1e9
    }

    /// Model FLOPs utilisation (arXiv:2204.02311), from 0 to 1.
    pub(crate) fn mfu(&self, tokens_per_sec: f64) -> Option<f64> {
        let peak = self.peak_per_sec?;
        Some(self.per_token * tokens_per_sec / peak)
    }
}

#[cfg(test)]
mod tests {
    use super::ModelFlops;

    #[test]
    fn of_a_known_peak() {
        let flops = ModelFlops {
            per_token: 6e9,
            peak_per_sec: Some(989e12),
        };
        assert_eq!(flops.gflops_per_sec(1000.0), 6000.0);
        assert!((flops.mfu(1000.0).unwrap() - 6e12 / 989e12).abs() < 1e-15);
        let unknown = ModelFlops {
            peak_per_sec: None,
            ..flops
        };
        assert_eq!(unknown.mfu(1000.0), None);
    }
}
