//! Spans as trace events: the JSON that Perfetto and Chrome read.

use candle_comm::Mesh;
use candle_comm::trace::{OpSpan, Span, SpanKind};
use candle_core::{Error, Result};
use serde::Serialize;
use serde_json::json;

use super::clock::Clock;

/// A complete event; times are in microseconds.
#[derive(Serialize)]
struct Event<'a> {
    ph: &'static str,
    pid: usize,
    tid: usize,
    cat: &'static str,
    name: String,
    ts: f64,
    dur: f64,
    args: Args<'a>,
}

#[derive(Serialize)]
struct Args<'a> {
    step: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    micro_batch: Option<usize>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    op: Option<OpArgs<'a>>,
}

#[derive(Serialize)]
struct OpArgs<'a> {
    group: &'a str,
    num_ranks: usize,
    bytes: u64,
}

/// Perfetto knows threads by numbers that are unique, takes 0 for the kernel, and shows the thread first whose number is that of its
/// process: here what a rank computes. Tracks of communication have numbers from this times the process's on.
const TRACKS: usize = 10_000;

/// A rank's events, one a line, each but the last with a comma at its end; first what the rank and its tracks are called.
///
/// A process of the trace is a rank, whose number is one less. On its first track events lie within each other or apart; operations in flight are on as many more as it takes for them to lie apart.
pub(super) fn events(spans: &[Span], mesh: &Mesh, clock: &Clock) -> Result<String> {
    let pid = mesh.world.rank() + 1;
    let mut placed: Vec<_> = spans
        .iter()
        .map(|span| (clock.nanos(span.start), clock.nanos(span.end), span))
        .collect();
    // What lies within a span comes after it.
    placed.sort_by_key(|(start, end, _)| (*start, -*end));
    let mut tracks: Vec<i64> = Vec::new();
    let mut lines = Vec::with_capacity(placed.len() + 8);
    for (start, end, span) in placed {
        let tid = match span.kind {
            SpanKind::Communication(_) => TRACKS * pid + free_track(&mut tracks, start, end),
            _ => pid,
        };
        let (cat, name) = category(&span.kind);
        let (stage, micro_batch) = match span.kind {
            SpanKind::Pass {
                stage, micro_batch, ..
            } => (Some(stage), Some(micro_batch)),
            _ => (None, None),
        };
        let event = Event {
            ph: "X",
            pid,
            tid,
            cat,
            name,
            ts: start as f64 / 1e3,
            dur: (end - start) as f64 / 1e3,
            args: Args {
                step: span.step,
                stage,
                micro_batch,
                op: op(&span.kind),
            },
        };
        lines.push(serde_json::to_string(&event).map_err(Error::wrap)?);
    }
    let name = |tid: usize, what: &str, name: &str| json!({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}});
    let mut names = vec![
        name(pid, "process_name", &rank_name(mesh)),
        name(pid, "thread_name", "computing"),
    ];
    for track in 0..tracks.len() {
        let number = match track {
            0 => String::new(),
            _ => format!(" {}", track + 1),
        };
        let tid = TRACKS * pid + track;
        names.push(name(tid, "thread_name", &format!("communication{number}")));
    }
    let names = names.iter().map(ToString::to_string);
    Ok(names.chain(lines).collect::<Vec<_>>().join(",\n"))
}

/// Such as `rank 3 (pp 1, dp 0, tp 1)`.
fn rank_name(mesh: &Mesh) -> String {
    let (pp, dp, tp) = (mesh.pp.rank(), mesh.dp.rank(), mesh.tp.rank());
    let cp = match mesh.cp.world_size() {
        1 => String::new(),
        _ => format!(", cp {}", mesh.cp.rank()),
    };
    format!("rank {} (pp {pp}, dp {dp}{cp}, tp {tp})", mesh.world.rank())
}

/// The first track that is free from `start` to `end`, a new one if need be; tracks have the ends of what is on them.
fn free_track(tracks: &mut Vec<i64>, start: i64, end: i64) -> usize {
    match tracks.iter().position(|busy_until| *busy_until <= start) {
        Some(track) => {
            tracks[track] = end;
            track
        }
        None => {
            tracks.push(end);
            tracks.len() - 1
        }
    }
}

/// Category and name.
fn category(kind: &SpanKind) -> (&'static str, String) {
    let plain = |category: &'static str| (category, category.to_string());
    match kind {
        SpanKind::Step => plain("step"),
        SpanKind::Data => plain("data"),
        SpanKind::Pass {
            pass, micro_batch, ..
        } => (pass.name(), format!("{} {micro_batch}", pass.name())),
        SpanKind::Optimizer => plain("optimizer"),
        SpanKind::Evaluation => plain("evaluation"),
        SpanKind::Checkpoint => plain("checkpoint"),
        SpanKind::Idle(op) => ("idle", format!("waiting for {}", op.operation)),
        SpanKind::Communication(op) => ("communication", op.operation.to_string()),
    }
}

fn op(kind: &SpanKind) -> Option<OpArgs<'_>> {
    let (SpanKind::Idle(op) | SpanKind::Communication(op)) = kind else {
        return None;
    };
    let OpSpan {
        group,
        num_ranks,
        bytes,
        ..
    } = *op;
    Some(OpArgs {
        group,
        num_ranks,
        bytes,
    })
}
