//! What a rank's memory holds, in words: at the end of a run, and when a GPU has none left.

use candle_comm::message_of;
use candle_core::{Device, Error, Result, bail};
use candle_ops::GpuState;
use candle_parallel::{MemoryCategory, MemoryReport, ModelPart};

use super::available_memory::AvailableMemory;

/// What errors of the driver, cuBLAS and cuDNN about missing memory contain.
const OUT_OF_MEMORY: [&str; 4] = [
    "OUT_OF_MEMORY",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "out of memory",
];

/// What takes less memory.
pub const LESS_MEMORY_HINT: &str = "hint: a shorter --seq-len and smaller micro-batches take less for activations; --dtype bf16, --freeze, \
    --dp with --zero 3, --offload all --offload-dir DIR, --tp and --pp less for the rest";

const HINT_FOR_WEIGHTS: &str = "hint: --dtype bf16, --dp with --zero 3, --offload params --offload-dir DIR, --tp and --pp take less for weights";

/// `err` of building a model on `device`, and if that GPU had no memory left what is held of it.
pub fn explain_out_of_memory(err: Error, device: &Device) -> Error {
    with_report(err, HINT_FOR_WEIGHTS, || {
        let gpu = GpuState::of(device)?;
        Ok(gpu.map(|gpu| format!("{}\n  this rank: nothing but weights so far", of_gpu(&gpu))))
    })
}

/// `err`, and if a GPU had no memory left what this rank holds of it.
pub(crate) fn explain(err: Error, part: &ModelPart) -> Error {
    with_report(err, LESS_MEMORY_HINT, || report(part))
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

fn report(part: &ModelPart) -> Result<Option<String>> {
    let Some(gpu) = GpuState::of(part.device())? else {
        return Ok(None);
    };
    let held = part.params().meter().report();
    let known = held.on_device(|of| of.now);
    Ok(Some(format!(
        "{}\n  this rank: {}; the rest, {}, is workspaces, what is being computed and other ranks on this GPU",
        of_gpu(&gpu),
        in_words(|category| held.of(category).now),
        memory_in_words(gpu.used.saturating_sub(known)),
    )))
}

/// A warning if this machine, or this process's control group, has less memory left than the ranks here take if all are at their `peaks` at a time.
///
/// # Errors
/// They take `at_least` more than there is in all.
pub fn check_memory(peaks: u64, at_least: u64, num_processes: usize) -> Result<Option<String>> {
    match AvailableMemory::of_process() {
        Some(memory) => check_against(&memory, peaks, at_least, num_processes as u64),
        None => Ok(None),
    }
}

/// What this machine, or this process's control group, has left; `None` where nothing tells.
pub fn memory_left() -> Option<u64> {
    AvailableMemory::of_process().map(|memory| memory.left)
}

fn check_against(
    memory: &AvailableMemory,
    peaks: u64,
    at_least: u64,
    num_processes: u64,
) -> Result<Option<String>> {
    if at_least > memory.all {
        bail!(
            "this run needs {} of this machine's memory, of which there are {} in all, swap included\n{LESS_MEMORY_HINT}",
            memory_in_words(at_least),
            memory_in_words(memory.all)
        );
    }
    // What the processes hold already is among what they need.
    let own = memory.own.saturating_mul(num_processes);
    let available = memory.left.saturating_add(own);
    Ok((peaks > available).then(|| {
        format!(
            "this run is expected to need {} of this machine's memory, of which it can have {}\n{LESS_MEMORY_HINT}",
            memory_in_words(peaks),
            memory_in_words(available)
        )
    }))
}

/// `weights 1.2 GiB, gradients 2.4 GiB`: the most that was held of each category.
pub fn peaks_in_words(memory: &MemoryReport) -> String {
    in_words(|category| memory.of(category).peak)
}

fn in_words(bytes_of: impl Fn(MemoryCategory) -> u64) -> String {
    let bytes = MemoryCategory::ALL.map(|category| (category, bytes_of(category)));
    let bytes = bytes.iter().filter(|(_, bytes)| *bytes > 0);
    let words = bytes.map(|(category, bytes)| format!("{category} {}", memory_in_words(*bytes)));
    words.collect::<Vec<_>>().join(", ")
}

fn of_gpu(gpu: &GpuState) -> String {
    format!(
        "  {}: {} in all, {} free, {} in tensors of this process",
        gpu.name,
        memory_in_words(gpu.total),
        memory_in_words(gpu.free),
        memory_in_words(gpu.used),
    )
}

/// Bytes of memory in the unit that leaves less than 1024, as `1.2 GiB`.
pub fn memory_in_words(bytes: u64) -> String {
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

#[cfg(test)]
mod tests {
    use super::{AvailableMemory, check_against};

    #[test]
    fn more_than_is_left_is_a_warning_and_more_than_there_is_an_error() {
        let memory = AvailableMemory {
            left: 900,
            own: 50,
            all: 2000,
        };
        let check = |peaks, at_least| check_against(&memory, peaks, at_least, 2);
        assert_eq!(check(1000, 1000).unwrap(), None);
        let warning = check(1001, 900).unwrap().unwrap();
        assert!(warning.contains("need 1001.0 bytes"), "{warning}");
        assert!(warning.contains("can have 1000.0 bytes"), "{warning}");
        assert!(check(5000, 2000).unwrap().is_some());
        let error = check(5000, 2048).unwrap_err().to_string();
        assert!(error.contains("needs 2.0 KiB"), "{error}");
        assert!(error.contains("\nhint: "), "{error}");
    }
}
