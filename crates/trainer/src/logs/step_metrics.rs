//! What is known about one optimizer step.

use std::collections::BTreeMap;

use crate::parameter_server::Staleness;
use candle_parallel::{ContextRank, MemoryReport, PipelineRank};
use serde::{Deserialize, Deserializer, Serialize};

/// Numbers of one optimizer step, over all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Step, counted from 0.
    pub step: usize,
    /// Steps of the run that were done with this one: the number that the progress line shows and that a checkpoint after it is called by.
    #[serde(default)]
    pub global_step: usize,
    /// Passes over the data that were done with this step, with their fraction; `None` of a step whose micro-batches come from elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Cross-entropy in nats, averaged over all target tokens of the global batch. Of a skipped step it may be NaN or infinite; JSON has
    /// null for both.
    #[serde(deserialize_with = "number_or_null")]
    pub loss: f64,
    /// L2 norm of all gradients before clipping; as the loss.
    #[serde(deserialize_with = "number_or_null")]
    pub grad_norm: f64,
    /// Learning rate the step used, or would have used.
    pub learning_rate: f64,
    /// What the gradient of the loss was multiplied by in the passes: 1 but in f16.
    pub loss_scale: f64,
    /// Steps of the run so far that overflowed in f16, so that nothing was updated.
    pub skipped_steps: usize,
    /// The fraction of the positions of the global batch that hold no token of the data: see [`Filling::padding`](crate::Filling::padding).
    /// 0 of a step whose micro-batches come from elsewhere.
    #[serde(default)]
    pub padding: f64,
    /// Target tokens of the global batch: those with loss.
    pub num_tokens: usize,
    /// `num_tokens / step_secs`.
    pub tokens_per_sec: f64,
    /// Positions of the global batch, with loss or without, padding too. Of a step whose micro-batches come from elsewhere it is right if
    /// all replicas have as many.
    #[serde(default)]
    pub num_positions: usize,
    /// `num_positions / step_secs`.
    #[serde(default)]
    pub positions_per_sec: f64,
    /// Wall-clock time of the step, in seconds.
    pub step_secs: f64,
    /// Operations per second that the model needs for the tokens of the step, targets or not, in 10^9, over all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gflops_per_sec: Option<f64>,
    /// That over what the devices can do: model FLOPs utilisation, from 0 to 1, where their peak is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
    /// Of each rank of the first replica's pipeline, in their order; empty without a pipeline.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pipeline: Vec<PipelineRank>,
    /// What each context-parallel rank of the first replica has computed; empty without context parallelism.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub context: Vec<ContextRank>,
    /// How far workers were ahead of each other, with an asynchronous parameter server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub staleness: Option<Staleness>,
    /// What blocks of a model of one's own have reported, by name: see [`Pass::report`](candle_parallel::Pass::report).
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "numbers_or_null"
    )]
    pub reported: BTreeMap<String, f64>,
    /// Bytes that this rank holds after the step, and the most since the run began.
    pub memory: MemoryReport,
}

/// As [`number_or_null`], of each value of a map.
fn numbers_or_null<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    let number = |(name, number): (String, Option<f64>)| (name, number.unwrap_or(f64::NAN));
    Ok(numbers.into_iter().map(number).collect())
}

pub(crate) fn number_or_null<'de, D: Deserializer<'de>>(source: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(source)?.unwrap_or(f64::NAN))
}
