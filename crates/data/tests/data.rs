//! Tests of the way from files to micro-batches, one module per part.

#[path = "data/batches.rs"]
mod batches;
#[path = "data/chat.rs"]
mod chat;
#[path = "data/chosen_template.rs"]
mod chosen_template;
#[path = "data/columns.rs"]
mod columns;
#[path = "data/conversation_parts.rs"]
mod conversation_parts;
#[path = "data/csv.rs"]
mod csv;
#[path = "data/data.rs"]
mod data;
#[path = "data/hub.rs"]
mod hub;
#[path = "data/hub_dataset.rs"]
mod hub_dataset;
#[path = "data/hub_faults.rs"]
mod hub_faults;
#[path = "data/hub_server.rs"]
mod hub_server;
#[path = "data/json_document.rs"]
mod json_document;
#[path = "data/other_programs.rs"]
mod other_programs;
#[path = "data/parquet.rs"]
mod parquet;
#[path = "data/python_json.rs"]
mod python_json;
#[path = "data/read.rs"]
mod read;
#[path = "data/record_forms.rs"]
mod record_forms;
#[path = "data/records.rs"]
mod records;
#[path = "data/samples.rs"]
mod samples;
#[path = "data/template_language.rs"]
mod template_language;
#[path = "data/tokenizer.rs"]
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
