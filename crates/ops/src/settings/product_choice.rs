//! With what a CPU multiplies matrices, if the environment says it.

use super::matmul_precision::MatmulPrecision;
use crate::cpu::processor::has_amx;
#[cfg(target_arch = "x86_64")]
use crate::cpu::processor::has_avx512_bf16;
use candle_core::{Error, Result};
use std::fmt::{Display, Formatter};
use std::str::FromStr;
use std::sync::LazyLock;

/// On AMX a product of f32 is done by multiply-adds if the harmonic mean of its extents is at most this: parts multiply faster, but each value of a
/// matrix costs them more. Of the cases of `bench_train.py` steps were measured both ways on two processors: all products of `small`, which was faster by
/// multiply-adds on one and as fast on the other, are below, and all of `default`, which was faster by parts on both, above. `bench_product --choose` finds what is
/// best product by product.
const THREE_PARTS_FROM: f64 = 400.0;

/// The variable that chooses.
const VARIABLE: &str = "CANDLE_TRAIN_PRODUCTS";

/// With what products on the CPU are computed, of linear layers and of attention: what the environment variable `CANDLE_TRAIN_PRODUCTS`
/// says, so that each way can be tried on any processor that has it; without it the fastest that is as exact as f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductChoice {
    /// `fma`: multiply-adds of f32, to which bf16 and f16 are widened.
    Fma,
    /// `dots`: AVX512-BF16 multiplies pairs of bf16; f32 and f16 as with [`Self::Fma`].
    Dots,
    /// `2`: AMX multiplies tiles of bf16, and each f32 as the sum of two bf16; f16 as with [`Self::Fma`].
    TwoParts,
    /// `3`: as [`Self::TwoParts`], with each f32 as the sum of three bf16.
    ThreeParts,
}

impl ProductChoice {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Fma, Self::Dots, Self::TwoParts, Self::ThreeParts];

    /// That of this process, if the environment has one: read once.
    ///
    /// # Errors
    /// When the variable has a value that means nothing, or one that [is not possible](Self::is_possible) here.
    pub fn from_env() -> Result<Option<Self>> {
        static CHOSEN: LazyLock<std::result::Result<Option<ProductChoice>, String>> =
            LazyLock::new(|| {
                // Set to nothing is not set: a script can leave a variable out so.
                let value = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
                let chosen = value.map(|value| value.to_string_lossy().parse());
                chosen.transpose().map_err(|error: Error| error.to_string())
            });
        CHOSEN.clone().map_err(Error::Msg)
    }

    /// Whether this processor can.
    pub fn is_possible(self) -> bool {
        match self {
            Self::Fma => true,
            #[cfg(target_arch = "x86_64")]
            Self::Dots => has_avx512_bf16(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Dots => false,
            Self::TwoParts | Self::ThreeParts => has_amx(),
        }
    }

    /// What a product of f32 takes each of them for is off by so much of it, at most: for [`Self::Fma`] half a unit in the last place, by
    /// which its sums are rounded.
    pub fn f32_error(self) -> f64 {
        match self {
            Self::Fma | Self::Dots | Self::ThreeParts => 2f64.powi(-24),
            Self::TwoParts => 2f64.powi(-16),
        }
    }

    /// The fastest of this processor for products of this size that keeps so many bits of f32. It depends on nothing else, so all ranks and runs
    /// on such processors choose alike.
    pub fn fastest(size: ProductSize, precision: MatmulPrecision) -> Self {
        match has_amx() {
            true => Self::fastest_with_amx(size, precision),
            false if Self::Dots.is_possible() => Self::Dots,
            false => Self::Fma,
        }
    }

    fn fastest_with_amx(size: ProductSize, precision: MatmulPrecision) -> Self {
        match precision {
            MatmulPrecision::High => Self::TwoParts,
            MatmulPrecision::Highest if size.harmonic_mean() > THREE_PARTS_FROM => Self::ThreeParts,
            MatmulPrecision::Highest => Self::Fma,
        }
    }
}

/// The size of a product of two matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductSize {
    /// Rows of the left matrix.
    pub rows: usize,
    /// Columns of the right matrix.
    pub cols: usize,
    /// Columns of the left matrix, which are rows of the right one.
    pub num_k: usize,
}

impl ProductSize {
    /// The side of the cube that has as many values of its three matrices for each multiplication: of these `rows cols num_k`, of those
    /// `rows num_k + num_k cols + rows cols`.
    pub fn harmonic_mean(self) -> f64 {
        let inverses = [self.rows, self.cols, self.num_k].map(|extent| 1.0 / extent as f64);
        3.0 / inverses.iter().sum::<f64>()
    }
}

/// `fma`, `dots`, `2` or `3`.
impl Display for ProductChoice {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Fma => "fma",
            Self::Dots => "dots",
            Self::TwoParts => "2",
            Self::ThreeParts => "3",
        })
    }
}

/// The names of [`Display`].
impl FromStr for ProductChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let named = Self::ALL
            .into_iter()
            .find(|choice| choice.to_string() == name);
        match named {
            Some(choice) if choice.is_possible() => Ok(choice),
            Some(choice) => Err(Error::Msg(format!(
                "{VARIABLE}: this processor cannot do `{choice}`, which needs {}\nhint: leave the variable out, or set it to fma",
                match choice {
                    Self::Dots => "AVX512-BF16",
                    _ => "AMX",
                }
            ))),
            None => Err(Error::Msg(format!(
                "{VARIABLE}: expected fma, dots, 2 or 3, got `{name}`\nhint: leave the variable out for what is fastest here"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ProductChoice, ProductSize};
    use crate::settings::matmul_precision::MatmulPrecision::{High, Highest};

    #[test]
    fn small_and_flat_products_of_f32_are_multiply_adds() {
        use ProductChoice::{Fma, ThreeParts};
        for (extents, chosen) in [
            // The largest of `small`, and the smallest of `default`.
            ([256, 256, 8192], Fma),
            ([1024, 512, 256], ThreeParts),
            ([usize::MAX, 512, 512], ThreeParts),
            ([4096, 4096, 28], Fma),
            ([512, 512, 0], Fma),
        ] {
            // Whichever is which.
            for turn in 0..3 {
                let [rows, cols, num_k] = [0, 1, 2].map(|i| extents[(i + turn) % 3]);
                let size = ProductSize { rows, cols, num_k };
                assert_eq!(
                    ProductChoice::fastest_with_amx(size, Highest),
                    chosen,
                    "{size:?}"
                );
                assert_eq!(
                    ProductChoice::fastest_with_amx(size, High),
                    ProductChoice::TwoParts
                );
            }
        }
    }

    #[test]
    fn names_are_read_as_they_are_written_and_others_refused() {
        for choice in ProductChoice::ALL {
            match choice.to_string().parse::<ProductChoice>() {
                Ok(read) => assert!(read == choice && choice.is_possible()),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!choice.is_possible(), "{error}");
                    assert!(error.contains("cannot do") && error.contains("\nhint: "));
                }
            }
        }
        for name in ["", "1", "4", "FMA", "amx"] {
            let error = name.parse::<ProductChoice>().unwrap_err().to_string();
            assert!(error.contains("CANDLE_TRAIN_PRODUCTS: expected fma, dots, 2 or 3"));
        }
    }
}
