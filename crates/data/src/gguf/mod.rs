//! A tokenizer in a GGUF file: what llama.cpp needs to make the same token ids of texts.

mod byte_level;
mod sentence_piece;
mod to_gguf;

pub use to_gguf::{GgufVocab, gguf_vocab};

/// Kinds of tokens, by their numbers in a file.
mod kind {
    /// Of ordinary text.
    pub const NORMAL: i32 = 1;
    /// Never part of a text.
    pub const CONTROL: i32 = 3;
    /// Added, and found in texts before anything else.
    pub const USER_DEFINED: i32 = 4;
    /// A row of the embedding without a token.
    pub const UNUSED: i32 = 5;
    /// One byte, where no token has a character.
    pub const BYTE: i32 = 6;
}

/// What stands for a space in vocabularies of SentencePiece: ▁.
const SPACE: char = '\u{2581}';
