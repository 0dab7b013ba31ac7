//! The first message of an operation: what this rank calls, from where, and its data if they are few.
//!
//! ```text
//! length of the call: u32 | length of the call site: u32 | bytes that follow: u64 | call | call site | data
//! ```
//! It is short enough for every MPI to send without waiting for the receiver.

/// Data up to this size travel inside the first message.
pub(super) const INLINE_BYTES: usize = 2048;

/// A call or its site longer than this loses its middle.
const TEXT_BYTES: usize = 512;

/// Room for every first message.
pub(super) const MAX_BYTES: usize = 16 + 2 * TEXT_BYTES + INLINE_BYTES;

/// What a rank says when it starts an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    /// The operation and what it is called on, on which ranks must agree.
    pub call: String,
    /// Where it was called.
    pub site: String,
    /// Its data, if they are few.
    pub data: Vec<u8>,
    /// Bytes of data that follow in other messages.
    pub follows: u64,
}

impl Header {
    /// As bytes, at most [`MAX_BYTES`] if the data are at most [`INLINE_BYTES`].
    pub fn encode(&self) -> Vec<u8> {
        let (call, site) = (shorten(&self.call), shorten(&self.site));
        let parts: [&[u8]; 6] = [
            &(call.len() as u32).to_le_bytes(),
            &(site.len() as u32).to_le_bytes(),
            &self.follows.to_le_bytes(),
            call.as_bytes(),
            site.as_bytes(),
            &self.data,
        ];
        parts.concat()
    }

    /// What [`encode`](Self::encode) gave; `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (call_len, rest) = bytes.split_first_chunk::<4>()?;
        let (site_len, rest) = rest.split_first_chunk::<4>()?;
        let (follows, rest) = rest.split_first_chunk::<8>()?;
        let (call, rest) = rest.split_at_checked(u32::from_le_bytes(*call_len) as usize)?;
        let (site, data) = rest.split_at_checked(u32::from_le_bytes(*site_len) as usize)?;
        Some(Self {
            call: String::from_utf8(call.to_vec()).ok()?,
            site: String::from_utf8(site.to_vec()).ok()?,
            data: data.to_vec(),
            follows: u64::from_le_bytes(*follows),
        })
    }

    /// What it was called on and where, for messages.
    pub fn call_at_site(&self) -> String {
        format!("{} at {}", self.call, self.site)
    }
}

/// `text`, without its middle if it is long.
fn shorten(text: &str) -> String {
    if text.len() <= TEXT_BYTES {
        return text.to_string();
    }
    let half = TEXT_BYTES / 2 - 1;
    let is_border = |index: &usize| text.is_char_boundary(*index);
    let head = (0..=half).rev().find(is_border).unwrap_or(0);
    let tail = (text.len() - half..text.len()).find(is_border);
    let tail = tail.unwrap_or(text.len());
    format!("{}..{}", &text[..head], &text[tail..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let header = Header {
            call: "all_reduce(sum) of f32 [2, 3]".into(),
            site: "src/step.rs:7:9".into(),
            data: vec![7; INLINE_BYTES],
            follows: 1 << 40,
        };
        assert_eq!(Header::decode(&header.encode()), Some(header.clone()));
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes[..20]), None);
        assert_eq!(Header::decode(&[]), None);
    }

    #[test]
    fn long_texts_fit() {
        let header = Header {
            call: "ä".repeat(4000),
            site: format!("{}x/end.rs:1:1", "ö".repeat(900)),
            data: vec![1; INLINE_BYTES],
            follows: 0,
        };
        let bytes = header.encode();
        assert!(bytes.len() <= MAX_BYTES, "{}", bytes.len());
        let got = Header::decode(&bytes).unwrap();
        assert!(got.site.ends_with("x/end.rs:1:1") && got.site.contains(".."));
        assert_eq!(got.data, header.data);
    }
}
