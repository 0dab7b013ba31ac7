//! The memory that training a model takes on one device, beside the flags that it takes so much with.

use candle_core::DType;
use candle_parallel::checkpoint::Checkpoint;
use candle_parallel::{
    LoraConfig, MemoryCategory, MemoryReport, PlannedParam, Recompute, WeightFormat, planned_memory,
};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::memory_in_words;

use super::facts::parameters_of;
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
pub(super) fn print_memory(config: &ModelConfig, weights: &Checkpoint) {
    let num_tokens = NUM_TOKENS.min(config.max_seq_len());
    print_line(&format!(
        "memory to train it on one device, with micro-batches of 1 sequence of {num_tokens} tokens, without what is being computed:"
    ));
    let heads = COLUMNS.map(|category| category.to_string());
    print_row("", &[heads.to_vec(), vec!["in all".to_string()]].concat());
    for way in &WAYS {
        let memory = way.memory(config, weights, num_tokens);
        let bytes = COLUMNS.map(|category| memory.of(category).peak);
        let total = bytes.iter().sum::<u64>();
        let bytes = bytes.iter().chain([&total]);
        let sizes: Vec<String> = bytes.map(|bytes| memory_in_words(*bytes)).collect();
        print_row(way.flags, &sizes);
    }
}

fn print_row(flags: &str, cells: &[String]) {
    let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>12}")).collect();
    print_line(&format!("  {flags:<44}{}", cells.concat()));
}

impl Way {
    fn memory(
        &self,
        config: &ModelConfig,
        weights: &Checkpoint,
        num_tokens: usize,
    ) -> MemoryReport {
        // Matrices of decoder layers are linear layers' weights, in all families.
        let is_inner = |name: &str| name.starts_with("model.layers.");
        let shapes = parameters_of(weights, Some(config));
        let shapes: Vec<(&[usize], bool)> = shapes
            .map(|(name, tensor)| (tensor.shape.as_slice(), is_inner(name)))
            .collect();
        let rank = LoraConfig::default().rank;
        let linears = shapes.iter().filter_map(|(shape, is_inner)| match shape {
            [rows, columns] if *is_inner && self.has_adapters => Some([*rows, *columns]),
            _ => None,
        });
        let adapters: Vec<[usize; 2]> = linears
            .flat_map(|[rows, columns]| [[rank, columns], [rows, rank]])
            .collect();
        let own = shapes.iter().map(|&(shape, is_inner)| PlannedParam {
            shape,
            is_trained: !self.has_adapters,
            is_inner,
        });
        let beside = adapters.iter().map(|shape| PlannedParam {
            shape,
            is_trained: true,
            is_inner: true,
        });
        let of_token = CausalLm::tape_bytes_of_blocks(
            config,
            0..config.num_hidden_layers + 2,
            self.dtype,
            1,
            false,
            Recompute::None,
        );
        let activations = num_tokens * of_token;
        planned_memory(own.chain(beside), self.dtype, self.base, activations)
    }
}
