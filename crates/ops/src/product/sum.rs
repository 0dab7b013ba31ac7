//! The values along `k` of a product, cut into sums that stay in registers.

use super::kernel::Kernel;
use super::packing::Format;
use std::ops::Range;

/// Values along `k` of one of the products, which are summed in registers.
pub(super) struct Sum {
    pub(super) factors: usize,
    pub(super) k: Range<usize>,
    /// Lanes that they are packed into, and those packed before in the same pass.
    pub(super) lanes: usize,
    pub(super) first_lane: usize,
}

/// All values along `k` of products, cut into sums of equal length, and these put together into passes of up to `max_lanes`.
pub(super) fn sums<K: Kernel>(num_k: &[usize], max_lanes: usize) -> Vec<Sum> {
    let step = K::Format::TERMS * K::LANES_STEP;
    let mut sums = Vec::new();
    let mut first_lane = 0;
    for (i, &num_k) in num_k.iter().enumerate() {
        let len = num_k.div_ceil(num_k.div_ceil(K::SUM_LEN).max(1));
        let len = len.next_multiple_of(step).max(1);
        for start in (0..num_k).step_by(len) {
            let k = start..num_k.min(start + len);
            let lanes = k.len().div_ceil(step) * K::LANES_STEP;
            if first_lane + lanes > max_lanes {
                first_lane = 0;
            }
            sums.push(Sum {
                factors: i,
                k,
                lanes,
                first_lane,
            });
            first_lane += lanes;
        }
    }
    sums
}
