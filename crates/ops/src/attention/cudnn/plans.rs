//! Handles and plans, kept for the life of the program.

use super::choice::Choice;
use super::configurations::{Configurations, Target};
use super::plan::Plan;
use super::sizes::{Direction, Packed, Sizes};
use crate::cuda::cudnn_library::{Library, Opaque, is_out_of_memory};
use crate::settings::gpu_settings::GpuSettings;
use candle_core::{CudaDevice, Error, Result};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One thread at a time uses them, for as long as it takes to put a pass on a stream; the first pass of each sizes takes about
/// a second.
#[derive(Default)]
pub(super) struct Plans {
    /// By GPU.
    handles: HashMap<usize, Handle>,
    /// By GPU and sizes; none where cuDNN cannot.
    plans: HashMap<(usize, Sizes), Option<PlansOfSizes>>,
    /// By GPU and sizes of all sequences.
    calls: HashMap<(usize, Sizes), Sizes>,
    /// Passes of which one plan was told.
    passes: HashSet<Direction>,
    told: HashSet<String>,
}

#[derive(Clone, Copy)]
struct Handle(Opaque);

// SAFETY: a handle may be used by any thread, by one at a time; the lock of the plans sees to that.
unsafe impl Send for Handle {}

/// After the reason why packed documents are not cuDNN's, while sequences of one document each may be.
pub(super) const PACKING_HINT: &str = "\nhint: packing costs the tensor cores here, by estimate up to 10 times the time of a step; --no-packing gives each record a sequence of its own, which cuDNN takes";

static PLANS: Mutex<Option<Plans>> = Mutex::new(None);

/// Those of the program, locked.
pub(super) fn with_plans<R>(work: impl FnOnce(&mut Plans) -> R) -> R {
    let mut plans: MutexGuard<'_, Option<Plans>> =
        PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    work(plans.get_or_insert_default())
}

impl Plans {
    /// The handle of a GPU, set to its stream; the GPU must be this thread's.
    pub(super) fn handle(
        &mut self,
        library: &'static Library,
        device: &CudaDevice,
    ) -> Result<Opaque> {
        let stream = device.cuda_stream();
        let Handle(handle) = match self.handles.entry(stream.context().ordinal()) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                let mut handle = std::ptr::null_mut();
                // SAFETY: cuDNN writes the new handle, of the thread's current GPU.
                let status = unsafe { (library.create)(&raw mut handle) };
                library.check(status, "opening it")?;
                *entry.insert(Handle(handle))
            }
        };
        // SAFETY: both are alive, and of the same GPU.
        let status = unsafe { (library.set_stream)(handle, stream.cu_stream().cast()) };
        library.check(status, "choosing the stream")?;
        Ok(handle)
    }

    /// As many of the sequences as a call takes: all, unless the plan for all says that it needs much memory. None where cuDNN
    /// has no plan.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub(super) fn sizes_of_one_call(
        &mut self,
        library: &'static Library,
        (gpu, handle): (usize, Opaque),
        sizes: Sizes,
    ) -> Result<Option<Sizes>> {
        if let Some(call) = self.calls.get(&(gpu, sizes)) {
            return Ok(Some(*call));
        }
        let Some(plan) = self.plan(library, (gpu, handle), sizes)? else {
            return Ok(None);
        };
        let call = sizes.of_one_call(plan.workspace_bytes);
        if call != sizes {
            self.plans.remove(&(gpu, sizes));
        }
        self.calls.insert((gpu, sizes), call);
        Ok(Some(call))
    }

    /// The plan in use for `sizes`; none where cuDNN has none, which is told once and remembered.
    ///
    /// # Errors
    /// When memory is missing: our own kernels would need as much, and the next step would be slow without a reason. When
    /// all that could be planned have failed.
    pub(super) fn plan(
        &mut self,
        library: &'static Library,
        (gpu, handle): (usize, Opaque),
        sizes: Sizes,
    ) -> Result<Option<&Plan>> {
        let plans = match self.plans.entry((gpu, sizes)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let of_passes = GpuSettings::get()?.cudnn_config;
                let only = of_passes.map(|[forward, backward]| match sizes.pass {
                    Direction::Forward => forward,
                    Direction::Backward | Direction::DeterministicBackward => backward,
                });
                entry.insert(
                    match PlansOfSizes::new(library, Target::Handle(handle), sizes, only) {
                        Ok(plans) => {
                            if self.passes.insert(sizes.pass) {
                                tracing::info!("{}", plans.describe());
                            }
                            Some(plans)
                        }
                        Err(err) if is_out_of_memory(&err) => return Err(err),
                        Err(err) => {
                            let hint = sizes.packed.map_or("", |_| PACKING_HINT);
                            tell(&mut self.told, format!("{sizes:?}: {err}{hint}"));
                            None
                        }
                    },
                )
            }
        };
        match plans {
            Some(plans) => plans.current().map(Some),
            None => Ok(None),
        }
    }

    /// The plan in use has failed: the next is tried.
    ///
    /// # Errors
    /// When memory was missing.
    pub(super) fn failed(&mut self, gpu: usize, sizes: Sizes, err: Error) -> Result<()> {
        match self.plans.get_mut(&(gpu, sizes)) {
            Some(Some(plans)) => plans.choice.failed(err),
            _ => Err(err),
        }
    }

    /// Says once why attention is computed by our own kernels.
    pub(super) fn tell(&mut self, reason: String) {
        tell(&mut self.told, reason);
    }
}

fn tell(told: &mut HashSet<String>, reason: String) {
    if !told.contains(&reason) {
        tracing::warn!("attention is computed without cuDNN, slowly: {reason}");
        told.insert(reason);
    }
}

/// What cuDNN suggests for a pass, and the one in use.
pub(super) struct PlansOfSizes {
    sizes: Sizes,
    configurations: Configurations,
    choice: Choice<Plan>,
    /// The number that the user asked for, or the last.
    only: Option<usize>,
}

impl PlansOfSizes {
    /// Those of which one can be planned.
    pub(super) fn new(
        library: &'static Library,
        target: Target,
        sizes: Sizes,
        only: Option<usize>,
    ) -> Result<Self> {
        let mut configurations = Configurations::new(library, target, sizes)?;
        let only = match only {
            Some(only) => Some(only.min(configurations.count()?.saturating_sub(1))),
            None => None,
        };
        let mut plans = Self {
            sizes,
            configurations,
            choice: Choice::new(only.unwrap_or(0)),
            only,
        };
        plans.current()?;
        Ok(plans)
    }

    /// The one in use.
    pub(super) fn current(&mut self) -> Result<&Plan> {
        let (configurations, only) = (&mut self.configurations, self.only);
        let plan = |number: usize| match only {
            Some(only) if number > only => Ok(None),
            _ => configurations.plan(number),
        };
        self.choice.current(plan)
    }

    /// What it is, for the log.
    pub(super) fn describe(&self) -> String {
        let Sizes { b, t, num_keys, .. } = self.sizes;
        let of_what = match self.sizes.packed {
            None if t != num_keys => format!("{b} sequences of {t} queries and {num_keys} keys"),
            None => format!("{b} sequences of {t} tokens"),
            Some(Packed { tokens, .. }) => {
                format!("up to {b} documents of up to {t} tokens, {tokens} tokens in all")
            }
        };
        let (number, workspace_bytes) = self
            .choice
            .in_use()
            .map_or((0, 0), |(number, plan)| (number, plan.workspace_bytes));
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        format!(
            "attention by cuDNN, {}: configuration {number}, {} MiB of workspace and {} of sums for {of_what}",
            self.sizes.pass,
            mib(workspace_bytes),
            mib(self.sizes.bytes_beside_workspace())
        )
    }
}
