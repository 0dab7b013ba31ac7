//! Every CUDA kernel against an f64 reference, run on the CPU from the kernel's own source.

/// Runs `kernel(arguments)` in every thread of a launch.
macro_rules! launch {
    ($launch:expr, $kernel:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: buffers have the sizes that the kernel documents; one CPU thread runs all threads of the grid.
        $launch.run(|| unsafe { $kernel($($argument),*) })
    };
}

#[path = "kernels/adamw.rs"]
mod adamw;
#[path = "kernels/attention.rs"]
mod attention;
#[path = "kernels/attention_reference.rs"]
mod attention_reference;
#[path = "kernels/column_sum.rs"]
mod column_sum;
#[path = "kernels/cross_entropy.rs"]
mod cross_entropy;
#[path = "kernels/element.rs"]
mod element;
#[path = "kernels/elementwise.rs"]
mod elementwise;
#[path = "kernels/embedding.rs"]
mod embedding;
#[path = "kernels/embedding_order.rs"]
mod embedding_order;
#[path = "kernels/half_precision.rs"]
mod half_precision;
#[path = "kernels/layer_norm.rs"]
mod layer_norm;
#[path = "kernels/quantized.rs"]
mod quantized;
#[path = "kernels/rms_norm.rs"]
mod rms_norm;
#[path = "kernels/rope.rs"]
mod rope;
#[path = "kernels/shim.rs"]
mod shim;
#[path = "kernels/sum_of_squares.rs"]
mod sum_of_squares;
#[path = "kernels/swiglu.rs"]
mod swiglu;
