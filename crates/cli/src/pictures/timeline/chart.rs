//! The picture: a row for each rank, above what it computes, below it a line for operations in flight, pale where the rank does not wait for them,
//! beside it shares of its time.

use std::collections::BTreeSet;

use candle_trainer::counted;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::segments::{Shares, mean, overlap, segments, shares_of, union};
use super::style::{Category, GREY, GRID};
use super::trace_file::{Rank, TraceFile, TraceSpan};
use crate::pictures::picture::{Drawing, Drawn, FONT, round_step};

/// In pixels: where rows begin and end.
const LEFT: i32 = 220;
const WIDTH: i32 = 1000;
const TOP: i32 = 112;
const BELOW: i32 = 64;
/// Of a column of shares.
const COLUMN: i32 = 80;
/// Of all rows together, as far as rows are not too low or too high for it.
const HEIGHT: i32 = 1000;
const TEXT: i32 = 15;

/// A step, of a trace or simulated.
pub(super) struct TimelineChart<'a> {
    ranks: &'a [Rank],
    /// What is drawn, and from where it is.
    title: String,
    source: String,
    /// That of times.
    unit: &'static str,
    /// When it begins and ends.
    window: (f64, f64),
    shares: Vec<Shares>,
    /// What has a column of shares.
    columns: Vec<Category>,
    row_height: i32,
}

fn text(size: i32, color: &RGBColor, (h, v): (HPos, VPos)) -> TextStyle<'_> {
    let font = (FONT, size).into_font();
    font.color(color).pos(Pos::new(h, v))
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share.max(0.0))
}

impl<'a> TimelineChart<'a> {
    /// The step `step` of a trace, which every rank has.
    pub fn of_step(trace: &'a TraceFile, step: usize) -> Self {
        let (start, end) = trace.window(step);
        Self {
            title: format!("Step {step}: {} ms", number(end - start, 3)),
            source: trace.name.clone(),
            unit: "ms",
            ..Self::new(&trace.ranks, (start, end), Category::is_common)
        }
    }

    /// What `ranks` would do from 0 to `end`, in no unit of time.
    pub fn of_schedule(ranks: &'a [Rank], end: f64, title: String, source: String) -> Self {
        Self {
            title,
            source,
            ..Self::new(ranks, (0.0, end), |category| category == Category::Idle)
        }
    }

    /// Shares of categories that take time, and of those which are always shown.
    fn new(
        ranks: &'a [Rank],
        window: (f64, f64),
        is_always_shown: impl Fn(Category) -> bool,
    ) -> Self {
        let shares = ranks.iter().map(|rank| shares_of(rank, window));
        let shares: Vec<_> = shares.collect();
        let mean = mean(&shares);
        let is_shown =
            |category: &Category| is_always_shown(*category) || mean[*category as usize] >= 0.0005;
        let columns = Category::ALL.into_iter().filter(is_shown);
        Self {
            ranks,
            title: String::new(),
            source: String::new(),
            unit: "",
            window,
            shares,
            columns: columns.collect(),
            row_height: (HEIGHT / ranks.len().max(1) as i32).clamp(4, 60),
        }
    }

    fn num_ranks(&self) -> i32 {
        self.ranks.len() as i32
    }

    /// Every how many ranks there is room for text.
    fn text_rows(&self) -> usize {
        (TEXT + 2).div_euclid(self.row_height).max(0) as usize + 1
    }

    fn x(&self, at: f64) -> i32 {
        let (start, end) = self.window;
        LEFT + (f64::from(WIDTH) * (at - start) / (end - start)).round() as i32
    }

    fn column_x(&self, index: usize) -> i32 {
        LEFT + WIDTH + COLUMN * (index as i32 + 1)
    }

    fn draw_head<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Drawn<B> {
        let style = text(24, &BLACK, (HPos::Left, VPos::Center));
        area.draw(&Text::new(self.title.as_str(), (20, 34), style))?;
        let ranks = counted(self.ranks.len(), "rank");
        let from = format!("{ranks}, {}", self.source);
        let style = text(TEXT, &GREY, (HPos::Left, VPos::Center));
        area.draw(&Text::new(from, (20, 64), style))?;
        let mean = mean(&self.shares);
        for (index, column) in self.columns.iter().enumerate() {
            let x = self.column_x(index);
            let style = match column {
                // Of white only the border is seen.
                Category::Step => GREY.stroke_width(1),
                _ => column.color().filled(),
            };
            area.draw(&Rectangle::new([(x - COLUMN + 16, 30), (x, 36)], style))?;
            let style = text(TEXT, &BLACK, (HPos::Right, VPos::Center));
            area.draw(&Text::new(column.short_name(), (x, 54), style))?;
            let style = text(TEXT + 1, &BLACK, (HPos::Right, VPos::Center));
            let share = percent(mean[*column as usize]);
            area.draw(&Text::new(share, (x, 82), style))?;
        }
        let style = text(TEXT, &GREY, (HPos::Right, VPos::Center));
        let x = self.column_x(0) - COLUMN + 4;
        area.draw(&Text::new("mean of the ranks", (x, 82), style))
    }

    fn draw_axis<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Drawn<B> {
        let (start, end) = self.window;
        let bottom = TOP + self.row_height * self.num_ranks();
        let tick = round_step((end - start).max(1e-6) / 10.0);
        let mut index = 0;
        loop {
            let at = f64::from(index) * tick;
            if at > end - start {
                break;
            }
            let x = self.x(start + at);
            area.draw(&PathElement::new([(x, TOP - 6), (x, bottom + 6)], GRID))?;
            let style = text(TEXT, &GREY, (HPos::Center, VPos::Top));
            area.draw(&Text::new(number(at, 6), (x, bottom + 12), style))?;
            index += 1;
        }
        let style = text(TEXT, &GREY, (HPos::Right, VPos::Top));
        area.draw(&Text::new(self.unit, (LEFT - 14, bottom + 12), style))
    }

    fn draw_row<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, Shift>,
        index: usize,
        rank: &Rank,
    ) -> Drawn<B> {
        let top = TOP + self.row_height * index as i32;
        // Below the rows that are high enough is some room.
        let gap = self.row_height / 6;
        let line = (self.row_height / 7).max(1);
        let bottom = top + self.row_height - gap - line;
        let segments = segments(&rank.computing, self.window);
        let stages = segments
            .iter()
            .filter_map(|segment| Some(segment.unit?.stage));
        let stages: BTreeSet<usize> = stages.collect();
        for segment in &segments {
            let turn = segment.unit.map(|unit| stages.range(..unit.stage).count());
            self.draw_segment(area, segment, turn.unwrap_or_default(), (top, bottom))?;
        }
        self.draw_numbers(area, &segments, (top + bottom) / 2)?;
        let in_flight = union(&rank.in_flight, self.window);
        let draw_line = |(start, end), category: Category| {
            let (from, to) = (self.x(start), self.x(end));
            let corners = [(from, bottom + 1), (to, bottom + 1 + line)];
            if to > from {
                area.draw(&Rectangle::new(corners, category.color().filled()))
            } else {
                Ok(())
            }
        };
        for span in &in_flight {
            draw_line(*span, Category::Hidden)?;
        }
        let idle = segments.iter().filter(|it| it.category == Category::Idle);
        for span in idle.flat_map(|idle| overlap(&in_flight, (idle.start, idle.end))) {
            draw_line(span, Category::InFlight)?;
        }
        if !index.is_multiple_of(self.text_rows()) {
            return Ok(());
        }
        let y = (top + bottom) / 2;
        let style = text(TEXT, &BLACK, (HPos::Right, VPos::Center));
        area.draw(&Text::new(
            rank.name.as_str(),
            (LEFT - 14, y),
            style.clone(),
        ))?;
        for (column, of) in self.columns.iter().enumerate() {
            let share = percent(self.shares[index][*of as usize]);
            area.draw(&Text::new(share, (self.column_x(column), y), style.clone()))?;
        }
        Ok(())
    }

    fn draw_segment<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, Shift>,
        segment: &TraceSpan,
        turn: usize,
        (top, bottom): (i32, i32),
    ) -> Drawn<B> {
        let (from, to) = (self.x(segment.start), self.x(segment.end));
        if to <= from || segment.category == Category::Step {
            return Ok(());
        }
        let color = shaded(segment.category.color(), turn);
        area.draw(&Rectangle::new([(from, top), (to, bottom)], color.filled()))?;
        if to > from + 4 {
            // Apart from what was before.
            area.draw(&PathElement::new([(from, top), (from, bottom)], WHITE))?;
        }
        Ok(())
    }

    /// The number of each pass's micro-batch on its longest piece, if there is room.
    fn draw_numbers<B: DrawingBackend>(
        &self,
        area: &DrawingArea<B, Shift>,
        segments: &[TraceSpan],
        y: i32,
    ) -> Drawn<B> {
        let mut longest: Vec<&TraceSpan> = Vec::new();
        for segment in segments.iter().filter(|it| it.unit.is_some()) {
            let is_same = |other: &&mut &TraceSpan| {
                (other.category, other.unit) == (segment.category, segment.unit)
            };
            match longest.iter_mut().rev().find(is_same) {
                Some(other) if segment.end - segment.start > other.end - other.start => {
                    *other = segment;
                }
                Some(_) => {}
                None => longest.push(segment),
            }
        }
        let size = (self.row_height / 3).clamp(1, 17);
        let style = text(size, &WHITE, (HPos::Center, VPos::Center));
        for segment in longest {
            let number = segment.unit.map(|unit| unit.micro_batch.to_string());
            let number = number.unwrap_or_default();
            let (from, to) = (self.x(segment.start), self.x(segment.end));
            let width = 4 + number.len() as i32 * size * 2 / 3;
            if size >= 8 && to - from >= width {
                area.draw(&Text::new(number, ((from + to) / 2, y), style.clone()))?;
            }
        }
        Ok(())
    }
}

impl Drawing for TimelineChart<'_> {
    fn size(&self) -> (u32, u32) {
        let width = LEFT + WIDTH + COLUMN * self.columns.len() as i32 + 24;
        let height = TOP + self.row_height * self.num_ranks() + BELOW;
        (width as u32, height as u32)
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Drawn<B> {
        self.draw_head(area)?;
        self.draw_axis(area)?;
        let mut rows = self.ranks.iter().enumerate();
        rows.try_for_each(|(index, rank)| self.draw_row(area, index, rank))
    }
}

/// The colour of a rank's first stage, paler for each later one.
fn shaded(color: RGBColor, turn: usize) -> RGBColor {
    let white = 1.0 - 0.72f64.powi(turn.min(4) as i32);
    let pale = |part: u8| (f64::from(part) + white * (255.0 - f64::from(part))) as u8;
    RGBColor(pale(color.0), pale(color.1), pale(color.2))
}

/// With so many digits at least as it needs before the point.
fn number(value: f64, num_digits: usize) -> String {
    let before = value.abs().max(1.0).log10() as usize + 1;
    let text = format!("{value:.*}", num_digits.saturating_sub(before));
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}
