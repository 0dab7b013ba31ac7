//! Compiles the CUDA kernels as C++, with what they use of CUDA defined in `shim/cuda.h`.

use std::path::{Path, PathBuf};

const KERNELS: &str = "../../crates/ops/kernels";

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-changed={KERNELS}");
    let mut sources = vec![
        PathBuf::from("shim/block.cpp"),
        PathBuf::from("shim/launch.cpp"),
        PathBuf::from("shim/stacks.cpp"),
        PathBuf::from("shim/broken.cu"),
    ];
    for entry in std::fs::read_dir(KERNELS)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            sources.push(path);
        }
    }
    sources.sort();
    let shim =
        Path::new(&std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default()).join("shim/cuda.h");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        .flag("-include")
        .flag(shim.as_os_str())
        .flags(["-x", "c++"])
        // Kernels read bytes as other types, as CUDA allows, and no product is fused unless the source says so.
        .flags([
            "-fno-strict-aliasing",
            "-ffp-contract=off",
            "-U_FORTIFY_SOURCE",
        ])
        // A misaligned or overflowing access ends the test as it would end the kernel.
        .flags([
            "-fsanitize=alignment,signed-integer-overflow,shift,bounds",
            "-fsanitize-undefined-trap-on-error",
        ])
        // `#pragma unroll` is nvcc's.
        .flags(["-Wno-unknown-pragmas", "-Wno-unused-function"])
        .warnings_into_errors(true)
        .files(sources)
        .compile("kernels");
    Ok(())
}
