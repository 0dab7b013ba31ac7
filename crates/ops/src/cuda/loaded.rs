//! Kernels on a GPU, loaded together when it is opened.
//!
//! CUDA loads a kernel when it is first asked for, which may wait for all that runs on the GPU. If that is an operation of NCCL that waits
//! for another rank, and that rank waits for this one, none goes on; so nothing is left to load by then.

use super::kernel_files::{KERNEL_FILES, KernelFile, Replacements};
use crate::settings::gpu_settings::GpuSettings;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::kernels;
use candle_core::{CudaDevice, Error, Result, bail};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

/// Kernels by name.
type Functions = HashMap<String, CudaFunction>;

/// By the GPU's number.
static LOADED: Mutex<Option<HashMap<usize, Functions>>> = Mutex::new(None);

/// Loads all kernels that are not there yet.
///
/// # Errors
/// When a file cannot be loaded, or lacks a kernel, or the folder of [`GpuSettings::kernels`] is not as it should be.
pub(crate) fn load_all(context: &Arc<CudaContext>) -> Result<()> {
    with_functions(context, |_| Ok(()))
}

/// A kernel; of a device that was not opened by this crate all are loaded now.
pub(crate) fn loaded(context: &Arc<CudaContext>, kernel: &str) -> Result<CudaFunction> {
    with_functions(context, |functions| match functions.get(kernel) {
        Some(function) => Ok(function.clone()),
        None => bail!("there is no kernel {kernel}"),
    })
}

/// Kernels of candle that steps of training use, by the files that have them: those that tests of training on an emulated GPU
/// asked for. candle keeps files, and finds kernels in them by name.
const OF_CANDLE: [(&kernels::Module, &[&str]); 5] = [
    (
        &kernels::FILL,
        &[
            "const_set_f32",
            "const_set_bf16",
            "const_set_f16",
            "const_set_f64",
            "copy2d_f32",
            "copy2d_bf16",
            "copy2d_f16",
            "copy2d_f64",
        ],
    ),
    (&kernels::UNARY, &["ucopy_f32", "ucopy_bf16", "ucopy_f16"]),
    (
        &kernels::BINARY,
        &[
            "badd_f32",
            "badd_bf16",
            "badd_f16",
            "badd_f64",
            "bmul_f32",
            "bmul_bf16",
            "bmul_f16",
        ],
    ),
    (
        &kernels::AFFINE,
        &["affine_f32", "affine_bf16", "affine_f16", "affine_f64"],
    ),
    (
        &kernels::CAST,
        &[
            "cast_bf16_f32",
            "cast_f32_bf16",
            "cast_f32_f64",
            "cast_f64_f32",
            "cast_bf16_f64",
            "cast_f16_f32",
            "cast_f32_f16",
            "cast_f16_f64",
        ],
    ),
];

/// Loads kernels of candle.
///
/// # Errors
/// When one cannot be loaded.
pub(crate) fn load_those_of_candle(device: &CudaDevice) -> Result<()> {
    for (file, names) in OF_CANDLE {
        for name in names {
            let loaded = device.get_or_load_func(name, file);
            loaded.map_err(|err| err.context(format!("candle's kernel {name}")))?;
        }
    }
    Ok(())
}

fn with_functions<R>(
    context: &Arc<CudaContext>,
    work: impl FnOnce(&Functions) -> Result<R>,
) -> Result<R> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    match loaded.get_or_insert_default().entry(context.ordinal()) {
        Entry::Occupied(entry) => work(entry.get()),
        Entry::Vacant(entry) => work(entry.insert(load(context)?)),
    }
}

fn load(context: &Arc<CudaContext>) -> Result<Functions> {
    let replacements = match GpuSettings::get()?.kernels {
        Some(folder) => Replacements::of(&folder)?,
        None => Replacements::default(),
    };
    let mut functions = Functions::new();
    for file in KERNEL_FILES {
        load_file(context, file, &replacements, &mut functions)?;
    }
    for path in replacements.paths() {
        tracing::warn!(
            "cuda:{}: {} replaces kernels of this program",
            context.ordinal(),
            path.display()
        );
    }
    Ok(functions)
}

fn load_file(
    context: &Arc<CudaContext>,
    file: &KernelFile,
    replacements: &Replacements,
    functions: &mut Functions,
) -> Result<()> {
    let (compiled, what) = replacements.compiled(file);
    let failed = |doing: &str, err: DriverError| Error::Msg(format!("{what} {doing}: {err}"));
    let module = context
        .load_module(Ptx::from_binary(compiled.into_owned()))
        .map_err(|err| failed("cannot be loaded", err))?;
    for kernel in file.kernels {
        for suffix in kernel.suffixes {
            let name = [kernel.name, suffix].concat();
            let function = module
                .load_function(&name)
                .map_err(|err| failed(&format!("has no kernel {name} that loads"), err))?;
            functions.insert(name, function);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Functions, KERNEL_FILES, Replacements, load_file};
    use candle_core::Result;

    #[test]
    fn code_that_cannot_be_loaded_is_named() -> Result<()> {
        let device = match crate::cuda::device::open(0) {
            Ok(device) => device,
            Err(err) => {
                let required = std::env::var("CANDLE_TRAIN_REQUIRE_CUDA").is_ok_and(|v| v == "1");
                assert!(!required, "CANDLE_TRAIN_REQUIRE_CUDA is 1, but {err}");
                eprintln!("not tested on a GPU: {err}");
                return Ok(());
            }
        };
        let stream = device.as_cuda_device()?.cuda_stream();
        let file = KERNEL_FILES.iter().find(|file| file.name == "rope");
        let file = file.ok_or_else(|| candle_core::Error::msg("no file rope"))?;
        let (embedded, _) = Replacements::default().compiled(file);
        let folder = std::env::temp_dir().join(format!("loaded-{}", std::process::id()));
        let path = folder.join("rope.cubin");
        std::fs::create_dir_all(&folder)?;
        let load = |code: &[u8]| {
            std::fs::write(&path, code)?;
            let replacements = Replacements::of(&folder)?;
            let mut functions = Functions::new();
            load_file(stream.context(), file, &replacements, &mut functions)?;
            Ok::<_, candle_core::Error>(functions.len())
        };
        let loaded = [load(&embedded), load(b"no code of a GPU")];
        std::fs::remove_dir_all(&folder)?;
        let [whole, broken] = loaded;
        assert_eq!(whole?, 3);
        let error = broken.err().map(|err| err.to_string()).unwrap_or_default();
        let name = path.display().to_string();
        assert!(
            error.contains(&name) && error.contains("no output of nvcc"),
            "{error}"
        );
        Ok(())
    }
}
