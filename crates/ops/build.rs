//! With the feature `cuda`, compiles each file of `kernels/` into a fatbin that the library carries: machine code for
//! sm_80 and sm_90, and PTX for what comes after. Without it, does nothing.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::{env, fs};

const TARGETS: [&str; 2] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_90,code=[sm_90,compute_90]",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    println!("cargo:rerun-if-changed=kernels");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let mut sources = Vec::new();
    for entry in fs::read_dir("kernels")? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            sources.push(path);
        }
    }
    sources.sort();
    let num_jobs: usize = env::var("NUM_JOBS")?.parse()?;
    for sources in sources.chunks(num_jobs) {
        let compilers = sources
            .iter()
            .map(|source| compile(source, &out))
            .collect::<Result<Vec<_>, _>>()?;
        for (source, mut compiler) in sources.iter().zip(compilers) {
            if !compiler.wait()?.success() {
                return Err(
                    format!("{} does not compile; nvcc says why above", source.display()).into(),
                );
            }
        }
    }
    Ok(())
}

fn compile(source: &Path, out: &Path) -> Result<Child, Box<dyn Error>> {
    let nvcc = match env::var_os("CUDA_HOME") {
        Some(toolkit) => PathBuf::from(toolkit).join("bin/nvcc"),
        None => PathBuf::from("nvcc"),
    };
    let fatbin = out
        .join(source.file_name().ok_or("a kernel without a file name")?)
        .with_extension("fatbin");
    Command::new(&nvcc)
        .args(["-std=c++17", "-Werror", "all-warnings", "-fatbin", "-o"])
        .arg(fatbin)
        .args(TARGETS.iter().flat_map(|target| ["-gencode", target]))
        .arg(source)
        .spawn()
        .map_err(|err| {
            format!(
                "the feature `cuda` needs NVIDIA's compiler, and {} does not start: {err}\nhint: scripts/cuda-toolkit.sh DEST makes a toolkit; then set CUDA_HOME=DEST",
                nvcc.display()
            )
            .into()
        })
}
