//! Values that a flag cannot have, each refused before a step is made; and zero steps, which are allowed.

use crate::folder::read_tensors;
use crate::workspace::Workspace;

/// What is said of a GPU that no machine has.
const NO_SUCH_GPU: &[&str] = if cfg!(feature = "cuda") {
    &["cuda:4096"]
} else {
    &["built without CUDA", "hint: "]
};

#[test]
fn values_out_of_range_are_refused_with_the_name_and_the_value() {
    let workspace = Workspace::new();
    let cases: &[(&str, &str, &[&str])] = &[
        ("--lr", "nan", &["lr is NaN"]),
        ("--lr", "-0.1", &["lr is -0.1"]),
        ("--lr", "inf", &["lr is inf"]),
        ("--lr", "fast", &["'fast'", "--lr"]),
        ("--min-lr-ratio", "1.5", &["min_lr_ratio is 1.5"]),
        ("--max-grad-norm", "0", &["max_grad_norm is 0"]),
        ("--max-grad-norm", "nan", &["max_grad_norm is NaN"]),
        ("--weight-decay", "-1", &["weight_decay is -1"]),
        ("--temperature", "-1", &["temperature is -1"]),
        ("--temperature", "nan", &["temperature is NaN"]),
        ("--top-p", "0", &["top_p is 0"]),
        ("--zero", "2", &["2", "0..=1", "--zero"]),
        ("--schedule", "zigzag", &["'zigzag'", "1f1b, gpipe"]),
        ("--dtype", "f64", &["'f64'", "f32, bf16"]),
        ("--device", "gpu", &["'gpu'", "--device", "`cuda:N`"]),
        ("--device", "cuda:4096", NO_SUCH_GPU),
        (
            "--freeze",
            "layers.(",
            &["'layers.('", "--freeze", "unclosed group"],
        ),
        (
            "--freeze",
            "lm_heads",
            &["--freeze lm_heads", "none of the 39 parameters", "hint: "],
        ),
        (
            "--freeze",
            "weight$",
            &["--freeze weight$", "all 39 parameters", "nothing is left"],
        ),
        ("--save-dtype", "i8", &["'i8'", "f32, f16, bf16"]),
        ("--steps", "-1", &["'-1'", "--steps"]),
        ("--seed", "-1", &["'-1'", "--seed"]),
        ("--stepz", "1", &["--stepz", "--steps"]),
    ];
    for (flag, value, parts) in cases {
        workspace.refuses(&workspace.finetune().flag(flag, value), parts);
    }
    let program = workspace
        .finetune()
        .flag("--prompt", "")
        .flag("--sample-tokens", 1);
    workspace.refuses(&program, &["--prompt", "no tokens"]);
}

#[test]
fn zero_steps_save_the_model_as_it_is() {
    let workspace = Workspace::new();
    let outcome = workspace.finetune().flag("--steps", 0).succeeds();
    assert!(outcome.stdout.contains("0 steps"), "{}", outcome.stdout);
    let saved = read_tensors(&workspace.output().join("model.safetensors"));
    assert!(saved == read_tensors(&workspace.model("model.safetensors")));
}
