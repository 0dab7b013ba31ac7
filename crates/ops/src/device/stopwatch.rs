//! Time that parts of a program take on their device.

use candle_core::{Device, Result};

/// Adds up the time that work takes on its device: on a GPU by its own clock, from CUDA events before and after the work, so
/// that the host, which only asks for the work, need not wait for it.
///
/// A GPU's stream does one thing after the other: what other threads put on it in between counts too.
#[derive(Default)]
pub struct Stopwatch {
    secs: f64,
    #[cfg(feature = "cuda")]
    spans: Vec<crate::cuda::profile::Span>,
}

impl Stopwatch {
    /// Times `work`, which is on `device`.
    ///
    /// # Errors
    /// Those of `work`, and of a GPU that has failed.
    pub fn time<T>(&mut self, device: &Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let start = crate::cuda::profile::mark(cuda)?;
                let result = work()?;
                let end = crate::cuda::profile::mark(cuda)?;
                self.spans.push(crate::cuda::profile::Span { start, end });
                Ok(result)
            }
            _ => {
                let start = std::time::Instant::now();
                let result = work();
                self.secs += start.elapsed().as_secs_f64();
                result
            }
        }
    }

    /// The seconds so far, from which it starts anew. Waits for the end of the work.
    ///
    /// # Errors
    /// The GPU has failed.
    pub fn take_secs(&mut self) -> Result<f64> {
        let secs = std::mem::take(&mut self.secs);
        #[cfg(feature = "cuda")]
        let secs = {
            let spans = std::mem::take(&mut self.spans);
            let spans = spans.iter().map(crate::cuda::profile::Span::secs);
            secs + spans.sum::<Result<f64>>()?
        };
        Ok(secs)
    }
}
