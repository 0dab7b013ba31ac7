//! Tests of `candle-train`'s parts, one module per part.

#[path = "train/batches.rs"]
mod batches;
#[path = "train/chat.rs"]
mod chat;
#[path = "train/chosen_template.rs"]
mod chosen_template;
#[path = "train/columns.rs"]
mod columns;
#[path = "train/conversation_parts.rs"]
mod conversation_parts;
#[path = "train/csv.rs"]
mod csv;
#[path = "train/data.rs"]
mod data;
#[path = "train/hub.rs"]
mod hub;
#[path = "train/hub_dataset.rs"]
mod hub_dataset;
#[path = "train/hub_faults.rs"]
mod hub_faults;
#[path = "train/hub_server.rs"]
mod hub_server;
#[path = "train/json_document.rs"]
mod json_document;
#[path = "train/lr_schedule.rs"]
mod lr_schedule;
#[path = "train/metrics.rs"]
mod metrics;
#[path = "train/other_programs.rs"]
mod other_programs;
#[path = "train/parquet.rs"]
mod parquet;
#[path = "train/progress.rs"]
mod progress;
#[path = "train/python_json.rs"]
mod python_json;
#[path = "train/read.rs"]
mod read;
#[path = "train/record_forms.rs"]
mod record_forms;
#[path = "train/records.rs"]
mod records;
#[path = "train/sampler.rs"]
mod sampler;
#[path = "train/samples.rs"]
mod samples;
#[path = "train/template_language.rs"]
mod template_language;
#[path = "train/tensorboard.rs"]
mod tensorboard;
#[path = "train/tokenizer.rs"]
mod tokenizer;

/// The error's text, which must contain all of `parts`.
#[track_caller]
fn assert_error<T>(result: candle_core::Result<T>, parts: &[&str]) {
    let message = match result {
        Ok(_) => panic!("expected an error that mentions {parts:?}"),
        Err(e) => e.to_string(),
    };
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}
