//! What cuDNN is asked to do, and what it cannot.

use super::graph::{K_LENS, K_OFFSETS, Q_LENS, Q_OFFSETS, ROW_OFFSETS, alignment};
use super::plans::PACKING_HINT;
use super::sizes::{Direction, Packed, Sizes};
use crate::attention::ragged::Ragged;
use crate::attention::rectangle::Mask;
use crate::attention::spec::{AttentionSpec, NAME};
use crate::cuda::cudnn_library::Library;
use crate::cuda::element::Element;
use crate::cuda::gpu::Gpu;
use crate::cuda::values::GpuValues;
use crate::settings::attention_code::AttentionCode;
use crate::settings::gpu_settings::GpuSettings;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
use candle_core::{DType, Device, Result, Tensor};

/// A pass that cuDNN may know.
pub(super) struct Work {
    pub(super) library: &'static Library,
    pub(super) sizes: Sizes,
    pub(super) scale: f32,
    /// The documents, if the sequences have several.
    pub(super) ragged: Option<Ragged>,
}

/// A tensor of a call.
#[derive(Clone, Copy)]
pub(super) struct Argument {
    /// In the graph.
    pub(super) number: i64,
    /// Of its first value.
    pub(super) address: u64,
    /// From one sequence to the next; 0 where all calls have the same address: they share the memory, or offsets say where in the
    /// tensor each document is.
    pub(super) bytes_each: usize,
}

impl Argument {
    pub(super) fn shared(number: i64, address: u64) -> Self {
        Self {
            number,
            address,
            bytes_each: 0,
        }
    }

    /// Whether each call over `b` of `of` sequences finds it aligned.
    pub(super) fn is_aligned(&self, b: usize, of: usize) -> bool {
        let (alignment, bytes) = (alignment(self.number), (self.bytes_each * b) as u64);
        self.address.is_multiple_of(alignment) && (b == of || bytes.is_multiple_of(alignment))
    }
}

impl Work {
    /// The pass over queries and keys of these shapes.
    pub(super) fn new(
        library: &'static Library,
        [q, k]: [&Tensor; 2],
        (spec, mask): (&AttentionSpec, Mask),
        pass: Direction,
    ) -> Result<Self> {
        let (b, t, heads, d) = q.dims4()?;
        let (_, num_keys, kv_heads, _) = k.dims4()?;
        let mut sizes = Sizes {
            pass,
            dtype: q.dtype(),
            b,
            t,
            num_keys,
            mask,
            packed: None,
            heads,
            kv_heads,
            d,
            window: spec.window.filter(|window| *window < t),
        };
        let ragged = spec.whole().flatten().and_then(Ragged::new);
        if let Some(ragged) = &ragged {
            let longest = ragged.longest();
            sizes = Sizes {
                b: ragged.num_documents,
                t: ragged.max_len,
                num_keys: ragged.max_len,
                packed: Some(Packed {
                    tokens: ragged.num_tokens(),
                    is_by_token: pass == Direction::Forward || has_backward_by_token(q)?,
                }),
                window: spec.window.filter(|window| *window < longest),
                ..sizes
            };
        }
        Ok(Self {
            library,
            sizes,
            scale: spec.scale,
            ragged,
        })
    }

    /// Values for each token.
    pub(super) fn of_values<T: Element>(
        &self,
        number: i64,
        address: u64,
        tensor: &Tensor,
    ) -> Argument {
        match self.ragged {
            Some(_) => Argument::shared(number, address),
            None => Argument {
                number,
                address,
                bytes_each: size_of::<T>() * tensor.elem_count() / self.sizes.b,
            },
        }
    }

    /// A number for each row of scores.
    pub(super) fn of_rows(&self, number: i64, address: u64) -> Argument {
        match self.sizes.packed_by_token() {
            Some(_) => Argument::shared(number, address),
            None => Argument {
                number,
                address,
                bytes_each: 4 * self.sizes.num_rows() / self.sizes.b,
            },
        }
    }

    /// The values of tensors, locked, and where they are.
    pub(super) fn read<'a, T: Element, const N: usize>(
        &self,
        gpu: &Gpu,
        tensors: [(i64, &str, &'a Tensor); N],
    ) -> Result<Vec<(GpuValues<'a>, Argument)>> {
        let read = |(number, what, tensor): (i64, &str, &'a Tensor)| {
            let values = gpu.read::<T>(what, tensor)?;
            let argument = self.of_values::<T>(number, values.get::<T>().address(), tensor);
            Ok((values, argument))
        };
        tensors.into_iter().map(read).collect()
    }

    /// Lengths and offsets of the documents on the GPU, if there are several in a sequence.
    pub(super) fn table(&self, gpu: &Gpu) -> Result<Option<Tensor>> {
        let Sizes {
            heads, kv_heads, d, ..
        } = self.sizes;
        let device = Device::Cuda(gpu.device.clone());
        let table = |ragged: &Ragged| ragged.on(&device, [heads * d, kv_heads * d, heads]);
        self.ragged.as_ref().map(table).transpose()
    }

    /// What that table, at an address, has.
    pub(super) fn of_documents(&self, address: u64) -> Vec<Argument> {
        let Some(ragged) = &self.ragged else {
            return vec![];
        };
        let [q_offsets, k_offsets, row_offsets] = ragged.offsets_at();
        let parts = [
            (Q_OFFSETS, q_offsets, 8),
            (K_OFFSETS, k_offsets, 8),
            (ROW_OFFSETS, row_offsets, 8),
            (Q_LENS, ragged.lens_at(), 4),
            (K_LENS, ragged.lens_at(), 4),
        ];
        parts
            .map(|(number, at, bytes_each)| Argument {
                number,
                address: address + at as u64,
                bytes_each,
            })
            .to_vec()
    }

    /// The log-sum-exps that our kernels have, `(b, heads, t)`, as this pass has them.
    pub(super) fn statistics(&self, log_sum_exp: &Tensor) -> Result<Tensor> {
        match (&self.ragged, self.sizes.packed_by_token()) {
            (None, _) => Ok(log_sum_exp.clone()),
            (Some(_), Some(_)) => Ragged::by_token(log_sum_exp),
            (Some(ragged), None) => ragged.by_document(log_sum_exp),
        }
    }
}

/// Shorter sequences are left to our kernels: each length takes a plan of its own, about half a second of work, and a text that is
/// generated passes through all lengths.
const MIN_TOKENS: usize = 128;

/// Why cuDNN is not asked.
pub(super) fn refusal(q: &Tensor, k: &Tensor, spec: &AttentionSpec) -> Result<Option<String>> {
    let (_, t, heads, d) = q.dims4()?;
    let (_, num_keys, kv_heads, _) = k.dims4()?;
    let (groups, asked_for) = (spec.groups, GpuSettings::get()?.attention);
    let is_packed = || spec.whole().flatten().and_then(Ragged::new).is_some();
    Ok(if asked_for == Some(AttentionCode::Own) {
        Some("CANDLE_TRAIN_ATTENTION=own".to_string())
    } else if !matches!(q.dtype(), DType::BF16 | DType::F16) {
        Some(format!("it takes BF16 and F16, not {:?}", q.dtype()))
    } else if spec.whole().is_none() {
        Some("queries and keys are neither the same whole sequences nor pieces of them that see all of each other, but pieces of packed documents or tokens that go on after others".to_string())
    } else if t.min(num_keys) < MIN_TOKENS && asked_for != Some(AttentionCode::Cudnn) {
        Some(format!("sequences are shorter than {MIN_TOKENS} tokens"))
    } else if !d.is_multiple_of(8) || d > 256 {
        Some(format!(
            "it takes heads of a multiple of 8 up to 256, not {d}"
        ))
    } else if !d.is_multiple_of(16) && is_packed() {
        // With others sums of gradients by token are wrong (cudnn-frontend 1.32, `scaled_dot_product_flash_attention.h`).
        Some(format!(
            "of packed documents it takes heads of a multiple of 16, not {d}{PACKING_HINT}"
        ))
    } else if groups.offset != 0 || heads != kv_heads * groups.size {
        Some(format!(
            "it takes whole groups of heads, not {heads} query heads on {kv_heads} key/value heads with {groups:?}"
        ))
    } else {
        None
    })
}

/// Generations of GPUs whose backward passes over packed documents take no statistics and sums by token (cudnn-frontend 1.32,
/// `scaled_dot_product_flash_attention.h`), though cuDNN 9.19 makes such plans.
const NOT_BY_TOKEN: [i32; 2] = [8, 12];

fn has_backward_by_token(q: &Tensor) -> Result<bool> {
    let gpu = Gpu::of(NAME, q)?;
    let context = gpu.device.cuda_stream().context().clone();
    let generation = context.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    Ok(!NOT_BY_TOKEN.contains(&generation.w()?))
}

#[cfg(test)]
mod tests {
    use super::super::graph::{LOG_SUM_EXP, Q_LENS, Q_OFFSETS};
    use super::Argument;

    #[test]
    fn offsets_of_any_document_are_aligned_and_values_of_some_sequences_are_not() {
        let is_aligned = |number, bytes_each, b| {
            let argument = Argument {
                number,
                address: 256,
                bytes_each,
            };
            argument.is_aligned(b, 8)
        };
        assert!(is_aligned(Q_OFFSETS, 8, 1));
        assert!(is_aligned(Q_LENS, 4, 1));
        assert!(is_aligned(LOG_SUM_EXP, 0, 1));
        assert!(is_aligned(LOG_SUM_EXP, 36, 8));
        assert!(is_aligned(LOG_SUM_EXP, 36, 4));
        assert!(!is_aligned(LOG_SUM_EXP, 36, 2));
    }
}
