//! Pictures as files.

use std::io::Write;
use std::path::Path;
use std::sync::Once;

use candle_core::{Error, Result, bail};
use candle_train::WholeFile;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;

/// The font of all text.
pub(crate) const FONT: &str = "sans-serif";

/// What a backend's drawing ends with.
pub(crate) type Drawn<B> =
    std::result::Result<(), DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>>;

/// Something that can be drawn with any backend.
pub(crate) trait Drawing {
    /// Draws it on `area`, which is of [`Self::size`].
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Drawn<B>;

    /// Width and height in pixels.
    fn size(&self) -> (u32, u32);

    /// Writes the picture to a file whose name ends with `.png` or `.svg`.
    ///
    /// # Errors
    /// Another ending, and a file that cannot be written: what was there stays.
    fn write(&self, output: &Path) -> Result<()> {
        let (width, height) = self.size();
        let bytes = match output.extension().and_then(|ending| ending.to_str()) {
            Some("svg") => {
                let mut svg = String::new();
                self.draw_with(SVGBackend::with_string(&mut svg, self.size()), output)?;
                svg.into_bytes()
            }
            Some("png") => {
                let mut pixels = vec![0; width as usize * height as usize * 3];
                let backend = BitMapBackend::with_buffer(&mut pixels, self.size());
                self.draw_with(backend, output)?;
                png_of(&pixels, self.size()).map_err(|err| cannot_write(output, err))?
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
