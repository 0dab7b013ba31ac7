//! Numbers of flags, and what is said of one that is out of its range.

use std::fmt::Display;
use std::ops::{Bound, RangeBounds};
use std::str::FromStr;

/// A parser of numbers within a range, which are neither NaN nor infinite.
pub fn real(
    range: impl RangeBounds<f64> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse().ok().filter(|number: &f64| number.is_finite());
        within(&range, number, "a number")
    }
}

/// A parser of whole numbers within a range.
pub fn whole<T: FromStr + PartialOrd + Display>(
    range: impl RangeBounds<T> + Clone + Send + Sync + 'static,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| within(&range, text.parse().ok(), "a whole number")
}

/// A number as people write it on a command line: 2e-5, and not 0.00002.
pub fn written(number: f64) -> String {
    match number != 0.0 && number.abs() < 1e-3 {
        true => format!("{number:e}"),
        false => number.to_string(),
    }
}

/// A size such as 5GB, 500MiB or 1000000 in bytes.
///
/// # Errors
/// What is expected.
pub fn num_bytes(text: &str) -> Result<usize, String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        "kib" => 1024.0,
        "mib" => 1024.0 * 1024.0,
        "gib" => 1024.0 * 1024.0 * 1024.0,
        _ => f64::NAN,
    };
    let bytes = number.parse().map_or(f64::NAN, |number: f64| number * unit);
    match (1.0..=1e18).contains(&bytes) {
        true => Ok(bytes as usize),
        false => Err("expected a size such as 5GB, 500MB or 512MiB".to_string()),
    }
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
