//! How many parts each axis of the mesh has.

/// The number of parts along each axis of a [`Mesh`](crate::Mesh).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Degrees {
    /// Pipeline parallel: stages.
    pub pp: usize,
    /// Data parallel: replicas.
    pub dp: usize,
    /// Context parallel: parts of a sequence.
    pub cp: usize,
    /// Tensor parallel: parts of a layer.
    pub tp: usize,
}

impl Default for Degrees {
    /// One rank: every degree is 1.
    fn default() -> Self {
        Self {
            pp: 1,
            dp: 1,
            cp: 1,
            tp: 1,
        }
    }
}

impl Degrees {
    /// The number of ranks that these degrees need; `None` if it overflows.
    pub fn world_size(&self) -> Option<usize> {
        self.pp
            .checked_mul(self.dp)?
            .checked_mul(self.cp)?
            .checked_mul(self.tp)
    }
}

impl std::fmt::Display for Degrees {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "pp({}) * dp({}) * cp({}) * tp({})",
            self.pp, self.dp, self.cp, self.tp
        )
    }
}
