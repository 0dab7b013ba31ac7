//! An axis: its range, the places of its ticks, and what is written beside them.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use crate::pictures::picture::round_step;

/// About so many ticks are wanted.
const TICKS: f64 = 8.0;

/// What is so little outside of a range is at its end.
const ROUNDING: f64 = 1e-9;

/// How values become lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    Linear,
    /// By their logarithms of base 10.
    Log,
}

/// An axis of some values.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    /// As lengths.
    range: Range<f64>,
    /// As lengths.
    ticks: Vec<f64>,
    /// What is written at each.
    labels: Vec<String>,
}

impl Scale {
    /// The length of a value.
    pub fn length(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log => value.log10(),
        }
    }

    fn value(self, length: f64) -> f64 {
        match self {
            Self::Linear => length,
            Self::Log => 10f64.powf(length),
        }
    }
}

impl Axis {
    /// From the least to the greatest of `values`, and the part `margin` of it more on each side; never empty.
    pub fn of(values: impl Iterator<Item = f64>, scale: Scale, margin: f64) -> Self {
        let lengths = values.map(|value| scale.length(value));
        let (least, greatest) = lengths.fold(
            (f64::INFINITY, f64::NEG_INFINITY),
            |(least, greatest), length| (least.min(length), greatest.max(length)),
        );
        let range = match greatest - least {
            // What rounding alone makes different has no ticks between.
            width if width > 1e-9 * least.abs() => {
                least - margin * width..greatest + margin * width
            }
            _ => {
                let around = if least == 0.0 { 1.0 } else { 0.1 * least.abs() };
                least - around..least + around
            }
        };
        let values = ticks(&range, scale);
        Self {
            ticks: values.iter().map(|value| scale.length(*value)).collect(),
            labels: labels(&values),
            range,
        }
    }

    /// Where a length is, from 0 at the beginning to 1 at the end.
    pub fn part(&self, length: f64) -> f64 {
        (length - self.range.start) / (self.range.end - self.range.start)
    }
}

/// Its values are lengths.
impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, length: &f64, (start, end): (i32, i32)) -> i32 {
        start + (self.part(*length) * f64::from(end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.clone(),
        }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    /// What is written at the tick at this length.
    fn format_ext(&self, length: &f64) -> String {
        let near = |tick: &f64| (tick - length).abs();
        let ticks = self.ticks.iter().zip(&self.labels);
        let nearest = ticks.min_by(|a, b| near(a.0).total_cmp(&near(b.0)));
        nearest.map_or(String::new(), |(_, label)| label.clone())
    }
}

/// Round values within a range of lengths.
fn ticks(range: &Range<f64>, scale: Scale) -> Vec<f64> {
    let (least, greatest) = (scale.value(range.start), scale.value(range.end));
    if scale == Scale::Log && range.end - range.start > 1.0 {
        let digits: &[f64] = match range.end - range.start {
            width if width < 3.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let powers = range.start.floor() as i32..=range.end.floor() as i32;
        let stride = (powers.clone().count() as f64 / (2.0 * TICKS))
            .ceil()
            .max(1.0) as usize;
        let values = powers
            .step_by(stride)
            .flat_map(|power| digits.iter().map(move |digit| digit * 10f64.powi(power)));
        return values
            .filter(|value| {
                let length = scale.length(*value);
                (range.start - ROUNDING..=range.end + ROUNDING).contains(&length)
            })
            .collect();
    }
    let step = round_step((greatest - least) / TICKS);
    let first = (least / step - ROUNDING).ceil() as i64;
    let last = (greatest / step + ROUNDING).floor() as i64;
    (first..=last).map(|index| index as f64 * step).collect()
}

/// All with the same number of decimals, in thousands or millions if they are large.
fn labels(values: &[f64]) -> Vec<String> {
    let greatest = values.iter().fold(0.0, |most: f64, it| most.max(it.abs()));
    let is_tiny = values.iter().all(|value| value.abs() < 1e-3) && greatest > 0.0;
    if is_tiny {
        return values.iter().map(|value| scientific(*value)).collect();
    }
    let (divisor, unit) = match greatest {
        _ if greatest >= 1e9 => (1e9, "G"),
        _ if greatest >= 1e6 => (1e6, "M"),
        _ if greatest >= 1e4 => (1e3, "k"),
        _ => (1.0, ""),
    };
    let is_whole = |decimals: i32| {
        let power = 10f64.powi(decimals);
        let mut rest = values.iter().map(|value| value / divisor * power);
        rest.all(|value| (value - value.round()).abs() < 1e-6 * power.max(1.0))
    };
    // Those of a logarithmic axis are far apart, and have as many decimals as each needs.
    let spread = values.iter().filter(|value| **value > 0.0);
    let spread = spread.fold(f64::INFINITY, |least: f64, it| least.min(*it));
    let is_spread = greatest / spread >= 1e3 && values.iter().all(|value| *value > 0.0);
    let decimals = (0..6).find(|&decimals| is_whole(decimals)).unwrap_or(6) as usize;
    let label = |value: &f64| match (*value, is_spread) {
        (0.0, _) => "0".to_string(),
        (value, true) => shortest(value),
        (value, false) => format!("{:.decimals$}{unit}", value / divisor),
    };
    values.iter().map(label).collect()
}

/// A number that stands for itself.
fn shortest(value: f64) -> String {
    match value.abs() {
        size if !(1e-3..1e6).contains(&size) => scientific(value),
        size if size >= 1e4 => format!("{}k", (value / 1e3 * 1e4).round() / 1e4),
        _ => format!("{}", (value * 1e6).round() / 1e6),
    }
}

/// As 1e-4, 2.5e-4.
fn scientific(value: f64) -> String {
    if value == 0.0 {
        return "0".to_string();
    }
    let text = format!("{value:.3e}");
    match text.split_once('e') {
        Some((digits, power)) => {
            let digits = digits.trim_end_matches('0').trim_end_matches('.');
            format!("{digits}e{power}")
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use plotters::coord::ranged1d::ValueFormatter;

    use super::{Axis, Scale};

    fn labels(values: &[f64], scale: Scale) -> Vec<String> {
        let axis = Axis::of(values.iter().copied(), scale, 0.0);
        assert!(axis.range.start < axis.range.end, "{axis:?}");
        axis.ticks
            .iter()
            .map(|tick| axis.format_ext(tick))
            .collect()
    }

    #[test]
    fn ticks_are_round_and_labels_alike() {
        use Scale::{Linear, Log};
        for (values, scale, expected) in [
            (&[0.0, 300.0][..], Linear, "0 50 100 150 200 250 300"),
            (&[2.1, 4.0], Linear, "2.5 3.0 3.5 4.0"),
            (&[0.0, 25_000.0], Linear, "0 5k 10k 15k 20k 25k"),
            (&[0.0, 7.5e6], Linear, "0 1M 2M 3M 4M 5M 6M 7M"),
            (&[0.0, 2e-4], Linear, "0 5e-5 1e-4 1.5e-4 2e-4"),
            (&[-1.0, 1.0], Linear, "-1.0 -0.5 0 0.5 1.0"),
            (&[7.0], Linear, "6.4 6.6 6.8 7.0 7.2 7.4 7.6"),
            (&[0.0], Linear, "-1.0 -0.5 0 0.5 1.0"),
            (&[1.0, 50.0], Log, "1 2 5 10 20 50"),
            (&[1e-4, 1e4], Log, "1e-4 0.001 0.01 0.1 1 10 100 1000 10k"),
            // Less than a power of ten has the ticks of a linear axis, at the places of their logarithms.
            (&[2.0, 4.1], Log, "2.0 2.5 3.0 3.5 4.0"),
        ] {
            assert_eq!(labels(values, scale).join(" "), expected, "{values:?}");
        }
    }

    #[test]
    fn whatever_the_values_there_are_ticks_and_few() {
        for power in -12..12 {
            for width in [1.0, 1.7, 3.3, 9.0] {
                let least = 10f64.powi(power);
                for scale in [Scale::Linear, Scale::Log] {
                    let labels = labels(&[least, least + width * least * 1e3], scale);
                    assert!((2..16).contains(&labels.len()), "{labels:?}");
                    let mut unique = labels.clone();
                    unique.dedup();
                    assert_eq!(unique, labels);
                }
            }
        }
    }
}
