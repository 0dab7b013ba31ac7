//! Times training steps of a Llama with random weights on random tokens, and prints one JSON line.
//!
//! The model, tape and optimizer are those of `finetune_llama`. A step is forward, backward, clipping and AdamW. With one rank
//! and nothing frozen the line also tells the time that the products of the linear layers take alone: no step can be faster.
//!
//! On a GPU the host runs ahead: a step ends when the loss is read, so the time of AdamW counts in the step that follows.
//! `--profile` tells what the first rank's device does operation by operation, in steps of their own after the measured ones: events
//! take time. On a CPU a row is what the first rank waits for; `everything else` is time in none of candle-ops' operations.
//!
//! Every step trains on the same tokens, which depend on the vocabulary and their number alone: ids `x mod vocabulary` of
//! `x = 1, 48271, ..`, each the last times 48271 modulo 2^31 - 1. With `--model` the weights are those of a checkpoint, so that
//! losses and norms can be compared with another program's.
//!
//! | field of the line | unit and meaning |
//! |---|---|
//! | `system`, `device`, `dtype` | the program and its version; `cpu` or the GPU's name; type of weights and activations |
//! | `step_secs`, `min_step_secs` | median and shortest step |
//! | `losses`, `grad_norms` | of every step, the two that warm up included: mean over the tokens, and L2 norm before clipping; null where f16 overflowed |
//! | `loss_scale`, `skipped_steps` | the loss scale of the last step, and the steps so far that overflowed and updated nothing; 1 and 0 but in f16 |
//! | `matmul_precision` | how f32 were multiplied in linear layers (`--matmul-precision`) |
//! | `micro_batch_size` | sequences that go through the model together |
//! | `tokens_per_sec` | tokens of a step, over all replicas, per median step |
//! | `flops_per_token` | operations that a step needs: 6 per weight of a product (2 forward, 2 for the gradient of its input, 2 for its own), 4 for a frozen one, and 12 · layers · heads · head_dim · seq_len / 2 for attention. The embedding is a lookup and counts as the head only, if tied; nothing counts that is computed again |
//! | `attention` | the code that computed it: `cpu`, `own` kernels on a GPU, `cudnn`, or two of them if cuDNN could not do all |
//! | `deterministic` | whether cuDNN's backward pass was to add in a fixed order (`--deterministic`); all other code does |
//! | `mfu` | model FLOPs utilisation, `flops_per_token · tokens_per_sec` over `--peak-tflops` of all devices; null if that is not known |
//! | `libraries` | versions of CUDA, cuBLAS and, where it was used, cuDNN; null on the CPU |
//! | `peak_device_bytes` | the most that tensors held at a time, by the driver's memory pool; null on the CPU |
//! | `device_bytes` | what tensors of all ranks on the first rank's GPU hold after the last step, by that pool; null on the CPU |
//! | `device_in_use_bytes` | memory of that GPU that is not free then: with kernels, libraries, what the pool keeps, and other processes; null on the CPU |
//! | `parameters`, `trainable_parameters` | values of the whole model, and those not frozen |
//! | `peak_allocated_bytes` | the most that the steps had allocated on the host at a time, in blocks of 4 KiB or more |
//! | `peak_rss_bytes`, `page_faults_per_step` | memory of the process on the host at its peak, up to the last step, and minor page faults |
//! | `memory` | bytes that the first rank holds, now and at their peak (`weights_bytes`, `weights_peak_bytes`): `weights`, `gradients` and `optimizer` that it keeps, `activations` between passes, weights `gathered` for use, `buffers` of communication, weights that stay `packed` |
//! | `product_floor_secs` | the products of the linear layers alone, as above; null on a GPU, and where something is frozen or offloaded |
//! | `read_bytes_per_step`, `written_bytes_per_step` | what a measured step moves from and to files |
//! | `plain_copy_secs` | with `--offload-dir`: how long a plain copy of these bytes takes, by the same calls, in the first folder; else null |
//! | `forward_secs`, `backward_secs`, `communication_secs`, `optimizer_secs` | means over the steps on the first rank; on a GPU by its own clock (CUDA events), with the optimizer's of the step before; communication is what the host waits for |
//! | `hidden_communication_secs` | mean time of a step in which communication was under way and the rank computed; 0 on a GPU, where the host does not see it |
//! | `pipeline` | of each rank of the first replica's pipeline the mean `idle_share` over the steps and `peak_activations_bytes`; empty without a pipeline |
//! | `context_bytes_per_step` | what the first rank sends in a measured step to those that share its sequences; 0 without `--cp` |
//! | `stage_secs` | with `--stage-secs`, of each stage and pass the median seconds of a micro-batch, from three more steps; else null |
//! | `saving_step_secs`, `writing_step_secs` | with `--save-dir`: median of the steps after which a checkpoint was copied to be saved, the copy included, and of those right after, beside which it was written; neither is in `step_secs`. Null without |
//!
//! The shape of Llama-3.1-8B with everything frozen but the norms:
//! `bench_train --device cuda --dtype bf16 --hidden-size 4096 --intermediate-size 14336 --layers 32 --heads 32 --kv-heads 8
//! --vocab-size 128256 --seq-len 4096 --batch-size 1 --freeze 'proj|embed_tokens|lm_head'`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use candle_comm::trace::{self, SpanKind};
use candle_comm::{Degrees, Mesh, ProcessGroup, launch};
use candle_core::{DType, Device, Error, Result, bail};
use candle_ops::{AttentionCode, GpuSettings, GpuState, MatmulPrecision, Profile};
use candle_parallel::checkpoint::CheckpointSaver;
use candle_parallel::{LossScaling, MemoryReport, ParamStore, PipelineRank};
use candle_train_cli::parse;
use candle_train_examples::{
    MovedBytes, moved_bytes, page_faults, peak_rss_bytes, plain_copy_secs, product_floor_secs,
};
use candle_train_models::{ModelConfig, flops_per_token};
use candle_train_run::{
    Allocator, FreezeArgs, LayoutArgs, LossScaleArgs, RankArgs, exit_as_rank,
    fingerprint_of_program, keep_freed_memory, peak_allocated_bytes, return_freed_memory,
};
use candle_trainer::{
    BatchConfig, Batches, Checkpoints, DataPosition, LrSchedule, SampleConfig, Samples, StepTimes,
    Tokens, TrainConfig, Trainer, TrainingRecord,
};
use clap::Parser;
use serde_json::{Value, json};

/// Time training steps of a Llama with random weights on random tokens; prints one JSON line.
#[derive(Parser, Debug)]
#[command(name = "bench_train")]
struct Args {
    /// Folder of a checkpoint, which gives weights and shape, in place of random weights
    #[arg(long, value_name = "DIR", conflicts_with_all = ["hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "vocab_size", "tie"])]
    model: Option<PathBuf>,
    /// Width of the residual stream
    #[arg(long, default_value_t = 512)]
    hidden_size: usize,
    /// Width of the MLP
    #[arg(long, default_value_t = 1376)]
    intermediate_size: usize,
    /// Number of layers
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Number of query heads
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Number of key/value heads
    #[arg(long, default_value_t = 4)]
    kv_heads: usize,
    /// Number of tokens of the vocabulary
    #[arg(long, default_value_t = 8192)]
    vocab_size: usize,
    /// Length of a sequence
    #[arg(long, default_value_t = 256, value_name = "TOKENS")]
    seq_len: usize,
    /// Sequences of a step, over all replicas
    #[arg(long, default_value_t = 4, value_name = "SEQUENCES")]
    batch_size: usize,
    /// Sequences that go through the model together [default: the batch of a replica, cut into one part per pipeline stage]
    #[arg(long, value_name = "SEQUENCES")]
    micro_batch_size: Option<usize>,
    /// Measured steps, after two that warm up
    #[arg(long, default_value_t = 6)]
    steps: usize,
    /// Threads that compute, over all ranks; 0: one per core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    loss_scale: LossScaleArgs,
    #[command(flatten)]
    freeze: FreezeArgs,
    /// Use the embedding's weight in the head
    #[arg(long)]
    tie: bool,
    #[command(flatten)]
    layout: LayoutArgs,
    /// Dense operations per second in 16 bits of each device, in 10^12, for the MFU [default: 989 for an H100 or H200]
    #[arg(long, value_name = "TFLOPS")]
    peak_tflops: Option<f64>,
    /// Print the time of each operation of the first rank's device to stderr, from three more steps after the measured ones
    #[arg(long)]
    profile: bool,
    /// Measure what the passes of each stage take, in three more steps after the measured ones. One micro-batch (--micro-batch-size as large as
    /// --batch-size) leaves one rank to work at a time
    #[arg(long)]
    stage_secs: bool,
    /// Write to this file which operations each rank starts in three more steps after the measured ones, in their order, a line for each: rank,
    /// name, axis, number of ranks, bytes
    #[arg(long, value_name = "FILE")]
    operations: Option<PathBuf>,
    /// Save a checkpoint in this folder after every fourth step, to time that
    #[arg(long, value_name = "DIR")]
    save_dir: Option<PathBuf>,
}

const NUM_WARM_UP_STEPS: usize = 2;
const NUM_PROFILED_STEPS: usize = 3;
/// Of a rank, in the steps whose stages are timed.
const MAX_SPANS: usize = 1 << 20;
/// Steps from one checkpoint to the next.
const SAVE_EVERY: usize = 4;
/// More threads than this in one process is a slip of the keyboard.
const MAX_THREADS: usize = 1024;

/// Whether there are steps, or have been.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);

/// What the first rank measured.
#[derive(Default)]
struct Measured {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    loss_scale: f64,
    skipped_steps: usize,
    step_secs: Vec<f64>,
    /// Of steps with a copy for a checkpoint, and of those right after.
    saving_step_secs: Vec<f64>,
    writing_step_secs: Vec<f64>,
    times: Vec<StepTimes>,
    num_parameters: usize,
    num_trainable_parameters: usize,
    page_faults_per_step: u64,
    /// Of a step.
    moved: MovedBytes,
    plain_copy_secs: Option<f64>,
    peak_allocated_bytes: usize,
    peak_rss_bytes: u64,
    /// With one rank and nothing frozen, the time that the products of the linear layers take alone.
    product_floor_secs: Option<f64>,
    flops_per_token: f64,
    memory: MemoryReport,
    gpu: Option<GpuState>,
    profile: Option<Profile>,
    /// Of each step.
    pipeline: Vec<Vec<PipelineRank>>,
    /// Sent in all measured steps to ranks that share sequences.
    context_bytes: u64,
    /// What a pass of a micro-batch takes in a stage.
    stage_secs: Option<Vec<Value>>,
}

#[global_allocator]
static ALLOCATOR: Allocator = candle_train_run::ALLOCATOR;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let mut args: Args = parse();
    // Not as many replicas as there are processes.
    args.layout.dp.get_or_insert(1);
    if let Ok(true) = args.ranks.needs_mpi() {
        return ExitCode::from(candle_launch::NEEDS_MPI_EXIT_CODE);
    }
    let ended = run(&mut args).map(|()| ExitCode::SUCCESS);
    exit_as_rank(ended, HAS_BEGUN.load(Ordering::Acquire))
}

fn run(args: &mut Args) -> Result<()> {
    let config = match &args.model {
        Some(dir) => ModelConfig::from_file(dir.join("config.json"))?,
        None => model_config(args)?,
    };
    let degrees = args.layout.degrees();
    args.layout.data_parallel().validate(degrees.dp)?;
    args.loss_scale.config(args.layout.dtype())?;
    let mut ranks = args.ranks.config(degrees)?;
    let batch_config = batch_config(args)?;
    batch_config.validate(args.seq_len, degrees.dp)?;
    let micro_batches = batch_config.micro_batch_size * degrees.dp;
    let num_micro_batches = batch_config
        .global_batch_size
        .div_ceil(micro_batches.max(1));
    args.layout.fill_schedule(&config, num_micro_batches);
    args.layout
        .check_model(&config, &batch_config, args.seq_len)?;
    if args.threads > MAX_THREADS {
        bail!(
            "--threads is {}; expected at most {MAX_THREADS}",
            args.threads
        );
    }
    let num_ranks = degrees.pp * degrees.dp * degrees.cp * degrees.tp;
    if args.threads > 0 {
        ranks.threads_per_rank = Some((args.threads * args.layout.pp / num_ranks).max(1));
    }
    let num_devices = match ranks.env.world_size() {
        1 => ranks.devices.len(),
        processes => processes,
    };
    if ranks.env.world_size() > 1 {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let flags = [("the command line".to_string(), words.join(" "))];
        ranks.fingerprint = fingerprint_of_program(&ranks, &flags)?;
    }
    let args = &*args;
    let measured = launch::run(&ranks, |world| {
        args.ranks.settle();
        bench(args, &config, &batch_config, degrees, world)
    })?;
    if !ranks.is_first() {
        return Ok(());
    }
    let Some(mut first) = measured.into_iter().next() else {
        bail!("no rank measured anything");
    };
    print(args, &batch_config, num_devices, &mut first)
}

fn model_config(args: &Args) -> Result<ModelConfig> {
    let config = serde_json::json!({
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "max_position_embeddings": args.seq_len.max(2048),
        "tie_word_embeddings": args.tie,
    });
    ModelConfig::from_json(&config.to_string())
}

/// Unless told, one micro-batch per replica and stage, so that pipelines have something to overlap.
fn batch_config(args: &Args) -> Result<BatchConfig> {
    let Degrees { pp, dp, .. } = args.layout.degrees();
    let parts = dp * pp;
    let is_divisible = args.batch_size.is_multiple_of(parts) && args.batch_size > 0;
    if args.micro_batch_size.is_none() && !is_divisible {
        bail!(
            "--batch-size {} is not a multiple of dp({dp}) * pp({pp}) = {parts}",
            args.batch_size
        );
    }
    Ok(BatchConfig {
        micro_batch_size: args.micro_batch_size.unwrap_or(args.batch_size / parts),
        global_batch_size: args.batch_size,
        shuffle: false,
        seed: 0,
        uneven: false,
        ramp: None,
    })
}

fn bench(
    args: &Args,
    config: &ModelConfig,
    batch_config: &BatchConfig,
    degrees: Degrees,
    world: ProcessGroup,
) -> Result<Measured> {
    let mesh = Mesh::new(world, degrees)?;
    if mesh.world.rank() == 0 {
        if let Some(warning) = args.ranks.warning_of_precision(mesh.world.device()) {
            eprintln!("warning: {warning}");
        }
        if let Some(note) = args.layout.recompute.note() {
            eprintln!("{note}");
        }
    }
    let dtype = args.layout.dtype();
    let store = match &args.model {
        Some(dir) => ParamStore::from_pretrained(dir)?,
        None => ParamStore::init(0),
    };
    let of_replica = batch_config.global_batch_size / degrees.dp;
    let num_micro_batches = of_replica.div_ceil(batch_config.micro_batch_size);
    let store = args
        .freeze
        .apply(store.with_data_parallel(args.layout.data_parallel()))
        .with_offload(args.layout.offload())
        .with_packed_weights(args.layout.packing(num_micro_batches));
    let vb = store.builder(dtype, mesh.world.device());
    let part = args.layout.part(config, &mesh, &vb, args.seq_len)?;
    args.freeze.check(part.params().catalog())?;
    let num_parameters = part.params().num_global_values();
    let num_trainable_parameters = part.params().num_trainable_values();
    let flops_per_token = flops_per_token(config, part.params(), args.seq_len);
    let num_measured_steps = NUM_WARM_UP_STEPS + args.steps;
    let profiles = [args.profile, args.stage_secs, args.operations.is_some()];
    let num_profiled_steps =
        NUM_PROFILED_STEPS * profiles.into_iter().map(usize::from).sum::<usize>();
    let train = train_config(
        num_measured_steps + num_profiled_steps,
        &args.layout,
        args.loss_scale.config(args.layout.dtype())?,
    );
    let tokens = tokens(config.vocab_size, args.batch_size * args.seq_len + 1)?;
    let samples = Samples::new(&tokens, SampleConfig::new(args.seq_len))?;
    let (dp_rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
    let batches = Batches::new(&samples, batch_config.clone(), dp_rank, dp, &Device::Cpu)?;
    let mut trainer = Trainer::new(train, &mesh, part)?;
    match args.layout.offload().dirs.is_empty() {
        true => keep_freed_memory(),
        false => return_freed_memory(),
    }
    if mesh.world.device().is_cuda() {
        trainer = trainer.with_device_times();
    }
    if let Some(dir) = &args.save_dir {
        let saver = CheckpointSaver::new(&mesh.world, dir, 1, None)?;
        let is_first = mesh.world.rank() == 0;
        let record = TrainingRecord::default();
        let checkpoints = Checkpoints::new(saver, Some(SAVE_EVERY), record, is_first);
        trainer = trainer.with_checkpoints(checkpoints);
    }
    let mut measured = Measured {
        num_parameters,
        num_trainable_parameters,
        flops_per_token,
        ..Measured::default()
    };
    let mut faults_before = 0;
    let mut moved_before = MovedBytes::default();
    HAS_BEGUN.store(true, Ordering::Release);
    for step in 0..num_measured_steps {
        if step == NUM_WARM_UP_STEPS {
            faults_before = page_faults();
            moved_before = moved_bytes();
            mesh.cp.reset_counters();
        }
        let secs = measured.train_step(&mut trainer, &batches)?;
        let before_copy = Instant::now();
        trainer.checkpoint(DataPosition::of(&batches, trainer.step())?)?;
        if step >= NUM_WARM_UP_STEPS {
            let secs = secs + before_copy.elapsed().as_secs_f64();
            match (&args.save_dir, trainer.step() % SAVE_EVERY) {
                (Some(_), 0) => measured.saving_step_secs.push(secs),
                (Some(_), 1) => measured.writing_step_secs.push(secs),
                _ => measured.step_secs.push(secs),
            }
            measured.times.push(trainer.times());
        }
    }
    measured.context_bytes = mesh.cp.counters().total().bytes;
    let moved = moved_bytes();
    let num_steps = args.steps.max(1) as u64;
    measured.moved = MovedBytes {
        read: (moved.read - moved_before.read) / num_steps,
        written: (moved.written - moved_before.written) / num_steps,
    };
    measured.page_faults_per_step = (page_faults() - faults_before) / args.steps.max(1) as u64;
    if args.profile {
        measured.profile_steps(&mut trainer, &batches, &mesh)?;
    }
    if args.stage_secs {
        measured.time_stages(&mut trainer, &batches, &mesh)?;
    }
    if let Some(file) = &args.operations {
        measured.write_operations(&mut trainer, &batches, &mesh, file)?;
    }
    measured.peak_allocated_bytes = peak_allocated_bytes();
    measured.peak_rss_bytes = peak_rss_bytes();
    // Between these no rank on this GPU computes, none has freed what it holds, and what was freed before is free.
    mesh.world.barrier()?;
    mesh.world.device().synchronize()?;
    measured.memory = trainer.memory();
    measured.gpu = GpuState::of(mesh.world.device())?;
    mesh.world.barrier()?;
    let offload = args.layout.offload();
    if let (0, Some(dir)) = (mesh.world.rank(), offload.dirs.first()) {
        let copied = plain_copy_secs(dir, measured.moved)?;
        measured.plain_copy_secs = Some(copied);
    }
    let is_one_cpu = mesh.world.world_size() == 1 && mesh.world.device().is_cpu();
    let is_whole = num_trainable_parameters == num_parameters && offload.dirs.is_empty();
    if is_one_cpu && is_whole {
        let num_tokens = args.batch_size * args.seq_len;
        measured.product_floor_secs = Some(product_floor_secs(config, num_tokens, dtype)?);
    }
    Ok(measured)
}

impl Measured {
    /// Trains a step and returns its seconds.
    fn train_step(&mut self, trainer: &mut Trainer, batches: &Batches) -> Result<f64> {
        let report = trainer.train_step(&batches.batch(trainer.step())?)?;
        self.losses.push(report.loss);
        self.grad_norms.push(report.grad_norm);
        self.loss_scale = report.loss_scale;
        self.skipped_steps = report.skipped_steps;
        self.pipeline.push(report.pipeline);
        Ok(report.step_secs)
    }

    /// Trains a few steps more, and records what passes take on all ranks of the pipeline.
    fn time_stages(&mut self, trainer: &mut Trainer, batches: &Batches, mesh: &Mesh) -> Result<()> {
        trace::start(MAX_SPANS);
        for _ in 0..NUM_PROFILED_STEPS {
            self.train_step(trainer, batches)?;
        }
        let mut secs: BTreeMap<(usize, &str), Vec<f64>> = BTreeMap::new();
        for span in trace::stop().spans {
            if let SpanKind::Pass { pass, stage, .. } = span.kind {
                let of_pass = secs.entry((stage, pass.name())).or_default();
                of_pass.push((span.end - span.start).as_secs_f64());
            }
        }
        let own = secs.into_iter().map(|((stage, pass), mut secs)| {
            json!({"stage": stage, "pass": pass, "secs": median(&mut secs)})
        });
        let own = serde_json::to_vec(&own.collect::<Vec<_>>()).map_err(Error::wrap)?;
        let all = mesh.pp.all_gather_bytes(&own)?.into_iter();
        let all = all.map(|of_rank| serde_json::from_slice(&of_rank).map_err(Error::wrap));
        let all: Vec<Vec<Value>> = all.collect::<Result<_>>()?;
        self.stage_secs = Some(all.concat());
        Ok(())
    }

    /// Trains a few steps more, and writes to `file` which operations each rank starts.
    fn write_operations(
        &mut self,
        trainer: &mut Trainer,
        batches: &Batches,
        mesh: &Mesh,
        file: &Path,
    ) -> Result<()> {
        trace::start(MAX_SPANS);
        for _ in 0..NUM_PROFILED_STEPS {
            self.train_step(trainer, batches)?;
        }
        let mut spans = trace::stop().spans;
        spans.sort_by_key(|span| span.start);
        let mut own = String::new();
        for span in spans {
            if let SpanKind::Communication(op) = span.kind {
                let rank = mesh.world.rank();
                let (name, group, num, bytes) = (op.operation, op.group, op.num_ranks, op.bytes);
                own += &format!("{rank} {name} {group} {num} {bytes}\n");
            }
        }
        let all = mesh.world.all_gather_bytes(own.as_bytes())?;
        if mesh.world.rank() == 0 {
            std::fs::write(file, all.concat()).map_err(Error::wrap)?;
        }
        Ok(())
    }

    /// Trains a few steps more, on the first rank under a profile.
    fn profile_steps(
        &mut self,
        trainer: &mut Trainer,
        batches: &Batches,
        mesh: &Mesh,
    ) -> Result<()> {
        let device = mesh.world.device();
        let is_profiled = mesh.world.rank() == 0;
        if is_profiled {
            Profile::start(device)?;
        }
        for _ in 0..NUM_PROFILED_STEPS {
            self.train_step(trainer, batches)?;
        }
        if is_profiled {
            self.profile = Some(Profile::finish(device, NUM_PROFILED_STEPS)?);
        }
        Ok(())
    }
}

/// The median; sorts the values.
fn median(secs: &mut [f64]) -> Option<f64> {
    secs.sort_by(f64::total_cmp);
    secs.get(secs.len() / 2).copied()
}

fn train_config(num_steps: usize, layout: &LayoutArgs, loss_scaling: LossScaling) -> TrainConfig {
    TrainConfig {
        loss_scaling,
        schedule: layout.pipeline.order.schedule(),
        pipeline_prefetch: layout.pipeline.pipeline_prefetch,
        ..TrainConfig::new(LrSchedule::constant(1e-4, num_steps))
    }
}

/// A multiplicative generator modulo 2^31 - 1: any tokens do, they only have to be spread over the vocabulary.
fn tokens(vocab_size: usize, count: usize) -> Result<Tokens> {
    let next = |id: &u64| Some(id * 48271 % 0x7fff_ffff);
    let ids = std::iter::successors(Some(1u64), next).map(|id| (id % vocab_size as u64) as u32);
    Tokens::from_ids(ids.take(count).collect())
}

fn print(
    args: &Args,
    batch_config: &BatchConfig,
    num_devices: usize,
    measured: &mut Measured,
) -> Result<()> {
    let steps = &mut measured.step_secs;
    if steps.is_empty() {
        bail!("--steps is 0: nothing was measured");
    }
    let times = &measured.times;
    let mean = |of: fn(&StepTimes) -> f64| times.iter().map(of).sum::<f64>() / times.len() as f64;
    let saving_step_secs = median(&mut measured.saving_step_secs);
    let writing_step_secs = median(&mut measured.writing_step_secs);
    let step_secs = median(steps).unwrap_or_default();
    let tokens_per_sec = (args.batch_size * args.seq_len) as f64 / step_secs;
    let device = measured.gpu.as_ref().map_or("cpu", |gpu| &gpu.name);
    let default_peak = measured.gpu.as_ref().and_then(GpuState::peak_tflops);
    let default_peak = default_peak.filter(|_| args.layout.dtype() != DType::F32);
    let flops = tokens_per_sec * measured.flops_per_token;
    let peak = args.peak_tflops.or(default_peak);
    let mfu = peak.map(|peak| flops / (peak * 1e12 * num_devices as f64));
    let attention = AttentionCode::used().into_iter();
    let attention: Vec<String> = attention.map(|code| code.to_string()).collect();
    let of_steps = measured
        .pipeline
        .iter()
        .skip(NUM_WARM_UP_STEPS)
        .take(args.steps);
    let last = of_steps.clone().next_back().cloned().unwrap_or_default();
    let pipeline = last.into_iter().enumerate().map(|(rank, of_rank)| {
        let shares: Option<Vec<f64>> = of_steps.clone().map(|step| step[rank].idle_share).collect();
        json!({
            "idle_share": shares.map(|shares| shares.iter().sum::<f64>() / shares.len() as f64),
            "peak_activations_bytes": of_rank.peak_activations_bytes,
        })
    });
    let pipeline: Vec<_> = pipeline.collect();
    let line = json!({
        "system": format!("candle-train {}", env!("CARGO_PKG_VERSION")),
        "dtype": args.layout.dtype().as_str(),
        "matmul_precision": MatmulPrecision::get().to_string(),
        "step_secs": step_secs,
        "min_step_secs": steps[0],
        "saving_step_secs": saving_step_secs,
        "writing_step_secs": writing_step_secs,
        "losses": measured.losses,
        "grad_norms": measured.grad_norms,
        "loss_scale": measured.loss_scale,
        "skipped_steps": measured.skipped_steps,
        "micro_batch_size": batch_config.micro_batch_size,
        "tokens_per_sec": tokens_per_sec,
        "flops_per_token": measured.flops_per_token,
        "device": device,
        "libraries": measured.gpu.as_ref().map(|gpu| &gpu.libraries),
        "attention": attention.join("+"),
        "deterministic": GpuSettings::get()?.deterministic,
        "mfu": mfu,
        "peak_device_bytes": measured.gpu.as_ref().map(|gpu| gpu.peak),
        "device_bytes": measured.gpu.as_ref().map(|gpu| gpu.used),
        "device_in_use_bytes": measured.gpu.as_ref().map(|gpu| gpu.total - gpu.free),
        "parameters": measured.num_parameters,
        "trainable_parameters": measured.num_trainable_parameters,
        "peak_allocated_bytes": measured.peak_allocated_bytes,
        "peak_rss_bytes": measured.peak_rss_bytes,
        "memory": measured.memory,
        "page_faults_per_step": measured.page_faults_per_step,
        "read_bytes_per_step": measured.moved.read,
        "written_bytes_per_step": measured.moved.written,
        "plain_copy_secs": measured.plain_copy_secs,
        "product_floor_secs": measured.product_floor_secs,
        "pipeline": pipeline,
        "context_bytes_per_step": measured.context_bytes / args.steps.max(1) as u64,
        "stage_secs": measured.stage_secs,
        "forward_secs": mean(|t| t.forward_secs),
        "backward_secs": mean(|t| t.backward_secs),
        "communication_secs": mean(|t| t.communication_secs),
        "hidden_communication_secs": mean(|t| t.hidden_communication_secs),
        "optimizer_secs": mean(|t| t.optimizer_secs),
    });
    if let Some(profile) = &measured.profile {
        eprint!("{profile}");
    }
    println!("{line}");
    Ok(())
}
