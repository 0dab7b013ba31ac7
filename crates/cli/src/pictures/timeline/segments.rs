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

/// The fractions of a time that a rank spent on each of [`Category::ALL`].
pub(super) type Shares = [f64; Category::ALL.len()];

/// The shares of a rank from `start` to `end`.
pub(super) fn shares_of(rank: &Rank, (start, end): (f64, f64)) -> Shares {
    let whole = end - start;
    let in_flight = union(&rank.in_flight, (start, end));
    let mut shares = [0.0; Category::ALL.len()];
    for segment in segments(&rank.computing, (start, end)) {
        shares[segment.category as usize] += (segment.end - segment.start) / whole;
        if segment.category == Category::Idle {
            let both = overlap(&in_flight, (segment.start, segment.end));
            let seen = both.map(|(from, to)| to - from).sum::<f64>() / whole;
            shares[Category::Hidden as usize] -= seen;
        }
    }
    let share = in_flight.iter().map(|span| span.1 - span.0).sum::<f64>() / whole;
    shares[Category::InFlight as usize] = share;
    shares[Category::Hidden as usize] += share;
    // Before and after its own step a rank has no event.
    let known: f64 = shares[..Category::Step as usize].iter().sum();
    shares[Category::Step as usize] = 1.0 - known;
    shares
}

/// The means over ranks.
pub(super) fn mean(all: &[Shares]) -> Shares {
    let sum = |index: usize| all.iter().map(|shares| shares[index]).sum::<f64>();
    std::array::from_fn(|index| sum(index) / all.len() as f64)
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
        use Category::{Backward, Forward, Hidden, Idle, InFlight, Step};
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
        let shares = shares_of(&rank, (1.0, 11.0));
        let known = [0.2, 0.4, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0];
        assert_eq!(shares[..known.len()], known);
        assert!((shares[Step as usize] - 0.15).abs() < 1e-12);
        assert!((shares[InFlight as usize] - 0.35).abs() < 1e-12);
        assert!((shares[Hidden as usize] - 0.2).abs() < 1e-12, "{shares:?}");
    }
}
