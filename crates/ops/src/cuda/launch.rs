//! From a kernel's name to work on candle's stream: one function for each kernel in the table.

#![allow(unsafe_code)]

use super::adamw_slots::AdamWSlots;
use super::element::Element;
use super::kernel_table::for_each_kernel;
use super::loaded::loaded;
use super::pointer::{Argument, In, OptIn, OptOut, Out};
use super::profile::timed;
use crate::timing::op_times::OpName;
use candle_core::Result;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use candle_core::cuda_backend::cudarc::driver::{
    CudaFunction, CudaStream, LaunchConfig, PushKernelArg,
};
use std::sync::Arc;

/// Shared memory that a block may have without asking for it.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// Where and how wide a kernel runs. The numbers come from shapes alone, never from the GPU at hand, so that results do not
/// depend on it.
pub(crate) struct Launch {
    pub(super) stream: Arc<CudaStream>,
    pub(super) config: LaunchConfig,
}

impl Launch {
    fn function(&self, kernel: &str) -> Result<CudaFunction> {
        let function = loaded(self.stream.context(), kernel)?;
        if self.config.shared_mem_bytes > DEFAULT_SHARED_BYTES {
            let bytes = self.config.shared_mem_bytes as i32;
            function
                .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)
                .w()?;
        }
        Ok(function)
    }
}

macro_rules! launchers {
    ($($file:literal { $($name:ident $([$t:ident])? ($($argument:ident: $type:ty),* $(,)?);)* })*) => {
        $($(
            /// Puts the kernel on the stream.
            ///
            /// # Safety
            /// The pointers must hold as many values as the kernel reads or writes for the sizes given, and the launch must
            /// be what `kernels/README.md` asks for.
            #[allow(clippy::too_many_arguments, reason = "the kernel's, in its order: a struct for each would say them once more")]
            pub(crate) unsafe fn $name $(<$t: Element>)? (launch: &Launch, $($argument: $type),*) -> Result<()> {
                let name = [stringify!($name) $(, "_", $t::DTYPE.as_str())?].concat();
                let function = launch.function(&name)?;
                $(let $argument = Argument::raw(&$argument);)*
                let mut arguments = launch.stream.launch_builder(&function);
                $(arguments.arg(&$argument);)*
                // SAFETY: number, order and types of the arguments are the kernel's, by the test of the table; the rest is
                // the caller's promise.
                timed(OpName::Named(stringify!($name)), &launch.stream, || unsafe { arguments.launch(launch.config) }.w())?;
                Ok(())
            }
        )*)*
    };
}

for_each_kernel!(launchers);
