//! What README.md and docs/memory.md say fits in which memory: of models that are built without their values, by the formula that
//! `candle-train inspect` prints and that a test compares with what runs expect.

use candle_comm::Degrees;
use candle_core::{DType, Device, Error, Result};
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, LoraConfig, MemoryCategory, MemoryPlan, Offload, PackWeights,
    ParamStore, PipelineLayout, Plan, PlannedPasses, PlannedUpdate, PlannedWork, Recompute,
    Schedule, WeightFormat,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
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
    fn config(&self) -> Result<ModelConfig> {
        let config = json!({
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 131_072,
        });
        ModelConfig::from_json(&config.to_string())
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

fn bytes(large: &Sizes, method: Method) -> Result<Bytes> {
    let config = large.config()?;
    let vb = method.store()?.builder(DType::BF16, &Device::Cpu);
    let model = CausalLm::spec(&config, Degrees::default(), &vb, PartConfig::default())?;
    let plan = Plan::new(&Schedule::OneForwardOneBackward, model.layout(), 1)?;
    let memory = |recompute| {
        let work = PlannedWork {
            replicas: DataParallel::default(),
            pack_weights: PackWeights::Off,
            offload: &Offload::default(),
            on_gpu: false,
            passes: Some(PlannedPasses {
                plan: &plan,
                tapes: model.tapes(),
                recompute,
                num_rows: NUM_TOKENS,
            }),
            update: Some(PlannedUpdate {
                rule: &AdamW(AdamWConfig::default()),
            }),
        };
        Ok::<_, Error>(MemoryPlan::new(&model.of_rank(0), &work)?.report())
    };
    let [none, full] = [Recompute::None, Recompute::Full].map(memory);
    let (none, full) = (none?, full?);
    let activations = [none, full].map(|memory| memory.of(MemoryCategory::Activations).peak as f64);
    let all = none.on_device(|of| of.peak);
    let state = all as f64 - activations[0];
    Ok(Bytes { state, activations })
}

/// Memory and room on a disk for training all weights with everything offloaded to files: at the moment when most is held.
fn offloaded_bytes(large: &Sizes) -> Result<[f64; 2]> {
    let config = large.config()?;
    let vb = ParamStore::init(0).builder(DType::BF16, &Device::Cpu);
    // A stage for each layer, and for embedding and head.
    let mut layers = vec![1; large.layers + 2];
    layers[0] = 0;
    layers[large.layers + 1] = 0;
    let ranks = Schedule::GPipe.placement(1, layers.len())?;
    let parts = PartConfig {
        layout: Some(PipelineLayout::of_layers(&layers, &ranks)?),
        ..PartConfig::default()
    };
    let model = CausalLm::spec(&config, Degrees::default(), &vb, parts)?;
    let plan = Plan::new(&Schedule::GPipe, model.layout(), 1)?;
    let work = PlannedWork {
        replicas: DataParallel::default(),
        pack_weights: PackWeights::Off,
        offload: &Offload::all().in_dir("files"),
        on_gpu: false,
        passes: Some(PlannedPasses {
            plan: &plan,
            tapes: model.tapes(),
            recompute: Recompute::Full,
            num_rows: NUM_TOKENS,
        }),
        update: Some(PlannedUpdate {
            rule: &AdamW(AdamWConfig::default()),
        }),
    };
    let memory = MemoryPlan::new(&model.of_rank(0), &work)?;
    let disk = memory.report().of(MemoryCategory::Disk).peak;
    Ok([memory.peak() as f64, disk as f64])
}

/// The model that the README tells of.
const README_MODEL: &str = "Llama 3.1 8B";

#[test]
fn what_fits_in_which_memory_is_what_the_documents_say() -> Result<()> {
    let readme = include_str!("../../../README.md");
    let guide = include_str!("../../../docs/memory.md");
    for large in &LARGE {
        let methods = [Method::All, Method::Lora, Method::LoraOnBlocks];
        let methods = methods.map(|method| bytes(large, method));
        let [all, lora, on_blocks] = methods.map(|bytes| bytes.expect(large.name));
        let name = large.name;
        let [memory, disk] = offloaded_bytes(large)?;
        let gb = |bytes: f64| bytes / 1e9;
        let sum = |bytes: Bytes| gb(bytes.state + bytes.activations[1]);
        let of_readme = format!(
            "{:.0} GB for all weights, {:.1} with {:.0} more in files, {:.1} for LoRA on a base of 4.5 bits",
            sum(all),
            gb(memory),
            gb(disk),
            sum(on_blocks)
        );
        assert!(
            name != README_MODEL || readme.contains(&of_readme),
            "{of_readme}"
        );
        let of_guide = format!(
            "| {name} | {:.1} | {:.1} | {:.1} | {:.1} | {:.2} | {:.1} | {:.0} |",
            gb(all.state),
            gb(lora.state),
            gb(on_blocks.state),
            gb(all.activations[0]),
            gb(all.activations[1]),
            gb(memory),
            gb(disk)
        );
        assert!(guide.lines().any(|line| line == of_guide), "{of_guide}");
    }
    Ok(())
}
