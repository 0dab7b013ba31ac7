use std::io::Write;
use std::sync::{Arc, Mutex};

use candle_trainer::Progress;

use crate::metrics::step;

#[derive(Clone, Default)]
struct Sink(Arc<Mutex<Vec<u8>>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn lines(num_steps: usize, steps: std::ops::Range<usize>) -> Vec<String> {
    let sink = Sink::default();
    let mut progress = Progress::to_writer(num_steps, Box::new(sink.clone()));
    progress.println("start");
    steps.for_each(|s| progress.update(&step(s)));
    progress.finish();
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    text.lines().map(String::from).collect()
}

#[test]
fn plain_lines_for_the_first_step_every_tenth_of_the_run_and_the_last_step() {
    let lines = lines(95, 0..95);
    assert_eq!(lines[0], "start");
    assert!(
        lines[1].starts_with(
            "step 1/95 loss 2.5000 4096 positions/s 2048 loss tokens/s lr 1.00e-3 eta "
        ),
        "{}",
        lines[1]
    );
    assert!(lines[2].starts_with("step 10/95 "), "{}", lines[2]);
    assert!(lines.last().unwrap().starts_with("step 95/95 "));
    assert_eq!(lines.len(), 2 + 9 + 1);
}

#[test]
fn short_and_resumed_runs() {
    assert_eq!(lines(3, 0..3).len(), 4);
    assert!(lines(100, 50..51)[1].starts_with("step 51/100 "));
    assert_eq!(lines(0, 0..1).len(), 2);
}
