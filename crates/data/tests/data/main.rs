//! Tests of the way from files to micro-batches, one module per part.

mod batches;
mod chat;
mod chosen_template;
mod columns;
mod conversation_parts;
mod csv;
mod data;
mod hub;
mod hub_dataset;
mod hub_faults;
mod hub_server;
mod json_document;
mod other_programs;
mod parquet;
mod python_json;
mod read;
mod record_forms;
mod records;
mod samples;
mod template_language;
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
