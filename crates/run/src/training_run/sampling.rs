//! What the model writes before and after training.

use std::ops::ControlFlow;

use candle_comm::Mesh;
use candle_core::Result;
use candle_parallel::{ModelPart, Pipeline, Schedule};
use candle_trainer::{Activity, GenerateConfig, Sampler, SamplingConfig, generate};

use crate::output::observer::RunEvent;
use crate::training_run::TrainingRun;

impl TrainingRun<'_> {
    /// Lets the model continue the prompt and prints it on the first rank. Every rank must call it.
    pub(crate) fn print_sample(&self, title: &str, mesh: &Mesh, part: &ModelPart) -> Result<()> {
        let (args, config, tokenizer) = (&self.samples, &self.spec.config, &self.tokenizer);
        let Some(text) = args.prompt() else {
            return Ok(());
        };
        let prompt = tokenizer.encode_prompt(text)?;
        let limits = GenerateConfig {
            max_context: config.max_seq_len(),
            // A sample ends where the model's positions do; nothing is computed of its last token.
            max_new_tokens: args.sample_tokens.min(
                config
                    .max_text_len()
                    .saturating_sub(prompt.len())
                    .saturating_add(1),
            ),
            eos_ids: [config.eos_token_ids.as_slice(), &[tokenizer.eos_id()]].concat(),
            use_cache: true,
        };
        let mut sampler = Sampler::new(SamplingConfig {
            temperature: args.temperature,
            top_p: args.top_p,
            seed: self.spec.training.batches.seed,
            ..SamplingConfig::default()
        })?;
        let pipeline = Pipeline::new(Schedule::GPipe, mesh);
        let is_first = mesh.world.rank() == 0;
        let sampling = is_first.then(|| Activity::start("writing a sample"));
        let go_on = |_: &[u32]| Ok(ControlFlow::Continue(()));
        let ids = generate(&pipeline, part, &prompt, &limits, &mut sampler, go_on)?;
        drop(sampling);
        if is_first {
            let text = tokenizer.decode(&[prompt, ids].concat())?;
            let text = text.trim_end();
            self.observers.tell(&RunEvent::Sample { title, text });
        }
        Ok(())
    }
}
