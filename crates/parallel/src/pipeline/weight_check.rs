//! Whether a checkpoint has the weights that a model asks for, found out in the memory of one block.

use std::collections::BTreeSet;

use candle_core::{DType, Device, Result};

use super::block::Block;
use super::model_part::ModelPart;
use crate::params::{ParamBuilder, ParamStore};

impl ModelPart {
    /// Reads all weights of a model as one rank that builds it does, but a block at a time, and keeps none; how many there are. `open`
    /// gives the checkpoint, each time anew, and `build` a block, as for [`ModelPart::build`].
    ///
    /// # Errors
    /// A weight that is missing, has another shape or values that are NaN or infinite; one that no block asks for.
    pub fn check_weights(
        num_blocks: usize,
        open: impl Fn() -> Result<ParamStore>,
        build: impl Fn(usize, ParamBuilder) -> Result<Block>,
    ) -> Result<usize> {
        let mut names = BTreeSet::new();
        for index in 0..num_blocks {
            let store = open()?;
            let vb = store.builder(DType::F32, &Device::Cpu);
            build(index, vb.block(index, num_blocks))
                .map_err(|err| err.context(format!("building block {index}")))?;
            names.extend(store.names());
        }
        open()?.check_all_used(&names)?;
        Ok(names.len())
    }
}
