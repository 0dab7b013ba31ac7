//! Kernels that take rows in turns give the same bits in any grid. `candle-ops` launches a block for each row.
#![allow(unsafe_code)]

use super::faults::kernel;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, LaunchConfig, PushKernelArg,
};
use std::sync::Arc;

const ROWS: usize = 7;
const COLS: usize = 33;

enum Argument {
    Output(CudaSlice<f32>),
    Floats(CudaSlice<f32>),
    Ids(CudaSlice<u32>),
    I64(i64),
    I32(i32),
    U32(u32),
    F32(f32),
}

use Argument::{F32, Floats, I32, I64, Ids, Output, U32};

/// What `kernel` writes in a grid of so many blocks.
fn run(
    stream: &Arc<CudaStream>,
    name: &str,
    num_blocks: usize,
    arguments: &mut [Argument],
) -> Vec<f32> {
    let function = kernel(stream.context(), name);
    let mut launch = stream.launch_builder(&function);
    for argument in arguments.iter_mut() {
        match argument {
            Output(values) => launch.arg(values),
            Floats(values) => launch.arg(&*values),
            Ids(values) => launch.arg(&*values),
            I64(number) => launch.arg(&*number),
            I32(number) => launch.arg(&*number),
            U32(number) => launch.arg(&*number),
            F32(number) => launch.arg(&*number),
        };
    }
    let config = LaunchConfig {
        grid_dim: (num_blocks as u32, 1, 1),
        block_dim: (64, 1, 1),
        shared_mem_bytes: 128,
    };
    // SAFETY: the arguments are the kernel's, with values for ROWS rows of COLS.
    unsafe { launch.launch(config) }.unwrap();
    let output = arguments.iter().find_map(|argument| match argument {
        Output(values) => Some(stream.clone_dtoh(values).unwrap()),
        _ => None,
    });
    output.unwrap()
}

#[test]
fn rows_in_turns() {
    let stream = CudaContext::new(0).unwrap().default_stream();
    let floats = |len: usize| {
        let values: Vec<f32> = (0..len)
            .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
            .collect();
        Floats(stream.clone_htod(&values).unwrap())
    };
    let ids = || Ids(stream.clone_htod(&[0u32, 5, 10, 4, 9, 3, 8]).unwrap());
    // SAFETY: f32 takes any bits.
    let output = |len: usize| Output(unsafe { stream.alloc(len) }.unwrap());
    let same = |name: &str, arguments: &dyn Fn() -> Vec<Argument>| {
        let want = run(&stream, name, ROWS, &mut arguments());
        assert!(want.iter().all(|x| x.is_finite()), "{name}: {want:?}");
        for num_blocks in [1, 2, 3] {
            let got = run(&stream, name, num_blocks, &mut arguments());
            assert_eq!(got, want, "{name} in {num_blocks} blocks");
        }
    };
    let (len, rows, cols, width) = (ROWS * COLS, ROWS as i64, COLS as i64, COLS as i32);
    let (out, of_row) = (|| output(len), || floats(COLS));
    same("rms_norm_forward_f32", &|| {
        let (x, eps) = (floats(len), F32(1e-5));
        vec![out(), x, of_row(), I64(rows), I32(width), eps]
    });
    same("layer_norm_forward_f32", &|| {
        let (x, eps) = (floats(len), F32(1e-5));
        vec![out(), x, of_row(), of_row(), I64(rows), I32(width), eps]
    });
    same("softmax_stats_f32", &|| {
        let logits = floats(len);
        let sizes = [I64(rows), I64(cols), I64(0)];
        [output(3 * ROWS), logits, ids()]
            .into_iter()
            .chain(sizes)
            .collect()
    });
    same("cross_entropy_backward_f32", &|| {
        let (logits, lse, grads) = (floats(len), floats(ROWS), floats(ROWS));
        let sizes = [F32(0.0), I64(rows), I64(cols), I64(0)];
        [out(), logits, lse, ids(), grads]
            .into_iter()
            .chain(sizes)
            .collect()
    });
    same("fill_rows_f32", &|| {
        vec![out(), of_row(), I64(rows), I64(cols)]
    });
    same("embedding_forward_f32", &|| {
        let (table, sizes) = (floats(11 * COLS), [I64(rows), I64(cols), U32(0), U32(11)]);
        [out(), table, ids()].into_iter().chain(sizes).collect()
    });
    same("attention_delta_f32", &|| {
        let sizes = [I64(rows), I32(ROWS as i32), I32(1), I32(width)];
        [output(ROWS), floats(len), floats(len)]
            .into_iter()
            .chain(sizes)
            .collect()
    });
}
