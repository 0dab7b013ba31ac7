//! What a specification says that one rank makes by arithmetic is what all ranks build: random families, layouts, adapters and forms.

use std::collections::BTreeSet;
use std::ops::Range;

use candle_comm::launch::threads;
use candle_comm::{Degrees, Mesh, message_of};
use candle_core::{DType, Device, Result};
use candle_parallel::{
    DataParallel, LoraConfig, ModelSpec, ParamStore, PipelineLayout, RankSpec, WeightFormat,
    ZeroStage,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
use serde_json::json;

use crate::pairwise::Random;

const FAMILIES: [&str; 5] = ["llama", "mistral", "qwen2", "qwen3", "gemma"];
const NUM_CASES: usize = 150;
/// Values to whose multiples a rank's slice of a bucket is padded.
const SLICE_ALIGNMENT: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Trained {
    All,
    Some,
    Lora,
}

#[derive(Clone, Debug)]
struct Case {
    family: &'static str,
    is_tied: bool,
    has_biases: bool,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    intermediate: usize,
    vocab: usize,
    /// Of each stage.
    layers: Vec<usize>,
    /// Of each stage.
    ranks: Vec<usize>,
    degrees: Degrees,
    zero: ZeroStage,
    tile_linears: usize,
    trained: Trained,
    format: Option<WeightFormat>,
    dtype: DType,
    sequence_parallel: bool,
}

impl Case {
    fn random(seed: usize) -> Self {
        let mut random = Random::new(seed);
        let mut one_of = |count: usize| random.below(count);
        let (pp, tp) = (1 + one_of(3), 1 + one_of(4));
        let virtual_stages = 1 + one_of(2);
        let ranks: Vec<usize> = match (virtual_stages, one_of(2)) {
            (1, _) => (0..pp).collect(),
            (_, 0) => (0..pp).chain(0..pp).collect(),
            _ => (0..pp).chain((0..pp).rev()).collect(),
        };
        let zero = [
            ZeroStage::Zero,
            ZeroStage::One,
            ZeroStage::Two,
            ZeroStage::Three,
        ][one_of(4)];
        let kv_heads = [1, 2, 4][one_of(3)];
        Self {
            family: FAMILIES[one_of(FAMILIES.len())],
            is_tied: one_of(2) == 0,
            has_biases: one_of(2) == 0,
            hidden: [32, 64][one_of(2)],
            heads: kv_heads * [1, 2, 3][one_of(3)],
            kv_heads,
            intermediate: [48, 64, 96][one_of(3)],
            vocab: 40 + one_of(30),
            layers: ranks.iter().map(|_| 1 + one_of(2)).collect(),
            ranks,
            degrees: Degrees {
                pp,
                dp: 1 + one_of(2),
                cp: 1 + one_of(2),
                tp,
            },
            tile_linears: match zero {
                ZeroStage::Three => 1 + one_of(3),
                _ => 1,
            },
            zero,
            trained: [Trained::All, Trained::Some, Trained::Lora][one_of(3)],
            format: [None, Some(WeightFormat::BF16), Some(WeightFormat::Q8_0)][one_of(3)],
            dtype: [DType::F32, DType::BF16][one_of(2)],
            sequence_parallel: one_of(2) == 0,
        }
    }

    fn config(&self) -> Result<ModelConfig> {
        let mut file = json!({
            "model_type": self.family, "vocab_size": self.vocab, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers.iter().sum::<usize>(),
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": 16,
        });
        // Gemma's file cannot say otherwise.
        if self.family != "gemma" {
            file["tie_word_embeddings"] = json!(self.is_tied);
        }
        if self.family == "llama" {
            file["attention_bias"] = json!(self.has_biases);
            file["mlp_bias"] = json!(self.has_biases);
        }
        ModelConfig::from_json(&file.to_string())
    }

    fn replicas(&self) -> DataParallel {
        DataParallel {
            zero: self.zero,
            tile_linears: self.tile_linears,
            ..DataParallel::default()
        }
    }

    fn store(&self, replicas: DataParallel) -> Result<ParamStore> {
        let mut store = ParamStore::init(3).with_data_parallel(replicas);
        if let Some(format) = self.format {
            store = store.with_frozen_format(format);
        }
        match self.trained {
            Trained::All => Ok(store),
            Trained::Some => Ok(
                store.freeze(|name| name.contains("embed_tokens") || name.contains("layers.0."))
            ),
            Trained::Lora => store.with_lora(LoraConfig {
                rank: 2,
                ..LoraConfig::default()
            }),
        }
    }

    fn parts(&self) -> Result<PartConfig> {
        Ok(PartConfig {
            layout: Some(PipelineLayout::of_layers(&self.layers, &self.ranks)?),
            sequence_parallel: self.sequence_parallel,
            ..PartConfig::default()
        })
    }

    fn spec_with(&self, replicas: DataParallel) -> Result<ModelSpec> {
        let vb = self.store(replicas)?.builder(self.dtype, &Device::Cpu);
        CausalLm::spec(&self.config()?, self.degrees, &vb, self.parts()?)
    }

    /// What each rank builds.
    fn build_with(&self, replicas: DataParallel) -> Result<Vec<Built>> {
        let num_ranks = self.degrees.world_size().unwrap();
        threads(num_ranks, |world| {
            let mesh = Mesh::new(world, self.degrees)?;
            let vb = self.store(replicas)?.builder(self.dtype, &Device::Cpu);
            let part = CausalLm::part_with(&self.config()?, &mesh, &vb, self.parts()?)?;
            let params = part.params();
            let params_here = params.iter().map(|param| {
                let (dim, ranges) = match param.shard() {
                    Some(shard) => (shard.dim(), shard.ranges().to_vec()),
                    None => (0, vec![0..param.global_shape.dims()[0]]),
                };
                BuiltParam {
                    name: param.name.clone(),
                    global: param.global_shape.dims()[dim],
                    ranges,
                    shape: param.local_shape().dims().to_vec(),
                    blocks: param.blocks.clone(),
                    num_values: param.num_values(),
                    dtype: param.dtype(),
                    trainable: param.trainable,
                }
            });
            Ok(Built {
                pp_rank: mesh.pp.rank(),
                replica: mesh.replicas.rank(),
                params: params_here.collect(),
                model: params.model().clone(),
                own: params.of_rank().clone(),
            })
        })
    }
}

struct Built {
    pp_rank: usize,
    replica: usize,
    params: Vec<BuiltParam>,
    model: ModelSpec,
    own: RankSpec,
}

struct BuiltParam {
    name: String,
    /// Length of the dim that is cut.
    global: usize,
    ranges: Vec<Range<usize>>,
    shape: Vec<usize>,
    blocks: Vec<usize>,
    num_values: usize,
    dtype: DType,
    trainable: bool,
}

impl Built {
    fn find(&self, name: &str) -> Option<usize> {
        self.params.iter().position(|param| param.name == name)
    }
}

/// What the specification says of each rank is what the rank has.
fn assert_same(case: &Case, model: &ModelSpec, built: &[Built]) {
    for (rank, built) in built.iter().enumerate() {
        assert_eq!(&built.model, model, "{case:?}");
        assert_eq!(built.model.hash(), model.hash());
        let own = model.of_rank(rank);
        assert_eq!(own, built.own, "{case:?}");
        assert_eq!(own.params().len(), built.params.len(), "{case:?}");
        for (held, param) in own.params().iter().zip(&built.params) {
            let what = format!("{} of rank {rank} of {case:?}", held.name);
            assert_eq!(held.name, param.name, "{what}");
            assert_eq!(held.blocks, param.blocks, "{what}");
            assert_eq!(held.trainable, param.trainable, "{what}");
            assert_eq!(held.dtype, param.dtype, "{what}");
            assert_eq!(held.num_values, param.num_values, "{what}");
            // Of blocks of values the bytes are held.
            if held.dtype != DType::U8 {
                assert_eq!(held.shape, param.shape, "{what}");
            }
        }
    }
}

/// The first rank of the first stage with a value owns it, and no other rank of the replica.
fn assert_owners(case: &Case, model: &ModelSpec, built: &[Built]) {
    let layout = model.layout();
    for param in model.params() {
        let first_stage = param
            .blocks
            .iter()
            .filter_map(|&block| layout.stage_of_block(block))
            .min();
        let owner = layout.rank_of(first_stage.unwrap());
        let holders = built
            .iter()
            .filter(|built| built.replica == 0 && built.pp_rank == owner);
        let parts = holders.map(|built| {
            let index = built.find(&param.name).unwrap();
            (&built.params[index], built.own.owned(index))
        });
        let parts: Vec<_> = parts.collect();
        assert_eq!(parts.len(), case.degrees.tp);
        let has =
            |ranges: &[Range<usize>], index| ranges.iter().any(|range| range.contains(&index));
        for index in 0..parts[0].0.global {
            let expected = parts
                .iter()
                .position(|(param, _)| has(&param.ranges, index));
            let owners: Vec<usize> = (0..parts.len())
                .filter(|&rank| has(parts[rank].1, index))
                .collect();
            assert_eq!(
                owners,
                Vec::from_iter(expected),
                "{} of {case:?}",
                param.name
            );
        }
        let others = built.iter().filter(|built| built.pp_rank != owner);
        for other in others {
            let owned = other.find(&param.name).map(|index| other.own.owned(index));
            assert!(
                owned.unwrap_or_default().is_empty(),
                "{} of {case:?}",
                param.name
            );
        }
    }
}

/// Every parameter is in one bucket, with those of its block or of its ties, and buckets are as long as they must be.
fn assert_buckets(case: &Case, model: &ModelSpec, built: &[Built]) {
    let num_replicas = case.degrees.dp * case.degrees.cp;
    let layout = model.layout();
    let stages = |name: &str| -> BTreeSet<usize> {
        let blocks = model.get(name).unwrap().blocks.iter();
        blocks
            .filter_map(|&block| layout.stage_of_block(block))
            .collect()
    };
    for built in built {
        let mut seen = BTreeSet::new();
        let mut was_trainable = true;
        for index in 0..built.own.num_buckets() {
            let (names, len) = built.own.bucket(index).unwrap();
            let params: Vec<&BuiltParam> = names
                .iter()
                .map(|name| &built.params[built.find(name).unwrap()])
                .collect();
            let sum: usize = params.iter().map(|param| param.num_values).sum();
            assert_eq!(
                len,
                sum.next_multiple_of(SLICE_ALIGNMENT * num_replicas),
                "{case:?}"
            );
            let trainable = params[0].trainable;
            assert!(
                was_trainable || !trainable,
                "a frozen bucket before a trained one: {case:?}"
            );
            was_trainable = trainable;
            let is_tie = |param: &&BuiltParam| param.trainable && stages(&param.name).len() > 1;
            for param in &params {
                assert!(seen.insert(param.name.clone()), "{} twice", param.name);
                assert_eq!((param.trainable, param.dtype), (trainable, params[0].dtype));
                match is_tie(&params[0]) {
                    true => assert_eq!(stages(&param.name), stages(&params[0].name)),
                    false => assert_eq!(
                        (is_tie(param), param.blocks[0]),
                        (false, params[0].blocks[0])
                    ),
                }
            }
            let sizes: Vec<usize> = names
                .iter()
                .map(|name| model.get(name).unwrap().num_values())
                .collect();
            assert!(sizes.is_sorted_by(|a, b| a >= b), "{names:?} of {case:?}");
        }
        assert_eq!(seen.len(), built.params.len(), "{case:?}");
        assert!(built.own.bucket(built.own.num_buckets()).is_none());
    }
}

#[test]
fn what_one_rank_works_out_is_what_all_build() {
    let (mut num_built, mut num_refused) = (0, 0);
    for seed in 0..NUM_CASES {
        let case = Case::random(seed);
        let replicas = case.replicas();
        match (case.spec_with(replicas), case.build_with(replicas)) {
            (Ok(model), Ok(built)) => {
                assert_same(&case, &model, &built);
                assert_owners(&case, &model, &built);
                assert_buckets(&case, &model, &built);
                num_built += 1;
            }
            (Err(spec), Err(build)) => {
                // The parameter that is named is the first of a rank's own blocks.
                let hint = |err| message_of(&err).lines().last().map(str::to_string);
                assert_eq!(hint(spec), hint(build), "{case:?}");
                num_refused += 1;
            }
            (spec, build) => panic!("{case:?}: {:?} and {:?}", spec.err(), build.err()),
        }
    }
    assert!(
        num_built >= NUM_CASES / 2 && num_refused > 0,
        "{num_built} built, {num_refused} refused"
    );
}

/// The tied embedding of a pipeline is on its first and its last stage, and the first one owns it.
#[test]
fn many_ranks_cost_one_rank_nothing() -> Result<()> {
    let config = json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 16,
        "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": true,
    });
    let config = ModelConfig::from_json(&config.to_string())?;
    let of_replicas = |dp: usize| {
        let degrees = Degrees {
            pp: 4,
            dp,
            cp: 1,
            tp: 8,
        };
        let vb = ParamStore::init(0).builder(DType::F32, &Device::Cpu);
        Ok::<_, candle_core::Error>((
            CausalLm::spec(&config, degrees, &vb, PartConfig::default())?,
            degrees,
        ))
    };
    for dp in [1, 32, 100_000] {
        let (model, degrees) = of_replicas(dp)?;
        let tied = model.get("model.embed_tokens.weight").unwrap();
        assert_eq!(tied.blocks, [0, 17]);
        let holders = model.holders(tied);
        assert_eq!(
            holders.iter().map(|holder| holder.rank).collect::<Vec<_>>(),
            (0..8).collect::<Vec<_>>()
        );
        let last = degrees.world_size().unwrap() - 1;
        let (first, last) = (model.of_rank(0), model.of_rank(last));
        for rank in [&first, &last] {
            let place = rank
                .params()
                .iter()
                .position(|param| param.name == tied.name)
                .unwrap();
            assert_eq!(rank.params()[place].shape, [12, 64]);
            assert_eq!(
                rank.owned(place).len(),
                usize::from(std::ptr::eq(rank, &first))
            );
        }
        let norm = model.get("model.norm.weight").unwrap();
        assert_eq!(model.holders(norm)[0].rank, 3 * 8 * dp);
    }
    Ok(())
}

#[test]
fn what_a_start_refuses_is_refused_without_one() {
    let case = || Case {
        family: "llama",
        layers: vec![2, 2],
        ranks: vec![0, 1],
        degrees: Degrees {
            pp: 2,
            dp: 2,
            cp: 1,
            tp: 2,
        },
        heads: 4,
        kv_heads: 2,
        intermediate: 48,
        trained: Trained::All,
        format: None,
        ..Case::random(0)
    };
    let degrees = |pp, dp, tp| Degrees { pp, dp, cp: 1, tp };
    let refused: [(Case, DataParallel, &str); 6] = [
        (
            Case {
                degrees: degrees(1, 1, 5),
                layers: vec![4],
                ranks: vec![0],
                ..case()
            },
            DataParallel::default(),
            "tp(5) > num_attention_heads(4)",
        ),
        (
            Case {
                degrees: degrees(3, 1, 1),
                ..case()
            },
            DataParallel::default(),
            "expected as many as the pipeline has, 3",
        ),
        (
            case(),
            DataParallel {
                zero_group: Some(3),
                ..DataParallel::default()
            },
            "zero-group(3) does not divide dp(2)",
        ),
        (
            case(),
            DataParallel {
                quantize_weights: true,
                ..DataParallel::default()
            },
            "without ZeRO stage 3",
        ),
        (
            Case {
                heads: 2,
                trained: Trained::Lora,
                format: Some(WeightFormat::Q8_0),
                ..case()
            },
            DataParallel::default(),
            "cuts blocks of 32 values",
        ),
        (
            Case {
                layers: vec![2, 0, 2],
                ranks: vec![0, 1, 0],
                ..case()
            },
            DataParallel::default(),
            "expected for each stage a number of blocks > 0",
        ),
    ];
    for (case, replicas, words) in refused {
        let spec = case.spec_with(replicas).map(drop).unwrap_err().to_string();
        let build = case.build_with(replicas).map(drop).unwrap_err().to_string();
        assert!(spec.contains(words), "{spec}");
        assert!(build.contains(words), "{build}");
    }
    let zero = Case {
        degrees: degrees(0, 1, 1),
        ..case()
    };
    let said = zero
        .spec_with(DataParallel::default())
        .unwrap_err()
        .to_string();
    assert!(said.contains("pp is 0"), "{said}");
}
