//! `candle-train plot`: numbers of the steps as a picture.

mod axis;
mod chart;
mod curve;
mod quantity;
mod smoothing;

use std::path::PathBuf;

use candle_core::{Result, bail};

use crate::pictures::picture::write_picture;
use axis::Scale;
use chart::{Chart, FEW_POINTS, Line};
use curve::{Curve, MetricsFile};
use quantity::{Quantity, axis_label};
use smoothing::Smoothing;

/// Draw numbers of the steps of one or several runs
#[derive(Debug, clap::Args)]
pub(crate) struct PlotArgs {
    /// Files of --metrics, each with a curve for every --metric
    #[arg(required = true, value_name = "METRICS")]
    metrics: Vec<PathBuf>,
    /// The picture, which ends with .png or .svg
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Which numbers: loss, eval_loss, grad_norm, tokens_per_sec, memory/weights_bytes .. with commas between, or the flag several times
    #[arg(
        long = "metric",
        default_value = "loss",
        value_name = "NAMES",
        value_delimiter = ','
    )]
    names: Vec<String>,
    /// What stands above the picture [default: nothing]
    #[arg(long, value_name = "TEXT")]
    title: Option<String>,
    /// Draw moving averages before faint curves of the numbers themselves: exponential ones, as TensorBoard's and corrected for their start,
    /// by a factor below 1, such as 0.9, or over a window of points, such as 20, whose factor is 1 - 2 / (20 + 1). Curves of up to 40
    /// points stay as they are [default: the numbers alone]
    #[arg(long, value_name = "WINDOW|FACTOR", value_parser = Smoothing::parse)]
    smooth: Option<Smoothing>,
    /// A logarithmic y axis, for numbers above 0
    #[arg(long)]
    log: bool,
}

impl PlotArgs {
    /// Draws the picture, and says so.
    ///
    /// # Errors
    /// Files that hold no metrics, or not these; numbers of different units, or none that have a logarithm; a picture of another kind, or
    /// that cannot be written.
    pub fn run(&self) -> Result<()> {
        let names = self.names()?;
        let files = self.metrics.iter().map(|path| MetricsFile::read(path));
        let files = files.collect::<Result<Vec<_>>>()?;
        let mut curves = Vec::new();
        for file in &files {
            for name in &names {
                curves.push(file.curve(name)?);
            }
        }
        let values = curves.iter().flatten().map(|(_, value)| *value);
        let greatest = values.fold(0.0, f64::max);
        let quantities: Vec<Quantity> = names
            .iter()
            .map(|name| Quantity::named(name, greatest))
            .collect();
        let chart = Chart {
            title: self.title.as_deref(),
            y_label: axis_label(&quantities)?,
            scale: if self.log { Scale::Log } else { Scale::Linear },
            lines: self.lines(&files, &quantities, &curves)?,
        };
        write_picture(&chart, &self.output)
    }

    /// The names of numbers, each once.
    fn names(&self) -> Result<Vec<&str>> {
        let mut names = Vec::new();
        for name in self.names.iter().map(|name| name.trim()) {
            if name.is_empty() {
                bail!("--metric has a name that is empty\nhint: such as loss,eval_loss");
            }
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// The lines of the chart: those of the files one after the other, each with one of every quantity.
    fn lines(
        &self,
        files: &[MetricsFile],
        quantities: &[Quantity],
        curves: &[Curve],
    ) -> Result<Vec<Line>> {
        let mut lines = Vec::new();
        let of_file = curves.chunks(quantities.len());
        for (file, curves) in files.iter().zip(of_file) {
            for (quantity, curve) in quantities.iter().zip(curves) {
                if self.log {
                    check_positive(file, quantity, curve)?;
                }
                let points: Curve = curve
                    .iter()
                    .map(|&(step, value)| (step, value / quantity.divisor))
                    .collect();
                let smoothing = self.smooth.filter(|_| points.len() > FEW_POINTS);
                lines.push(Line {
                    name: match (files.len(), quantities.len()) {
                        (1, _) => quantity.label.clone(),
                        (_, 1) => file.shown(),
                        _ => format!("{}: {}", file.shown(), quantity.label),
                    },
                    averages: smoothing.map(|smoothing| smoothing.averages(&points)),
                    points,
                });
            }
        }
        Ok(lines)
    }
}

/// An error if a value has no logarithm.
fn check_positive(file: &MetricsFile, quantity: &Quantity, curve: &Curve) -> Result<()> {
    match curve.iter().find(|(_, value)| *value <= 0.0) {
        None => Ok(()),
        Some((step, value)) => bail!(
            "{} of step {step} in {} is {value}, and --log draws numbers above 0 only\nhint: leave --log out",
            quantity.name,
            file.shown()
        ),
    }
}
