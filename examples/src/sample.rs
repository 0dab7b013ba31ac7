//! A sample of what the model writes.

use candle_comm::Mesh;
use candle_core::{Result, bail};
use candle_parallel::Stage;
use candle_train::{GenerateConfig, Sampler, SamplingConfig, Tokenizer, generate};
use clap::Args;

use crate::output::print_line;

/// Flags of the samples.
#[derive(Args, Clone, Debug)]
pub struct SampleArgs {
    /// Text that the samples continue
    #[arg(long, default_value = "The Queen", help_heading = "Samples")]
    pub prompt: String,
    /// Length of a sample; 0: none
    #[arg(
        long,
        default_value_t = 80,
        value_name = "TOKENS",
        help_heading = "Samples"
    )]
    pub sample_tokens: usize,
    /// Randomness of the samples; 0: always the most likely token
    #[arg(long, default_value_t = 0.5, help_heading = "Samples")]
    pub temperature: f64,
    /// Samples take the most likely tokens that together have this probability
    #[arg(
        long,
        default_value_t = 0.9,
        value_name = "PROBABILITY",
        help_heading = "Samples"
    )]
    pub top_p: f64,
}

impl SampleArgs {
    /// How tokens are chosen.
    pub fn sampling(&self, seed: u64) -> SamplingConfig {
        SamplingConfig {
            temperature: self.temperature,
            top_p: self.top_p,
            seed,
        }
    }
}

/// Everything a sample needs but the model.
pub struct SampleWriter<'a> {
    /// The flags.
    pub args: &'a SampleArgs,
    /// Seed of the choices.
    pub seed: u64,
    /// Tokenizer of the model.
    pub tokenizer: &'a Tokenizer,
    /// Number of tokens of the model.
    pub vocab_size: usize,
    /// Longest sequence the model is given.
    pub max_context: usize,
    /// Tokens that end a sample.
    pub eos_ids: &'a [u32],
}

impl SampleWriter<'_> {
    /// Checks the flags.
    pub fn validate(&self) -> Result<()> {
        self.args.sampling(self.seed).validate()?;
        if self.args.sample_tokens == 0 {
            return Ok(());
        }
        let prompt = self.tokenizer.encode(&self.args.prompt)?;
        if prompt.is_empty() {
            bail!(
                "--prompt {:?} has no tokens; expected some text",
                self.args.prompt
            );
        }
        self.tokenizer.check_vocab(&prompt, self.vocab_size)
    }

    /// Lets the model continue the prompt and prints it on the first rank. Every rank must call it.
    pub fn print(&self, title: &str, mesh: &Mesh, stage: &Stage) -> Result<()> {
        if self.args.sample_tokens == 0 {
            return Ok(());
        }
        let prompt = self.tokenizer.encode(&self.args.prompt)?;
        let config = GenerateConfig {
            vocab_size: self.vocab_size,
            max_context: self.max_context,
            max_new_tokens: self.args.sample_tokens,
            eos_ids: self.eos_ids.to_vec(),
        };
        let mut sampler = Sampler::new(self.args.sampling(self.seed))?;
        let ids = generate(stage, &mesh.pp, &prompt, &config, &mut sampler)?;
        if mesh.world.rank() == 0 {
            let text = self.tokenizer.decode(&[prompt, ids].concat())?;
            print_line(&format!("--- {title}\n{}\n---", text.trim_end()));
        }
        Ok(())
    }
}
