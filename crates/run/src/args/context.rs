//! Flags of context parallelism: which ranks share a sequence, and how they attend to what the others have.

use candle_core::{DType, Device, Result, bail};
use candle_ops::AttentionCode;
use candle_parallel::{ContextConfig, ContextMethod};
use candle_train_models::ModelConfig;
use clap::Args;
use serde::Serialize;

use crate::args::choices::name_of;
use crate::args::number::whole;

/// How sequences are divided over ranks.
#[derive(Args, Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ContextArgs {
    /// Tensor-parallel ranks have each a part of the rows between their layers: less memory, and the bytes of an all-reduce in two parts
    #[arg(long)]
    pub sequence_parallel: bool,
    /// Context-parallel degree: ranks that share each sequence, for those too long for one
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pub cp: usize,
    /// How context-parallel ranks come to the keys and values of the others
    #[arg(long, default_value = "auto")]
    pub cp_method: ContextMethod,
    /// Ranks of a group that exchanges heads for rows; the groups of --cp lie in a ring [default: as --cp-method says]
    #[arg(long, value_name = "RANKS", value_parser = whole::<usize>(1..))]
    pub ulysses: Option<usize>,
}

impl ContextArgs {
    /// What the library takes.
    pub fn config(&self) -> ContextConfig {
        ContextConfig {
            method: self.cp_method,
            ulysses: self.ulysses,
        }
    }

    /// What decides the order in which the same numbers are added, by flag.
    pub(crate) fn sum_order(&self) -> Vec<(String, String)> {
        let mut order = Vec::new();
        if self.cp > 1 {
            order.push(("--cp", self.cp.to_string()));
            order.push(("--cp-method", name_of(&self.cp_method)));
            order.extend(self.ulysses.map(|ranks| ("--ulysses", ranks.to_string())));
        }
        if self.sequence_parallel {
            order.push(("--sequence-parallel", "true".to_string()));
        }
        let named = order.into_iter();
        named
            .map(|(name, value)| (name.to_string(), value))
            .collect()
    }

    /// An error if sequences of `seq_len` tokens, or the heads of the model on `tp` ranks, cannot be divided.
    pub(crate) fn check(&self, config: &ModelConfig, tp: usize, seq_len: usize) -> Result<()> {
        if self.cp > seq_len {
            bail!(
                "--cp {} is more than the {seq_len} tokens of a sequence (--seq-len)\nhint: --cp {seq_len} at most",
                self.cp
            );
        }
        if self.sequence_parallel && tp == 1 {
            bail!(
                "--sequence-parallel is given with --tp 1, where there are no ranks to divide rows over\nhint: --tp 2 or more, or leave it out"
            );
        }
        let heads = config.heads_of_rank(tp);
        self.config().groups(self.cp, heads, DType::F32).map(drop)
    }

    /// What computes attention on GPUs, in words; nothing without context parallelism. `is_packed`: sequences have several documents.
    pub(crate) fn attention_in_words(
        &self,
        (config, tp): (&ModelConfig, usize),
        (seq_len, is_packed): (usize, bool),
        (devices, dtype): (&[Device], DType),
    ) -> Result<Option<String>> {
        let gpu = devices.iter().find(|device| !device.is_cpu());
        let Some(gpu) = gpu.filter(|_| self.cp > 1) else {
            return Ok(None);
        };
        let heads = config.heads_of_rank(tp);
        let (ulysses, gathers) = self.config().groups(self.cp, heads, dtype)?;
        let has_whole = ulysses == self.cp;
        let mut windows = config.windows.iter().flatten();
        let own = "attention: this program's kernels";
        let cudnn = "attention: cuDNN, where it takes the sizes";
        let words = match AttentionCode::of_whole(gpu, dtype)? {
            AttentionCode::Cudnn if has_whole => format!("{cudnn}, on whole sequences"),
            AttentionCode::Cudnn if is_packed => format!(
                "{own}, as each rank has pieces of packed documents\nhint: --cp-method ulysses, where there are heads enough, leaves it to cuDNN"
            ),
            AttentionCode::Cudnn if gathers => format!(
                "{own}, as queries see different parts of the keys that are gathered\nhint: --cp-method ring leaves it to cuDNN"
            ),
            AttentionCode::Cudnn if windows.any(|window| *window < seq_len) => {
                format!("{cudnn}; this program's kernels in layers with a window")
            }
            AttentionCode::Cudnn => {
                format!("{cudnn}, causal for a rank's own keys and full for those of others")
            }
            _ => format!(
                "{own}, as cuDNN is not there, not wanted, or does not take {}",
                dtype.as_str()
            ),
        };
        Ok(Some(words))
    }

    /// What is chosen for the run, in words; nothing without context parallelism.
    pub(crate) fn in_words(
        &self,
        config: &ModelConfig,
        tp: usize,
        dtype: DType,
    ) -> Result<Option<String>> {
        if self.cp == 1 {
            return Ok(None);
        }
        let (ulysses, gathers) = self
            .config()
            .groups(self.cp, config.heads_of_rank(tp), dtype)?;
        let num_groups = self.cp / ulysses;
        let method = match (ulysses, gathers) {
            (1, false) => "a ring".to_string(),
            (1, true) => "all-gather".to_string(),
            (all, _) if all == self.cp => "Ulysses".to_string(),
            (some, false) => format!("Ulysses in groups of {some}, in a ring of {num_groups}"),
            (some, true) => {
                format!("Ulysses in groups of {some}, and all-gather over {num_groups}")
            }
        };
        let why = match (self.cp_method, self.ulysses) {
            (ContextMethod::Auto, None) if self.cp > config.heads_of_rank(tp).0 => {
                ", as there are fewer query heads than ranks"
            }
            (ContextMethod::Auto, None) if ulysses == 1 => ", which sends fewer bytes than Ulysses",
            (ContextMethod::Auto, None) => ", which sends fewer bytes than a ring",
            _ => "",
        };
        Ok(Some(format!(
            "context parallelism: {} ranks share a sequence, by {method}{why}",
            self.cp
        )))
    }
}
