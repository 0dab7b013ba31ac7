//! What README.md and docs/memory.md say fits in which memory. Small models are built as the large ones would be; the meter counts what their
//! parameters hold, and then the sizes of the large ones take the place of theirs.

use candle_comm::{Degrees, Mesh, launch};
use candle_core::{DType, Device, Result};
use candle_parallel::{
    AdamWConfig, CatalogEntry, DistributedOptimizer, Gradients, LoraConfig, MemoryCategory,
    ParamStore, Recompute, Stage, WeightFormat,
};
use candle_train_models::{CausalLm, ModelConfig};
use serde_json::json;

/// Of the sequence that a step has.
const NUM_TOKENS: usize = 2048;

struct Sizes {
    name: &'static str,
    vocab: usize,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    is_tied: bool,
}

const LARGE: [Sizes; 3] = [
    Sizes {
        name: "Llama 3.2 1B",
        vocab: 128_256,
        hidden: 2048,
        intermediate: 8192,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        is_tied: true,
    },
    Sizes {
        name: "Llama 3.2 3B",
        vocab: 128_256,
        hidden: 3072,
        intermediate: 8192,
        layers: 28,
        heads: 24,
        kv_heads: 8,
        head_dim: 128,
        is_tied: true,
    },
    Sizes {
        name: "Llama 3.1 8B",
        vocab: 128_256,
        hidden: 4096,
        intermediate: 14_336,
        layers: 32,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        is_tied: false,
    },
];

impl Sizes {
    /// A small model that is built in the same way, of so many layers. Each of its sizes is another number, and rows fit blocks of 256.
    fn small(&self, layers: usize) -> Self {
        Self {
            vocab: 96,
            hidden: 256,
            intermediate: 768,
            layers,
            heads: 8,
            kv_heads: 2,
            head_dim: 64,
            ..*self
        }
    }

    fn config(&self) -> Result<ModelConfig> {
        let config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 131_072,
        });
        ModelConfig::from_json(&config.to_string())
    }

    /// What a dim of a weight may be.
    fn dims(&self) -> [usize; 5] {
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        [self.vocab, self.hidden, self.intermediate, queries, keys]
    }
}

/// What is trained.
#[derive(Clone, Copy)]
enum Method {
    All,
    Lora,
    LoraOnBlocks,
}

impl Method {
    fn store(self) -> Result<ParamStore> {
        let store = ParamStore::init(0);
        let lora = LoraConfig {
            rank: 16,
            ..LoraConfig::default()
        };
        match self {
            Self::All => Ok(store),
            Self::Lora => store.with_lora(lora),
            Self::LoraOnBlocks => Ok(store.with_lora(lora)?.with_frozen_format(WeightFormat::Q4K)),
        }
    }
}

/// Bytes that a model takes.
#[derive(Clone, Copy)]
struct Bytes {
    /// Of weights, gradients and the optimizer's state.
    state: f64,
    /// Of what passes keep, without recomputing and with it.
    activations: [f64; 2],
}

/// Bytes of a parameter with the sizes of another model in place of the small one's.
fn bytes_of(entry: &CatalogEntry, small: &Sizes, large: &Sizes) -> f64 {
    let sizes: Vec<(usize, usize)> = small.dims().into_iter().zip(large.dims()).collect();
    let in_large = |dim: &usize| {
        let size = sizes.iter().find(|(of_small, _)| of_small == dim);
        size.map_or(*dim, |(_, of_large)| *of_large)
    };
    let values: usize = entry.shape.iter().map(in_large).product();
    let held = match entry.form.as_str() {
        "bf16" => 2.0,
        // Blocks of 256 values take 144 bytes.
        "q4k" => 144.0 / 256.0,
        form => panic!("{}: {form}", entry.name),
    };
    // The gradient, two moments and the other half of the master.
    let trained = if entry.trainable {
        4.0 + 8.0 + 2.0
    } else {
        0.0
    };
    values as f64 * (held + trained)
}

/// Bytes that a stage of a small model would take with the sizes of a large one, but for the number of layers.
fn scaled(small: &Sizes, large: &Sizes, stage: &Stage) -> Result<Bytes> {
    let catalog = stage.params().catalog();
    let sum = |sizes: &Sizes| -> f64 {
        let bytes = catalog.iter().map(|entry| bytes_of(entry, small, sizes));
        bytes.sum()
    };
    let report = stage.params().expected_memory(0);
    let counted: u64 = MemoryCategory::ALL
        .map(|category| report.of(category).peak)
        .iter()
        .sum();
    let ratio = counted as f64 / sum(small);
    assert!((ratio - 1.0).abs() < 1e-3, "{}: {ratio}", large.name);
    let config = Sizes {
        layers: small.layers,
        ..*large
    }
    .config()?;
    let activations = [Recompute::None, Recompute::Full].map(|recompute| {
        (NUM_TOKENS * CausalLm::tape_bytes_per_token(&config, stage, 1, recompute)) as f64
    });
    Ok(Bytes {
        state: sum(large),
        activations,
    })
}

/// With so many layers as the small model has.
fn bytes_with_layers(large: &Sizes, method: Method, layers: usize) -> Result<Bytes> {
    let small = large.small(layers);
    let config = small.config()?;
    let bytes = launch::threads(1, |world| {
        let mesh = Mesh::new(
            world,
            Degrees {
                pp: 1,
                dp: 1,
                cp: 1,
                tp: 1,
            },
        )?;
        let builder = method.store()?.builder(DType::BF16, &Device::Cpu);
        let stage = CausalLm::stage(&config, &mesh, &builder)?;
        let gradients = Gradients::new(stage.params(), &mesh)?;
        let adamw = AdamWConfig::default();
        let optimizer = DistributedOptimizer::adamw(stage.params(), &mesh, adamw)?;
        let bytes = scaled(&small, large, &stage)?;
        drop((gradients, optimizer));
        Ok(bytes)
    })?;
    Ok(bytes[0])
}

/// Every layer takes as much as another.
fn bytes(large: &Sizes, method: Method) -> Result<Bytes> {
    let (one, two) = (
        bytes_with_layers(large, method, 1)?,
        bytes_with_layers(large, method, 2)?,
    );
    let of_all = |one: f64, two: f64| one + (two - one) * (large.layers - 1) as f64;
    Ok(Bytes {
        state: of_all(one.state, two.state),
        activations: [0, 1].map(|index| of_all(one.activations[index], two.activations[index])),
    })
}

#[test]
fn what_fits_in_which_memory_is_what_the_documents_say() -> Result<()> {
    let readme = include_str!("../../../README.md");
    let guide = include_str!("../../../docs/memory.md");
    for large in &LARGE {
        let methods = [Method::All, Method::Lora, Method::LoraOnBlocks];
        let methods = methods.map(|method| bytes(large, method));
        let [all, lora, on_blocks] = methods.map(|bytes| bytes.expect(large.name));
        let name = large.name;
        let gb = |bytes: f64| bytes / 1e9;
        let sum = |bytes: Bytes| gb(bytes.state + bytes.activations[1]);
        let of_readme = format!(
            "| {name} | {:.1} | {:.1} | {:.1} |",
            sum(all),
            sum(lora),
            sum(on_blocks)
        );
        let of_guide = format!(
            "| {name} | {:.1} | {:.1} | {:.1} | {:.1} | {:.2} |",
            gb(all.state),
            gb(lora.state),
            gb(on_blocks.state),
            gb(all.activations[0]),
            gb(all.activations[1])
        );
        for (page, row) in [(readme, of_readme), (guide, of_guide)] {
            assert!(page.lines().any(|line| line == row), "{row}");
        }
    }
    Ok(())
}
