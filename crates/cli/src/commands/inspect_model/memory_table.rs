//! The memory that training a model takes on one device, beside the flags that it takes so much with.

use candle_comm::Degrees;
use candle_core::{DType, Device, Result};
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, LoraConfig, MemoryCategory, MemoryPlan, MemoryReport,
    Offload, PackWeights, ParamStore, Plan, PlannedPasses, PlannedUpdate, PlannedWork, Recompute,
    Schedule, WeightFormat,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
use candle_trainer::memory_in_words;

use candle_train_run::print_line;

/// Tokens of a micro-batch, or the model's context if that is shorter.
const NUM_TOKENS: usize = 2048;

/// A way to train.
struct Way {
    flags: &'static str,
    dtype: DType,
    has_adapters: bool,
    base: Option<WeightFormat>,
}

const WAYS: [Way; 4] = [
    Way {
        flags: "--dtype f32",
        dtype: DType::F32,
        has_adapters: false,
        base: None,
    },
    Way {
        flags: "--dtype bf16",
        dtype: DType::BF16,
        has_adapters: false,
        base: None,
    },
    Way {
        flags: "--dtype bf16 --lora-rank 16",
        dtype: DType::BF16,
        has_adapters: true,
        base: None,
    },
    Way {
        flags: "--dtype bf16 --lora-rank 16 --base-dtype q4k",
        dtype: DType::BF16,
        has_adapters: true,
        base: Some(WeightFormat::Q4K),
    },
];

const COLUMNS: [MemoryCategory; 4] = [
    MemoryCategory::Weights,
    MemoryCategory::Gradients,
    MemoryCategory::Optimizer,
    MemoryCategory::Activations,
];

/// Prints a line for each way.
///
/// # Errors
/// Numbers of the model that do not fit each other.
pub(super) fn print_memory(config: &ModelConfig) -> Result<()> {
    let num_tokens = NUM_TOKENS.min(config.max_seq_len());
    print_line(&format!(
        "memory to train it on one device, with micro-batches of 1 sequence of {num_tokens} tokens, without what is being computed:"
    ));
    let heads = COLUMNS.map(|category| category.to_string());
    print_row("", &[heads.to_vec(), vec!["in all".to_string()]].concat());
    for way in &WAYS {
        let memory = way.memory(config, num_tokens)?;
        let bytes = COLUMNS.map(|category| memory.of(category).peak);
        let total = bytes.iter().sum::<u64>();
        let bytes = bytes.iter().chain([&total]);
        let sizes: Vec<String> = bytes.map(|bytes| memory_in_words(*bytes)).collect();
        print_row(way.flags, &sizes);
    }
    Ok(())
}

fn print_row(flags: &str, cells: &[String]) {
    let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>12}")).collect();
    print_line(&format!("  {flags:<44}{}", cells.concat()));
}

impl Way {
    /// The memory of each category, with micro-batches of `num_tokens`.
    fn memory(&self, config: &ModelConfig, num_tokens: usize) -> Result<MemoryReport> {
        let mut store = ParamStore::init(0);
        if self.has_adapters {
            store = store.with_lora(LoraConfig::default())?;
        }
        if let Some(format) = self.base {
            store = store.with_frozen_format(format);
        }
        let vb = store.builder(self.dtype, &Device::Cpu);
        let model = CausalLm::spec(config, Degrees::default(), &vb, PartConfig::default())?;
        let plan = Plan::new(&Schedule::OneForwardOneBackward, model.layout(), 1)?;
        let work = PlannedWork {
            pack_weights: PackWeights::Off,
            replicas: DataParallel::default(),
            offload: &Offload::default(),
            on_gpu: false,
            passes: Some(PlannedPasses {
                plan: &plan,
                tapes: model.tapes(),
                recompute: Recompute::None,
                num_rows: num_tokens,
            }),
            update: Some(PlannedUpdate {
                rule: &AdamW(AdamWConfig::default()),
            }),
        };
        Ok(MemoryPlan::new(&model.of_rank(0), &work)?.report())
    }
}
