//! Of processors that this crate has no kernels for: there are no panels.

use crate::cpu::element::Element;
use crate::product::matrix::Matrix;
use crate::settings::product_choice::ProductSize;
use std::sync::Arc;

/// There are none on this processor.
#[derive(Debug)]
pub(crate) enum Panels {}

pub(crate) fn new_panels<T: Element>(_num_k: usize, _cols: usize) -> Option<Panels> {
    None
}

pub(crate) fn panel_bytes<T: Element>(_num_k: usize, _cols: usize) -> Option<usize> {
    None
}

pub(crate) fn is_worth_it<T: Element>(_rows: usize, _cols: usize) -> bool {
    false
}

pub(crate) fn fill_panels<T: Element>(
    _: &mut Arc<Panels>,
    _: bool,
    _: Matrix<'_, T>,
    _: ProductSize,
) {
}
