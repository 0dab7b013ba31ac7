//! Products of the linear layers of a training step, beside the same products by PyTorch (oneDNN), in turns.
//!
//! `cargo run --release -p candle-ops --example bench_product -- [--python PYTHON] [--turns N]` prints a row for each product and
//! precision: GFLOP/s of the forward pass, of the input gradient and of the weight gradient, which goes into an f32 buffer. PYTHON is an
//! interpreter with torch; with it each cell also has our speed over PyTorch's. Of each product the fastest run counts. `all of` a
//! model is the time of all products of its step, each as often as it occurs. All cores.
//!
//! With `--rows N` it prints the forward pass of N rows, as a model that generates has, in GB/s of weights that are read, each a row's share of
//! which is that of a plain sum over as many bytes; weights take turns, so that none is in a cache.
//!
//! With `--choose`, on a processor with AMX, it prints how well the code chooses by what products of f32 are multiplied, and what would be better.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use candle_ops::{
    HeldRows, MatmulPrecision, ProductChoice, ProductSize, linear_forward, linear_input_grad,
    linear_of_few_rows, linear_weight_grad_into,
};
use rayon::prelude::*;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc; // as the programs have

const SCRIPT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../scripts/reference/bench_products_torch.py"
);
/// Runs of a product in a turn.
const RUNS: usize = 3;
/// Until threads of the other program no longer spin. Whoever is next computes meanwhile: cores that rested are slow for their first products, and in a
/// step of training none rests.
const PAUSE: Duration = Duration::from_millis(5);

fn pause() {
    let start = Instant::now();
    while start.elapsed() < PAUSE {
        std::hint::spin_loop();
    }
}

/// Rows, `in` and `out` of a linear layer, and how often a step has it.
struct Linear {
    name: &'static str,
    sizes: [usize; 3],
    count: usize,
}

const fn linear(name: &'static str, sizes: [usize; 3], count: usize) -> Linear {
    Linear { name, sizes, count }
}

/// The models are those of `bench_train.py`; the products of its default and its long case are the same.
const MODELS: [(&str, &[Linear]); 3] = [
    ("a cube", &[linear("2048³", [2048, 2048, 2048], 1)]),
    (
        "default and long",
        &[
            linear("k, v", [1024, 512, 256], 16),
            linear("q, o", [1024, 512, 512], 16),
            linear("gate, up", [1024, 512, 1376], 16),
            linear("down", [1024, 1376, 512], 8),
            linear("head", [1024, 512, 8192], 1),
        ],
    ),
    (
        "large",
        &[
            linear("q, k, v, o", [512, 768, 768], 48),
            linear("gate, up", [512, 768, 2048], 24),
            linear("down", [512, 2048, 768], 12),
            linear("head", [512, 768, 32000], 1),
        ],
    ),
];

/// What is asked of PyTorch by these names.
const PASSES: [&str; 3] = ["forward", "input_grad", "weight_grad"];

fn main() -> Result<()> {
    // On a thread of the pool, as ranks are.
    rayon::scope(|_| run())
}

fn run() -> Result<()> {
    let (mut python, mut turns, mut rows) = (None, 7, None);
    let mut chooses = false;
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        match flag.as_str() {
            "--serve" => return serve(),
            "--choose" => {
                chooses = true;
                continue;
            }
            _ => {}
        }
        match (flag.as_str(), args.next()) {
            ("--python", Some(program)) => python = Some(program),
            ("--turns", Some(number)) => turns = number.parse::<usize>().map_err(Error::wrap)?,
            ("--rows", Some(number)) => rows = Some(number.parse::<usize>().map_err(Error::wrap)?),
            _ => bail!("expected --python PYTHON, --turns N, --rows N or --choose, got {flag}"),
        }
    }
    if chooses {
        return compare_choices(turns);
    }
    if let Some(rows) = rows {
        return bench_few_rows(rows, turns);
    }
    let torch = python.map(|python| Other::start(Command::new(python).arg(SCRIPT)));
    let mut torch = torch.transpose()?;
    let mut precisions = vec![
        (DType::F32, MatmulPrecision::Highest),
        (DType::BF16, MatmulPrecision::Highest),
    ];
    if MatmulPrecision::matters_on(&Device::Cpu) {
        precisions.insert(1, (DType::F32, MatmulPrecision::High));
    }
    println!(
        "| product, rows x in x out | precision | forward, GFLOP/s{0} | input gradient{0} | weight gradient{0} |\n|---|---|---|---|---|",
        torch.as_ref().map_or("", |_| ", ratio to PyTorch")
    );
    for (model, linears) in MODELS {
        for (dtype, precision) in &precisions {
            precision.set();
            let what = match precision {
                MatmulPrecision::Highest => dtype.as_str().to_string(),
                precision => format!("{} {precision}", dtype.as_str()),
            };
            let mut totals = [[0.0; 2]; 3];
            for Linear { name, sizes, count } in linears {
                let [rows, num_in, num_out] = sizes;
                let secs = secs_of_passes(*sizes, *dtype, turns, torch.as_mut())?;
                let flops = 2.0 * (rows * num_in * num_out) as f64;
                let cells = secs.map(|[ours, other]| cell(flops, [ours, other]));
                println!(
                    "| {name}: {rows} x {num_in} x {num_out} | {what} | {} |",
                    cells.join(" | ")
                );
                for (total, secs) in totals.iter_mut().zip(secs) {
                    *total = [0, 1].map(|i| total[i] + *count as f64 * secs[i]);
                }
            }
            if linears.len() == 1 {
                continue;
            }
            let flops = linears
                .iter()
                .map(|Linear { sizes, count, .. }| 2 * sizes.iter().product::<usize>() * count);
            let flops = flops.sum::<usize>() as f64;
            let cells = totals.map(|secs| cell(flops, secs));
            let all = [0, 1].map(|i| totals.iter().map(|secs| secs[i]).sum());
            println!(
                "| **all of {model}: {}** | {what} | {} |",
                cell(3.0 * flops, all),
                cells.join(" | ")
            );
        }
    }
    Ok(())
}

/// `in` and `out` of the linear layers of a Llama of 1.1B parameters, and how often it has each.
const LARGE: [Linear; 5] = [
    linear("k, v", [1, 2048, 256], 44),
    linear("q, o", [1, 2048, 2048], 44),
    linear("gate, up", [1, 2048, 5632], 44),
    linear("down", [1, 5632, 2048], 22),
    linear("head", [1, 2048, 32000], 1),
];

/// More than caches hold.
const BYTES: usize = 1 << 29;

/// Prints how fast products of so many rows read weights.
fn bench_few_rows(rows: usize, turns: usize) -> Result<()> {
    let values = vec![1u64; BYTES / size_of::<u64>()];
    let sum = || {
        let parts = values.par_chunks(1 << 14);
        let sums = parts.map(|part| {
            part.iter()
                .fold(0u64, |sum, value| sum.wrapping_add(*value))
        });
        black_box(sums.reduce(|| 0, u64::wrapping_add));
        Ok(())
    };
    let plain = BYTES as f64 / fewest_secs(turns, sum)? / 1e9;
    println!("A plain sum reads {plain:.1} GB/s.\n");
    println!(
        "| product, rows x in x out | weights | GB/s | of the plain sum | ms |\n|---|---|---|---|---|"
    );
    let floats = [DType::F32, DType::BF16, DType::F16].map(|dtype| (dtype, None));
    let blocks = [
        (HeldRows::Q8_0, GgmlDType::Q8_0),
        (HeldRows::Q4K, GgmlDType::Q4K),
    ];
    let blocks = blocks.map(|blocks| (DType::BF16, Some(blocks)));
    for (dtype, blocks) in floats.into_iter().chain(blocks) {
        let form = match blocks {
            Some((form, _)) => format!("{form:?}").to_lowercase(),
            None => dtype.as_str().to_string(),
        };
        let (mut all_bytes, mut all_secs) = (0.0, 0.0);
        for Linear { name, sizes, count } in &LARGE {
            let [_, num_in, num_out] = *sizes;
            let values = Tensor::randn(0f32, 1.0, (num_out, num_in), &Device::Cpu)?;
            let first = match blocks {
                None => values.to_dtype(dtype)?,
                Some((_, blocks)) => {
                    let bytes = QTensor::quantize(&values, blocks)?.data()?.into_owned();
                    let shape = (num_out, bytes.len() / num_out);
                    Tensor::from_vec(bytes, shape, &Device::Cpu)?
                }
            };
            let bytes = first.elem_count() * first.dtype().size_in_bytes();
            let copies = (1..BYTES.div_ceil(bytes)).map(|_| first.copy());
            let weights = copies
                .chain([Ok(first.clone())])
                .collect::<Result<Vec<_>>>()?;
            let xs = Tensor::randn(0f32, 1.0, (rows, num_in), &Device::Cpu)?.to_dtype(dtype)?;
            let run = || {
                weights.iter().try_for_each(|weight| {
                    let ys = match blocks {
                        None => Some(linear_forward(&xs, weight, None)?),
                        Some((form, _)) => linear_of_few_rows(&xs, weight, form, None, None)?,
                    };
                    drop(black_box(ys));
                    Ok(())
                })
            };
            let secs = fewest_secs(turns, run)? / weights.len() as f64;
            let speed = bytes as f64 / secs / 1e9;
            println!(
                "| {name}: {rows} x {num_in} x {num_out} | {form} | {speed:.1} | {:.2} | {:.3} |",
                speed / plain,
                secs * 1e3
            );
            all_bytes += (bytes * count) as f64;
            all_secs += secs * *count as f64;
        }
        let speed = all_bytes / all_secs / 1e9;
        println!(
            "| **all of a model** | {form} | {speed:.1} | **{:.2}** | {:.1} |",
            speed / plain,
            all_secs * 1e3
        );
    }
    Ok(())
}

/// The fastest of some runs.
fn fewest_secs(turns: usize, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut fewest = f64::INFINITY;
    for _ in 0..turns {
        let start = Instant::now();
        run()?;
        fewest = fewest.min(start.elapsed().as_secs_f64());
    }
    Ok(fewest)
}

/// Our speed, and if the other one's seconds are known, the ratio.
fn cell(flops: f64, [ours, other]: [f64; 2]) -> String {
    let speed = format!("{:.0}", flops / ours / 1e9);
    match other.is_finite() {
        true => format!("{speed}, {:.2}", other / ours),
        false => speed,
    }
}

/// Fewest seconds of each pass, ours and PyTorch's, which are infinite without it.
fn secs_of_passes(
    sizes: [usize; 3],
    dtype: DType,
    turns: usize,
    mut torch: Option<&mut Other>,
) -> Result<[[f64; 2]; 3]> {
    let operands = Operands::new(sizes, dtype)?;
    let mut fewest = [[f64::INFINITY; 2]; 3];
    for _ in 0..turns {
        for (pass, fewest) in fewest.iter_mut().enumerate() {
            pause();
            for _ in 0..RUNS {
                let start = Instant::now();
                operands.multiply(pass)?;
                fewest[0] = fewest[0].min(start.elapsed().as_secs_f64());
            }
            if let Some(torch) = &mut torch {
                fewest[1] = fewest[1].min(torch.secs(PASSES[pass], dtype, sizes)?);
            }
        }
    }
    Ok(fewest)
}

/// What the products of a linear layer multiply.
struct Operands {
    xs: Tensor,
    weight: Tensor,
    dy: Tensor,
    dw: Tensor,
}

impl Operands {
    fn new([rows, num_in, num_out]: [usize; 3], dtype: DType) -> Result<Self> {
        let random = |dims: (usize, usize)| -> Result<Tensor> {
            Tensor::randn(0f32, 1.0, dims, &Device::Cpu)?.to_dtype(dtype)
        };
        Ok(Self {
            xs: random((rows, num_in))?,
            weight: random((num_out, num_in))?,
            dy: random((rows, num_out))?,
            dw: Tensor::zeros(num_out * num_in, DType::F32, &Device::Cpu)?,
        })
    }

    /// Computes one of the [`PASSES`].
    fn multiply(&self, pass: usize) -> Result<()> {
        match pass {
            0 => drop(black_box(linear_forward(&self.xs, &self.weight, None)?)),
            1 => drop(black_box(linear_input_grad(&self.dy, &self.weight)?)),
            _ => linear_weight_grad_into(&self.dw, false, &self.dy, &self.xs)?,
        }
        Ok(())
    }
}

/// Rows, columns and values along `k` of products that are compared.
const EXTENTS: [usize; 6] = [32, 64, 128, 256, 512, 1024];

/// A product by multiply-adds and by parts.
struct Compared {
    size: ProductSize,
    /// Seconds of each.
    secs: [f64; 2],
}

impl Compared {
    /// The logarithm of how many times as long one takes as the faster one.
    fn loss(&self, by_parts: bool) -> f64 {
        (self.secs[usize::from(by_parts)] / self.secs[0].min(self.secs[1])).ln()
    }
}

/// Compares what the code chooses for products of f32 with what is faster.
fn compare_choices(turns: usize) -> Result<()> {
    if !MatmulPrecision::matters_on(&Device::Cpu) {
        bail!(
            "--choose: expected a processor with AMX, and CANDLE_TRAIN_PRODUCTS not set: else there is one way to multiply f32"
        );
    }
    let mut by_fma = Other::of_choice(ProductChoice::Fma)?;
    for (precision, parts) in [
        (MatmulPrecision::Highest, ProductChoice::ThreeParts),
        (MatmulPrecision::High, ProductChoice::TwoParts),
    ] {
        let mut by_parts = Other::of_choice(parts)?;
        println!(
            "| {precision}, cube of | multiply-adds, GFLOP/s | {parts} parts | chosen |\n|---|---|---|---|"
        );
        let mut all = Vec::new();
        for place in 0..EXTENTS.len().pow(3) {
            let extent = |i| EXTENTS[place / EXTENTS.len().pow(i) % EXTENTS.len()];
            let [rows, num_k, cols] = [extent(0), extent(1), extent(2)];
            let mut secs = [f64::INFINITY; 2];
            for _ in 0..turns {
                for (fewest, way) in secs.iter_mut().zip([&mut by_fma, &mut by_parts]) {
                    let secs = way.secs(PASSES[0], DType::F32, [rows, num_k, cols])?;
                    *fewest = fewest.min(secs);
                }
            }
            let size = ProductSize { rows, cols, num_k };
            if rows == cols && cols == num_k {
                let speeds = secs.map(|secs| 2.0 * (rows * cols * num_k) as f64 / secs / 1e9);
                println!(
                    "| {rows} | {:.0} | {:.0} | {} |",
                    speeds[0],
                    speeds[1],
                    ProductChoice::fastest(size, precision)
                );
            }
            all.push(Compared { size, secs });
        }
        let loss = |by_parts: &dyn Fn(ProductSize) -> bool| {
            let losses = all.iter().map(|one| one.loss(by_parts(one.size)));
            (losses.sum::<f64>() / all.len() as f64).exp()
        };
        let sides = all.iter().map(|one| one.size.harmonic_mean());
        let from = |side: f64| loss(&|size| size.harmonic_mean() > side);
        let best = sides.min_by(|a, b| from(*a).total_cmp(&from(*b)));
        let best = best.unwrap_or_default();
        println!(
            "\nTime over that of the faster way, geometric mean of {} products: multiply-adds {:.3}, {parts} parts {:.3}, as the code chooses {:.3}, \
             parts of more than {best:.0} {:.3}.\n",
            all.len(),
            loss(&|_| false),
            loss(&|_| true),
            loss(&|size| ProductChoice::fastest(size, precision) == parts),
            from(best)
        );
    }
    Ok(())
}

/// Answers what [`Other::secs`] asks.
fn serve() -> Result<()> {
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [pass, dtype, sizes @ .., runs] = words.as_slice() else {
            bail!("expected a product, got {line}");
        };
        let numbers = sizes.iter().map(|word| word.parse().map_err(Error::wrap));
        let numbers = numbers.collect::<Result<Vec<usize>>>()?;
        let sizes = numbers.as_slice().try_into().map_err(Error::wrap)?;
        let operands = Operands::new(sizes, dtype.parse().map_err(Error::wrap)?)?;
        let pass = PASSES.iter().position(|name| name == pass);
        let pass = pass.ok_or_else(|| Error::msg(format!("expected a pass, got {line}")))?;
        pause();
        let runs = runs.parse().map_err(Error::wrap)?;
        println!("{}", fewest_secs(runs, || operands.multiply(pass))?);
    }
    Ok(())
}

/// A child process that multiplies in another way.
struct Other {
    name: String,
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Other {
    /// This program with another choice.
    fn of_choice(choice: ProductChoice) -> Result<Self> {
        let mut program = Command::new(std::env::current_exe()?);
        Self::start(
            program
                .arg("--serve")
                .env("CANDLE_TRAIN_PRODUCTS", choice.to_string()),
        )
    }

    fn start(command: &mut Command) -> Result<Self> {
        let name = format!("{command:?}");
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| Error::msg(format!("{name}: {error}")))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(stdin), Some(stdout)) => Ok(Self {
                name,
                child,
                stdin,
                stdout: BufReader::new(stdout),
            }),
            _ => bail!("{name}: it has no pipes"),
        }
    }

    /// Fewest seconds of one turn's runs.
    fn secs(
        &mut self,
        pass: &str,
        dtype: DType,
        [rows, num_in, num_out]: [usize; 3],
    ) -> Result<f64> {
        let dtype = dtype.as_str();
        writeln!(
            self.stdin,
            "{pass} {dtype} {rows} {num_in} {num_out} {RUNS}"
        )?;
        let mut answer = String::new();
        self.stdout.read_line(&mut answer)?;
        match answer.trim().parse() {
            Ok(secs) => Ok(secs),
            Err(_) => bail!("{}: expected seconds of {pass}, got {answer:?}", self.name),
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Nobody waits for its next answer.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
