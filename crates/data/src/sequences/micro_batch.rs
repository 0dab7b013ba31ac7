//! Samples as the rows of a micro-batch.

use candle_core::{Device, Result, Tensor};
use candle_ops::{DocumentStarts, IGNORE_INDEX};
use candle_parallel::Pass;

use super::samples::Sample;

/// What is read where there is nothing to read.
const PADDING_ID: u32 = 0;

/// The micro-batch of `samples`, tokens and targets (b, t) u32 with t the longest of them: shorter ones end with tokens without a target.
/// Without a sample it is one such token.
pub(crate) fn micro_batch_of(samples: &[Sample], device: &Device) -> Result<Pass> {
    let lens = samples.iter().map(|sample| sample.input_ids.len());
    let (b, t) = (samples.len().max(1), lens.max().unwrap_or(1));
    let mut tokens = vec![PADDING_ID; b * t];
    let mut targets = vec![IGNORE_INDEX; b * t];
    let mut starts = Vec::with_capacity(b * t);
    let rows = tokens.chunks_mut(t).zip(targets.chunks_mut(t));
    for (sample, (tokens, targets)) in samples.iter().zip(rows) {
        let len = sample.input_ids.len();
        tokens[..len].copy_from_slice(&sample.input_ids);
        targets[..len].copy_from_slice(&sample.targets);
        starts.extend(&sample.document_starts);
        starts.extend(std::iter::repeat_n(len as u32, t - len));
    }
    // What is read after the end of the only document changes nothing.
    let has_several = |sample: &Sample| sample.document_starts.iter().any(|&start| start > 0);
    let documents = samples
        .iter()
        .any(has_several)
        .then(|| DocumentStarts::new(starts, (b, t)));
    let tokens = Tensor::from_vec(tokens, (b, t), device)?;
    let targets = Tensor::from_vec(targets, (b, t), device)?;
    Ok(Pass::train(tokens, targets).with_documents(documents.transpose()?))
}
