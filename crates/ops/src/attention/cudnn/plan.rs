//! A graph's kernel that is ready to run.

use super::descriptor::{Descriptor, Value};
use crate::cuda::cudnn_library::{Library, Opaque};
use candle_core::{Result, bail};
use std::ffi::c_void;

/// A plan; it refers to its graph.
pub(super) struct Plan {
    library: &'static Library,
    plan: Descriptor,
    /// What a call must bring along, by its numbers in the graph.
    arguments: Vec<i64>,
    pub(super) workspace_bytes: usize,
}

impl Plan {
    /// The plan of a finalized descriptor, for a graph with these arguments.
    pub(super) fn new(
        library: &'static Library,
        plan: Descriptor,
        arguments: Vec<i64>,
    ) -> Result<Self> {
        let workspace_bytes = usize::try_from(plan.int(402)?).unwrap_or_default();
        Ok(Self {
            library,
            plan,
            arguments,
            workspace_bytes,
        })
    }

    /// Puts the pass on the handle's stream; `tensors` are their numbers in the graph and addresses on the GPU, `values` the
    /// numbers that the call brings along, by theirs. cuDNN refuses what its graph does not name, so of both only that is taken.
    ///
    /// # Errors
    /// An argument of the graph that is missing, and cuDNN's refusal.
    ///
    /// # Safety
    /// The tensors must have the graph's sizes and be aligned, the workspace must be as large as the plan says, and the handle must be that
    /// of the plan's GPU, used by nobody else meanwhile.
    pub(super) unsafe fn run(
        &self,
        handle: Opaque,
        tensors: &[(i64, u64)],
        workspace: u64,
        values: &[(i64, f32)],
    ) -> Result<()> {
        let pointer = |number: &i64| {
            let mut tensors = tensors.iter();
            let tensor = tensors.find(|(other, _)| other == number);
            let address = tensor.map(|(_, address)| *address as *mut c_void);
            let value = || values.iter().find(|(other, _)| other == number);
            let pointer = address
                .or_else(|| value().map(|(_, value)| (&raw const *value).cast_mut().cast()))
                .filter(|pointer| !pointer.is_null());
            match pointer {
                Some(pointer) => Ok(pointer),
                None => bail!("attention by cuDNN: argument {number} of its graph is missing"),
            }
        };
        let pointers = self.arguments.iter().map(pointer);
        let pointers: Vec<*mut c_void> = pointers.collect::<Result<_>>()?;
        let workspace = [workspace as *mut c_void];
        let arguments = Descriptor::of(
            self.library,
            16,
            &[
                (1000, Value::Ints(&self.arguments)),
                (1001, Value::Pointers(&pointers)),
                (1003, Value::Pointers(&workspace)),
            ],
        )?;
        // SAFETY: the caller's promise; the values are read during the call.
        let status = unsafe { (self.library.execute)(handle, self.plan.raw(), arguments.raw()) };
        self.library.check(status, "attention")
    }
}

#[cfg(test)]
mod tests {
    use super::super::configurations::{Configurations, Target};
    use super::super::descriptor::{Descriptor, Value};
    use super::super::plans::PlansOfSizes;
    use super::super::sizes::{Direction, Packed, Sizes};
    use crate::attention::rectangle::Mask;
    use crate::cuda::cudnn_library::Library;
    use candle_core::{DType, Result};

    /// An H200 as cuDNN describes it.
    const H200: &str = r#"{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
"multiProcessorCount": 132, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "l2CacheSize": 62914560, "warpSize": 32,
"maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024,
"maxRegistersPerSM": 65536, "pciDeviceId": 0, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
"isTccDriver": 0, "supportCoopLaunch": 1, "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0,
"deviceName": "NVIDIA H200", "totalGlobalMem": 150754820096}"#;

    /// The H100 with 80 GB differs from it in its memory.
    fn h100() -> String {
        H200.replace("NVIDIA H200", "NVIDIA H100 80GB HBM3")
            .replace("3201000", "2619000")
            .replace("62914560", "52428800")
            .replace("150754820096", "85024112640")
    }

    /// An A100 with 80 GB.
    fn a100() -> String {
        H200.replace("NVIDIA H200", "NVIDIA A100-SXM4-80GB")
            .replace("132", "108")
            .replace("1980000", "1410000")
            .replace("62914560", "41943040")
            .replace("232448", "166912")
            .replace("\"deviceVer\": 900", "\"deviceVer\": 800")
            .replace("150754820096", "84987740160")
    }

    /// Sequences, tokens and head_dim. Then documents, the most tokens of one, and tokens in all, of packed ones.
    const SEQUENCES: [(usize, usize, usize); 7] = [
        (8, 4096, 64),
        (1, 4096, 96),
        (8, 4096, 128),
        (2, 1000, 256),
        (2, 200, 64),
        (2, 129, 128),
        (2, 37, 16),
    ];
    const DOCUMENTS: [(usize, usize, usize, usize); 4] = [
        (128, 4096, 32768, 64),
        (64, 1024, 16384, 128),
        (16, 1024, 2000, 256),
        (16, 128, 400, 96),
    ];

    /// All sizes with each number of heads, each window, type and pass.
    fn cases() -> impl Iterator<Item = Sizes> {
        let sequences = SEQUENCES.map(|(b, t, d)| (b, t, None, d));
        let documents = DOCUMENTS.map(|(b, t, tokens, d)| {
            let is_by_token = true;
            let packed = Packed {
                tokens,
                is_by_token,
            };
            (b, t, Some(packed), d)
        });
        let sizes = [(32, 8), (4, 4)].into_iter().flat_map(move |heads| {
            let both = sequences.into_iter().chain(documents);
            both.map(move |sizes| (heads, sizes))
        });
        let passes = [
            Direction::Forward,
            Direction::Backward,
            Direction::DeterministicBackward,
        ];
        sizes.flat_map(move |((heads, kv_heads), (b, t, packed, d))| {
            passes.into_iter().flat_map(move |pass| {
                let variants = [None, Some(t / 3 + 1)]
                    .into_iter()
                    .flat_map(|window| [(window, DType::BF16), (window, DType::F16)]);
                variants.map(move |(window, dtype)| Sizes {
                    pass,
                    dtype,
                    b,
                    t,
                    num_keys: t,
                    mask: Mask::Causal,
                    packed,
                    heads,
                    kv_heads,
                    d,
                    window,
                })
            })
        })
    }

    /// Sequences, queries and keys of parts that context-parallel ranks attend to: all queries and the first half of the keys, the last half of the
    /// queries and all keys, and those of pieces of different lengths.
    const PARTS: [(usize, usize, usize); 5] = [
        (1, 8192, 4096),
        (1, 4096, 8192),
        (4, 2048, 1024),
        (1, 1025, 2049),
        (1, 257, 129),
    ];

    /// The same with each number of heads, type and pass.
    fn cases_of_parts() -> impl Iterator<Item = Sizes> {
        let whole = cases().filter(|sizes| {
            (sizes.b, sizes.t) == (SEQUENCES[0].0, SEQUENCES[0].1) && sizes.window.is_none()
        });
        whole.flat_map(|sizes| {
            [64, 128].into_iter().flat_map(move |d| {
                PARTS.map(|(b, t, num_keys)| Sizes {
                    b,
                    t,
                    num_keys,
                    mask: Mask::Full,
                    d,
                    ..sizes
                })
            })
        })
    }

    /// Those of packed documents that cuDNN takes on an A100: heads of at most 128, and of the backward passes the one in no fixed
    /// order, with statistics and sums that are not by token.
    fn cases_of_a100() -> impl Iterator<Item = Sizes> {
        let is_taken = |sizes: &Sizes| {
            sizes.packed.is_some()
                && sizes.d <= 128
                && sizes.pass != Direction::DeterministicBackward
        };
        cases().filter(is_taken).map(|sizes| Sizes {
            packed: sizes.packed.map(|packed| Packed {
                is_by_token: sizes.pass == Direction::Forward,
                ..packed
            }),
            ..sizes
        })
    }

    /// Needs libcudnn.so.9 and a libcuda.so.1, though no GPU: one whose modules load and whose other functions answer with the
    /// error that there is no device is enough. Without any, cuDNN plans nothing; so this runs on demand.
    #[test]
    fn cudnn_plans_every_size_for_an_h100_and_an_h200() -> Result<()> {
        plan("H200", H200, cases())?;
        plan("H100", &h100(), cases())
    }

    #[test]
    fn cudnn_plans_parts_of_sequences_for_an_h100_and_an_h200() -> Result<()> {
        plan("H200", H200, cases_of_parts())?;
        plan("H100", &h100(), cases_of_parts())
    }

    #[test]
    fn cudnn_plans_packed_documents_for_an_a100() -> Result<()> {
        plan("A100", &a100(), cases_of_a100())
    }

    /// Plans the cases for a GPU of these properties, and prints a row of a table for each.
    fn plan(name: &str, gpu: &str, cases: impl Iterator<Item = Sizes>) -> Result<()> {
        if std::env::var_os("CANDLE_TRAIN_CUDNN_PLANS").is_none() {
            eprintln!("SKIPPED: CANDLE_TRAIN_CUDNN_PLANS is not set");
            return Ok(());
        }
        let library = Library::get().map_err(candle_core::Error::msg)?;
        println!(
            "| GPU | pass | type | b | queries | keys | mask | packed tokens | heads | d | window | sequences a call | workspace MiB | beside it MiB | configurations |"
        );
        let properties = Descriptor::of(library, 38, &[(2702, Value::Text(&format!("{gpu}\0")))])?;
        let target = Target::Properties(properties.raw());
        for all in cases {
            let planned = |sizes: Sizes| -> Result<usize> {
                let plans = PlansOfSizes::new(library, target, sizes, None);
                let mut plans = plans.map_err(|err| err.context(format!("{sizes:?}")))?;
                Ok(plans.current()?.workspace_bytes)
            };
            let call = all.of_one_call(planned(all)?);
            let bytes = planned(call)?;
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            let (workspace, beside) = (mib(bytes), mib(call.bytes_beside_workspace()));
            let mut configurations = Configurations::new(library, target, call)?;
            let Sizes {
                pass,
                dtype,
                b,
                t,
                num_keys,
                mask,
                packed,
                heads,
                kv_heads,
                d,
                window,
            } = all;
            println!(
                "| {name} | {pass:?} | {dtype:?} | {b} | {t} | {num_keys} | {mask:?} | {:?} | {heads} on {kv_heads} | {d} | {window:?} | {} | {workspace:.1} | {beside:.1} | {} |",
                packed.map(|packed| packed.tokens),
                call.b,
                configurations.count()?
            );
            assert!(bytes + call.bytes_beside_workspace() < 3 << 30, "{all:?}");
            let is_one_call = pass == Direction::Backward && packed.is_none_or(|it| it.is_by_token);
            assert!(!is_one_call || call.b == b, "{all:?}");
        }
        Ok(())
    }
}
