//! How curves look: on white paper, with lines that are told apart without seeing red and green as two.

use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::prelude::*;

use super::axis::{Axis, Scale};
use crate::pictures::picture::{Drawing, Drawn, FONT};

/// The colours of Okabe and Ito, who chose them to be told apart by everybody (<https://jfly.uni-koeln.de/color/>): those that are seen on white.
const COLORS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
];
const INK: RGBColor = RGBColor(0x30, 0x34, 0x3b);
const GRID: RGBColor = RGBColor(0xe4, 0xe7, 0xec);
/// What remains of the colour of a curve whose averages are drawn.
const FAINT: f64 = 0.35;
/// Units of the drawing in a pixel: curves that rise slowly have no stairs then.
const SCALE: u32 = 4;

/// Where a legend may be: the best place first, unless curves go through it.
const CORNERS: [(SeriesLabelPosition, [f64; 2]); 4] = [
    (SeriesLabelPosition::UpperRight, [1.0, 1.0]),
    (SeriesLabelPosition::UpperLeft, [0.0, 1.0]),
    (SeriesLabelPosition::LowerRight, [1.0, 0.0]),
    (SeriesLabelPosition::LowerLeft, [0.0, 0.0]),
];
/// Parts of the width and of the height that a legend takes, about.
const CORNER: [f64; 2] = [0.35, 0.2];
/// Of a curve of up to so many points each is marked, and none is an average of others.
pub(super) const FEW_POINTS: usize = 40;

/// Curves with their axes.
pub(super) struct Chart<'a> {
    pub title: Option<&'a str>,
    pub y_label: String,
    pub scale: Scale,
    pub lines: Vec<Line>,
}

/// A curve.
pub(super) struct Line {
    /// In the legend.
    pub name: String,
    /// Steps and values.
    pub points: Vec<(f64, f64)>,
    /// Drawn before the points, which are faint then.
    pub averages: Option<Vec<(f64, f64)>>,
}

/// A length in the units of the drawing.
fn px(pixels: u32) -> u32 {
    SCALE * pixels
}

/// Of text.
fn font<'a>(pixels: u32) -> TextStyle<'a> {
    (FONT, px(pixels)).into_font().color(&INK)
}

fn faint(RGBColor(red, green, blue): RGBColor) -> RGBColor {
    let mixed = |part: u8| (255.0 - FAINT * (255.0 - f64::from(part))) as u8;
    RGBColor(mixed(red), mixed(green), mixed(blue))
}

impl Line {
    /// What is drawn in its full colour.
    fn front(&self) -> &[(f64, f64)] {
        self.averages.as_deref().unwrap_or(&self.points)
    }
}

impl Chart<'_> {
    /// That through which the fewest points go.
    fn emptiest_corner(&self, x: &Axis, y: &Axis) -> SeriesLabelPosition {
        let is_near = |place: [f64; 2], corner: [f64; 2]| {
            let mut distances = place.into_iter().zip(corner).zip(CORNER);
            distances.all(|((at, end), reach)| (at - end).abs() < reach)
        };
        let num_points = |corner: [f64; 2]| {
            let points = self.lines.iter().flat_map(Line::front);
            let places =
                points.map(|(step, value)| [x.part(*step), y.part(self.scale.length(*value))]);
            places.filter(|place| is_near(*place, corner)).count()
        };
        let corners = CORNERS.into_iter();
        let emptiest = corners.min_by_key(|(_, corner)| num_points(*corner));
        emptiest.map_or(SeriesLabelPosition::UpperRight, |(position, _)| position)
    }

    /// The faint ones first, behind all others.
    fn draw_lines<'a, B: DrawingBackend + 'a>(
        &self,
        chart: &mut ChartContext<'a, B, Cartesian2d<Axis, Axis>>,
    ) -> Drawn<B> {
        let colors = || COLORS.iter().cycle();
        for (line, color) in self.lines.iter().zip(colors()) {
            if line.averages.is_some() {
                let style = faint(*color).stroke_width(px(1));
                chart.draw_series(LineSeries::new(self.lengths(&line.points), style))?;
            }
        }
        for (index, (line, color)) in self.lines.iter().zip(colors()).enumerate() {
            let style = color.stroke_width(px(5) / 2).filled();
            // A second round of the colours is dashed.
            let is_dashed = (index / COLORS.len()) % 2 == 1;
            let points = self.lengths(line.front());
            let marks = match line.points.len() <= FEW_POINTS {
                true => points.clone(),
                false => Vec::new(),
            };
            let drawn = match is_dashed {
                true => chart.draw_series(DashedLineSeries::new(points, px(10), px(6), style))?,
                false => chart.draw_series(LineSeries::new(points, style))?,
            };
            let width = if is_dashed { px(12) } else { px(28) } as i32;
            drawn
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + width, y)], style));
            let mark = |point| Circle::new(point, px(4), style);
            chart.draw_series(marks.into_iter().map(mark))?;
        }
        Ok(())
    }

    /// Steps, and the lengths of values.
    fn lengths(&self, points: &[(f64, f64)]) -> Vec<(f64, f64)> {
        let points = points.iter();
        points
            .map(|(step, value)| (*step, self.scale.length(*value)))
            .collect()
    }
}

impl Drawing for Chart<'_> {
    fn size(&self) -> (u32, u32) {
        (px(1200), px(700))
    }

    fn scale(&self) -> u32 {
        SCALE
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Drawn<B> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let x = Axis::of(points().map(|(step, _)| *step), Scale::Linear, 0.0);
        let y = Axis::of(points().map(|(_, value)| *value), self.scale, 0.04);
        let corner = self.emptiest_corner(&x, &y);
        let mut builder = ChartBuilder::on(area);
        builder
            .margin(px(20))
            .margin_right(px(36))
            .x_label_area_size(px(60))
            .y_label_area_size(px(88));
        if let Some(title) = self.title {
            builder.caption(title, font(26));
        }
        let mut chart = builder.build_cartesian_2d(x, y)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(&self.y_label)
            .label_style(font(18))
            .axis_desc_style(font(20))
            .axis_style(INK.stroke_width(px(1)))
            .bold_line_style(GRID.stroke_width(px(1)))
            .set_all_tick_mark_size(px(5))
            .disable_x_mesh()
            .draw()?;
        self.draw_lines(&mut chart)?;
        if self.lines.len() == 1 {
            return Ok(());
        }
        chart
            .configure_series_labels()
            .position(corner)
            .margin(px(12))
            .legend_area_size(px(38))
            .label_font(font(18))
            .background_style(WHITE.mix(0.85))
            .border_style(GRID.stroke_width(px(1)))
            .draw()
    }
}
