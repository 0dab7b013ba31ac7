//! Numbers of flags, and what is said of one that is out of its range.

use std::fmt::Display;
use std::ops::{Bound, RangeBounds};
use std::str::FromStr;

/// A parser of numbers within a range, which are neither NaN nor infinite.
pub(crate) fn real(
    range: impl RangeBounds<f64> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number: &f64| number.is_finite());
        within(&range, number, "a number")
    }
}

/// A parser of whole numbers within a range.
pub(crate) fn whole<T: FromStr + PartialOrd + Display>(
    range: impl RangeBounds<T> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| within(&range, text.parse().ok(), "a whole number")
}

fn within<T: PartialOrd + Display>(
    range: &impl RangeBounds<T>,
    number: Option<T>,
    kind: &str,
) -> Result<T, String> {
    number.filter(|n| range.contains(n)).ok_or_else(|| {
        let least = match range.start_bound() {
            Bound::Included(least) => format!(" >= {least}"),
            Bound::Excluded(least) => format!(" > {least}"),
            Bound::Unbounded => String::new(),
        };
        let most = match range.end_bound() {
            Bound::Included(most) => format!(" and <= {most}"),
            Bound::Excluded(most) => format!(" and < {most}"),
            Bound::Unbounded => String::new(),
        };
        format!("expected {kind}{least}{most}")
    })
}
