//! What a rank's memory holds, in words: at the end of a run, and when a GPU has none left.

use candle_comm::message_of;
use candle_core::{Device, Error, Result};
use candle_ops::GpuState;
use candle_parallel::{MemoryCategory, MemoryReport, Stage};

/// What errors of the driver, cuBLAS and cuDNN about missing memory contain.
const OUT_OF_MEMORY: [&str; 4] = [
    "OUT_OF_MEMORY",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "out of memory",
];

const HINT: &str = "hint: a shorter --seq-len and smaller micro-batches take less for activations; --dtype bf16, --freeze, \
    --dp with --zero 3, --offload optimizer, --tp and --pp less for the rest";

const HINT_FOR_WEIGHTS: &str =
    "hint: --dtype bf16, --dp with --zero 3, --tp and --pp take less for weights";

/// `err` of building a model on `device`, and if that GPU had no memory left what is held of it.
pub fn explain_out_of_memory(err: Error, device: &Device) -> Error {
    with_report(err, HINT_FOR_WEIGHTS, || {
        let gpu = GpuState::of(device)?;
        Ok(gpu.map(|gpu| format!("{}\n  this rank: nothing but weights so far", of_gpu(&gpu))))
    })
}

/// `err`, and if a GPU had no memory left what this rank holds of it.
pub(crate) fn explain(err: Error, stage: &Stage) -> Error {
    with_report(err, HINT, || report(stage))
}

fn with_report(err: Error, hint: &str, report: impl FnOnce() -> Result<Option<String>>) -> Error {
    let message = err.to_string();
    // What another rank said of its GPU may be quoted.
    let is_quoted = message.contains("rank ") && message.contains(" failed: ");
    let is_out_of_memory = !is_quoted && OUT_OF_MEMORY.iter().any(|words| message.contains(words));
    match is_out_of_memory.then(report) {
        Some(Ok(Some(report))) => Error::Msg(format!("{}\n{report}\n{hint}", message_of(&err))),
        // The driver that ran out of memory may not answer either: what it said first matters more.
        _ => err,
    }
}

fn report(stage: &Stage) -> Result<Option<String>> {
    let Some(gpu) = GpuState::of(stage.device())? else {
        return Ok(None);
    };
    let held = stage.params().meter().report();
    let known: u64 = MemoryCategory::ALL
        .map(|category| held.of(category).now)
        .iter()
        .sum();
    Ok(Some(format!(
        "{}\n  this rank: {}; the rest, {}, is workspaces, what is being computed and other ranks on this GPU",
        of_gpu(&gpu),
        in_words(|category| held.of(category).now),
        size(gpu.used.saturating_sub(known)),
    )))
}

/// `weights 1.2 GiB, gradients 2.4 GiB`: the most that was held of each category.
pub fn peaks_in_words(memory: &MemoryReport) -> String {
    in_words(|category| memory.of(category).peak)
}

fn in_words(bytes_of: impl Fn(MemoryCategory) -> u64) -> String {
    let bytes = MemoryCategory::ALL.map(|category| (category, bytes_of(category)));
    let bytes = bytes.iter().filter(|(_, bytes)| *bytes > 0);
    let words = bytes.map(|(category, bytes)| format!("{category} {}", size(*bytes)));
    words.collect::<Vec<_>>().join(", ")
}

fn of_gpu(gpu: &GpuState) -> String {
    format!(
        "  {}: {} in all, {} free, {} in tensors of this process",
        gpu.name,
        size(gpu.total),
        size(gpu.free),
        size(gpu.used),
    )
}

/// In the unit that leaves less than 1024.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["bytes", "KiB", "MiB", "GiB"];
    let power = (1..UNITS.len())
        .take_while(|&power| bytes >> (10 * power) > 0)
        .count();
    format!(
        "{:.1} {}",
        bytes as f64 / (1u64 << (10 * power)) as f64,
        UNITS[power]
    )
}
