//! How context-parallel ranks attend.

use candle_core::{DType, Result, bail};
use serde::{Deserialize, Serialize};

/// How context-parallel ranks come to the keys and values that others have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ContextMethod {
    /// Ring or Ulysses, whichever sends fewer bytes.
    #[default]
    Auto,
    /// They go from rank to rank, while those that are here are used; any number of heads.
    Ring,
    /// Each rank gathers all of them, a layer at a time.
    AllGather,
    /// Ranks exchange heads for rows; no more ranks than query heads.
    Ulysses,
}

/// How context-parallel ranks attend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextConfig {
    /// How ranks come to what others have.
    pub method: ContextMethod,
    /// Ranks of a group that exchanges heads for rows, within a ring of such groups; `None`: as the method says.
    pub ulysses: Option<usize>,
}

impl ContextConfig {
    /// The number of ranks that exchange heads for rows, of `cp`, and whether the others' keys and values are gathered. A tensor-parallel rank
    /// has `(q, kv)` heads.
    ///
    /// # Errors
    /// Groups that do not divide `cp`, or have more ranks than there are query heads.
    pub fn groups(
        &self,
        cp: usize,
        (num_q_heads, num_kv_heads): (usize, usize),
        dtype: DType,
    ) -> Result<(usize, bool)> {
        let largest = |most: usize| (1..=most).rev().find(|size| cp.is_multiple_of(*size));
        let largest = largest(num_q_heads.min(cp)).unwrap_or(1);
        if let Some(ulysses) = self.ulysses {
            if ulysses == 0 || !cp.is_multiple_of(ulysses) {
                bail!(
                    "ulysses {ulysses} does not divide cp {cp}: groups that exchange heads for rows lie in a ring\nhint: ulysses {largest} (--ulysses {largest})"
                );
            }
            if ulysses > num_q_heads {
                bail!(
                    "ulysses {ulysses} is more than the {num_q_heads} query heads of a tensor-parallel rank\nhint: ulysses {largest} (--ulysses {largest})"
                );
            }
        }
        let gathers = self.method == ContextMethod::AllGather;
        match (self.method, self.ulysses) {
            (ContextMethod::Ring | ContextMethod::AllGather, ulysses) => {
                Ok((ulysses.unwrap_or(1), gathers))
            }
            (_, Some(ulysses)) => Ok((ulysses, false)),
            (ContextMethod::Ulysses, None) if cp > num_q_heads => bail!(
                "the method ulysses with cp {cp} has more ranks than the {num_q_heads} query heads of a tensor-parallel rank\nhint: ulysses {largest} (--ulysses {largest}), groups in a ring"
            ),
            (ContextMethod::Ulysses, None) => Ok((cp, false)),
            (ContextMethod::Auto, None) => {
                let bytes = dtype.size_in_bytes();
                let is_less = cp <= num_q_heads
                    && ulysses_bytes(cp, (num_q_heads, num_kv_heads), bytes)
                        < ring_bytes(cp, num_kv_heads, bytes);
                Ok((if is_less { cp } else { 1 }, false))
            }
        }
    }
}

/// What a ring of `cp` ranks sends in a layer's forward and backward pass for each value of a head and each row of the sequences: keys and values twice, their
/// gradients in f32 once around.
fn ring_bytes(cp: usize, num_kv_heads: usize, bytes: usize) -> f64 {
    let (cp, heads) = (cp as f64, num_kv_heads as f64);
    2.0 * heads * (2.0 * bytes as f64 * (cp - 1.0) / cp + 4.0)
}

/// The same of `cp` ranks that exchange heads for rows, which repeat key/value heads if there are fewer.
fn ulysses_bytes(cp: usize, (num_q_heads, num_kv_heads): (usize, usize), bytes: usize) -> f64 {
    let cp = cp as f64;
    let heads = num_q_heads as f64 + (num_kv_heads as f64).max(cp);
    4.0 * heads * bytes as f64 * (cp - 1.0) / (cp * cp)
}
