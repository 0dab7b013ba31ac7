//! What a product multiplies.

use super::matrix::Matrix;
#[cfg(target_arch = "x86_64")]
use super::panels::Panels;
#[cfg(not(target_arch = "x86_64"))]
use super::without_kernels::Panels;

/// Two matrices to multiply.
#[derive(Clone, Copy)]
pub(crate) struct Factors<'a, T = f32> {
    pub(crate) lhs: Matrix<'a, T>,
    pub(crate) rhs: Matrix<'a, T>,
    /// The right one once more, in the order in which products read it.
    pub(crate) panels: Option<&'a Panels>,
}

impl<'a, T> Factors<'a, T> {
    pub(crate) fn new(lhs: Matrix<'a, T>, rhs: Matrix<'a, T>) -> Self {
        let panels = None;
        Self { lhs, rhs, panels }
    }
}
