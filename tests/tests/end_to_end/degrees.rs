//! Degrees that do not fit the model, the batch or the world: one sentence with the numbers.

use candle_comm::{Mesh, launch};
use candle_core::{DType, Device, Result};
use candle_parallel::ParamStore;
use candle_train_models::{CausalLm, ModelConfig};

use crate::fixture::{Fixture, Run};
use crate::run::{Layout, train};

/// The message of building a model on a layout that it does not fit.
fn refused(config: &ModelConfig, layout: Layout) -> String {
    let built = launch::threads(layout.world_size(), |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let vb = ParamStore::init(1).builder(DType::F32, &Device::Cpu);
        CausalLm::part(config, &mesh, &vb).map(|_| ())
    });
    message(built)
}

fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("this must fail"),
        Err(err) => err.to_string(),
    }
}

fn assert_says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is not in: {said}");
    }
}

fn config() -> ModelConfig {
    Fixture::new("gqa").config()
}

#[test]
fn more_stages_than_layers() {
    let said = refused(&config(), Layout::new(5, 1, 1));
    assert_says(&said, &["pp(5)", "number of layers(4)", "pp <= 4"]);
}

#[test]
fn more_tensor_parallel_ranks_than_heads_or_features_or_tokens() {
    let said = refused(&config(), Layout::new(1, 1, 5));
    assert_says(&said, &["tp(5)", "num_attention_heads(4)", "tp <= 4"]);
    let narrow = ModelConfig {
        intermediate_size: 3,
        ..config()
    };
    let said = refused(&narrow, Layout::new(1, 1, 4));
    assert_says(&said, &["tp(4)", "intermediate_size(3)", "tp <= 3"]);
    let few = ModelConfig {
        vocab_size: 2,
        ..config()
    };
    let said = refused(&few, Layout::new(1, 1, 3));
    assert_says(&said, &["tp(3)", "vocab_size(2)", "tp <= 2"]);
}

#[test]
fn a_global_batch_that_replicas_do_not_divide() {
    let fixture = Fixture::new("gqa");
    let run = Run {
        micro_batch_size: 2,
        global_batch_size: 8,
        ..fixture.run.clone()
    };
    let said = message(train(&fixture, &run, Layout::new(1, 3, 1)));
    let words = ["global_batch_size(8)", "micro_batch_size(2)", "dp(3)", "6"];
    assert_says(&said, &words);
}

#[test]
fn a_product_that_is_not_the_world_size() {
    let built = launch::threads(4, |world| {
        Mesh::new(world, Layout::new(3, 1, 2).degrees()).map(|_| ())
    });
    let words = ["pp(3) * dp(1) * cp(1) * tp(2) = 6 != world_size(4)"];
    assert_says(&message(built), &words);
}

#[test]
fn sequences_longer_than_the_model_knows() {
    let fixture = Fixture::new("gqa");
    let run = Run {
        seq_len: 2049,
        global_batch_size: 2,
        micro_batch_size: 2,
        ..fixture.run.clone()
    };
    let said = message(train(&fixture, &run, Layout::new(1, 1, 1)));
    assert_says(&said, &["2049", "max_position_embeddings", "2048"]);
}
