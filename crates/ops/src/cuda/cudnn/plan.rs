//! A graph with the kernel that cuDNN chose for it.

use super::descriptor::{Descriptor, Value};
use super::graph::{Graph, ONE, SCALE, UNSEEN};
use super::library::{Library, Opaque, is_out_of_memory};
use super::sizes::Sizes;
use super::{backward, forward};
use candle_core::{Result, bail};
use std::ffi::c_void;

/// What a plan is made for: the GPU of a handle, or, in tests, one that is only described.
pub(super) enum Target {
    Handle(Opaque),
    #[cfg(test)]
    Properties(Descriptor),
}

/// A plan, ready to run.
pub(super) struct Plan {
    library: &'static Library,
    plan: Descriptor,
    /// What the plan refers to.
    _graph: Vec<Descriptor>,
    pub(super) workspace_bytes: usize,
}

/// Mode A of cuDNN's heuristics: the best guess first.
const BEST_GUESS: i32 = 3;

impl Plan {
    /// The first of cuDNN's suggestions that it can carry out.
    ///
    /// # Errors
    /// When cuDNN has no kernel for these sizes, in its words, or no memory to look for one.
    pub(super) fn new(library: &'static Library, target: &Target, sizes: Sizes) -> Result<Self> {
        let mut graph = Graph::new(library, sizes);
        if sizes.backward {
            backward::describe(&mut graph)?;
        } else {
            forward::describe(&mut graph)?;
        }
        let (mut of_graph, mut of_plan) = (Vec::new(), Vec::new());
        let mut of_heuristics = vec![(200, Value::HeuristicMode(BEST_GUESS))];
        #[cfg(test)]
        let properties_raw;
        match target {
            Target::Handle(handle) => {
                of_graph.push((800, Value::Handle(*handle)));
                of_plan.push((400, Value::Handle(*handle)));
            }
            #[cfg(test)]
            Target::Properties(properties) => {
                properties_raw = [properties.raw()];
                of_heuristics.push((204, Value::Descriptors(&properties_raw)));
            }
        }
        let graph = graph.finish(&of_graph)?;
        let operations: Vec<Opaque> = graph.last().map(Descriptor::raw).into_iter().collect();
        of_heuristics.push((201, Value::Descriptors(&operations)));
        let heuristics = Descriptor::of(library, 4, &of_heuristics)?;
        let mut refused = None;
        for config in heuristics.descriptors(202, 3)? {
            let config = [config.raw()];
            let mut attributes = of_plan.clone();
            attributes.push((401, Value::Descriptors(&config)));
            match Descriptor::of(library, 5, &attributes) {
                Ok(plan) => {
                    let workspace_bytes = usize::try_from(plan.int(402)?).unwrap_or_default();
                    return Ok(Self {
                        library,
                        plan,
                        _graph: graph,
                        workspace_bytes,
                    });
                }
                Err(err) if is_out_of_memory(&err) => return Err(err),
                Err(err) => refused = Some(err),
            }
        }
        match refused {
            Some(err) => Err(err),
            None => bail!("cuDNN has no kernel for {sizes:?}"),
        }
    }

    /// Puts the pass on the handle's stream; `tensors` are their numbers in the graph and addresses on the GPU.
    ///
    /// # Safety
    /// The tensors must be all that the graph reads or writes in memory, of its sizes and aligned, the workspace as large as
    /// the plan says, and the handle that of the plan's GPU, used by nobody else meanwhile.
    pub(super) unsafe fn run(
        &self,
        handle: Opaque,
        tensors: &[(i64, u64)],
        workspace: u64,
        scale: f32,
    ) -> Result<()> {
        let numbers = [(SCALE, scale), (ONE, 1.0), (UNSEEN, f32::NEG_INFINITY)];
        let ids: Vec<i64> = tensors
            .iter()
            .map(|(id, _)| *id)
            .chain(numbers.iter().map(|(id, _)| *id))
            .collect();
        let pointers: Vec<*mut c_void> = tensors
            .iter()
            .map(|(_, address)| *address as *mut c_void)
            .chain(
                numbers
                    .iter()
                    .map(|(_, value)| (&raw const *value).cast_mut().cast()),
            )
            .collect();
        let workspace = [workspace as *mut c_void];
        let arguments = Descriptor::of(
            self.library,
            16,
            &[
                (1000, Value::Ints(&ids)),
                (1001, Value::Pointers(&pointers)),
                (1003, Value::Pointers(&workspace)),
            ],
        )?;
        // SAFETY: the caller's promise; the three numbers are read during the call.
        let status = unsafe { (self.library.execute)(handle, self.plan.raw(), arguments.raw()) };
        self.library.check(status, "attention")
    }
}

#[cfg(test)]
mod tests {
    use super::super::descriptor::{Descriptor, Value};
    use super::super::library::Library;
    use super::super::sizes::Sizes;
    use super::{Plan, Target};
    use candle_core::Result;

    /// An H200 as cuDNN describes it.
    const H200: &str = r#"{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
"multiProcessorCount": 132, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "l2CacheSize": 62914560, "warpSize": 32,
"maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024,
"maxRegistersPerSM": 65536, "pciDeviceId": 0, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
"isTccDriver": 0, "supportCoopLaunch": 1, "deviceVer": 900, "driverVer": 13000, "cudaDeviceId": 0,
"deviceName": "NVIDIA H200", "totalGlobalMem": 150754820096}"#;

    /// Needs libcudnn.so.9 and a libcuda.so.1, though no GPU: one whose modules load and whose other functions answer with the
    /// error that there is no device is enough. Without any, cuDNN plans nothing; so this runs on demand.
    #[test]
    fn cudnn_plans_every_size_for_an_h200() -> Result<()> {
        if std::env::var_os("CANDLE_TRAIN_CUDNN_PLANS").is_none() {
            eprintln!("SKIPPED: CANDLE_TRAIN_CUDNN_PLANS is not set");
            return Ok(());
        }
        let library = Library::get().map_err(candle_core::Error::msg)?;
        let text = format!("{H200}\0");
        let properties = Descriptor::of(library, 38, &[(2702, Value::Text(&text))])?;
        let target = Target::Properties(properties);
        for (heads, kv_heads) in [(32, 8), (4, 4)] {
            for (b, t, d) in [
                (8, 4096, 64),
                (1, 4096, 96),
                (1, 4096, 128),
                (2, 1000, 256),
                (2, 37, 16),
            ] {
                for backward in [false, true] {
                    let sizes = Sizes {
                        b,
                        t,
                        heads,
                        kv_heads,
                        d,
                        backward,
                    };
                    let plan = Plan::new(library, &target, sizes.of_one_call())
                        .map_err(|err| err.context(format!("{sizes:?}")))?;
                    println!("{sizes:?}: {} bytes", plan.workspace_bytes);
                    assert!(plan.workspace_bytes < 3 << 30, "{sizes:?}");
                }
            }
        }
        Ok(())
    }
}
