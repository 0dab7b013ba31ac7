//! End-to-end tests of the workspace; see `tests/end_to_end/`.
#![forbid(unsafe_code)]
