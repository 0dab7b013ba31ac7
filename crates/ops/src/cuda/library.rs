//! Which of NVIDIA's libraries a program has, looked up when something failed.
//!
//! A program linked against `scripts/cuda-stand-ins.py`'s files starts without them, and what is missing shows as an error
//! code that could also mean something else. Here the loader itself is asked.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};

/// A function of each library that opening a device needs, the library's file, and where it comes from.
const LIBRARIES: [(&CStr, &CStr, &str); 3] = [
    (
        c"cuInit",
        c"libcuda.so.1",
        "it comes with NVIDIA's driver, version 580 or later",
    ),
    (
        c"cublasCreate_v2",
        c"libcublas.so.13",
        "it comes with CUDA 13 and with PyPI's nvidia-cublas; name its folder in LD_LIBRARY_PATH",
    ),
    (
        c"curandCreateGenerator",
        c"libcurand.so.10",
        "it comes with CUDA 13 and with PyPI's nvidia-curand; name its folder in LD_LIBRARY_PATH",
    ),
];

const RTLD_NOW: c_int = 2;
/// All that the process has loaded and made visible.
const RTLD_DEFAULT: *mut c_void = std::ptr::null_mut();

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

/// Loads one of NVIDIA's libraries, which stays loaded; else why it cannot be loaded, if the loader says it.
pub(super) fn open(file: &CStr) -> Result<*mut c_void, Option<String>> {
    // SAFETY: the name ends in a zero byte, and NVIDIA's libraries may be loaded at any time. `dlerror` is null or a text of this thread that lives until its next call of
    // these functions.
    unsafe {
        let library = dlopen(file.as_ptr(), RTLD_NOW);
        if !library.is_null() {
            return Ok(library);
        }
        let text = dlerror();
        Err((!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned()))
    }
}

/// The address of a function of a library that [`open`] gave, or of all that is loaded ([`RTLD_DEFAULT`]), if it has one.
pub(super) fn address_of(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the callers give a library that stays loaded or `RTLD_DEFAULT`; the name ends in a zero byte.
    let address = unsafe { dlsym(library, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// The first library that is neither loaded nor can be, as a sentence with a hint.
pub(crate) fn missing_library() -> Option<String> {
    LIBRARIES
        .iter()
        .find_map(|(function, file, origin)| missing(function, file, origin))
}

fn missing(function: &CStr, file: &CStr, origin: &str) -> Option<String> {
    if address_of(RTLD_DEFAULT, function).is_some() {
        return None;
    }
    let reason = open(file).err()?.unwrap_or_default();
    let file = file.to_string_lossy();
    let reason = reason.trim_start_matches(&*file);
    Some(format!(
        "{file} could not be loaded{reason}\nhint: {origin}"
    ))
}
