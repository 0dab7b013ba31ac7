//! cuDNN's shared library, and its functions that are used here.

#![allow(unsafe_code)]

use super::library;
use candle_core::{Error, Result, bail};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// `cudnnHandle_t` or `cudnnBackendDescriptor_t`.
pub(crate) type Opaque = *mut c_void;

macro_rules! library {
    ($($field:ident = $name:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions; their meanings are those of NVIDIA's cuDNN backend interface.
        pub(crate) struct Library {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn open() -> std::result::Result<Self, String> {
                let library = library::open(c"libcudnn.so.9");
                let no_reason = || "libcudnn.so.9 could not be loaded".into();
                let library = library.map_err(|reason| reason.unwrap_or_else(no_reason))?;
                let opened = Self {
                    $($field: match library::address_of(library, $name) {
                        // SAFETY: the function of this name has this type in every cuDNN 9.
                        Some(function) => unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(function)
                        },
                        None => return Err(format!("libcudnn.so.9 has no function {}", $name.to_string_lossy())),
                    },)*
                };
                // SAFETY: the function may be called at any time.
                match refusal(unsafe { (opened.version)() }) {
                    Some(reason) => Err(reason),
                    None => Ok(opened),
                }
            }
        }
    };
}

library! {
    version = c"cudnnGetVersion": fn() -> usize;
    create = c"cudnnCreate": fn(*mut Opaque) -> c_int;
    set_stream = c"cudnnSetStream": fn(Opaque, Opaque) -> c_int;
    error_name = c"cudnnGetErrorString": fn(c_int) -> *const c_char;
    last_error = c"cudnnGetLastErrorString": fn(*mut c_char, usize);
    create_descriptor = c"cudnnBackendCreateDescriptor": fn(c_int, *mut Opaque) -> c_int;
    destroy_descriptor = c"cudnnBackendDestroyDescriptor": fn(Opaque) -> c_int;
    finalize = c"cudnnBackendFinalize": fn(Opaque) -> c_int;
    set_attribute = c"cudnnBackendSetAttribute": fn(Opaque, c_int, c_int, i64, *const c_void) -> c_int;
    get_attribute = c"cudnnBackendGetAttribute": fn(Opaque, c_int, c_int, i64, *mut i64, *mut c_void) -> c_int;
    execute = c"cudnnBackendExecute": fn(Opaque, Opaque, Opaque) -> c_int;
}

/// The oldest that is used, as it gives its version.
const OLDEST: usize = 91600;

/// Why a cuDNN of this version is not used: older ones have errors in backward passes over lengths that are no multiples of
/// 128, around which NVIDIA's frontend works (cudnn-frontend 1.32, `scaled_dot_product_flash_attention.h`).
fn refusal(version: usize) -> Option<String> {
    let words = |version: usize| format!("{}.{}", version / 10000, version / 100 % 100);
    (version < OLDEST).then(|| {
        format!(
            "libcudnn.so.9 is cuDNN {}, expected {} or later: before, backward passes had errors for lengths that are no multiples of 128\nhint: PyPI's nvidia-cudnn-cu13 has later ones; name its folder in LD_LIBRARY_PATH",
            words(version),
            words(OLDEST)
        )
    })
}

/// Whether the library can be used.
pub(crate) fn is_there() -> bool {
    Library::get().is_ok()
}

static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();

/// 10000 major + 100 minor + patch, if the library is open.
pub(crate) fn version() -> Option<usize> {
    let library = LIBRARY.get()?.as_ref().ok()?;
    // SAFETY: the function may be called at any time.
    Some(unsafe { (library.version)() })
}

/// Whether memory was missing, of the GPU or of the host: another time there may be enough.
pub(crate) fn is_out_of_memory(err: &Error) -> bool {
    let text = err.to_string();
    ["ALLOCATION_FAILED", "ALLOC_FAILED"]
        .iter()
        .any(|name| text.contains(name))
}

impl Library {
    /// The library, opened at the first call; its loader's words if it cannot be.
    pub(crate) fn get() -> std::result::Result<&'static Self, &'static str> {
        LIBRARY
            .get_or_init(Self::open)
            .as_ref()
            .map_err(String::as_str)
    }

    /// An error with cuDNN's text, unless `status` is that of success.
    pub(crate) fn check(&self, status: c_int, doing: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text = [0u8; 1024];
        // SAFETY: cuDNN writes at most as many bytes as it is told, a zero among them.
        unsafe { (self.last_error)(text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        // SAFETY: a text that lives as long as the library, for any status.
        let name = unsafe { CStr::from_ptr((self.error_name)(status)) };
        bail!(
            "cuDNN, {doing}: {} ({status}): {}",
            name.to_string_lossy(),
            text.to_string_lossy().trim()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::refusal;

    #[test]
    fn a_cudnn_with_known_errors_is_refused() {
        let reason = refusal(91501).unwrap_or_default();
        assert!(reason.contains("cuDNN 9.15, expected 9.16"), "{reason}");
        assert_eq!(refusal(91600), None);
        assert_eq!(refusal(91900), None);
    }
}
