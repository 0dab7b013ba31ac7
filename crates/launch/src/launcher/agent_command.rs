//! The command that starts a host's agent.

use std::path::PathBuf;

use super::layout::Host;

/// The words of the command: this program as an agent, on another host through ssh or what stands for it.
pub(super) fn words(host: &Host) -> Vec<String> {
    let own_program = own_program();
    let Some(via) = &host.via else {
        return vec![own_program, "agent".to_string()];
    };
    // What ssh runs goes through a shell there.
    let remote = [host.name.clone(), quoted(&own_program), "agent".to_string()];
    via.iter().cloned().chain(remote).collect()
}

/// The path of this program.
pub(super) fn own_program() -> String {
    let path = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("candle-train"));
    path.display().to_string()
}

/// A word as a shell reads it.
pub(super) fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_string();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}
