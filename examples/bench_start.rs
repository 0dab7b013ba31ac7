//! Measures what a rank does before its first step, beside the same for fewer ranks. It prints one JSON line for each number of ranks.
//!
//! Ranks as threads (`--ranks`) begin with a checkpoint: mesh, model, gradients and optimizer, in replicas that divide the weights (ZeRO-3). Ranks that are
//! simulated (`--simulated`) are one rank, which works out by arithmetic what a model of 80 layers asks for and what this
//! rank holds of it on tp 8 x pp 8 x dp N / 64, for each place in the pipeline.
//!
//! | field of the line | meaning |
//! |---|---|
//! | `ranks`, `is_simulated` | how many, and whether there is but one |
//! | `start_secs` | from the first rank's begin to the last one's end; of simulated ranks that of the slowest place |
//! | `secs_per_rank`, `times_first` | the same for each rank, and beside that of the line before all others: 1 if a start costs a rank as much among many |
//! | `rank_mb` | resident memory of the process that it did not have at the begin, in MB a rank: of several numbers of ranks the largest counts |
//! | `num_params`, `num_buckets` | the model's parameters and the buckets of a rank |

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use candle_comm::launch::threads_with;
use candle_comm::{Degrees, LocalConfig, Mesh};
use candle_core::{DType, Device, Error, Result};
use candle_parallel::{AdamWConfig, DistributedOptimizer, Gradients, ParamStore, ZeroStage};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
use clap::Parser;
use serde_json::json;

/// Measure what a rank does before its first step
#[derive(Parser)]
struct Args {
    /// The checkpoint that ranks as threads begin with
    #[arg(long, default_value = "examples/assets/shakespeare-llama")]
    model: PathBuf,
    /// Numbers of ranks as threads, the first of which the others are compared with
    #[arg(long, value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Pipeline stages of ranks as threads
    #[arg(long, default_value_t = 1)]
    pp: usize,
    /// Tensor-parallel ranks of ranks as threads
    #[arg(long, default_value_t = 1)]
    tp: usize,
    /// Numbers of simulated ranks, multiples of 64
    #[arg(long, value_delimiter = ',')]
    simulated: Vec<usize>,
    /// Layers of the model of simulated ranks
    #[arg(long, default_value_t = 80)]
    layers: usize,
}

/// What was measured.
struct Start {
    num_ranks: usize,
    /// Of them, those that did something.
    num_running: usize,
    took: Duration,
    bytes: u64,
    num_params: usize,
    num_buckets: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let before = resident_bytes()?;
    let of_threads = args
        .ranks
        .iter()
        .map(|&ranks| of_threads(&args, ranks, before));
    print(of_threads)?;
    print(
        args.simulated
            .iter()
            .map(|&ranks| of_simulated(&args, ranks, before)),
    )
}

fn print(starts: impl Iterator<Item = Result<Start>>) -> Result<()> {
    let mut first = None;
    for start in starts {
        let start = start?;
        let secs = start.took.as_secs_f64();
        let per_rank = secs / start.num_running as f64;
        let line = json!({
            "ranks": start.num_ranks,
            "is_simulated": start.num_ranks > start.num_running,
            "start_secs": secs,
            "secs_per_rank": per_rank,
            "times_first": per_rank / *first.get_or_insert(per_rank),
            "rank_mb": start.bytes as f64 / 1e6 / start.num_running as f64,
            "num_params": start.num_params,
            "num_buckets": start.num_buckets,
        });
        println!("{line}");
    }
    Ok(())
}

/// Bytes of this process that are in memory.
fn resident_bytes() -> Result<u64> {
    let fields = fs::read_to_string("/proc/self/statm")?;
    let pages = fields
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    let pages =
        pages.ok_or_else(|| Error::msg("/proc/self/statm does not tell what is in memory"))?;
    Ok(4096 * pages)
}

fn of_threads(args: &Args, num_ranks: usize, before: u64) -> Result<Start> {
    let config = ModelConfig::from_file(args.model.join("config.json"))?;
    let (pp, tp) = (args.pp, args.tp);
    let degrees = Degrees {
        pp,
        dp: num_ranks / (pp * tp),
        cp: 1,
        tp,
    };
    let most = AtomicU64::new(before);
    let begun = Instant::now();
    let run = |world| {
        let mesh = Mesh::new(world, degrees)?;
        let store = ParamStore::from_pretrained(&args.model)?.with_data_parallel(ZeroStage::Three);
        let part = CausalLm::part(
            &config,
            &mesh,
            &store.builder(DType::F32, mesh.world.device()),
        )?;
        let params = part.params();
        let _gradients = Gradients::new(params, &mesh)?;
        let _optimizer = DistributedOptimizer::adamw(params, &mesh, AdamWConfig::default())?;
        mesh.world.barrier()?;
        let took = begun.elapsed();
        if mesh.world.rank() == 0 {
            most.store(resident_bytes()?, Ordering::Relaxed);
        }
        mesh.world.barrier()?;
        Ok((took, params.catalog().len(), params.num_buckets()))
    };
    let ended = threads_with(LocalConfig::new(num_ranks), run)?;
    let (_, num_params, num_buckets) = ended[0];
    Ok(Start {
        num_ranks,
        num_running: num_ranks,
        took: ended
            .iter()
            .map(|(took, ..)| *took)
            .max()
            .unwrap_or_default(),
        bytes: most.into_inner().saturating_sub(before),
        num_params,
        num_buckets,
    })
}

fn of_simulated(args: &Args, num_ranks: usize, before: u64) -> Result<Start> {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 8192,
        "intermediate_size": 28_672, "num_hidden_layers": args.layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131_072,
    });
    let config = ModelConfig::from_json(&config.to_string())?;
    let (tp, pp) = (8, 8);
    let degrees = Degrees {
        pp,
        dp: num_ranks / (pp * tp),
        cp: 1,
        tp,
    };
    let (mut took, mut num_params, mut num_buckets, mut most) = (Duration::ZERO, 0, 0, before);
    for pp_rank in 0..pp {
        let begun = Instant::now();
        let store = ParamStore::init(0).with_data_parallel(ZeroStage::One);
        let vb = store.builder(DType::BF16, &Device::Cpu);
        let model = CausalLm::spec(&config, degrees, &vb, PartConfig::default())?;
        let hash = model.hash();
        let rank = model.of_rank(pp_rank * num_ranks / pp);
        took = took.max(begun.elapsed());
        most = most.max(resident_bytes()?);
        num_params = model.params().len();
        num_buckets = rank.num_buckets();
        std::hint::black_box((hash, rank));
    }
    Ok(Start {
        num_ranks,
        num_running: 1,
        took,
        bytes: most - before,
        num_params,
        num_buckets,
    })
}
