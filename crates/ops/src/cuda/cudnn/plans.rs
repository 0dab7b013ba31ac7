//! Handles and plans, kept for the life of the program.

use super::library::{Library, Opaque, is_out_of_memory};
use super::plan::{Plan, Target};
use super::sizes::Sizes;
use candle_core::{CudaDevice, Result};
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
    plans: HashMap<(usize, Sizes), Option<Plan>>,
    told: HashSet<String>,
}

#[derive(Clone, Copy)]
struct Handle(Opaque);

// SAFETY: a handle may be used by any thread, by one at a time; the lock of the plans sees to that.
unsafe impl Send for Handle {}

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

    /// The plan for `sizes`; none where cuDNN has none, which is told once and remembered.
    ///
    /// # Errors
    /// When memory is missing: our own kernels would need as much, and the next step would be slow without a reason.
    pub(super) fn plan(
        &mut self,
        library: &'static Library,
        handle: Opaque,
        gpu: usize,
        sizes: Sizes,
    ) -> Result<Option<&Plan>> {
        if !self.plans.contains_key(&(gpu, sizes)) {
            let plan = match Plan::new(library, &Target::Handle(handle), sizes) {
                Ok(plan) => Some(plan),
                Err(err) if is_out_of_memory(&err) => return Err(err),
                Err(err) => {
                    self.tell(format!("{sizes:?}: {err}"));
                    None
                }
            };
            self.plans.insert((gpu, sizes), plan);
        }
        Ok(self.plans.get(&(gpu, sizes)).and_then(Option::as_ref))
    }

    /// Says once why attention is computed by our own kernels.
    pub(super) fn tell(&mut self, reason: String) {
        if !self.told.contains(&reason) {
            tracing::warn!("attention is computed without cuDNN, slowly: {reason}");
            self.told.insert(reason);
        }
    }
}
