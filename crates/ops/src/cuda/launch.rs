//! From a kernel's name to work on candle's stream: one function for each kernel in the table.

use super::adamw_slots::AdamWSlots;
use super::element::Element;
use super::kernel_table::for_each_kernel;
use super::pointer::{Argument, In, OptIn, OptOut, Out};
use super::profile::timed;
use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use half::bf16;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Shared memory that a block may have without asking for it.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// Where and how wide a kernel runs. The numbers come from shapes alone, never from the GPU at hand, so that results do not
/// depend on it.
pub(super) struct Launch {
    stream: Arc<CudaStream>,
    config: LaunchConfig,
}

impl Launch {
    /// `grid` blocks of `block` threads with `shared_bytes` of shared memory each.
    pub(super) fn new(
        stream: Arc<CudaStream>,
        grid: (u32, u32, u32),
        block: u32,
        shared_bytes: u32,
    ) -> Self {
        let config = LaunchConfig {
            grid_dim: grid,
            block_dim: (block, 1, 1),
            shared_mem_bytes: shared_bytes,
        };
        Self { stream, config }
    }

    fn function(&self, file: &'static str, kernel: String) -> Result<CudaFunction> {
        let function = loaded(self.stream.context(), file, kernel)?;
        if self.config.shared_mem_bytes > DEFAULT_SHARED_BYTES {
            let bytes = self.config.shared_mem_bytes as i32;
            function
                .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
                .w()?;
        }
        Ok(function)
    }
}

/// What has been loaded, by the GPU's number.
#[derive(Default)]
struct Loaded {
    modules: HashMap<(usize, &'static str), Arc<CudaModule>>,
    functions: HashMap<(usize, String), CudaFunction>,
}

static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

fn loaded(context: &Arc<CudaContext>, file: &'static str, kernel: String) -> Result<CudaFunction> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default();
    let gpu = context.ordinal();
    let key = (gpu, kernel);
    if let Some(function) = loaded.functions.get(&key) {
        return Ok(function.clone());
    }
    let module = match loaded.modules.get(&(gpu, file)) {
        Some(module) => module.clone(),
        None => {
            let module = context
                .load_module(Ptx::from_binary(fatbin(file).to_vec()))
                .w()?;
            loaded.modules.insert((gpu, file), module.clone());
            module
        }
    };
    let function = module.load_function(&key.1).w()?;
    loaded.functions.insert(key, function.clone());
    Ok(function)
}

macro_rules! launchers {
    ($($file:literal { $($name:ident $([$t:ident])? ($($argument:ident: $type:ty),* $(,)?);)* })*) => {
        /// The compiled kernels of a file.
        fn fatbin(file: &str) -> &'static [u8] {
            match file {
                $($file => include_bytes!(concat!(env!("OUT_DIR"), "/", $file, ".fatbin")),)*
                _ => &[],
            }
        }

        $($(
            /// Puts the kernel on the stream.
            ///
            /// # Safety
            /// The pointers must hold as many values as the kernel reads or writes for the sizes given, and the launch must
            /// be what `kernels/README.md` asks for.
            #[allow(clippy::too_many_arguments)]
            pub(super) unsafe fn $name $(<$t: Element>)? (launch: &Launch, $($argument: $type),*) -> Result<()> {
                let suffix: &[&str] = &[$($t::SUFFIX)?];
                let function = launch.function($file, [stringify!($name), &suffix.concat()].concat())?;
                $(let $argument = Argument::raw(&$argument);)*
                let mut arguments = launch.stream.launch_builder(&function);
                $(arguments.arg(&$argument);)*
                // SAFETY: number, order and types of the arguments are the kernel's, by the test of the table; the rest is
                // the caller's promise.
                timed(stringify!($name), &launch.stream, || unsafe { arguments.launch(launch.config) }.w())?;
                Ok(())
            }
        )*)*
    };
}

for_each_kernel!(launchers);
