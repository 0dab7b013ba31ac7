//! `candle-train plot`: numbers of the steps as a picture.

mod curve;

use std::ops::Range;
use std::path::PathBuf;

use candle_core::Result;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::picture::{Drawing, Drawn, FONT};
use curve::Curve;

/// Draw a number of the steps of one or several runs
#[derive(Debug, clap::Args)]
pub(crate) struct PlotArgs {
    /// Files of --metrics, a curve each
    #[arg(required = true, value_name = "METRICS")]
    metrics: Vec<PathBuf>,
    /// The picture, which ends with .png or .svg
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Which number: loss, grad_norm, tokens_per_sec, memory/weights_bytes ..
    #[arg(long, default_value = "loss", value_name = "NAME")]
    metric: String,
}

impl PlotArgs {
    /// Draws the picture.
    ///
    /// # Errors
    /// Files that hold no metrics, or not this one; a picture of another kind, or that cannot be written.
    pub fn run(&self) -> Result<()> {
        let read = |path: &PathBuf| Curve::read(path, &self.metric);
        let curves = self.metrics.iter().map(read).collect::<Result<Vec<_>>>()?;
        let plot = Plot {
            metric: &self.metric,
            curves,
        };
        plot.write(&self.output)
    }
}

struct Plot<'a> {
    metric: &'a str,
    curves: Vec<Curve>,
}

impl Drawing for Plot<'_> {
    fn size(&self) -> (u32, u32) {
        (1200, 700)
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Drawn<B> {
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let mut chart = ChartBuilder::on(area)
            .margin(20)
            .x_label_area_size(50)
            .y_label_area_size(90)
            .build_cartesian_2d(
                range(points().map(|(step, _)| *step), 0.0),
                range(points().map(|(_, value)| *value), 0.05),
            )?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(self.metric)
            .label_style((FONT, 18))
            .axis_desc_style((FONT, 20))
            .x_label_formatter(&|step| number(*step))
            .y_label_formatter(&|value| number(*value))
            .light_line_style(WHITE)
            .draw()?;
        for (index, curve) in self.curves.iter().enumerate() {
            let color = Palette99::pick(index);
            // A line through one point is not seen.
            let radius = if curve.points.len() == 1 { 4 } else { 0 };
            let line = color.stroke_width(2);
            let series = LineSeries::new(curve.points.iter().copied(), line).point_size(radius);
            chart
                .draw_series(series)?
                .label(&curve.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], line));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .margin(16)
            .legend_area_size(32)
            .label_font((FONT, 18))
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()
    }
}

/// From the least to the greatest value, and that part of it more on each side; never empty.
fn range(values: impl Iterator<Item = f64> + Clone, margin: f64) -> Range<f64> {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    let greatest = values.fold(f64::NEG_INFINITY, f64::max);
    match greatest - least {
        width if width > 0.0 => least - margin * width..greatest + margin * width,
        _ => {
            let around = if least == 0.0 { 1.0 } else { 0.1 * least.abs() };
            least - around..least + around
        }
    }
}

/// Short, for an axis.
fn number(value: f64) -> String {
    if value != 0.0 && !(1e-3..1e6).contains(&value.abs()) {
        return format!("{value:.2e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}
