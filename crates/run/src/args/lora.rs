//! Flags about low-rank adapters.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Result, bail};
use candle_parallel::{
    Adapter, LoraConfig, LoraTargets, ParamSpec, ParamStore, Parameters, WeightFormat,
};
use candle_trainer::{TrainingRecord, counted};
use clap::Args;
use serde::Serialize;

use crate::args::choices::{name_of, some_by_name};
use crate::args::number::{real, whole};
use crate::record::digest_of_weights;
use crate::start::adapter_base::check_base;

/// What is trained beside weights that stay as they are.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LoraArgs {
    /// Train low-rank adapters of this rank (LoRA), such as 16, and no other weight [default: train the weights]
    ///
    /// --output gets the adapter, which peft loads and candle-train merge folds into the model; --lr is 2e-4 by default then.
    #[arg(long, value_name = "RANK", value_parser = whole::<usize>(1..), conflicts_with_all = ["adapter", "freeze"])]
    pub lora_rank: Option<usize>,
    /// The adapters' product is multiplied by ALPHA / rank [default: 16]
    #[arg(long, value_name = "ALPHA", value_parser = real((Excluded(0.0), Unbounded)), conflicts_with = "adapter")]
    pub lora_alpha: Option<f64>,
    /// Probability with which a feature of an adapter's input is dropped in training [default: 0]
    #[arg(long, value_name = "PROBABILITY", value_parser = real(0.0..1.0), conflicts_with = "adapter")]
    pub lora_dropout: Option<f64>,
    /// Linear layers that get adapters, such as q_proj,v_proj, or all-linear: all but the head [default: all-linear]
    #[arg(
        long,
        num_args = 1..,
        value_name = "NAMES",
        value_delimiter = ',',
        conflicts_with = "adapter"
    )]
    pub lora_targets: Vec<String>,
    /// Multiply the product by ALPHA / √rank instead (rsLoRA)
    #[arg(long, conflicts_with = "adapter")]
    pub rslora: bool,
    /// Form of the weights beside adapters; q4k (QLoRA) takes the least memory [default: --dtype]
    ///
    /// It is a number's type, or blocks of 8.5 (q8_0) or 4.5 bits a value (q4k), which are unpacked where they are used; embedding and head are
    /// in bf16 then. Weights whose rows are no multiple of 256 values have q8_0 in place of q4k, which is told. Needs --lora-rank or --adapter.
    #[arg(long, ignore_case = true, value_name = "FORM")]
    #[serde(serialize_with = "some_by_name")]
    pub base_dtype: Option<WeightFormat>,
    /// Go on training the adapter in this folder, with its own rank, alpha, dropout and layers [default: none]
    #[arg(long, value_name = "DIR", conflicts_with = "freeze")]
    pub adapter: Option<PathBuf>,
}

/// All linear layers but the head.
const ALL_LINEAR: &str = "all-linear";
/// The flag's name in records.
const TARGETS: &str = "--lora-targets";

impl LoraArgs {
    /// Whether adapters are trained.
    pub fn is_given(&self) -> bool {
        self.lora_rank.is_some() || self.adapter.is_some()
    }

    /// Whether the base takes less memory than its weights in `dtype` would.
    pub(crate) fn has_smaller_base(&self, dtype: DType) -> bool {
        match self.base_dtype {
            None | Some(WeightFormat::F32) => false,
            Some(WeightFormat::F16 | WeightFormat::BF16) => dtype == DType::F32,
            // Blocks.
            Some(_) => true,
        }
    }

    /// An error if a flag is given without that which it belongs to.
    pub(crate) fn validate(&self) -> Result<()> {
        let details = [
            ("--lora-alpha", self.lora_alpha.is_some()),
            ("--lora-dropout", self.lora_dropout.is_some()),
            ("--lora-targets", !self.lora_targets.is_empty()),
            ("--rslora", self.rslora),
        ];
        let detail = details.iter().find(|(_, is_given)| *is_given);
        if let (Some((flag, _)), None) = (detail, self.lora_rank) {
            bail!(
                "{flag} is given without --lora-rank, so that no adapters are made\nhint: give --lora-rank too, such as 16"
            );
        }
        if self.base_dtype.is_some() && !self.is_given() {
            bail!(
                "--base-dtype is given without adapters, so that there is no base\nhint: give --lora-rank too, or --dtype instead"
            );
        }
        Ok(())
    }

    /// An error if there is no adapter to go on with, or one of another type of model; what to warn of. `model` is what `--model` says, and
    /// its folder.
    pub(crate) fn check(&self, model: Option<(&str, &Path)>) -> Result<Option<String>> {
        match (&self.adapter, model) {
            (Some(dir), Some((model, model_dir))) => check_base(dir, model, model_dir),
            _ => Ok(None),
        }
    }

    /// The names of --lora-targets, with commas, spaces or both between them; `all` is LLaMA-Factory's word.
    fn target_names(&self) -> Vec<String> {
        match self.lora_targets.as_slice() {
            [] => vec![ALL_LINEAR.to_string()],
            names => names_in(&names.join(",")),
        }
    }

    /// Writes names in the record of a checkpoint as this version writes them: earlier ones kept the spaces between them.
    pub(crate) fn rewrite_targets(earlier: &mut TrainingRecord) {
        if let Some(names) = earlier.settings.get_mut(TARGETS) {
            *names = names_in(names).join(",");
        }
    }

    /// The store with the adapters that these flags ask for; `base_model` is what `--model` says.
    pub(crate) fn apply(
        &self,
        store: ParamStore,
        seed: u64,
        base_model: Option<&str>,
    ) -> Result<ParamStore> {
        let base_model = base_model.map(|model| match Path::new(model).is_dir() {
            true => model.to_string(),
            // The revision is no part of a repository's name.
            false => model.split('@').next().unwrap_or_default().to_string(),
        });
        let store = match self.base_dtype {
            None => store,
            Some(format) => store.with_frozen_format(format),
        };
        if let Some(dir) = &self.adapter {
            let adapter = Adapter::open(dir)?.with_seed(seed);
            return store.with_adapter(adapter.with_base_model(base_model));
        }
        let Some(rank) = self.lora_rank else {
            return Ok(store);
        };
        let default = LoraConfig::default();
        store.with_lora(LoraConfig {
            rank,
            alpha: self.lora_alpha.unwrap_or(default.alpha),
            dropout: self.lora_dropout.unwrap_or(default.dropout),
            targets: match self.target_names() {
                names if names == [ALL_LINEAR] => LoraTargets::AllLinear,
                names => LoraTargets::Names(names),
            },
            use_rslora: self.rslora,
            seed,
            base_model,
        })
    }

    /// Notes what of them decides the weights.
    pub(crate) fn add_to(&self, record: &mut TrainingRecord) -> Result<()> {
        if let Some(dir) = &self.adapter {
            let digest = digest_of_weights(dir)?;
            record
                .model
                .insert("the weights of --adapter".into(), digest.into());
            let adapter = Adapter::open(dir)?;
            let LoraConfig {
                rank,
                alpha,
                dropout,
                use_rslora,
                ..
            } = adapter.config();
            let own = format!("rank {rank}, alpha {alpha}, dropout {dropout}, rsLoRA {use_rslora}");
            record
                .model
                .insert("the configuration of --adapter".into(), own.into());
        }
        if let Some(format) = self.base_dtype {
            record
                .settings
                .insert("--base-dtype".into(), name_of(&format));
        }
        let Some(rank) = self.lora_rank else {
            return Ok(());
        };
        let default = LoraConfig::default();
        let targets = self.target_names().join(",");
        let settings = [
            ("--lora-rank", rank.to_string()),
            (
                "--lora-alpha",
                self.lora_alpha.unwrap_or(default.alpha).to_string(),
            ),
            (
                "--lora-dropout",
                self.lora_dropout.unwrap_or(default.dropout).to_string(),
            ),
            (TARGETS, targets),
            ("--rslora", self.rslora.to_string()),
        ];
        let settings = settings.map(|(name, value)| (name.to_string(), value));
        record.settings.extend(settings);
        Ok(())
    }
}

/// The names of layers in a text, with commas, spaces or both between them.
fn names_in(text: &str) -> Vec<String> {
    let names = text.split(|c: char| c == ',' || c.is_whitespace());
    let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
    match names.as_slice() {
        ["all"] => vec![ALL_LINEAR.to_string()],
        names => names.iter().map(ToString::to_string).collect(),
    }
}

/// The matrices of a model that are not trained, and no adapters.
fn frozen_matrices(params: &Parameters) -> impl Iterator<Item = &ParamSpec> {
    let params = params.catalog().iter();
    params.filter(|param| !param.trainable && !param.is_adapter && param.shape.len() == 2)
}

/// Bits of a value of the matrices that are not trained; `None` if there are none.
pub(crate) fn frozen_bits(params: &Parameters) -> Option<f64> {
    let num_values: usize = frozen_matrices(params).map(ParamSpec::num_values).sum();
    let bits = frozen_matrices(params).map(|param| param.bits() * param.num_values() as f64);
    (num_values > 0).then(|| bits.sum::<f64>() / num_values as f64)
}

/// Weights whose rows are no whole blocks of `format` and so are held in another one, a line each.
pub fn other_forms(format: WeightFormat, params: &Parameters) -> Vec<String> {
    let block = match format {
        WeightFormat::Q4K => GgmlDType::Q4K.block_size(),
        WeightFormat::Q8_0 => GgmlDType::Q8_0.block_size(),
        _ => 1,
    };
    let mut others: BTreeMap<(usize, &str, String), BTreeSet<&str>> = BTreeMap::new();
    // Those of the first and the last block are in bf16 whatever their rows are.
    let last = params.model().layout().num_blocks() - 1;
    for param in frozen_matrices(params) {
        let width = param.shape[1];
        let is_inner = !param.blocks.iter().any(|block| [0, last].contains(block));
        if is_inner && !width.is_multiple_of(block) {
            let module = param.name.trim_end_matches(".weight");
            let name = module.rsplit('.').next().unwrap_or(module);
            let key = (width, param.form(), param.bits().to_string());
            others.entry(key).or_default().insert(name);
        }
    }
    let lines = others.into_iter().map(|((width, form, bits), names)| {
        format!(
            "{form} ({bits} bits a value) in place of {}, as rows of {width} values are no whole blocks of {block}: {}",
            name_of(&format),
            Vec::from_iter(names).join(", ")
        )
    });
    lines.collect()
}

/// What the adapters of a model are, in words; empty if it has none.
pub(crate) fn adapters_in_words(params: &Parameters) -> String {
    let of_lora = |lora: &LoraConfig| {
        format!(
            ", adapters of rank {} and scale {} beside {}",
            lora.rank,
            (lora.scale() * 1e4).round() / 1e4,
            counted(params.adapted_layers().len(), "layer")
        )
    };
    params.lora().map_or(String::new(), of_lora)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{LoraArgs, TARGETS};
    use candle_trainer::TrainingRecord;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        lora: LoraArgs,
    }

    #[test]
    fn names_in_records_of_before_are_the_same_names() {
        let words = "program --lora-rank 4 --lora-targets q_proj,v_proj".split(' ');
        let mut own = TrainingRecord::default();
        Line::parse_from(words).lora.add_to(&mut own).unwrap();
        for (names, is_same) in [("q_proj, v_proj", true), ("q_proj, k_proj", false)] {
            let mut earlier = own.clone();
            earlier.settings.insert(TARGETS.into(), names.into());
            LoraArgs::rewrite_targets(&mut earlier);
            assert_eq!(own.check(&earlier, false).is_ok(), is_same, "{names}");
        }
    }

    #[test]
    fn targets_are_named_with_commas_or_spaces() {
        let targets = |words: &[&str]| {
            let words = ["program", "--lora-rank", "4"].iter().chain(words);
            Line::parse_from(words).lora.target_names()
        };
        let both = ["q_proj", "v_proj"];
        for words in [
            &["--lora-targets", "q_proj,v_proj"][..],
            &["--lora-targets", "q_proj", "v_proj"],
            &["--lora-targets", "q_proj v_proj"],
            &["--lora-targets", "q_proj, v_proj"],
            &["--lora-targets", "q_proj", "--lora-targets", "v_proj"],
        ] {
            assert_eq!(targets(words), both, "{words:?}");
        }
        for words in [
            &[][..],
            &["--lora-targets", "all"],
            &["--lora-targets", "all-linear"],
        ] {
            assert_eq!(targets(words), ["all-linear"]);
        }
    }
}
