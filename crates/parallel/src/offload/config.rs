//! What a rank keeps away from the device that computes, and where.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use candle_core::{Error, Result, bail};
use serde::{Deserialize, Serialize};

use crate::data_parallel::{DataParallel, ZeroStage};
use crate::files::is_in_memory;
use crate::memory::MemoryCategory;

/// What a rank keeps away from the device that computes: see [`ParamStore::with_offload`](crate::ParamStore::with_offload). It passes through the
/// device bucket by bucket; the bits are the same everywhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Offload {
    /// The optimizer's state and masters (arXiv:2101.06840).
    pub optimizer: bool,
    /// Weights, of which only those of the block that runs are on the device, and of the one after it (arXiv:2104.07857). Where replicas
    /// divide something (ZeRO-1 to 3) each keeps its slice, and a block's are gathered for its passes.
    pub params: bool,
    /// Gradients: a block's leave when its backward pass is over, and come back for its update, or to be added to. Several calls of
    /// [`Pipeline::forward_backward`](crate::Pipeline::forward_backward) in one step over replicas that sum whole buckets (ZeRO-0 and 1, with
    /// overlap) keep the sums of the earlier ones on the device.
    pub gradients: bool,
    /// Inputs of blocks that are [computed again](crate::Recompute::Full) and of the head, from their forward to their backward pass, and what a
    /// stage gave until the next one of its rank takes it.
    pub activations: bool,
    /// Bytes of these activations that stay on the device all the same; what comes while they are there leaves.
    pub kept_activations: u64,
    /// Folders of files, one for each rank, which vanish with its process; ranks take the folders in turn. Without any: the host's memory,
    /// which on the CPU is the device's.
    pub dirs: Vec<PathBuf>,
    /// How many values of a bucket are updated at a time, at most, where the optimizer's state is away: so many of its state are on the device,
    /// as many more come, and as many go.
    pub update_values: usize,
}

impl Default for Offload {
    fn default() -> Self {
        Self {
            optimizer: false,
            params: false,
            gradients: false,
            activations: false,
            kept_activations: 0,
            dirs: Vec::new(),
            update_values: 4 << 20,
        }
    }
}

impl Offload {
    /// The optimizer's state in the host's memory.
    pub fn optimizer() -> Self {
        Self {
            optimizer: true,
            ..Self::default()
        }
    }

    /// Weights, gradients, the optimizer's state and activations in the host's memory.
    pub fn all() -> Self {
        Self {
            params: true,
            gradients: true,
            activations: true,
            ..Self::optimizer()
        }
    }

    /// The same in files of `dir`.
    pub fn in_dir(self, dir: impl Into<PathBuf>) -> Self {
        Self {
            dirs: vec![dir.into()],
            ..self
        }
    }

    /// An error if this does not go with how replicas work together, on GPUs or on CPUs.
    ///
    /// # Errors
    /// The one that it is for.
    pub fn validate(&self, replicas: &DataParallel, on_gpu: bool) -> Result<()> {
        let leave = self.place_of_params(0, on_gpu) != OffloadPlace::Device;
        if replicas.tile_linears > 1 && replicas.zero != ZeroStage::Three && !leave {
            bail!(
                "tile-linears({}) is given without ZeRO stage 3 and without offloaded weights, while only weights that come for the passes come in \
                 tiles\nhint: use ZeRO stage 3, or offload weights, or leave it out",
                replicas.tile_linears
            );
        }
        Ok(())
    }

    /// Whether files of a folder are in memory: it is of a file system that has no disk (tmpfs).
    pub fn is_in_memory(&self) -> bool {
        self.dirs.iter().any(|dir| is_in_memory(dir))
    }

    /// Where a rank keeps the optimizer's state.
    pub(crate) fn place_of_optimizer(&self, rank: usize, on_gpu: bool) -> OffloadPlace<'_> {
        self.place(self.optimizer, rank, on_gpu)
    }

    /// Where a rank keeps weights.
    pub(crate) fn place_of_params(&self, rank: usize, on_gpu: bool) -> OffloadPlace<'_> {
        self.place(self.params, rank, on_gpu)
    }

    /// Where a rank keeps sums of gradients.
    pub(crate) fn place_of_gradients(&self, rank: usize, on_gpu: bool) -> OffloadPlace<'_> {
        self.place(self.gradients, rank, on_gpu)
    }

    /// Where a rank keeps activations, but for [`Self::kept_activations`].
    pub(crate) fn place_of_activations(&self, rank: usize, on_gpu: bool) -> OffloadPlace<'_> {
        self.place(self.activations, rank, on_gpu)
    }

    fn place(&self, leaves: bool, rank: usize, on_gpu: bool) -> OffloadPlace<'_> {
        let turn = rank.checked_rem(self.dirs.len());
        match turn.and_then(|turn| self.dirs.get(turn)) {
            _ if !leaves => OffloadPlace::Device,
            Some(dir) => OffloadPlace::File(dir),
            None if on_gpu => OffloadPlace::Host,
            None => OffloadPlace::Device,
        }
    }
}

/// Where something is between its uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OffloadPlace<'a> {
    /// Where it is used.
    Device,
    Host,
    /// In a file of this folder.
    File(&'a Path),
}

impl OffloadPlace<'_> {
    /// As what it counts there; `None` where it is used.
    pub fn category(self) -> Option<MemoryCategory> {
        match self {
            Self::Device => None,
            Self::Host => Some(MemoryCategory::Host),
            Self::File(_) => Some(MemoryCategory::Disk),
        }
    }
}

/// As `--offload` has it: words of a list.
impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            (self.optimizer, "optimizer"),
            (self.gradients, "gradients"),
            (self.params, "params"),
            (self.activations, "activations"),
        ];
        let chosen = words.iter().filter(|(is_chosen, _)| *is_chosen);
        let chosen: Vec<&str> = chosen.map(|(_, word)| *word).collect();
        match (chosen.as_slice(), self.dirs.as_slice()) {
            (["optimizer"], [dir]) => write!(f, "nvme:{}", dir.display()),
            ([], _) => f.write_str("none"),
            (chosen, _) if chosen.len() == words.len() => f.write_str("all"),
            (chosen, _) => f.write_str(&chosen.join(",")),
        }
    }
}

impl FromStr for Offload {
    type Err = Error;

    /// A list of `optimizer`, `gradients`, `params` and `activations`, or `all`; `nvme:DIR` is the optimizer's state in that folder.
    fn from_str(text: &str) -> Result<Self> {
        if let Some(("nvme", dir)) = text.split_once(':')
            && !dir.is_empty()
        {
            return Ok(Self::optimizer().in_dir(dir));
        }
        let mut offload = Self::default();
        for word in text.split(',').map(str::trim) {
            match word {
                "optimizer" => offload.optimizer = true,
                "gradients" => offload.gradients = true,
                "params" => offload.params = true,
                "activations" => offload.activations = true,
                "all" => offload = Self::all(),
                _ => {
                    return Err(Error::Msg(format!(
                        "expected a list of `optimizer`, `gradients`, `params` and `activations`, or `all`, or `nvme:DIR`, got `{text}`"
                    )));
                }
            }
        }
        Ok(offload)
    }
}
