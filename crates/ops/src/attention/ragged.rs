//! Packed documents as the sequences of one batch, for kernels that take sequences of different lengths, one after the other: how many
//! tokens each has, and where its values begin.
//!
//! What a kernel is made for, the number of documents and the most tokens of one, is padded to few sizes, so that it is used again.
//! Documents beyond the last have no tokens.

use super::document_starts::{DocumentStarts, OnGpu};
use crate::embedding::lookup::embedding_forward;
use candle_core::{Device, Result, Tensor};

/// The least number of documents, and of tokens, that kernels are made for.
const MIN_DOCUMENTS: usize = 16;
const MIN_LEN: usize = 128;

/// Documents of different lengths.
#[derive(Clone)]
pub(crate) struct Ragged {
    documents: DocumentStarts,
    /// A power of two.
    pub(crate) num_documents: usize,
    /// Of a document, a power of two or what a sequence has.
    pub(crate) max_len: usize,
}

impl Ragged {
    /// None where each sequence is one document.
    pub(crate) fn new(documents: &DocumentStarts) -> Option<Self> {
        let (b, t) = documents.dims();
        let num_documents = documents.lens().count();
        let longest = documents.lens().max()?;
        (num_documents > b).then(|| Self {
            documents: documents.clone(),
            num_documents: num_documents.next_power_of_two().max(MIN_DOCUMENTS),
            max_len: longest
                .next_power_of_two()
                .max(MIN_LEN)
                .min(t.next_multiple_of(MIN_LEN)),
        })
    }

    pub(crate) fn num_tokens(&self) -> usize {
        let (b, t) = self.documents.dims();
        b * t
    }

    /// The longest document's tokens.
    pub(crate) fn longest(&self) -> usize {
        self.documents.lens().max().unwrap_or_default()
    }

    /// Lengths, and offsets in three kinds of tensors, by the number of values that each has for a token; a GPU gets them once.
    ///
    /// # Errors
    /// When the device cannot take them.
    pub(crate) fn on(&self, device: &Device, widths: [usize; 3]) -> Result<Tensor> {
        let what = OnGpu::Ragged(widths);
        self.documents.on_gpu(what, device, || self.words(widths))
    }

    /// Numbers of rows of scores, `(b, heads, t)`, in the order of the tokens, `(b, t, heads)`; and back.
    ///
    /// # Errors
    /// When they have not three dimensions.
    pub(crate) fn by_token(rows: &Tensor) -> Result<Tensor> {
        rows.transpose(1, 2)?.contiguous()
    }

    /// Numbers of rows of scores, `(b, heads, t)`, document by document with places for the longest, `(num_documents, heads, max_len)`;
    /// zeros after a document's last.
    ///
    /// # Errors
    /// When they have not as many sequences and tokens, or the device cannot take where each token goes.
    pub(crate) fn by_document(&self, rows: &Tensor) -> Result<Tensor> {
        let (b, heads, t) = rows.dims3()?;
        let places = self
            .documents
            .on_gpu(OnGpu::Places, rows.device(), || self.places())?;
        let numbers = embedding_forward(&Self::by_token(rows)?.reshape((b * t, heads))?, &places)?;
        Self::by_token(&numbers.reshape((self.num_documents, self.max_len, heads))?)
    }

    /// Of each place of each document its token, or a number that no token has.
    fn places(&self) -> Vec<u32> {
        let mut places = vec![u32::MAX; self.num_documents * self.max_len];
        let mut tokens = 0..;
        for (places, len) in places.chunks_mut(self.max_len).zip(self.documents.lens()) {
            places[..len]
                .iter_mut()
                .zip(&mut tokens)
                .for_each(|(place, token)| *place = token);
        }
        places
    }

    /// Where [`Self::on`] has the offsets of the first, second and third kind, `num_documents + 1` signed numbers of 64 bits each, in
    /// bytes; each begins at a multiple of 16.
    pub(crate) fn offsets_at(&self) -> [usize; 3] {
        [0, 1, 2].map(|kind| 4 * kind * self.words_of_offsets())
    }

    /// The same of the lengths, `num_documents` signed numbers of 32 bits.
    pub(crate) fn lens_at(&self) -> usize {
        4 * 3 * self.words_of_offsets()
    }

    fn words_of_offsets(&self) -> usize {
        (2 * (self.num_documents + 1)).next_multiple_of(4)
    }

    fn words(&self, widths: [usize; 3]) -> Vec<u32> {
        let mut words = Vec::with_capacity(self.lens_at() / 4 + self.num_documents);
        let empty = std::iter::repeat(0);
        for (kind, width) in widths.into_iter().enumerate() {
            let mut offset = 0u64;
            let lens = self.documents.lens().chain(empty.clone());
            for len in lens.take(self.num_documents + 1) {
                // As the memory of a GPU has them: the lower half first.
                words.extend([offset as u32, (offset >> 32) as u32]);
                offset += (len * width) as u64;
            }
            words.resize((kind + 1) * self.words_of_offsets(), 0);
        }
        let lens = self.documents.lens().chain(empty).take(self.num_documents);
        words.extend(lens.map(|len| len as u32));
        words
    }
}

#[cfg(test)]
mod tests {
    use super::Ragged;
    use crate::attention::causal::attention_forward;
    use crate::attention::document_starts::DocumentStarts;
    use crate::attention::head_groups::HeadGroups;
    use crate::attention::spec::AttentionSpec;
    use crate::device::device_choice::DeviceChoice;
    use candle_core::{Device, Result, Tensor};

    fn documents(rows: &[&[usize]]) -> Result<DocumentStarts> {
        let mut starts = Vec::new();
        for lens in rows {
            let mut start = 0;
            for &len in *lens {
                starts.extend(std::iter::repeat_n(start, len));
                start += len as u32;
            }
        }
        let t = starts.len() / rows.len();
        DocumentStarts::new(starts, (rows.len(), t))
    }

    #[test]
    fn few_sizes_take_all_documents() -> Result<()> {
        let sizes = |rows: &[&[usize]]| -> Result<_> {
            let ragged = Ragged::new(&documents(rows)?);
            Ok(ragged.map(|ragged| (ragged.num_documents, ragged.max_len)))
        };
        assert_eq!(sizes(&[&[300], &[300]])?, None);
        assert_eq!(sizes(&[&[300], &[200, 100]])?, Some((16, 384)));
        assert_eq!(sizes(&[&[100, 100, 100]])?, Some((16, 128)));
        assert_eq!(sizes(&[&[130, 1000]])?, Some((16, 1024)));
        assert_eq!(sizes(&[&[1; 33]])?, Some((64, 128)));
        let ragged = Ragged::new(&documents(&[&[130, 1000], &[1000, 130]])?);
        let tokens = ragged.map(|ragged| (ragged.longest(), ragged.num_tokens()));
        assert_eq!(tokens, Some((1000, 2260)));
        assert!(Ragged::new(&DocumentStarts::new(vec![], (0, 7))?).is_none());
        Ok(())
    }

    #[test]
    fn offsets_need_64_bits() -> Result<()> {
        let ragged = Ragged::new(&documents(&[&[1, 3]])?);
        let ragged = ragged.ok_or_else(|| candle_core::Error::msg("two documents"))?;
        let words = ragged.words([1 << 33, 2, 1]);
        let offsets = |at: usize| &words[at / 4..][..6];
        let [first, second, third] = ragged.offsets_at().map(offsets);
        assert_eq!(first, [0, 0, 0, 2, 0, 8]);
        assert_eq!(second, [0, 0, 2, 0, 8, 0]);
        assert_eq!(third, [0, 0, 1, 0, 4, 0]);
        Ok(())
    }

    /// On a GPU if there is one: each document, found by its offset and length, gives alone what all of them give together.
    #[test]
    fn a_document_at_its_offset_is_a_sequence() -> Result<()> {
        let device = match DeviceChoice::Cuda(0).open() {
            Ok(device) => device,
            Err(err) => {
                let required = std::env::var("CANDLE_TRAIN_REQUIRE_CUDA").is_ok_and(|v| v == "1");
                assert!(!required, "CANDLE_TRAIN_REQUIRE_CUDA is 1, but {err}");
                Device::Cpu
            }
        };
        let (heads, kv_heads, d) = (4, 2, 16);
        let documents = documents(&[&[1, 20, 9, 10], &[40], &[7, 33], &[39, 1]])?;
        let ragged = Ragged::new(&documents);
        let ragged = ragged.ok_or_else(|| candle_core::Error::msg("several documents"))?;
        let (b, t) = documents.dims();
        let random = |heads: usize| -> Result<Tensor> {
            // No GPU draws them, so that they are the same everywhere.
            let values =
                (0..b * t * heads * d).map(|i| ((i * i * 31 + 7 * i) % 101) as f32 / 50.0 - 1.0);
            Tensor::from_iter(values, &Device::Cpu)?
                .reshape((b, t, heads, d))?
                .to_device(&device)
        };
        let (q, k, v) = (
            random(heads)?,
            random(kv_heads)?,
            (random(kv_heads)? * 0.5)?,
        );
        let spec = |documents: Option<DocumentStarts>, window| AttentionSpec {
            window,
            rows: documents.map(Into::into),
            ..AttentionSpec::new(0.5, HeadGroups::new(heads / kv_heads))
        };
        // Uploaded once, whoever asks.
        let widths = [heads * d, kv_heads * d, heads];
        let table = ragged.on(&device, widths)?;
        let words = table.to_device(&Device::Cpu)?.to_vec1::<u32>()?;
        let offset = |kind: usize, i: usize| {
            let at = ragged.offsets_at()[kind] / 4 + 2 * i;
            (words[at] as u64 | (words[at + 1] as u64) << 32) as usize
        };
        for window in [None, Some(5)] {
            let (out, log_sum_exp) =
                attention_forward(&q, &k, &v, &spec(Some(documents.clone()), window))?;
            let by_token = Ragged::by_token(&log_sum_exp)?;
            let by_document = ragged.by_document(&log_sum_exp)?;
            let mut num_tokens = 0;
            for i in 0..ragged.num_documents {
                let len = words[ragged.lens_at() / 4 + i] as usize;
                num_tokens += len;
                let part = |of: &Tensor, kind: usize, width: usize| -> Result<Tensor> {
                    assert_eq!(offset(kind, i) + len * width, offset(kind, i + 1));
                    of.flatten_all()?
                        .narrow(0, offset(kind, i), len * width)?
                        .contiguous()
                };
                if len == 0 {
                    continue;
                }
                let alone = |of: &Tensor, kind: usize, heads: usize| {
                    part(of, kind, heads * d)?.reshape((1, len, heads, d))
                };
                let (want, sums) = attention_forward(
                    &alone(&q, 0, heads)?,
                    &alone(&k, 1, kv_heads)?,
                    &alone(&v, 1, kv_heads)?,
                    &spec(None, window),
                )?;
                let of_document = by_document.narrow(0, i, 1)?;
                let beyond = of_document.narrow(2, len, ragged.max_len - len)?;
                assert_eq!(beyond.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
                for (got, want) in [
                    (part(&out, 0, heads * d)?, &want),
                    (part(&by_token, 2, heads)?, &Ragged::by_token(&sums)?),
                    (
                        of_document.narrow(2, 0, len)?.contiguous()?.flatten_all()?,
                        &sums,
                    ),
                ] {
                    let difference = (got - want.flatten_all()?)?.abs()?.max_all()?;
                    assert!(difference.to_scalar::<f32>()? < 1e-5, "document {i}");
                }
            }
            assert_eq!(num_tokens, b * t);
        }
        Ok(())
    }
}
