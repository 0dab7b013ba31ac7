//! A checkpoint of `tests/fixtures` with PyTorch's numbers for it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use candle_parallel::{AdamWConfig, LossScaling};
use candle_train_models::ModelConfig;
use candle_trainer::hub::DataUse;
use candle_trainer::{
    BatchConfig, Data, DataSpec, EncoderConfig, LrDecay, LrSchedule, RecordEncoder, StepMetrics,
    Tokenizer, Tokens, TrainConfig,
};
use serde::Deserialize;

use crate::run::Layout;
use crate::tensors::{Tensors, read_tensors};

pub const ALL: [&str; 10] = [
    "gqa",
    "wide",
    "tied_bias",
    "bf16_sharded",
    "f16_tied",
    "mistral",
    "mistral_dynamic",
    "qwen2",
    "qwen3",
    "gemma",
];

pub struct Fixture {
    dir: PathBuf,
    model: PathBuf,
    /// Read once for all ranks of all runs.
    tokens: OnceLock<Tokens>,
    pub run: Run,
}

/// Hyper-parameters of the reference run.
#[derive(Clone, Debug, Deserialize)]
pub struct Run {
    pub seq_len: usize,
    pub global_batch_size: usize,
    pub micro_batch_size: usize,
    pub steps: usize,
    pub lr: f64,
    pub min_lr_ratio: f64,
    pub warmup_steps: usize,
    pub weight_decay: f64,
    pub max_grad_norm: f64,
    #[serde(default)]
    pub loss_scaling: LossScaling,
}

#[derive(Deserialize)]
pub struct ReferenceStep {
    pub step: usize,
    pub loss: f64,
    pub grad_norm: f64,
    pub learning_rate: f64,
    pub num_tokens: usize,
}

impl Fixture {
    pub fn new(name: &str) -> Self {
        let dir = root().join(name);
        Self::of(dir.join("model"), dir)
    }

    /// A low-rank adapter, in the folder `adapter`, of the model of the fixture with that name.
    pub fn adapter(name: &str) -> Self {
        Self::of(
            root().join(name).join("model"),
            root().join("lora").join(name),
        )
    }

    fn of(model: PathBuf, dir: PathBuf) -> Self {
        let text = std::fs::read_to_string(dir.join("run.json")).unwrap();
        let run = serde_json::from_str(&text).unwrap();
        Self {
            dir,
            model,
            tokens: OnceLock::new(),
            run,
        }
    }

    /// The model in `dir/model`, with the hyper-parameters of this one.
    pub fn moved_to(&self, dir: &Path) -> Self {
        Self {
            dir: dir.to_path_buf(),
            model: dir.join("model"),
            tokens: OnceLock::new(),
            run: self.run.clone(),
        }
    }

    pub fn model_dir(&self) -> PathBuf {
        self.model.clone()
    }

    pub fn adapter_dir(&self) -> PathBuf {
        self.dir.join("adapter")
    }

    /// The fixtures' text, in the tokens of this one.
    pub fn tokens(&self) -> Tokens {
        let encoded = || {
            let tokenizer = Tokenizer::from_dir(self.model_dir())?;
            let data = Data::find(&[DataSpec::new(text_file())], DataUse::Training)?;
            let encoder = RecordEncoder::new(&tokenizer, None, EncoderConfig::default())?;
            Tokens::encode(&data, &encoder, None)
        };
        let tokens = self.tokens.get_or_init(|| encoded().unwrap());
        tokens.clone()
    }

    pub fn config(&self) -> ModelConfig {
        ModelConfig::from_file(self.model_dir().join("config.json")).unwrap()
    }

    pub fn metrics(&self) -> Vec<ReferenceStep> {
        let text = std::fs::read_to_string(self.dir.join("reference/metrics.jsonl")).unwrap();
        let lines = text.lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    pub fn first_gradients(&self) -> Tensors {
        read_tensors(&self.dir.join("reference/grads.safetensors"))
    }

    pub fn final_weights(&self) -> Tensors {
        read_tensors(&self.dir.join("reference/weights.safetensors"))
    }
}

impl Run {
    pub fn batch_config(&self) -> BatchConfig {
        BatchConfig {
            micro_batch_size: self.micro_batch_size,
            global_batch_size: self.global_batch_size,
            shuffle: false,
            seed: 0,
            uneven: false,
            ramp: None,
        }
    }

    pub fn train_config(&self, layout: Layout) -> TrainConfig {
        TrainConfig {
            lr_schedule: LrSchedule {
                lr: self.lr,
                min_lr_ratio: self.min_lr_ratio,
                warmup_steps: self.warmup_steps,
                num_steps: self.steps,
                decay: LrDecay::Cosine,
                ramp: Vec::new(),
            },
            adamw: AdamWConfig {
                weight_decay: self.weight_decay,
                ..AdamWConfig::default()
            },
            max_grad_norm: Some(self.max_grad_norm),
            loss_scaling: self.loss_scaling,
            schedule: layout.schedule,
            pipeline_prefetch: 1,
        }
    }
}

impl ReferenceStep {
    pub fn assert_matches(&self, ours: &StepMetrics, tolerance: f64, what: &str) {
        let close = |a: f64, b: f64| (a - b).abs() <= tolerance * b.abs();
        let step = self.step;
        assert!(
            close(ours.loss, self.loss),
            "{what}, step {step}: loss {} instead of {}",
            ours.loss,
            self.loss
        );
        assert!(
            close(ours.grad_norm, self.grad_norm),
            "{what}, step {step}: norm {} instead of {}",
            ours.grad_norm,
            self.grad_norm
        );
        assert!(
            close(ours.learning_rate, self.learning_rate),
            "{what}, step {step}: learning rate"
        );
        assert_eq!(ours.num_tokens, self.num_tokens, "{what}, step {step}");
    }
}

/// Where this was compiled, or the folder's place in a repository whose root is the current folder: the test may have been carried
/// to another machine.
pub fn root() -> PathBuf {
    let compiled = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    match compiled.is_dir() {
        true => compiled,
        false => PathBuf::from("tests/fixtures"),
    }
}

/// The text of every reference run.
pub fn text_file() -> PathBuf {
    root().join("text.txt")
}
