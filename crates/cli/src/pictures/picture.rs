//! Pictures as files.

use std::io::Write;
use std::path::Path;
use std::sync::Once;

use candle_core::{Error, Result, bail};
use candle_train_run::print_line;
use candle_trainer::WholeFile;
use plotters::coord::Shift;

use plotters::prelude::*;
use plotters::style::register_font;
use plotters_backend::{BackendColor, BackendCoord, BackendStyle, DrawingErrorKind};

/// The font of all text.
pub(crate) const FONT: &str = "sans-serif";

/// What a backend's drawing ends with.
pub(crate) type Drawn<B> =
    std::result::Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

/// Something that can be drawn with any backend.
pub(crate) trait Drawing {
    /// Draws it on `area`, which is of [`Self::size`].
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Drawn<B>;

    /// Width and height in units of the drawing.
    fn size(&self) -> (u32, u32);

    /// Units of the drawing in a pixel of the picture, in both directions: with more than one lines have smooth borders.
    fn scale(&self) -> u32 {
        1
    }

    /// Writes the picture to a file whose name ends with `.png` or `.svg`.
    ///
    /// # Errors
    /// Another ending, and a file that cannot be written: what was there stays.
    fn write(&self, output: &Path) -> Result<()> {
        let ((width, height), scale) = (self.size(), self.scale());
        let pixels = (width / scale, height / scale);
        let bytes = match output.extension().and_then(|ending| ending.to_str()) {
            Some("svg") => {
                let mut svg = String::new();
                self.draw_with(SVGBackend::with_string(&mut svg, self.size()), output)?;
                let units = format!("width=\"{width}\" height=\"{height}\" viewBox");
                let shown = format!("width=\"{}\" height=\"{}\" viewBox", pixels.0, pixels.1);
                svg.replacen(&units, &shown, 1).into_bytes()
            }
            Some("png") => {
                let mut drawn = vec![0; width as usize * height as usize * 3];
                let backend = BitMapBackend::with_buffer(&mut drawn, self.size());
                self.draw_with(RoundJoins(backend), output)?;
                let averaged = averages(&drawn, width as usize, scale as usize);
                png_of(&averaged, pixels).map_err(|err| cannot_write(output, err))?
            }
            _ => bail!(
                "cannot draw {}: expected a name that ends with .png or .svg",
                output.display()
            ),
        };
        let written = WholeFile::create(output).and_then(|mut file| {
            file.write_all(&bytes)?;
            file.commit()
        });
        written.map_err(|err| cannot_write(output, err))
    }

    /// Draws it with a backend.
    fn draw_with<B: DrawingBackend>(&self, backend: B, output: &Path) -> Result<()> {
        static FONTS: Once = Once::new();
        FONTS.call_once(|| {
            // Without it there is no text, which the drawing below reports.
            let _ = register_font(FONT, FontStyle::Normal, dejavu::sans::regular());
        });
        let area = backend.into_drawing_area();
        let drawn = area.fill(&WHITE).and_then(|()| self.draw(&area));
        let drawn = drawn.and_then(|()| area.present());
        drawn.map_err(|err| Error::msg(format!("cannot draw {}: {err}", output.display())))
    }
}

/// Writes a picture as [`Drawing::write`] does, and says on stdout where it is.
///
/// # Errors
/// As [`Drawing::write`].
pub(crate) fn write_picture(drawing: &impl Drawing, output: &Path) -> Result<()> {
    drawing.write(output)?;
    print_line(&format!("wrote {}", output.display()));
    Ok(())
}

/// The least of 1, 2, 5, 10, 20 .. and 0.5, 0.2, 0.1 .. that is at least this.
pub(crate) fn round_step(width: f64) -> f64 {
    let power = 10f64.powf(width.log10().floor());
    let mut digits = [1.0, 2.0, 5.0].into_iter();
    let digit = digits.find(|digit| digit * power >= width);
    digit.unwrap_or(10.0) * power
}

/// The means of squares of `scale` x `scale` colours in rows of `width`.
fn averages(colors: &[u8], width: usize, scale: usize) -> Vec<u8> {
    let mut averages = Vec::with_capacity(colors.len() / (scale * scale));
    let mut sums = vec![0u32; width / scale * 3];
    for rows in colors.chunks_exact(width * 3 * scale) {
        sums.fill(0);
        for row in rows.chunks_exact(width * 3) {
            for (place, color) in row.chunks_exact(3).enumerate() {
                let sums = sums.iter_mut().skip(place / scale * 3);
                for (sum, part) in sums.zip(color) {
                    *sum += u32::from(*part);
                }
            }
        }
        let num_colors = (scale * scale) as u32;
        averages.extend(sums.iter().map(|sum| (sum / num_colors) as u8));
    }
    averages
}

/// A picture of points whose thick lines are drawn piece by piece, with round ends: as one polygon, which plotters makes of them, a
/// line that turns back on itself has holes.
struct RoundJoins<'a>(BitMapBackend<'a>);

type BitMapError = <BitMapBackend<'static> as DrawingBackend>::ErrorType;
type Painted = std::result::Result<(), DrawingErrorKind<BitMapError>>;

impl DrawingBackend for RoundJoins<'_> {
    type ErrorType = BitMapError;

    fn get_size(&self) -> (u32, u32) {
        self.0.get_size()
    }

    fn ensure_prepared(&mut self) -> Painted {
        self.0.ensure_prepared()
    }

    fn present(&mut self) -> Painted {
        self.0.present()
    }

    fn draw_pixel(&mut self, point: BackendCoord, color: BackendColor) -> Painted {
        self.0.draw_pixel(point, color)
    }

    fn draw_rect<S: BackendStyle>(
        &mut self,
        upper_left: BackendCoord,
        bottom_right: BackendCoord,
        style: &S,
        fill: bool,
    ) -> Painted {
        self.0.draw_rect(upper_left, bottom_right, style, fill)
    }

    fn draw_path<S: BackendStyle, I: IntoIterator<Item = BackendCoord>>(
        &mut self,
        path: I,
        style: &S,
    ) -> Painted {
        let radius = style.stroke_width() / 2;
        let mut last: Option<BackendCoord> = None;
        for point in path {
            if let Some(last) = last.filter(|last| *last != point) {
                self.0.draw_line(last, point, style)?;
            }
            if radius > 1 {
                self.0.draw_circle(point, radius, style, true)?;
            }
            last = Some(point);
        }
        Ok(())
    }
}

fn png_of(
    pixels: &[u8],
    (width, height): (u32, u32),
) -> std::result::Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

fn cannot_write(path: &Path, err: impl std::fmt::Display) -> Error {
    Error::msg(format!("cannot write {}: {err}", path.display()))
}
