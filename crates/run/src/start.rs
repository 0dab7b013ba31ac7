//! What a run begins with: the weights of a checkpoint, or random ones.

pub(crate) mod adapter_base;
pub(crate) mod builder;
pub(crate) mod finetune;
pub(crate) mod initial_weights;
pub(crate) mod pretrain;
pub(crate) mod start_model;

use std::fmt::Debug;

use candle_core::Result;
use candle_train_models::ModelConfig;
use candle_trainer::Tokenizer;
use clap::Args;
use serde::Serialize;
use toml::Table;

use crate::args::data::DataArgs;
use crate::args::lora::LoraArgs;
use crate::run::Run;
use crate::start::start_model::StartModel;

/// What a run begins with: the weights of a checkpoint, or random ones.
pub trait Start: Args + Clone + Debug + Serialize + Send + Sync {
    /// The subcommand of `candle-train`.
    const COMMAND: &'static str;

    /// Values of flags that have other defaults here than they say.
    fn defaults() -> Table;

    /// Without what may differ between ranks: where a host has its files.
    fn shared(&self) -> Self;

    /// What is trained beside the weights, if not these themselves.
    fn adapters(&self) -> LoraArgs {
        LoraArgs::default()
    }

    /// What else there is to do, in words after a hint, about sequences of `seq_len` tokens that are longer than the model takes.
    fn longer(&self, config: &ModelConfig, seq_len: usize) -> String;

    /// The model, before anything is known of its tokens. Unless it `needs_weights`, these need not be there, and none are fetched.
    ///
    /// # Errors
    /// A model that is not there, or of a kind that cannot be trained.
    fn model(run: &Run<Self>, needs_weights: bool) -> Result<StartModel>;

    /// The tokenizer, with which `model` becomes what is trained; `None` if a model without weights has none either. `is_first` shows what it
    /// takes long to do.
    ///
    /// # Errors
    /// A tokenizer that cannot be read, or trained on the data.
    fn tokenizer(
        run: &Run<Self>,
        model: &mut StartModel,
        is_first: bool,
    ) -> Result<Option<Tokenizer>>;

    /// What is trained on what, in words.
    fn title(&self, data: &DataArgs, model: &StartModel) -> String;
}
