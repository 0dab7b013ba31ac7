//! `candle-train plot`: numbers of the steps as a picture.

mod curve;

use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Once;

use candle_core::{Error, Result, bail};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;

use curve::Curve;

/// In pixels.
const SIZE: (u32, u32) = (1200, 700);
const FONT: &str = "sans-serif";

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
        let output = &self.output;
        match output.extension().and_then(|ending| ending.to_str()) {
            Some("svg") => {
                let mut svg = String::new();
                self.draw(SVGBackend::with_string(&mut svg, SIZE), &curves)?;
                std::fs::write(output, svg).map_err(|err| cannot_write(output, err))
            }
            Some("png") => {
                let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
                self.draw(BitMapBackend::with_buffer(&mut pixels, SIZE), &curves)?;
                write_png(output, &pixels)
            }
            _ => bail!(
                "cannot draw {}: expected a name that ends with .png or .svg",
                output.display()
            ),
        }
    }

    fn draw<B: DrawingBackend>(&self, backend: B, curves: &[Curve]) -> Result<()> {
        static FONTS: Once = Once::new();
        FONTS.call_once(|| {
            // Without it there is no text, which the drawing below reports.
            let _ = register_font(FONT, FontStyle::Normal, dejavu::sans::regular());
        });
        let drawn = draw_curves(&backend.into_drawing_area(), &self.metric, curves);
        drawn.map_err(|err| Error::msg(format!("cannot draw {}: {err}", self.output.display())))
    }
}

fn draw_curves<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    metric: &str,
    curves: &[Curve],
) -> std::result::Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    area.fill(&WHITE)?;
    let points = || curves.iter().flat_map(|curve| &curve.points);
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
        .y_desc(metric)
        .label_style((FONT, 18))
        .axis_desc_style((FONT, 20))
        .x_label_formatter(&|step| number(*step))
        .y_label_formatter(&|value| number(*value))
        .light_line_style(WHITE)
        .draw()?;
    for (index, curve) in curves.iter().enumerate() {
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
        .draw()?;
    area.present()
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

fn write_png(path: &Path, pixels: &[u8]) -> Result<()> {
    let file = File::create(path).map_err(|err| cannot_write(path, err))?;
    let mut encoder = png::Encoder::new(BufWriter::new(file), SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    let written = encoder.write_header().and_then(|mut writer| {
        writer.write_image_data(pixels)?;
        writer.finish()
    });
    written.map_err(|err| cannot_write(path, err))
}

fn cannot_write(path: &Path, err: impl std::fmt::Display) -> Error {
    Error::msg(format!("cannot write {}: {err}", path.display()))
}
