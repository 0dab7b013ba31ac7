//! Trains a small Llama and its tokenizer from nothing on text, and writes a Hugging Face checkpoint.
//!
//! The bundled model of `finetune_llama` was made with it: see `assets/README.md`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use candle_comm::{Mesh, ProcessGroup, RunConfig, launch};
use candle_core::{Result, bail};
use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, save_hf, sidecar_files};
use candle_train::{Documents, Tokenizer, Tokens, TrainConfig, explain_out_of_memory};
use candle_train_examples::{
    Flags, SampleArgs, SampleWriter, StorageChoice, TrainingArgs, exit_with, fingerprint, fit,
    keep_freed_memory, parse, print_line, with_config_dtype,
};
use candle_train_models::llama::{Llama, LlamaConfig, RopeKind};
use clap::Parser;

const BUNDLED_DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tinyshakespeare.txt");

/// Train a small Llama from random weights on text. All ranks are threads of this process.
#[derive(Parser, Debug)]
#[command(name = "pretrain_llama")]
struct Args {
    /// Text file (.txt, one document), or a folder of them [default: the bundled plays of Shakespeare]
    #[arg(long, value_name = "FILE|DIR")]
    data: Option<PathBuf>,
    /// Folder for the checkpoint
    #[arg(long, default_value = "pretrained", value_name = "DIR")]
    output: PathBuf,
    /// Folder of a tokenizer to use [default: a byte-level BPE is trained on the data]
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Tokens of the trained tokenizer
    #[arg(
        long,
        default_value_t = 1024,
        value_name = "TOKENS",
        help_heading = "Model"
    )]
    vocab_size: usize,
    /// Width of the residual stream
    #[arg(long, default_value_t = 192, help_heading = "Model")]
    hidden_size: usize,
    /// Width of the MLP
    #[arg(long, default_value_t = 512, help_heading = "Model")]
    intermediate_size: usize,
    /// Number of layers
    #[arg(long, default_value_t = 4, help_heading = "Model")]
    layers: usize,
    /// Number of query heads
    #[arg(long, default_value_t = 6, help_heading = "Model")]
    heads: usize,
    /// Number of key/value heads
    #[arg(long, default_value_t = 2, help_heading = "Model")]
    kv_heads: usize,
    /// Longest sequence the model may see, in tokens
    #[arg(
        long,
        default_value_t = 512,
        value_name = "TOKENS",
        help_heading = "Model"
    )]
    max_positions: usize,
    /// Give the head its own weight instead of the embedding's
    #[arg(long, help_heading = "Model")]
    untied: bool,
    /// Type of the saved weights
    #[arg(long, default_value = "f32", help_heading = "Output")]
    save_dtype: StorageChoice,
    #[command(flatten)]
    training: TrainingArgs,
    #[command(flatten)]
    samples: SampleArgs,
}

/// What every rank needs, read and checked once.
struct Job<'a> {
    args: &'a Args,
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
    let data = args.data.as_deref().unwrap_or(Path::new(BUNDLED_DATA));
    let documents = Documents::read(data)?;
    let tokenizer = match &args.tokenizer {
        Some(dir) => Tokenizer::from_dir(dir)?,
        None => Tokenizer::train_bpe(documents.iter(), args.vocab_size)?,
    };
    let config = model_config(args, &tokenizer)?;
    config.validate()?;
    Llama::check_degrees(&config, &training.degrees())?;
    let tokens = Tokens::encode(&documents, &tokenizer)?;
    let train = training.train_config(&tokens)?;
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
    let dtype = Some(args.save_dtype.into());
    let save = HfSave {
        dtype,
        ..HfSave::new(&args.output, sidecars(args, &tokenizer, &config, dtype)?)
    };
    if ranks.is_first() {
        save.check_writable()?;
        training.check_metrics()?;
        let run = training.describe(&tokens, train.lr_schedule.num_steps, &ranks);
        print_line(&format!(
            "{}, vocabulary {}: {run}",
            data.display(),
            config.vocab_size
        ));
    }
    let ranks = RunConfig {
        fingerprint: fingerprint(&ranks, flags, &tokens, None)?,
        ..ranks
    };
    let job = Job {
        args,
        config: &config,
        train: &train,
        tokens: &tokens,
        samples: &samples,
        save: &save,
    };
    launch::run(&ranks, |world| pretrain(&job, world))?;
    if ranks.is_first() {
        print_line(&format!("saved to {}", args.output.display()));
    }
    Ok(())
}

fn model_config(args: &Args, tokenizer: &Tokenizer) -> Result<LlamaConfig> {
    Ok(LlamaConfig {
        vocab_size: tokenizer.vocab_size(),
        hidden_size: args.hidden_size,
        intermediate_size: args.intermediate_size,
        num_hidden_layers: args.layers,
        num_attention_heads: args.heads,
        num_key_value_heads: args.kv_heads,
        head_dim: head_dim(args)?,
        rms_norm_eps: 1e-5,
        rope_theta: 10000.0,
        rope: RopeKind::Default,
        max_position_embeddings: args.max_positions.max(args.training.seq_len),
        tie_word_embeddings: !args.untied,
        attention_bias: false,
        mlp_bias: false,
        bos_token_id: tokenizer.bos_id(),
        eos_token_ids: vec![tokenizer.eos_id()],
    })
}

/// The heads share the residual stream's width.
fn head_dim(args: &Args) -> Result<usize> {
    let (hidden_size, heads) = (args.hidden_size, args.heads);
    match hidden_size.checked_rem(heads) {
        None => bail!("--heads is 0, expected at least 1"),
        Some(0) => Ok(hidden_size / heads),
        Some(rest) => bail!(
            "--hidden-size({hidden_size}) % --heads({heads}) = {rest} != 0\nhint: choose a --hidden-size that is a multiple of {heads}"
        ),
    }
}

/// config.json and the tokenizer's files.
fn sidecars(
    args: &Args,
    tokenizer: &Tokenizer,
    config: &LlamaConfig,
    dtype: Option<candle_core::DType>,
) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = match &args.tokenizer {
        Some(dir) => sidecar_files(dir)?,
        None => {
            let dir = tempfile::tempdir()?;
            tokenizer.save(dir.path())?;
            sidecar_files(dir.path())?
        }
    };
    files.retain(|(name, _)| name != "config.json" && name != "generation_config.json");
    files.push(("config.json".to_string(), config.to_json()?.into_bytes()));
    with_config_dtype(files, dtype)
}

/// One rank's part of the job.
fn pretrain(job: &Job, world: ProcessGroup) -> Result<()> {
    let training = &job.args.training;
    let mesh = Mesh::new(world, training.degrees())?;
    let store = training.freeze.apply(ParamStore::init(training.seed));
    let vb = store.builder(training.dtype.into(), mesh.world.device());
    let stage = Llama::stage(job.config, &mesh, &vb)
        .map_err(|err| explain_out_of_memory(err, mesh.world.device()))?;
    training.freeze.check(stage.params())?;
    if mesh.world.rank() == 0 {
        print_line(&format!(
            "{} parameters",
            stage.params().num_global_values()
        ));
    }
    let trainer = fit(training, job.train, &mesh, stage, job.tokens)?;
    job.samples.print("sample", &mesh, trainer.stage())?;
    save_hf(trainer.stage().params(), &mesh, job.save)
}
