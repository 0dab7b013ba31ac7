//! Sequences as a person reads them.

use std::io::IsTerminal;

use candle_core::Result;
use candle_trainer::{Sample, Tokenizer, counted};

/// What shows which tokens have loss: (before, after) them.
type Marks = (&'static str, &'static str);

const GREEN: Marks = ("\x1b[32m", "\x1b[0m");
const BRACKETS: Marks = ("⟦", "⟧");

/// Writes sequences as text: what has loss in green where stdout is a terminal, else in brackets.
pub(crate) struct PreviewText<'a> {
    tokenizer: &'a Tokenizer,
    marks: Marks,
}

impl<'a> PreviewText<'a> {
    /// In colour unless `NO_COLOR` is set.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        let is_colourless = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let marks = match std::io::stdout().is_terminal() && !is_colourless {
            true => GREEN,
            false => BRACKETS,
        };
        Self { tokenizer, marks }
    }

    /// What the marks mean.
    pub fn legend(&self) -> String {
        let (before, after) = self.marks;
        format!("{before}this{after} has loss")
    }

    /// A sequence, with a line above each record.
    pub fn describe(&self, index: usize, sample: &Sample) -> Result<String> {
        let (num_tokens, num_pieces) = (sample.input_ids.len(), sample.piece_lens.len());
        let num_learned = sample.has_loss.iter().filter(|&&has_loss| has_loss).count();
        let mut text = format!(
            "--- sequence {index}: {}, {num_learned} with loss",
            counted(num_tokens, "token")
        );
        let mut start = 0;
        for (piece, len) in sample.piece_lens.iter().enumerate() {
            if num_pieces > 1 {
                text += &format!(
                    "\n--- record {} of {num_pieces}: {}",
                    piece + 1,
                    counted(*len, "token")
                );
            }
            let end = start + len;
            text += "\n";
            text += &self.piece(&sample.input_ids[start..end], &sample.has_loss[start..end])?;
            start = end;
        }
        Ok(text)
    }

    /// Runs of tokens with and without loss. A run's text is what it adds to that of the run before it: tokens alone may lose their spaces.
    fn piece(&self, ids: &[u32], has_loss: &[bool]) -> Result<String> {
        let decode = |ids: &[u32]| self.tokenizer.decode_with_special_tokens(ids);
        let (before, after) = self.marks;
        let (mut marked, mut earlier, mut start) = (String::new(), 0, 0);
        for run in has_loss.chunk_by(|a, b| a == b) {
            let end = start + run.len();
            let both = decode(&ids[earlier..end])?;
            let added = match both.strip_prefix(&decode(&ids[earlier..start])?) {
                Some(added) => added.to_string(),
                None => decode(&ids[start..end])?,
            };
            match run[0] {
                true => marked += &format!("{before}{added}{after}"),
                false => marked += &added,
            }
            (earlier, start) = (start, end);
        }
        Ok(marked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_loss_keep_their_spaces_however_many_there_are() {
        let tokenizer =
            Tokenizer::train_bpe(["the cat sat on the mat\n"].into_iter(), 280).unwrap();
        let num_runs = 5_000;
        let ids = tokenizer.encode("the cat sat on the mat").unwrap();
        let ids: Vec<u32> = ids.into_iter().cycle().take(2 * num_runs).collect();
        let has_loss: Vec<bool> = (0..ids.len()).map(|index| index % 4 > 1).collect();
        let text = PreviewText {
            tokenizer: &tokenizer,
            marks: BRACKETS,
        };
        let marked = text.piece(&ids, &has_loss).unwrap();
        assert_eq!(marked.matches('⟦').count(), num_runs / 2);
        let plain = marked.replace(['⟦', '⟧'], "");
        assert_eq!(plain, tokenizer.decode_with_special_tokens(&ids).unwrap());
    }
}
