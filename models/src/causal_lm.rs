//! A causal language model as a chain of blocks, of which each pipeline stage builds its own.

use std::path::Path;
use std::sync::Arc;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{Device, Result, bail};
use candle_parallel::checkpoint::Checkpoint;
use candle_parallel::{
    Block, ContextConfig, ContextParallel, LayerRanks, ModelPart, ModelSpec, ParamBuilder,
    ParamStore, PipelineLayout, Region, head_block, layer_block, stage_blocks,
    vocab_parallel_embedding,
};

use crate::config::ModelConfig;
use crate::decoder_layer::DecoderLayer;
use crate::lm_head::LmHead;
use crate::rotary::RotaryTable;
use crate::scaled_embedding::ScaledEmbedding;

/// The two names of a tied weight.
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A causal language model: embedding, decoder layers, head with loss.
pub struct CausalLm;

/// How a model is divided over the ranks of a mesh, where there is a choice.
#[derive(Clone, Debug, Default)]
pub struct PartConfig {
    /// The stages of a pipeline; `None`: one a rank, with equal numbers of layers. [`block_costs`](crate::block_costs) leads to balanced ones.
    pub layout: Option<PipelineLayout>,
    /// How context-parallel ranks attend.
    pub context: ContextConfig,
    /// Whether tensor-parallel ranks have each a part of the rows of what lies outside of their regions: norms and residuals.
    pub sequence_parallel: bool,
}

impl CausalLm {
    /// This rank's part of the model: the blocks of its pipeline stage, with its tensor-parallel part of their parameters. Stages have equal
    /// numbers of layers.
    ///
    /// Degrees that do not fit the model are errors with the numbers, before any weight is read.
    ///
    /// # Errors
    /// Degrees that do not fit the model, with the numbers; weights that the checkpoint lacks or has in another shape.
    pub fn part(config: &ModelConfig, mesh: &Mesh, vb: &ParamBuilder) -> Result<ModelPart> {
        config.validate()?;
        Self::part_with(config, mesh, vb, PartConfig::default())
    }

    /// As [`Self::part`], divided as `parts` says.
    ///
    /// # Errors
    /// As for [`Self::part`]; a layout of another number of ranks or blocks, context parallelism that does not fit the heads.
    pub fn part_with(
        config: &ModelConfig,
        mesh: &Mesh,
        vb: &ParamBuilder,
        parts: PartConfig,
    ) -> Result<ModelPart> {
        let layout = Self::layout(config, &mesh.degrees, parts.layout)?;
        allow_more(config, vb.store());
        let rotary = Arc::new(RotaryTable::new(config, vb.device()));
        let heads = config.heads_of_rank(mesh.degrees.tp);
        let context = ContextParallel::new(mesh, &parts.context, heads, vb.dtype())?;
        let region = region(&mesh.tp, parts.sequence_parallel);
        let ranks = LayerRanks {
            region: region.clone(),
            context,
        };
        let part = ModelPart::build_stages(mesh, vb, layout, config.hidden_size, |index, vb| {
            Self::block(config, index, &rotary, &ranks, vb).map(Block::of_rows)
        })?;
        Ok(part.with_region(region))
    }

    /// What the model asks for if it is divided so, by arithmetic on one rank: no device, no file, no other rank. `vb` is of a store of its own, which tells
    /// what is frozen and what has adapters; it [has no values](ParamStore::without_values) afterwards.
    ///
    /// # Errors
    /// As for [`Self::part_with`], but for those of weights.
    pub fn spec(
        config: &ModelConfig,
        degrees: Degrees,
        vb: &ParamBuilder,
        parts: PartConfig,
    ) -> Result<ModelSpec> {
        degrees.check()?;
        let layout = Self::layout(config, &degrees, parts.layout)?;
        let heads = config.heads_of_rank(degrees.tp);
        parts.context.groups(degrees.cp, heads, vb.dtype())?;
        // Of parts that differ the last ones are the largest, for the memory of passes.
        let tp = ProcessGroup::unconnected(degrees.tp - 1, degrees.tp, vb.device().clone());
        let ranks = LayerRanks {
            region: region(&tp, parts.sequence_parallel),
            context: ContextParallel::none(vb.device()),
        };
        let rotary = Arc::new(RotaryTable::new(config, vb.device()));
        ModelSpec::describe(layout, degrees, vb, |index, vb| {
            Self::block(config, index, &rotary, &ranks, vb)
        })
    }

    /// The stages of a pipeline: those that were asked for, or else one a rank.
    fn layout(
        config: &ModelConfig,
        degrees: &Degrees,
        asked: Option<PipelineLayout>,
    ) -> Result<PipelineLayout> {
        config.validate()?;
        Self::check_tp(config, degrees.tp)?;
        let num_blocks = config.num_hidden_layers + 2;
        let layout = match asked {
            Some(layout) => layout,
            None => PipelineLayout::even(num_blocks, degrees.pp)?,
        };
        if layout.num_blocks() != num_blocks {
            bail!(
                "stages of {} layers; the model has {}",
                layout.num_layers().iter().sum::<usize>(),
                config.num_hidden_layers
            );
        }
        Ok(layout)
    }

    /// Reads all weights of the checkpoint in `dir`, in the memory of one layer, or of the embedding; how many there are.
    ///
    /// # Errors
    /// A weight that is missing, has another shape than `config` says, is of no type that can be trained or has values that are NaN or
    /// infinite; a tensor that the model does not have.
    pub fn check_weights(config: &ModelConfig, dir: &Path) -> Result<usize> {
        config.validate()?;
        let open = || {
            let store = ParamStore::from_pretrained(dir)?;
            allow_more(config, &store);
            Ok(store)
        };
        let ranks = LayerRanks::tensor_parallel(&ProcessGroup::single(Device::Cpu));
        let rotary = Arc::new(RotaryTable::new(config, &Device::Cpu));
        ModelPart::check_weights(config.num_hidden_layers + 2, open, |index, vb| {
            Self::block(config, index, &rotary, &ranks, vb)
        })
    }

    /// The weights in `dir`, where those of a tied pair may be under the head's name alone.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`].
    pub fn open_weights(config: &ModelConfig, dir: &Path) -> Result<Checkpoint> {
        let weights = Checkpoint::open(dir)?;
        if config.tie_word_embeddings {
            weights.allow_alias(HEAD, EMBEDDING);
        }
        Ok(weights)
    }

    fn block(
        config: &ModelConfig,
        index: usize,
        rotary: &Arc<RotaryTable>,
        ranks: &LayerRanks,
        vb: ParamBuilder,
    ) -> Result<Block> {
        let region = &ranks.region;
        let model = vb.pp("model");
        if index == 0 {
            let vb = model.pp("embed_tokens");
            let embedding =
                vocab_parallel_embedding(config.vocab_size, config.hidden_size, region, vb)?
                    .with_padding_idx(config.pad_token_id);
            let scale = config.embedding_scale;
            Ok(match scale == 1.0 {
                true => layer_block(embedding),
                false => layer_block(ScaledEmbedding { embedding, scale }),
            })
        } else if index <= config.num_hidden_layers {
            let layer = index - 1;
            let vb = model.pp("layers").pp(layer);
            let layer = DecoderLayer::new(config, layer, rotary.clone(), ranks, vb)?;
            Ok(layer_block(layer))
        } else {
            Ok(head_block(LmHead::new(config, region, vb)?))
        }
    }

    /// An error with the numbers if these degrees do not fit the model.
    ///
    /// # Errors
    /// Degrees that do not fit, with the numbers.
    pub fn check_degrees(config: &ModelConfig, degrees: &Degrees) -> Result<()> {
        stage_blocks(config.num_hidden_layers + 2, 0, degrees.pp.max(1))?;
        Self::check_tp(config, degrees.tp)
    }

    fn check_tp(config: &ModelConfig, tp: usize) -> Result<()> {
        let widths = [
            ("num_attention_heads", config.num_attention_heads),
            ("intermediate_size", config.intermediate_size),
            ("vocab_size", config.vocab_size),
        ];
        for (name, width) in widths {
            if tp > width {
                bail!(
                    "tp({tp}) > {name}({width}): each tensor-parallel rank needs at least one\nhint: use tp <= {width}"
                );
            }
        }
        Ok(())
    }
}

fn region(tp: &ProcessGroup, is_sequence_parallel: bool) -> Region {
    match is_sequence_parallel {
        true => Region::sequence_parallel(tp),
        false => Region::from(tp),
    }
}

/// What a checkpoint may hold beside the model's weights.
fn allow_more(config: &ModelConfig, store: &ParamStore) {
    store.allow_unused(".rotary_emb.inv_freq");
    if config.tie_word_embeddings {
        store.allow_alias(HEAD, EMBEDDING);
    }
}
