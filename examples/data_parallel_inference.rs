//! Scores the lines of a text file with one model on all devices of this process, a copy of it on each: how likely is each line?
//!
//! Prints one JSON object per line of the file, in the file's order, as soon as it is known: its number from 1, its tokens, and the mean
//! cross-entropy in nats of those that the model was to predict (`null` where there is none, as on an empty line).
//!
//! ```text
//! cargo run --release --example data_parallel_inference -- --model DIR --data lines.txt > scores.jsonl
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use candle_comm::{Degrees, LocalConfig, Mesh, launch};
use candle_core::{DType, Device, Error, Result, Tensor};
use candle_ops::DeviceChoice;
use candle_parallel::{EvalSums, ModelPart, ParamStore, Pass, Pipeline, Schedule};
use candle_train_cli::parse;
use candle_train_models::{CausalLm, ModelConfig};
use candle_train_run::exit_with;
use candle_trainer::Tokenizer;
use candle_trainer::hub::resolve_model;
use clap::Parser;
use serde_json::json;

/// Score the lines of a text file with one model on all devices
#[derive(Parser)]
struct Args {
    /// Checkpoint folder, or org/name[@revision] on the Hugging Face hub
    #[arg(long, value_name = "DIR|REPO")]
    model: String,
    /// Text file
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// cpu; cuda, all GPUs; or cuda:N [default: cuda if there is a GPU, else cpu]
    #[arg(long)]
    device: Option<DeviceChoice>,
    /// Copies of the model, each on a thread of its own, which take the devices in turn [default: one per GPU, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// Compute in bf16, with half the memory for weights
    #[arg(long)]
    bf16: bool,
}

/// The file on its way: a rank that is free takes the next line, and scores are printed in the order of the lines.
struct Lines<R> {
    file: R,
    path: PathBuf,
    num_taken: usize,
    /// Scores of lines that come after one which is still at work.
    waiting: BTreeMap<usize, EvalSums>,
    num_printed: usize,
    total: EvalSums,
    /// A rank has failed, or nobody reads the scores any more.
    is_over: bool,
}

impl<R: BufRead> Lines<R> {
    fn take(&mut self) -> Result<Option<(usize, String)>> {
        let (number, mut line) = (self.num_taken + 1, String::new());
        let read = self.file.read_line(&mut line).map_err(|err| {
            let path = self.path.display();
            Error::msg(format!("line {number} of {path} cannot be read: {err}"))
        })?;
        if self.is_over || read == 0 {
            return Ok(None);
        }
        self.num_taken = number;
        let text = line.strip_suffix('\n').unwrap_or(&line);
        Ok(Some((
            number,
            text.strip_suffix('\r').unwrap_or(text).to_string(),
        )))
    }

    fn put(&mut self, number: usize, score: EvalSums) -> Result<()> {
        self.waiting.insert(number, score);
        while let Some(score) = self.waiting.remove(&(self.num_printed + 1)) {
            self.num_printed += 1;
            self.total = self.total + score;
            let num_tokens = score.num_targets as usize;
            let loss = (num_tokens > 0).then(|| score.loss() / score.num_targets);
            let line = json!({"line": self.num_printed, "tokens": num_tokens, "loss": loss});
            match writeln!(io::stdout(), "{line}") {
                Ok(()) => {}
                Err(err) if err.kind() == ErrorKind::BrokenPipe => self.is_over = true,
                Err(err) => return Err(err.into()),
            }
        }
        Ok(())
    }
}

/// A rank at work. The others wait for nobody, and so do not hear of it if one ends by an error or a panic.
struct Rank<'a, R> {
    lines: &'a Mutex<Lines<R>>,
    is_done: bool,
}

impl<R> Drop for Rank<'_, R> {
    fn drop(&mut self) {
        if !self.is_done {
            lock(self.lines).is_over = true;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Predictions of each token from those before it, `max_len` at a time: a longer line continues without what came before.
fn micro_batches(ids: &[u32], max_len: usize) -> impl Iterator<Item = Result<Pass>> {
    let starts = (0..ids.len().saturating_sub(1)).step_by(max_len);
    starts.map(move |start| {
        let end = (start + max_len).min(ids.len() - 1);
        let row = |ids: &[u32]| Tensor::new(ids, &Device::Cpu)?.unsqueeze(0); // (1, t)
        Ok(Pass::train(
            row(&ids[start..end])?,
            row(&ids[start + 1..end + 1])?,
        ))
    })
}

fn score_lines(
    lines: &Mutex<Lines<impl BufRead>>,
    tokenizer: &Tokenizer,
    (part, pipeline, max_len): (&ModelPart, &Pipeline, usize),
) -> Result<()> {
    loop {
        let taken = lock(lines).take()?;
        let Some((number, text)) = taken else {
            return Ok(());
        };
        let ids = tokenizer.encode_prompt(&text)?;
        let score = pipeline.evaluate(part, micro_batches(&ids, max_len))?;
        lock(lines).put(number, score)?;
    }
}

fn open(path: &Path) -> Result<BufReader<File>> {
    let file = File::open(path);
    let file = file.map_err(|err| Error::msg(format!("--data {}: {err}", path.display())))?;
    Ok(BufReader::new(file))
}

fn run(args: &Args) -> Result<()> {
    let model = resolve_model(&args.model)?;
    let config = ModelConfig::from_file(model.join("config.json"))?;
    let tokenizer = Tokenizer::from_dir(&model)?;
    let choice = args.device.unwrap_or(DeviceChoice::preferred());
    let ranks = args.ranks.map(usize::from);
    let dp = ranks.unwrap_or(choice.num_devices()).max(1);
    let dtype = if args.bf16 { DType::BF16 } else { DType::F32 };
    let lines = Mutex::new(Lines {
        file: open(&args.data)?,
        path: args.data.clone(),
        num_taken: 0,
        waiting: BTreeMap::new(),
        num_printed: 0,
        total: EvalSums::default(),
        is_over: false,
    });
    let degrees = Degrees {
        dp,
        ..Degrees::default()
    };
    let local = LocalConfig {
        devices: choice.open_for(dp)?,
        ..LocalConfig::for_mesh(&degrees)?
    };
    let begun = Instant::now();
    launch::threads_with(local, |world| {
        let mut rank = Rank {
            lines: &lines,
            is_done: false,
        };
        let mesh = Mesh::new(world, degrees)?;
        let store = ParamStore::from_pretrained(&model)?;
        let part = CausalLm::part(&config, &mesh, &store.builder(dtype, mesh.world.device()))?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let scorer = (&part, &pipeline, config.max_seq_len());
        score_lines(&lines, &tokenizer, scorer)?;
        rank.is_done = true;
        Ok(())
    })?;
    let total = lock(&lines).total;
    let (num_tokens, secs) = (total.num_targets as usize, begun.elapsed().as_secs_f64());
    let loss = total.loss() / num_tokens.max(1) as f64;
    eprintln!(
        "{num_tokens} tokens in {secs:.1} s, ranks: {dp}; loss {loss:.4}, perplexity {:.2}",
        loss.exp()
    );
    Ok(())
}

fn main() -> ExitCode {
    let args = parse::<Args>();
    exit_with(run(&args))
}
