//! Exponential moving averages of curves, as TensorBoard draws them.
//!
//! With factor β, a₀ = 0 and aₜ = β aₜ₋₁ + (1 − β) xₜ; drawn is aₜ / (1 − βᵗ), the average of x₁ .. xₜ with weights that add up to 1. Without
//! that division a curve would begin at 0.

/// How much of the numbers before is in an average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Smoothing {
    /// β, between 0 and 1.
    factor: f64,
}

impl Smoothing {
    /// A factor below 1, or a number of points from 2 on, whose factor has the centre of gravity of their plain average: 1 − 2 / (N + 1).
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let number = text.parse::<f64>().ok().filter(|it| it.is_finite());
        match number {
            Some(factor) if factor > 0.0 && factor < 1.0 => Ok(Self { factor }),
            Some(window) if window >= 2.0 && window.fract() == 0.0 => Ok(Self {
                factor: 1.0 - 2.0 / (window + 1.0),
            }),
            _ => Err(
                "expected a factor > 0 and < 1, such as 0.9, or a whole number of points >= 2, such as 20"
                    .to_string(),
            ),
        }
    }

    /// The averages up to each of these points.
    pub(super) fn averages(self, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
        let (mut sum, mut weight) = (0.0, 0.0);
        let average = |&(step, value): &(f64, f64)| {
            sum = self.factor * sum + (1.0 - self.factor) * value;
            weight = self.factor * weight + (1.0 - self.factor);
            (step, sum / weight)
        };
        points.iter().map(average).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Smoothing;

    #[test]
    fn averages_have_weights_that_add_up_to_1() {
        let half = Smoothing::parse("0.5").unwrap();
        let points = [(0.0, 4.0), (1.0, 1.0), (5.0, 1.0)];
        let averages = half.averages(&points);
        // (1·4) / 1, (1·4 + 2·1) / 3, (1·4 + 2·1 + 4·1) / 7
        let expected = [(0.0, 4.0), (1.0, 2.0), (5.0, 10.0 / 7.0)];
        for (got, expected) in averages.iter().zip(expected) {
            assert_eq!(got.0, expected.0);
            assert!((got.1 - expected.1).abs() < 1e-12, "{averages:?}");
        }
        assert_eq!(Smoothing::parse("3"), Ok(half));
    }

    #[test]
    fn other_words_are_refused() {
        for text in ["0", "1", "1.5", "-3", "2.5", "nan", "inf", "much", ""] {
            let error = Smoothing::parse(text).unwrap_err();
            assert!(error.contains("such as 20"), "{text}: {error}");
        }
    }
}
