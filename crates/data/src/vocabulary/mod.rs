//! From texts to token ids and back: [`Tokenizer`], and how one is trained.

mod line_borders;
mod special_tokens;
mod text_growth;
mod tokenizer;
mod tokenizer_config;
mod train_bpe;

pub use tokenizer::Tokenizer;
