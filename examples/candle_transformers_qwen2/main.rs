//! candle-transformers' Qwen2, unchanged, trained in replicas with ZeRO. `scripts/candle-transformers-qwen2.sh` builds and runs it, with a
//! candle-nn whose operations have a backward pass: with candle's own the first step is an error.

use std::path::PathBuf;
use std::process::ExitCode;

use candle_comm::{Degrees, Mesh, launch, message_of};
use candle_core::{DType, Device, Error, Module, Result, Tensor, bail};
use candle_nn::{Init, Linear, linear_no_bias, loss::cross_entropy};
use candle_parallel::checkpoint::{HfSave, sidecar_files};
use candle_parallel::*;
use candle_trainer::{LrSchedule, Tokenizer, TrainConfig, Trainer};
use candle_transformers::models::qwen2::{Config, Model};
use clap::Parser;

const TEXT: &str = include_str!("../assets/alice.txt");
const CONFIG: &str = include_str!("config.json");
/// Sequences of a micro-batch, and their length.
const SHAPE: (usize, usize) = (2, 32);
/// Micro-batches of a step, over all replicas.
const NUM_MICRO_BATCHES: usize = 4;
const STAGES: [ZeroStage; 4] = [
    ZeroStage::Zero,
    ZeroStage::One,
    ZeroStage::Two,
    ZeroStage::Three,
];

/// Train candle-transformers' Qwen2 in two replicas
#[derive(Parser)]
struct Args {
    /// What the replicas divide: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(..4))]
    zero: u8,
    /// Number of steps
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..))]
    steps: u16,
    /// Checkpoint to begin with [default: a tiny model with random weights, whose tokens are bytes]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// New folder for the trained model
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Compare the losses of two replicas, with each ZeRO stage, with those of one rank
    #[arg(long, conflicts_with_all = ["zero", "save"])]
    check: bool,
}

/// `ModelForCausalLM` gives logits of the last position alone; its `Model` gives the hidden states of all, which training needs.
struct Qwen2(Model, Linear);

fn build(config: &Config, vb: &ParamBuilder) -> Result<Qwen2> {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let model = Model::new(config, vb.var_builder())?;
    let head = match config.tie_word_embeddings {
        false => linear_no_bias(hidden, vocab, vb.pp("lm_head").var_builder())?,
        true => {
            // As candle's embedding asks for it.
            let (mean, stdev) = (0.0, 1.0);
            let vb = vb.tied().pp("model.embed_tokens");
            let weight = vb.get((vocab, hidden), "weight", Init::Randn { mean, stdev })?;
            Linear::new(weight, None)
        }
    };
    Ok(Qwen2(model, head))
}

fn loss(Qwen2(model, head): &Qwen2, pass: &Pass) -> Result<Loss> {
    // A pass fills the cache of keys and values of a clone, which shares the weights. The next one begins with an empty one again.
    let hidden = model.clone().forward(pass.inputs(), 0, None)?;
    let logits = head.forward(&hidden)?.flatten_to(1)?;
    let mean = cross_entropy(&logits, &pass.targets()?.flatten_all()?)?;
    let count = pass.num_targets()? as f64;
    Ok(Loss::new((mean * count)?, count))
}

/// Sequences from all over the text.
fn micro_batch(tokens: &[u32], index: usize) -> Result<Pass> {
    let ids = |shift: usize| {
        let starts = (0..SHAPE.0).map(|row| (index * SHAPE.0 + row) * 997 + shift);
        let places = starts.flat_map(|start| start..start + SHAPE.1);
        let ids = places.map(|place| tokens[place % tokens.len()]);
        Tensor::from_iter(ids, &Device::Cpu)?.reshape(SHAPE)
    };
    Ok(Pass::train(ids(0)?, ids(1)?))
}

/// Trains in `dp` replicas, and gives the losses.
fn train(args: &Args, dp: usize, zero: ZeroStage) -> Result<Vec<f64>> {
    let sidecars = match &args.model {
        Some(dir) => sidecar_files(dir)?,
        None => vec![("config.json".into(), CONFIG.into())],
    };
    let Some((_, json)) = sidecars.iter().find(|(name, _)| name == "config.json") else {
        bail!("the folder of --model has no config.json")
    };
    let config: Config = serde_json::from_slice(json).map_err(|err| {
        Error::msg(format!(
            "candle-transformers' Qwen2 cannot read config.json: {err}\n\
             hint: it wants rope_theta, and a number as sliding_window, as transformers 4 writes them"
        ))
    })?;
    if let Some(save) = args.save.as_ref().filter(|save| save.exists()) {
        bail!("{save:?} is there; --save expects a new folder");
    }
    let tokens = match &args.model {
        Some(dir) if dir.join("tokenizer.json").exists() => {
            Tokenizer::from_dir(dir)?.encode(TEXT)?
        }
        _ => TEXT.bytes().map(u32::from).collect(),
    };
    let of_ranks = launch::threads(dp, |world| {
        let degrees = Degrees {
            dp,
            ..Degrees::default()
        };
        let mesh = Mesh::new(world, degrees)?;
        let is_first = mesh.world.rank() == 0;
        let store = match &args.model {
            Some(dir) => ParamStore::from_pretrained(dir)?,
            None => ParamStore::init(0),
        };
        let store = store.with_data_parallel(zero);
        let vb = store.builder(DType::F32, mesh.world.device());
        let part = ModelPart::whole(&mesh, &vb, |vb| build(&config, &vb), loss)?;
        let config = TrainConfig::new(LrSchedule::constant(3e-3, args.steps.into()));
        let mut trainer = Trainer::new(config, &mesh, part)?;
        let own = NUM_MICRO_BATCHES / dp;
        let batches = (0..).map(|step| {
            let first = step * NUM_MICRO_BATCHES + mesh.dp.rank() * own;
            let indices = first..first + own;
            indices.map(|index| micro_batch(&tokens, index)).collect()
        });
        let mut losses = Vec::new();
        trainer.train(batches, |step| {
            if is_first && !args.check {
                let (number, loss, norm) = (step.global_step, step.loss, step.grad_norm);
                println!("step {number} loss {loss:.6} gradient norm {norm:.5}");
            }
            losses.push(step.loss);
            Ok(())
        })?;
        if let Some(save) = &args.save {
            trainer.save_hf(&HfSave::new(save, sidecars.clone()))?;
        }
        Ok(losses)
    })?;
    Ok(of_ranks[0].clone())
}

/// An error if a loss of two replicas is not that of one rank, up to rounding.
fn check(args: &Args) -> Result<()> {
    let of_one = train(args, 1, ZeroStage::Zero)?;
    println!("one rank: {of_one:.6?}");
    for zero in STAGES {
        let losses = train(args, 2, zero)?;
        let off = losses
            .iter()
            .zip(&of_one)
            .map(|(loss, one)| (loss / one - 1.0).abs());
        let (off, name) = (off.fold(0.0, f64::max), zero as u8);
        println!("two replicas, ZeRO-{name}: {losses:.6?}, off by {off:.1e}");
        if off > 1e-5 {
            bail!(
                "losses with ZeRO-{name} are off by {off:.1e} of those of one rank; expected at most 1e-5"
            );
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match args.check {
        true => check(&args),
        false => train(&args, 2, STAGES[usize::from(args.zero)]).map(|_| ()),
    };
    if let Err(err) = &result {
        eprintln!("{}", message_of(err));
    }
    ExitCode::from(u8::from(result.is_err()))
}
