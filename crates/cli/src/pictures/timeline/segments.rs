//! Events within each other as pieces of time one after the other, and what share of a step they take.

use super::style::Category;
use super::trace_file::{Rank, TraceSpan};

/// Cuts the time from `start` to `end` into pieces, each with the words of the innermost event there. Events lie within
/// each other or apart.
pub(super) fn segments(events: &[TraceSpan], (start, end): (f64, f64)) -> Vec<TraceSpan> {
    let mut events: Vec<&TraceSpan> = events.iter().collect();
    // What lies within another one comes after it.
    events.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
    let mut open: Vec<&TraceSpan> = Vec::new();
    let mut segments = Vec::new();
    let mut reached = f64::NEG_INFINITY;
    let mut add = |event: &TraceSpan, from: f64, to: f64| {
        let (from, to) = (from.max(start), to.min(end));
        if to > from {
            segments.push(TraceSpan {
                start: from,
                end: to,
                ..event.clone()
            });
        }
    };
    for event in events {
        while let Some(outer) = open.pop_if(|outer| outer.end <= event.start) {
            add(outer, reached, outer.end);
            reached = reached.max(outer.end);
        }
        if let Some(outer) = open.last() {
            add(outer, reached, event.start);
        }
        reached = event.start;
        open.push(event);
    }
    while let Some(event) = open.pop() {
        add(event, reached, event.end);
        reached = reached.max(event.end);
    }
    segments
}

/// What fractions of a time a rank spent.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    /// On each of [`Category::ALL`].
    pub of: [f64; Category::ALL.len()],
    /// With operations in flight.
    pub in_flight: f64,
    /// With operations in flight while it was not idle.
    pub hidden: f64,
}

impl Shares {
    /// Those of a rank from `start` to `end`.
    pub fn new(rank: &Rank, (start, end): (f64, f64)) -> Self {
        let segments = segments(&rank.computing, (start, end));
        let whole = end - start;
        let in_flight = union(&rank.in_flight, (start, end));
        let mut shares = Self {
            in_flight: in_flight.iter().map(|span| span.1 - span.0).sum::<f64>() / whole,
            ..Self::default()
        };
        shares.hidden = shares.in_flight;
        for segment in segments {
            let mut categories = Category::ALL.iter().zip(&mut shares.of);
            let of = categories.find(|(category, _)| **category == segment.category);
            if let Some((_, share)) = of {
                *share += (segment.end - segment.start) / whole;
            }
            if segment.category == Category::Idle {
                let both = overlap(&in_flight, (segment.start, segment.end));
                shares.hidden -= both.map(|(from, to)| to - from).sum::<f64>() / whole;
            }
        }
        shares
    }

    /// What is neither of the categories.
    pub fn rest(&self) -> f64 {
        1.0 - self.of.iter().sum::<f64>()
    }

    /// The means over ranks.
    pub fn mean(all: &[Self]) -> Self {
        let mean = |of: &dyn Fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        Self {
            of: std::array::from_fn(|index| mean(&|shares| shares.of[index])),
            in_flight: mean(&|shares| shares.in_flight),
            hidden: mean(&|shares| shares.hidden),
        }
    }
}

/// The moments from `start` to `end` that lie in one of the spans or several, as spans apart, in order.
pub(super) fn union(spans: &[(f64, f64)], (start, end): (f64, f64)) -> Vec<(f64, f64)> {
    let clipped = spans
        .iter()
        .map(|span| (span.0.max(start), span.1.min(end)));
    let mut spans: Vec<(f64, f64)> = clipped.filter(|span| span.1 > span.0).collect();
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut union: Vec<(f64, f64)> = Vec::new();
    for span in spans {
        match union.last_mut() {
            Some(last) if span.0 <= last.1 => last.1 = last.1.max(span.1),
            _ => union.push(span),
        }
    }
    union
}

/// What spans, which lie apart and in order, have between `start` and `end`.
pub(super) fn overlap(
    spans: &[(f64, f64)],
    (start, end): (f64, f64),
) -> impl Iterator<Item = (f64, f64)> {
    let first = spans.partition_point(|span| span.1 <= start);
    let spans = spans[first..].iter().take_while(move |span| span.0 < end);
    spans.map(move |span| (span.0.max(start), span.1.min(end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(category: Category, start: f64, end: f64) -> TraceSpan {
        TraceSpan {
            start,
            end,
            category,
            unit: None,
        }
    }

    #[test]
    fn the_innermost_event_counts_and_nothing_counts_twice() {
        use Category::{Backward, Forward, Idle, Step};
        let computing = vec![
            event(Idle, 3.0, 4.0),
            event(Forward, 2.0, 6.0),
            event(Idle, 5.0, 6.0),
            event(Step, 1.0, 11.0),
            event(Backward, 6.0, 10.0),
            event(Idle, 10.5, 11.0),
            event(Step, 11.0, 20.0),
        ];
        let found: Vec<_> = segments(&computing, (1.0, 11.0))
            .into_iter()
            .map(|segment| (segment.category, segment.start, segment.end))
            .collect();
        assert_eq!(
            found,
            [
                (Step, 1.0, 2.0),
                (Forward, 2.0, 3.0),
                (Idle, 3.0, 4.0),
                (Forward, 4.0, 5.0),
                (Idle, 5.0, 6.0),
                (Backward, 6.0, 10.0),
                (Step, 10.0, 10.5),
                (Idle, 10.5, 11.0),
            ]
        );
        let rank = Rank {
            computing,
            in_flight: vec![(0.0, 2.0), (3.0, 3.5), (3.25, 5.0), (10.5, 30.0)],
            ..Rank::default()
        };
        let shares = Shares::new(&rank, (1.0, 11.0));
        assert_eq!(shares.of, [0.2, 0.4, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0]);
        assert!((shares.rest() - 0.15).abs() < 1e-12);
        assert!((shares.in_flight - 0.35).abs() < 1e-12);
        assert!((shares.hidden - 0.2).abs() < 1e-12, "{shares:?}");
    }
}
