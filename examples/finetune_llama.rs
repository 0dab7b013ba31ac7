//! Fine-tunes a Hugging Face Llama checkpoint on text, with tensor, pipeline and data parallel ranks: threads of this process, or
//! processes that a launcher started.
//!
//! Without arguments it fine-tunes a small bundled model, pre-trained on Shakespeare, on Alice in Wonderland.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_comm::{Mesh, ProcessGroup, RunConfig, launch};
use candle_core::Result;
use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, save_hf, sidecar_files};
use candle_train::hub::resolve_model;
use candle_train::{Documents, Tokenizer, Tokens, TrainConfig, explain_out_of_memory};
use candle_train_examples::{
    Flags, SampleArgs, SampleWriter, StorageChoice, TrainingArgs, exit_with, fingerprint, fit,
    keep_freed_memory, parse, print_line, with_config_dtype,
};
use candle_train_models::llama::{Llama, LlamaConfig};
use clap::Parser;

const BUNDLED_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/shakespeare-llama");
const BUNDLED_DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/alice.txt");

/// Fine-tune a Hugging Face Llama checkpoint on text
#[derive(Parser, Debug)]
#[command(name = "finetune_llama")]
struct Args {
    /// Checkpoint folder, or org/name[@revision] on the Hugging Face hub [default: the bundled model]
    #[arg(long, value_name = "DIR|REPO")]
    model: Option<String>,
    /// Text file (.txt, one document), or a folder of them [default: the bundled text]
    #[arg(long, value_name = "FILE|DIR")]
    data: Option<PathBuf>,
    /// Folder for the fine-tuned checkpoint
    #[arg(long, default_value = "finetuned", value_name = "DIR")]
    output: PathBuf,
    /// Type of the saved weights [default: each tensor's own in the input checkpoint]
    #[arg(long, help_heading = "Output")]
    save_dtype: Option<StorageChoice>,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    samples: SampleArgs,
}

/// What every rank needs, read and checked once.
struct Job<'a> {
    args: &'a Args,
    model: &'a Path,
    config: &'a LlamaConfig,
    train: &'a TrainConfig,
    tokens: &'a Tokens,
    samples: &'a SampleWriter<'a>,
    save: &'a HfSave,
}

fn main() -> ExitCode {
    keep_freed_memory();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let (args, flags) = parse();
    exit_with(run(&args, flags))
}

fn run(args: &Args, flags: Flags) -> Result<()> {
    let training = &args.training;
    let ranks = training.run_config()?;
    let model = resolve_model(args.model.as_deref().unwrap_or(BUNDLED_MODEL))?;
    let config = LlamaConfig::from_file(model.join("config.json"))?;
    Llama::check_degrees(&config, &training.degrees())?;
    let tokenizer = Tokenizer::from_dir(&model)?;
    let data = args.data.as_deref().unwrap_or(Path::new(BUNDLED_DATA));
    let tokens = Tokens::encode(&Documents::read(data)?, &tokenizer)?;
    tokenizer.check_vocab(tokens.ids(), config.vocab_size)?;
    let train = training.train_config(&tokens)?;
    training.check_positions(config.max_position_embeddings)?;
    let eos_ids = [config.eos_token_ids.as_slice(), &[tokenizer.eos_id()]].concat();
    let samples = SampleWriter {
        args: &args.samples,
        seed: training.seed,
        tokenizer: &tokenizer,
        vocab_size: config.vocab_size,
        max_context: config.max_position_embeddings,
        eos_ids: &eos_ids,
    };
    samples.validate()?;
    let dtype = args.save_dtype.map(Into::into);
    let sidecars = with_config_dtype(sidecar_files(&model)?, dtype)?;
    let save = HfSave {
        dtype,
        ..HfSave::new(&args.output, sidecars)
    };
    if ranks.is_first() {
        save.check_writable()?;
        training.check_metrics()?;
        let run = training.describe(&tokens, train.lr_schedule.num_steps, &ranks);
        print_line(&format!("{} on {}: {run}", model.display(), data.display()));
    }
    let ranks = RunConfig {
        fingerprint: fingerprint(&ranks, flags, &tokens, Some(&model))?,
        ..ranks
    };
    let job = Job {
        args,
        model: &model,
        config: &config,
        train: &train,
        tokens: &tokens,
        samples: &samples,
        save: &save,
    };
    launch::run(&ranks, |world| finetune(&job, world))?;
    if ranks.is_first() {
        print_line(&format!("saved to {}", args.output.display()));
    }
    Ok(())
}

/// One rank's part of the job.
fn finetune(job: &Job, world: ProcessGroup) -> Result<()> {
    let training = &job.args.training;
    let mesh = Mesh::new(world, training.degrees())?;
    let store = training
        .freeze
        .apply(ParamStore::from_pretrained(job.model)?);
    let vb = store.builder(training.dtype.into(), mesh.world.device());
    let stage = Llama::stage(job.config, &mesh, &vb)
        .map_err(|err| explain_out_of_memory(err, mesh.world.device()))?;
    training.freeze.check(stage.params())?;
    job.samples.print("before", &mesh, &stage)?;
    let trainer = fit(training, job.train, &mesh, stage, job.tokens)?;
    job.samples.print("after", &mesh, trainer.stage())?;
    save_hf(trainer.stage().params(), &mesh, job.save)
}
